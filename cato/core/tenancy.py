"""Tenants, their API keys and usage, as kept by the store and checked by an ingress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

SLA_CLASSES = ("interactive", "standard", "batch")
"""Classes of an SLA, the most urgent first."""


class Role(StrEnum):
    """Rights of a caller.

    A user sees its tenant's activity. A tenant admin also manages the tenant's keys. An operator
    sees and manages everything, and reads the deployment's metrics.
    """

    USER = "user"
    TENANT_ADMIN = "tenant-admin"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, the unit of billing; None sets no limit. Tokens are prompt plus output tokens.

    When several tenants wait for a pool, each is served in proportion to its `weight`.
    """

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_month: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What the store knows of a key; the key itself is shown only once, to its creator.

    `id` is its public part. `sla_class` is the most urgent class that it may claim. Empty `tasks`
    and `models` allow all. A conversation that names no task is one of `default_task`. Times are
    seconds since the epoch; `expires_at_s` is None for a key that stays valid, and in the past for
    a revoked one. `bounds` are limits of one call that differ from the usual ones, by the names of
    `cato.serve.ingress.bounds.Bounds`. `session_target_s` is for whole sessions that name none
    themselves; None without one.
    """

    id: str
    digest: str
    tenant: str
    name: str = ""
    sla_class: str = SLA_CLASSES[0]
    tasks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    default_task: str = ""
    created_at_s: float = 0.0
    expires_at_s: float | None = None
    role: Role = Role.USER
    bounds: tuple[tuple[str, int], ...] = ()
    session_target_s: float | None = None

    def is_valid(self, now_s: float) -> bool:
        return self.expires_at_s is None or now_s < self.expires_at_s


class KeyHistory(StrEnum):
    """Whether a deployment has ever had an API key, whatever its store holds now.

    `OPENED`: it had, and an operator has since chosen to serve without.
    """

    NEVER = "never"
    KEYED = "keyed"
    OPENED = "opened"


@dataclass(frozen=True, slots=True)
class Access:
    """All keys and tenants, and each tenant's tokens in `month` (UTC, as 2026-11)."""

    keys: tuple[ApiKey, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    spent_tokens: Mapping[str, int] = field(default_factory=dict)
    history: KeyHistory = KeyHistory.NEVER
    month: str = ""

    @property
    def needs_key(self) -> bool:
        """Whether a request needs a key, unless configured otherwise."""
        return bool(self.keys) or self.history is KeyHistory.KEYED


LAST_DAY = "9999-12-31"
"""Days are ISO dates such as 2026-11-21, which sort as text; none is later than this."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One key's usage of a model for a task on one day (UTC, as 2026-11-21).

    `requests` are those that called the model; a request that calls two counts for both.
    """

    day: str
    tenant: str
    key: str
    task: str
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def name(self) -> tuple[str, ...]:
        return self.day, self.tenant, self.key, self.task, self.model

    def plus(self, other: Usage) -> Usage:
        """The sum of two records of the same name."""
        assert self.name == other.name, f"{other.name} added to {self.name}"
        return replace(
            self,
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens + other.cached_prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


def add_usage(sums: dict[tuple[str, ...], Usage], usage: Iterable[Usage]) -> None:
    """Add each record to the sum of its name."""
    for used in usage:
        known = sums.get(used.name)
        sums[used.name] = used if known is None else known.plus(used)


@dataclass(frozen=True, slots=True)
class CardTime:
    """Time for which a model's replicas held accelerators on one day (UTC), all summed."""

    day: str
    model: str
    card_s: float


def add_card_time(sums: dict[tuple[str, str], CardTime], held: Iterable[CardTime]) -> None:
    """Add each record to the sum of its day and model."""
    for one in held:
        name = one.day, one.model
        known = sums.get(name)
        sums[name] = one if known is None else replace(known, card_s=known.card_s + one.card_s)


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """The usage and outcome of one session turn; see `cato.core.session.Turn`.

    `home` is the replica of the previous turn; `reason` and `placement` say why it went to
    `replica` (`cato.core.receipt.Placement`). `excuse`: why a turn without an answer is not an SLO
    miss (`cato.core.receipt.Excuse`).
    """

    request_id: str
    session: str
    turn: int
    parent: str
    kind: str
    model: str
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    met: bool
    status: str = "done"
    metric: str = ""
    target_s: float | None = None
    think_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    uncached_prompt_tokens: int = 0
    replica: str = ""
    placement: str = ""
    home: str = ""
    reason: str = ""
    session_slack_s: float | None = None
    excuse: str = ""


def turn_usage(receipt: Mapping[str, Any]) -> TurnUsage:
    """From a receipt as plain values; raise `LookupError` or `TypeError` if it is none."""
    calls = [node["llm"] for node in receipt["nodes"] if node["llm"] is not None]
    last = calls[-1] if calls else {}
    prompt_tokens = sum(call["prompt_tokens"] for call in calls)
    cached_tokens = sum(call["cached_prompt_tokens"] for call in calls)
    return TurnUsage(
        request_id=receipt["request_id"],
        session=receipt["session"],
        turn=receipt["turn"],
        parent=receipt["parent"],
        kind=receipt["turn_kind"],
        model=last.get("model", ""),
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached_tokens,
        output_tokens=sum(call["output_tokens"] for call in calls),
        met=receipt["met"],
        status=receipt["status"],
        metric=receipt["metric"],
        target_s=receipt["target_s"],
        think_s=receipt.get("think_s"),
        ttft_s=receipt["ttft_s"],
        e2e_s=receipt["e2e_s"],
        uncached_prompt_tokens=prompt_tokens - cached_tokens,
        replica=last.get("replica", ""),
        placement=last.get("placement", ""),
        home=last.get("home", ""),
        reason=(last.get("reasons") or [""])[-1],
        session_slack_s=receipt.get("session_slack_s"),
        excuse=receipt.get("excuse", ""),
    )
