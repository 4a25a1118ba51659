"""What runs have left behind, as an ingress sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from cato.core.administration import AuditEntry, Change
from cato.core.estimates import ByModel
from cato.core.ids import NodeId, TaskName
from cato.core.length import LengthBelief
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.rollout import Rollout
from cato.core.rollout_book import RolloutOrder
from cato.core.tenancy import LAST_DAY, Access, ApiKey, CardTime, Tenant, TurnUsage, Usage
from cato.estimators.dag_match import StageShare
from cato.telemetry.overview import Overview


class Records(Protocol):
    """Stores receipts and answers from what was learnt from them; on Ray, the Profiler actor."""

    def record(self, receipt: SlaReceipt, usage: Sequence[Usage]) -> None:
        """Store `receipt` and count the run's usage. Never blocks."""
        ...

    def estimates(self, task: TaskName) -> ByModel:
        """Measured baselines of a task's nodes; empty until runs were seen."""
        ...

    def length(
        self, task: TaskName, node: NodeId, model: str, features: tuple[float, ...], max_tokens: int
    ) -> LengthBelief | None:
        """Belief about the output length of a call with these features (`features_of`); None until
        enough were seen. Never blocks."""
        ...

    def stage_share(self, task: TaskName, executions: Iterable[NodeReceipt]) -> StageShare | None:
        """The fraction of a run's remaining time that its next stage should get, from the most
        similar past run of the task; None when there is none. `executions` are the run's so far.
        Never blocks."""
        ...

    async def receipt(self, request_id: str, tenant: str | None) -> Mapping[str, object] | None:
        """A receipt of `tenant` (None: any tenant) as plain values; None when it is unknown or no
        longer kept."""
        ...

    async def usage(
        self, tenant: str | None, since: str = "", until: str = LAST_DAY
    ) -> Sequence[Usage]:
        """Usage of `tenant` (None: all tenants) from `since` to `until`, one entry per day, tenant,
        key, task and model; raise `StoreError` when it cannot be read."""
        ...

    async def card_time(self, since: str, until: str) -> Sequence[CardTime]:
        """How long models held accelerators on those days; raise `StoreError`."""
        ...

    async def access(self) -> Access:
        """All current keys and tenants; raise `StoreError`."""
        ...

    async def administer(
        self, change: Change, by: str, within: str | None
    ) -> ApiKey | Tenant | None:
        """See `cato.store.keys.KeyTables.administer`; raise `StoreError`."""
        ...

    async def audit(
        self, tenant: str | None, limit: int, below: int | None
    ) -> Sequence[AuditEntry]:
        """See `cato.store.keys.KeyTables.audit`; raise `StoreError`."""
        ...

    async def turns(self, session: str, tenant: str | None) -> Sequence[TurnUsage]:
        """Usage per turn of a session, oldest first; otherwise as `usage`."""
        ...

    def rollouts(self) -> Mapping[str, Rollout]:
        """All rollouts known now, by model name."""
        ...

    async def order_rollout(self, order: RolloutOrder, by: str) -> Rollout:
        """Apply an `order` given by `by`, persist and log it, and return the new rollout; raise
        `InputError`, `UnknownNameError` or `StoreError`."""
        ...

    async def overview(self, tenant: str | None) -> Overview:
        """The fleet and its recent events, as far as `tenant` may see them (None: everything)."""
        ...

    async def metrics(self) -> bytes:
        """All metrics in the Prometheus text format."""
        ...
