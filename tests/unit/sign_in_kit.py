"""An identity provider in this process: its keys, its tokens and its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cato.core.sign_in import GroupRights, SignInSpec
from cato.core.tenancy import Role
from cato.serve.access.provider import HttpProblem
from cato.serve.access.sign_in import SignIn

ISSUER = "https://sso.example/realms/dev"
SPEC = SignInSpec(
    ISSUER,
    ("cato",),
    (
        GroupRights("ops", "platform", Role.OPERATOR),
        GroupRights("red-leads", "red", Role.TENANT_ADMIN),
        GroupRights("red", "red", sla_class="standard", tasks=("code-completion",)),
    ),
    client_id="cato-page",
)
_RSA = jwt.algorithms.RSAAlgorithm
_EC = jwt.algorithms.ECAlgorithm


class Provider:
    """Signs tokens, and answers as an OpenID provider does; `asked` are the URLs that it was asked.

    `clock_s` is the time that its callers see.
    """

    def __init__(self, kid: str = "k1") -> None:
        self.asked: list[str] = []
        self.is_up = True
        self.clock_s = 1000.0
        self.given: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}
        self.add_key(kid)

    def add_key(self, kid: str, *, curve: bool = False, bits: int = 2048) -> None:
        self.keys[kid] = (
            ec.generate_private_key(ec.SECP256R1())
            if curve
            else rsa.generate_private_key(public_exponent=65537, key_size=bits)
        )

    def jwk(self, kid: str) -> dict[str, Any]:
        key = self.keys[kid]
        kind = _EC if isinstance(key, ec.EllipticCurvePrivateKey) else _RSA
        return {**json.loads(kind.to_jwk(key.public_key())), "kid": kid, "use": "sig"}

    def token(self, kid: str = "k1", alg: str = "RS256", **claims: Any) -> str:
        """A token of somebody in the group red; `claims` that are None are left out."""
        headers = claims.pop("headers", {})
        now_s = int(time.time())
        of_all = {
            "iss": ISSUER, "aud": "cato", "sub": "u-1", "email": "ada@example.com",
            "iat": now_s, "exp": now_s + 300, "groups": ["red"],
        }  # fmt: skip
        found = {k: v for k, v in {**of_all, **claims}.items() if v is not None}
        return jwt.encode(found, self.keys[kid], alg, {"kid": kid, **headers})

    async def ask(self, url: str, form: Mapping[str, str] | None = None) -> dict[str, Any]:
        self.asked.append(url)
        if not self.is_up:
            raise HttpProblem("down")
        if url.endswith("/.well-known/openid-configuration"):
            return {
                "issuer": ISSUER,
                "jwks_uri": "https://sso.example/jwks",
                "authorization_endpoint": "https://sso.example/authorize",
                "token_endpoint": "https://sso.example/token",
            }
        if url.endswith("/token"):
            assert form is not None
            return self.given
        return {"keys": [self.jwk(kid) for kid in self.keys]}

    def sign_in(self, spec: SignInSpec = SPEC) -> SignIn:
        return SignIn(spec, self.ask, clock=lambda: self.clock_s)
