"""Who sends a request, and what it may ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cato.core.tenancy import Role


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request and what it may ask for; without a key, everything.

    `key` is the public part of an API key, or `oidc:` and the subject of a token; `name` is for
    display. `sla_class` is the most urgent class that it may claim; empty: any. The key or token
    ends at `expires_at_s`, in seconds since the epoch (None: never). `group` gave a person its
    rights.
    """

    key: str = ""
    tenant: str = ""
    sla_class: str = ""
    tasks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    default_task: str = ""
    weight: float = 1.0
    role: Role = Role.USER
    bounds: tuple[tuple[str, int], ...] = ()
    session_target_s: float | None = None
    name: str = ""
    expires_at_s: float | None = None
    group: str = ""

    @property
    def is_person(self) -> bool:
        """Whether a token of the identity provider was sent, not a key."""
        return self.key.startswith("oidc:")

    @property
    def who(self) -> str:
        """The caller's name in the audit log."""
        if not self.key:
            return "local"
        who = self.key if self.is_person else f"key:{self.key}"
        return f"{who} ({self.name})" if self.name else who

    @property
    def is_operator(self) -> bool:
        return not self.key or self.role is Role.OPERATOR

    @property
    def sees(self) -> str | None:
        """The tenant whose runs and usage it may see; None: all tenants."""
        return None if self.is_operator else self.tenant

    def may_run(self, task: str) -> bool:
        return not self.tasks or task in self.tasks

    def may_call(self, names: Iterable[str]) -> bool:
        """Whether one of a model's `names` is allowed."""
        return not self.models or not set(self.models).isdisjoint(names)


ANYBODY = Caller()
