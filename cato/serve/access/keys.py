"""API keys: `cato_<id>_<secret>`. The store keeps the id and a hash of the secret.

The secret is 256 random bits, so SHA-256 is enough. Slow hashes protect passwords that can be
guessed; here one would only add to every request's TTFT and let anybody overload the ingress.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

_SECRET_BYTES = 32
_ID_BYTES = 5
_FORM = re.compile(r"cato_([0-9a-f]{10})_([A-Za-z0-9_-]{43})")
# Compared with when the key does not exist, so that the check takes the same time.
_NO_DIGEST = "0" * 64


def new_key() -> tuple[str, str, str]:
    """A fresh key, its id and the digest of its secret."""
    id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    return f"cato_{id}_{secret}", id, digest_of(secret)


def parts(key: str) -> tuple[str, str] | None:
    """Id and secret; None if `key` is not a CATO key."""
    found = _FORM.fullmatch(key)
    return None if found is None else (found[1], found[2])


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def is_secret_of(secret: str, digest: str | None) -> bool:
    """Whether `digest` is the hash of `secret`; compares in constant time."""
    return hmac.compare_digest(digest_of(secret), digest or _NO_DIGEST) and digest is not None
