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
    """The key is refused from `at_s` on, or from an earlier end of its own."""

    id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class RotateKey:
    """`key` takes the place of the key `id`, which ends at `at_s`."""

    id: str
    key: ApiKey
    at_s: float


@dataclass(frozen=True, slots=True)
class DeleteKey:
    """The key is forgotten; its usage stays."""

    id: str


@dataclass(frozen=True, slots=True)
class SetTenant:
    """These limits take the place of the tenant's earlier ones."""

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class OpenWithoutKeys:
    """All keys are forgotten, and that there were any: the deployment serves without one again."""


Change = AddKey | EndKey | RotateKey | DeleteKey | SetTenant | OpenWithoutKeys


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One administrative change: who made it, of what, and how that was `before` and `after`.

    `who` is `key:ID`, `oidc:SUBJECT`, `cli:USER@HOST` or `local`, without a key. `tenant` is
    empty for a change that is of no single tenant. None: it did not exist.
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
    """A key for people: all but the digest of its secret."""
    plain = asdict(key)
    del plain["digest"]
    return {**plain, "bounds": dict(key.bounds)}
