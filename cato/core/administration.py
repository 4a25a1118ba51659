"""Changes that operators and tenant admins make, and the log of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cato.core.tenancy import ApiKey, Tenant


@dataclass(frozen=True, slots=True)
class AddKey:
    key: ApiKey


@dataclass(frozen=True, slots=True)
class EndKey:
    """Refuse the key from `at_s` on; if it already ends earlier, that end stays."""

    id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class RotateKey:
    """Replace the key `id` by `key`; the old one ends at `at_s`."""

    id: str
    key: ApiKey
    at_s: float


@dataclass(frozen=True, slots=True)
class DeleteKey:
    """Delete the key; its usage records stay."""

    id: str


@dataclass(frozen=True, slots=True)
class SetTenant:
    """Replace the tenant's limits."""

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class OpenWithoutKeys:
    """Forget all keys, and that there were any: the deployment serves without keys again."""


Change = AddKey | EndKey | RotateKey | DeleteKey | SetTenant | OpenWithoutKeys


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One administrative change: who made it, its object, and the state `before` and `after`.

    `who` is `key:ID`, `oidc:SUBJECT`, `cli:USER@HOST` or, without a key, `local`. `tenant` is empty
    if the change concerns no single tenant. `before` or `after` is None where the object did not
    exist.
    """

    id: int
    at_s: float
    who: str
    action: str
    tenant: str
    target: str
    before: Mapping[str, object] | None
    after: Mapping[str, object] | None


def shown_key(key: ApiKey) -> dict[str, object]:
    """A key without the digest of its secret, for people to read."""
    plain = asdict(key)
    del plain["digest"]
    return {**plain, "bounds": dict(key.bounds)}
