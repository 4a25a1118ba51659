"""The team's identity provider: how it is asked, and the public keys that it publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import jwt

ANSWER_WITHIN_S = 5.0
MAX_ANSWER_BYTES = 1_000_000
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_OF_CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}
MIN_RSA_BITS = 2048
UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


class HttpProblem(Exception):
    """The provider gave no usable answer; the message says why."""


class Http(Protocol):
    """An HTTP client for the provider; raises `HttpProblem`."""

    async def __call__(self, url: str, form: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Get the JSON object at `url`, or post `form` to it."""
        ...


async def http(url: str, form: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The real client: limited in time and size, without redirects."""
    within = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=within, trust_env=True) as session,
            session.request(
                "GET" if form is None else "POST", url, data=form, allow_redirects=False
            ) as answer,
        ):
            data = await answer.content.read(MAX_ANSWER_BYTES + 1)
            while not answer.content.at_eof() and len(data) <= MAX_ANSWER_BYTES:
                data += await answer.content.read(MAX_ANSWER_BYTES + 1 - len(data))
            if answer.status != 200 or len(data) > MAX_ANSWER_BYTES:
                raise HttpProblem(f"status {answer.status}, {len(data)} bytes")
        value = json.loads(data)
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        raise HttpProblem(type(error).__name__) from error
    if not isinstance(value, dict):
        raise HttpProblem("its answer is not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Key:
    """A public key, and the algorithms that it may be used with."""

    id: str | None
    algorithms: tuple[str, ...]
    key: Any


@dataclass(frozen=True, slots=True)
class Keys:
    """The provider's addresses and public keys, as of `at_s`."""

    at_s: float
    addresses: Mapping[str, str]
    keys: tuple[Key, ...]
    document: object

    def fit(self, id: str | None, algorithm: str) -> Key | None:
        """The key that must have signed a token; a token without key id needs one candidate."""
        fitting = [k for k in self.keys if algorithm in k.algorithms and id in (None, k.id)]
        return fitting[0] if len(fitting) == 1 else None


async def published(ask: Http, issuer: str, now_s: float) -> Keys:
    """The keys and addresses that the provider `issuer` publishes now; raise `HttpProblem`."""
    where = issuer.rstrip("/") + "/.well-known/openid-configuration"
    about = await ask(where)
    if about.get("issuer") != issuer:
        raise HttpProblem("its `issuer` differs from the configured one")
    addresses = {
        name: url
        for name in ("jwks_uri", "authorization_endpoint", "token_endpoint")
        if isinstance(url := about.get(name), str) and _is_safe(url, issuer)
    }
    if "jwks_uri" not in addresses:
        raise HttpProblem("it has no jwks_uri with https")
    document = (await ask(addresses["jwks_uri"])).get("keys")
    if not isinstance(document, list):
        raise HttpProblem("its keys are not a list")
    return Keys(now_s, addresses, tuple(filter(None, map(_key, document))), document)


def _is_safe(url: str, issuer: str) -> bool:
    """Whether requests to `url` are protected: `https`, or `http` on the issuer's host if the
    issuer itself uses `http`."""
    parts, home = urlsplit(url), urlsplit(issuer)
    return parts.scheme == "https" or (
        parts.scheme == home.scheme == "http" and parts.hostname == home.hostname
    )


def _key(value: object) -> Key | None:
    """A public key for signatures; None for other keys, such as for encryption."""
    if not isinstance(value, dict) or value.get("use", "sig") != "sig":
        return None
    kind, id, only = value.get("kty"), value.get("kid"), value.get("alg")
    algorithms: tuple[str, ...] = _RSA if kind == "RSA" else ()
    if kind in ("EC", "OKP") and value.get("crv") in _OF_CURVES:
        algorithms = (_OF_CURVES[value["crv"]],)
    if only is not None:
        algorithms = tuple(a for a in algorithms if a == only)
    if not algorithms:
        return None
    try:
        key = jwt.PyJWK(value, algorithms[0]).key
    except UNREADABLE:
        return None
    if kind == "RSA" and key.key_size < MIN_RSA_BITS:
        return None
    return Key(id if isinstance(id, str) else None, algorithms, key)
