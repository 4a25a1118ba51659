"""OpenID Connect sign-in: verifies tokens of the team's identity provider, beside API keys.

The provider's public keys are fetched for the first token, and again when they are old or a token
names an unknown key, but at most every `ASK_AGAIN_S`. While the provider is unreachable the known
keys stay in use for a day and, after a first failure, are refreshed in the background only. Of a
token only a digest is kept, and nothing is logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jwt

from cato.core.errors import AccessError
from cato.core.sign_in import Person, SignInSpec, person_of
from cato.serve.access.provider import UNREADABLE, Http, HttpProblem, Key, Keys, http, published

log = logging.getLogger("cato.access")

# Maximum age of the provider's keys: a revoked key is refused after this.
KEYS_AGE_S = 300.0
USABLE_S = 86_400.0
ASK_AGAIN_S = 10.0
MAX_TOKEN_CHARS = 16_384
# Cache of verified tokens: a digest and a person each, a few hundred bytes.
KEPT_TOKENS = 2_000
UNAVAILABLE_RETRY_S = 5.0

# A JWT: three parts of base64url, the first a JSON object.
_TOKEN = re.compile(r"eyJ[A-Za-z0-9_-]*\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
# Access tokens (RFC 9068) and ID tokens; other kinds, such as logout tokens, are refused.
_TYPES = (None, "jwt", "at+jwt", "application/at+jwt")

EXPIRED = "token_expired"
INVALID = "invalid_token"


def is_token(credentials: str) -> bool:
    """Whether `credentials` look like a signed token."""
    return len(credentials) <= MAX_TOKEN_CHARS and _TOKEN.fullmatch(credentials) is not None


class SignIn:
    """Verifies tokens for one ingress replica. `clock` is monotonic, in seconds."""

    def __init__(
        self, spec: SignInSpec, ask: Http = http, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.spec = spec
        self._ask = ask
        self._clock = clock
        self._keys: Keys | None = None
        self._asked_at_s = -ASK_AGAIN_S
        self._has_failed = False  # the last fetch
        self._fetching: asyncio.Task[None] | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._verified: OrderedDict[bytes, Person] = OrderedDict()

    async def person(self, token: str) -> Person:
        """The token's owner; raise `AccessError`."""
        keys = await self._current_keys()
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(digest)
        if known is not None:
            if time.time() >= known.ends_at_s:
                del self._verified[digest]
                raise _expired()
            return known
        kid, algorithm = self._header(token)
        key = keys.fit(kid, algorithm)
        if key is None:
            await self._refresh()
            key = None if self._keys is None else self._keys.fit(kid, algorithm)
        if key is None:
            raise _refused("unknown key")
        claims = self._claims(token, key, algorithm)
        rights = self.spec.rights_of(claims)
        if rights is None:
            raise AccessError(
                403, "no_group",
                "The owner of this token is in no group that this deployment admits.",
            )  # fmt: skip
        person = person_of(claims, rights, float(claims["exp"]) + self.spec.skew_s)
        self._verified[digest] = person
        if len(self._verified) > KEPT_TOKENS:
            self._verified.popitem(last=False)
        return person

    def _header(self, token: str) -> tuple[str | None, str]:
        """The key id and algorithm that the token claims. They are trusted only once they match one
        of the provider's keys."""
        try:
            header = jwt.get_unverified_header(token)
        except UNREADABLE as error:
            raise _refused(type(error).__name__) from None
        kid, algorithm, kind = header.get("kid"), header.get("alg"), header.get("typ")
        if algorithm not in self.spec.algorithms:
            raise _refused("algorithm")
        if (kind.lower() if isinstance(kind, str) else kind) not in _TYPES or "crit" in header:
            raise _refused("kind of token")
        return kid, algorithm

    def _claims(self, token: str, key: Key, algorithm: str) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=self.spec.audiences,
                issuer=self.spec.issuer,
                leeway=self.spec.skew_s,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
            float(claims["exp"])
        except jwt.ExpiredSignatureError:
            raise _expired() from None
        except UNREADABLE as error:
            raise _refused(type(error).__name__) from None
        return claims

    # The provider

    async def _current_keys(self) -> Keys:
        """Keys that are recent enough; raise `AccessError` if there are none."""
        now_s = self._clock()
        age_s = math.inf if self._keys is None else now_s - self._keys.at_s
        # A failure a while ago says nothing about now: the first request after a pause waits.
        asked_s = now_s - self._asked_at_s
        is_down = self._has_failed and asked_s <= KEYS_AGE_S
        is_refreshing = self._refresher is not None and not self._refresher.done()
        if age_s > (USABLE_S if is_down else 2 * KEYS_AGE_S):
            await self._refresh()
        elif age_s > KEYS_AGE_S and asked_s >= ASK_AGAIN_S and not is_refreshing:
            self._refresher = asyncio.get_running_loop().create_task(self._refresh_aside())
        if self._keys is None or now_s - self._keys.at_s > USABLE_S:
            raise AccessError(
                503, "sign_in_unavailable",
                "Tokens cannot be verified now: the identity provider does not answer.",
                UNAVAILABLE_RETRY_S,
            )  # fmt: skip
        return self._keys

    async def _refresh_aside(self) -> None:
        """`_refresh` as a task: no request is there to get its exception."""
        try:
            await self._refresh()
        except Exception:
            log.exception("the keys of %s cannot be read", self.spec.issuer)

    async def _refresh(self) -> None:
        """Fetch the keys unless that was tried a moment ago; keep the known ones on failure. A
        client that leaves does not end the fetch: others wait for it."""
        if self._fetching is None or self._fetching.done():
            now_s = self._clock()
            if now_s - self._asked_at_s < ASK_AGAIN_S:
                return
            self._asked_at_s = now_s
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(now_s))
        await asyncio.shield(self._fetching)

    async def _fetch(self, now_s: float) -> None:
        try:
            keys = await published(self._ask, self.spec.issuer, now_s)
        except HttpProblem as problem:
            self._has_failed = True
            log.warning("the keys of %s cannot be read: %s", self.spec.issuer, problem)
            return
        self._has_failed = False
        if self._keys is None or keys.document != self._keys.document:
            self._verified.clear()
            log.info("%s has %d public keys", self.spec.issuer, len(keys.keys))
        self._keys = keys

    # The status page

    async def flow(self) -> dict[str, str] | None:
        """What a browser needs to start a sign-in; None if it is not available."""
        if not self.spec.client_id:
            return None
        addresses = (await self._current_keys()).addresses
        if not {"authorization_endpoint", "token_endpoint"} <= addresses.keys():
            return None
        return {
            "authorization_endpoint": addresses["authorization_endpoint"],
            "client_id": self.spec.client_id,
            "scope": self.spec.scope,
        }

    async def exchange(self, code: str, verifier: str, redirect_uri: str) -> tuple[str, Person]:
        """Exchange a browser's authorization code for a token; return it and its owner."""
        addresses = (await self._current_keys()).addresses
        if not self.spec.client_id or "token_endpoint" not in addresses:
            raise AccessError(404, "no_sign_in", "Sign-in is not configured for this page.")
        form = {
            "grant_type": "authorization_code",
            "client_id": self.spec.client_id,
            "code": code,
            "code_verifier": verifier,
            "redirect_uri": redirect_uri,
        }
        try:
            given = await self._ask(addresses["token_endpoint"], form)
        except HttpProblem as problem:
            log.info("the code exchange failed: %s", problem)
            raise AccessError(
                401, INVALID, "The identity provider rejected the code; sign in again."
            ) from None
        refusal: AccessError = _refused("no token for this server")
        # An access token may be for another service or not a JWT; the ID token is for the client.
        for name in ("access_token", "id_token"):
            token = given.get(name)
            if isinstance(token, str) and is_token(token):
                try:
                    return token, await self.person(token)
                except AccessError as error:
                    refusal = error
        raise refusal


def _refused(why: str) -> AccessError:
    log.info("a token was refused: %s", why)
    return AccessError(401, INVALID, "The token is not valid.")


def _expired() -> AccessError:
    return AccessError(401, EXPIRED, "The token has expired; sign in again.")
