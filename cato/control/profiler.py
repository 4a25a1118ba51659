"""The Profiler actor: measures and learns from every finished run, and keeps it over restarts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cato.control.access_book import AccessBook
from cato.control.learning import Learning
from cato.control.reactions import Reactions
from cato.core.administration import AuditEntry, Change
from cato.core.estimates import Baselines, ByModel, PredictionErrors
from cato.core.ids import NodeId, TaskName
from cato.core.receipt import SlaReceipt
from cato.core.rollout import Rollout
from cato.core.rollout_book import RolloutBook, RolloutOrder, action_of
from cato.core.tenancy import LAST_DAY, Access, ApiKey, CardTime, Tenant, TurnUsage, Usage
from cato.core.topology import Kept
from cato.core.usage_outbox import UsageParcel
from cato.estimators.output_lengths import OutputLengths
from cato.estimators.stages import PastRuns
from cato.profiles.schema import ProfileFile
from cato.serve.ingress.feedback import Feedback
from cato.store.errors import StoreError, StoreUnavailableError
from cato.store.location import default_location
from cato.store.records import KeptReceipt, Learnt, Limits, Record
from cato.store.store import MetadataStore
from cato.store.writer import StoreWriter
from cato.telemetry.recent import RecentOverview, RecentRuns
from cato.telemetry.run_metrics import RunMetrics

log = logging.getLogger("cato.profiler")

# Receipts kept for `cato explain`, newest last; about 5 kB each. The store keeps more.
KEPT_RECEIPTS = 1_000
# Passed-through calls vary too much for a mean per model name to say anything about budgets.
UNLEARNT_PREFIX = "model:"
# Queries flush pending writes first, so that they see the newest use; a hanging store delays them
# by no more than this.
FLUSH_S = 1.0
# Interval for saving rollout counts: the most that a restart loses.
KEEP_ROLLOUTS_S = 5.0


Finished = tuple[SlaReceipt, tuple[NodeId, ...]]
"""A receipt, and all nodes of its workflow: nodes without an execution were skipped."""


@dataclass(frozen=True, slots=True)
class News:
    """What ingress replicas follow. None: not known yet, or for `lengths` and `past_runs` not
    newer than what the caller has. `kept_usage` is the number of the caller's last parcel of usage
    that `profiler`, the id of this process, has stored."""

    rollouts: tuple[Rollout, ...] | None
    access: Access | None
    profiler: str
    kept_usage: int
    estimates: Mapping[TaskName, ByModel]
    lengths: OutputLengths | None
    past_runs: PastRuns | None


class Profiler:
    """Node baselines, output lengths, receipts and run metrics of all ingress replicas.

    Learnt values are kept in the metadata store at `location` (None: `default_location`) and
    restored from it. Without the store everything works until the next restart.
    """

    def __init__(self, location: str | Path | None = None) -> None:
        self._baselines = Baselines()
        self._errors = PredictionErrors()
        self._metrics = RunMetrics()
        self._recent = RecentRuns()
        self._receipts: OrderedDict[tuple[str, str], SlaReceipt] = OrderedDict()
        self._learning = Learning()
        self._receipts_per_s = Kept().receipts_per_s
        self._second, self._kept_in_it = 0, 0
        self._earlier: Learnt | None = None
        self._has_earlier = False
        self._rollouts = RolloutBook()
        self._reactions = Reactions(self._rollouts)
        self._kept_rollouts: Mapping[str, Rollout] = {}  # in the store of that opening
        self._kept_in_opening = 0
        self._kept_rollouts_at_s = 0.0
        location = location or default_location()
        self._writer = StoreWriter(location, self._read_earlier)
        self._access = AccessBook(self._writer, location)
        self._id = secrets.token_hex(8)
        self._writer.start()

    async def record(
        self, finished: tuple[Finished, ...], usage: tuple[UsageParcel, ...] = (), to: str = ""
    ) -> str:
        """Store and learn; returns the id of this process. A tenant chooses its request ids; the
        newest run of an id is kept.

        `usage` is taken only if it is meant for this process (`to`): a sender that expects an
        earlier one may have parcels with lower numbers, which must come first.
        """
        self._take_earlier()
        records: list[Record] = [*usage] if to == self._id else []
        for receipt, all_nodes in finished:
            records += self._record(receipt, all_nodes)
        self._writer.put(records)
        self._learning.refit_when_due()
        return self._id

    async def keep(self, kept: Kept) -> None:
        """Above `kept.receipts_per_s`, runs are only counted: no receipt is kept and nothing is
        learnt. Until the first call, usage and the audit log are kept however old they are."""
        self._receipts_per_s = kept.receipts_per_s
        self._writer.limits = Limits(usage_days=kept.usage_days, audit_days=kept.audit_days)

    def _is_kept(self, now_s: float) -> bool:
        """Whether this is among the first `per_s` runs of the current second."""
        if int(now_s) != self._second:
            self._second, self._kept_in_it = int(now_s), 0
        self._kept_in_it += 1
        return self._kept_in_it <= self._receipts_per_s

    def _record(self, receipt: SlaReceipt, all_nodes: tuple[NodeId, ...]) -> list[Record]:
        """Learn from a run; return what the store should keep of it."""
        self._rollouts.record(receipt)
        now_s = time.time()
        if not receipt.is_shadow:
            self._metrics.record(receipt)
            self._recent.record(receipt, now_s)
        if not self._is_kept(now_s):
            return []
        if receipt.is_shadow:  # its answer went to no client
            return list(self._learning.add_lengths(receipt))
        name = (receipt.tenant, receipt.request_id)
        self._receipts[name] = receipt
        self._receipts.move_to_end(name)
        if len(self._receipts) > KEPT_RECEIPTS:
            self._receipts.popitem(last=False)
        self._reactions.expect(receipt)
        records: list[Record] = [
            KeptReceipt(receipt, now_s),
            *self._learning.add_lengths(receipt),
            *self._errors.record(receipt),
        ]
        if not receipt.task.startswith(UNLEARNT_PREFIX):
            records += self._baselines.record(receipt, all_nodes)
        if (stages := self._learning.add_run(receipt)) is not None:
            records.append(stages)
        return records

    async def react(self, told: tuple[Feedback, ...]) -> None:
        """Count and keep what users did with completions; see `Reactions.take`."""
        for r in filter(None, map(self._reactions.take, told)):
            self._metrics.record_reaction(r.task, r.model, r.reaction, r.e2e_s)
            self._writer.put([r])

    async def news(self, lengths_version: int, past_runs_version: int, sender: str = "") -> News:
        """All that an ingress replica with these versions follows, in one call; it sends its usage
        as `sender`."""
        return News(
            await self.rollouts(),
            await self.access(),
            self._id,
            self._writer.kept_usage.get(sender, 0),
            await self.estimates(),
            await self.lengths(lengths_version),
            await self.past_runs(past_runs_version),
        )

    async def rollouts(self) -> tuple[Rollout, ...] | None:
        """All rollouts, advanced by their rules; None until they were read from the store."""
        self._take_earlier()
        if not self._has_earlier:
            return None
        now_s = time.time()
        moved = self._rollouts.judge(now_s)
        for rollout in moved:
            log.warning(
                "rollout of %s: %s: %s", rollout.name, rollout.phase, rollout.outlook(now_s)
            )
        is_new = self._writer.openings != self._kept_in_opening
        if moved or is_new or now_s - self._kept_rollouts_at_s >= KEEP_ROLLOUTS_S:
            self._kept_rollouts_at_s = now_s
            self._keep_rollouts()
        return tuple(self._rollouts.all.values())

    async def order_rollout(self, order: RolloutOrder, by: str) -> Rollout:
        """Apply `order`, given by `by`, and return the rollout; raise `InputError`,
        `UnknownNameError`, or `StoreError` when it cannot be stored."""
        self._take_earlier()
        if not self._writer.state().is_ok:
            raise StoreUnavailableError("", "the store cannot keep a rollout now")
        before = self._rollouts.all.get(order.name)
        rollout = self._rollouts.order(order, time.time())
        log.warning("rollout of %s: %s", rollout.name, rollout.history[-1].why)
        self._keep_rollouts()
        await asyncio.to_thread(self._writer.flush, FLUSH_S)
        if rollout is before:  # the order came again
            return rollout
        action = action_of(order)
        await asyncio.to_thread(
            self._writer.read, lambda s: s.log_rollout(by, action, before, rollout)
        )
        return rollout

    def _keep_rollouts(self) -> None:
        opening = self._writer.openings
        known = dict(self._rollouts.all)
        kept = self._kept_rollouts if opening == self._kept_in_opening else {}
        self._writer.put([r for name, r in known.items() if r != kept.get(name)])
        self._kept_rollouts, self._kept_in_opening = known, opening

    async def estimates(self) -> Mapping[TaskName, ByModel]:
        self._take_earlier()
        return self._baselines.table()

    async def lengths(self, known_version: int) -> OutputLengths | None:
        """Estimates of output lengths; None if `known_version` is the newest."""
        self._take_earlier()
        return self._learning.lengths(known_version)

    async def past_runs(self, known_version: int) -> PastRuns | None:
        """Past multi-node runs; None if `known_version` is the newest."""
        self._take_earlier()
        return self._learning.past_runs(known_version)

    async def receipt(self, request_id: str, tenant: str | None) -> Mapping[str, object] | None:
        """A receipt of `tenant` (None: the newest of any tenant) as plain values; receipts from
        before a restart lack their free text."""
        known = self._receipts.get((tenant or "", request_id))
        if known is None and tenant is None:
            newest_first = reversed(self._receipts.values())
            known = next((r for r in newest_first if r.request_id == request_id), None)
        if known is not None:
            return known.as_dict()
        try:
            return await asyncio.to_thread(
                self._writer.read, lambda s: s.receipt(request_id, tenant)
            )
        except StoreError as error:
            log.warning("receipt of %s: %s", request_id, error)
            return None

    async def access(self) -> Access | None:
        """All keys, tenants and this month's spending; None if they could never be read."""
        return await self._access.access()

    async def usage(
        self, tenant: str | None, since: str = "", until: str = LAST_DAY
    ) -> tuple[Usage, ...]:
        """Usage of `tenant` (None: all tenants) on those days, by name; raise `StoreError`."""
        await asyncio.to_thread(self._writer.flush, FLUSH_S)
        return await asyncio.to_thread(self._writer.read, lambda s: s.usage(tenant, since, until))

    async def kept(self, sender: str) -> tuple[str, int]:
        """The id of this process, and the number of the sender's last parcel that is stored."""
        return self._id, self._writer.kept_usage.get(sender, 0)

    async def card_time(self, since: str, until: str) -> tuple[CardTime, ...]:
        """Accelerator time that models held on those days; raise `StoreError`."""
        return await asyncio.to_thread(self._writer.read, lambda s: s.card_time(since, until))

    async def administer(
        self, change: Change, by: str, within: str | None
    ) -> ApiKey | Tenant | None:
        """See `MetadataStore.administer`; raise `StoreError`. The next `access` sees the change."""
        return await self._access.administer(change, by, within)

    async def audit(
        self, tenant: str | None, limit: int, below: int | None
    ) -> tuple[AuditEntry, ...]:
        """See `MetadataStore.audit`; raise `StoreError`."""
        return await asyncio.to_thread(self._writer.read, lambda s: s.audit(tenant, limit, below))

    async def turns(self, session: str, tenant: str | None) -> tuple[TurnUsage, ...]:
        """What the turns of `session` used; raise `StoreError`."""
        await asyncio.to_thread(self._writer.flush, FLUSH_S)
        return await asyncio.to_thread(self._writer.read, lambda s: s.turns(session, tenant))

    async def recent(self, tenant: str | None) -> RecentOverview:
        """Attainment of the last half hour and its slowest runs, of `tenant` (None: of all)."""
        return self._recent.overview(tenant, time.time())

    async def keep_profile(self, profile: ProfileFile) -> str:
        """Store a measured profile. Returns why it could not be stored; empty on success."""
        try:
            await asyncio.to_thread(self._writer.read, lambda s: s.save_profile(profile))
        except StoreError as error:
            return str(error)
        return ""

    async def metrics(self) -> bytes:
        return self._metrics.render(self._errors.table().values(), self._writer.state())

    async def close(self) -> None:
        """Flush pending writes and close the store."""
        await asyncio.to_thread(self._writer.close)

    # Learnt before a restart

    def _read_earlier(self, store: MetadataStore) -> None:
        # Runs in the writer's thread if the store came up late; the next call applies it.
        self._earlier = store.learnt()

    def _take_earlier(self) -> None:
        if self._earlier is None:
            return
        earlier, self._earlier = self._earlier, None
        self._has_earlier = True
        self._baselines.restore(earlier.means)
        self._errors.restore(earlier.errors)
        self._learning.restore(earlier.samples, earlier.runs)
        self._rollouts.restore(earlier.rollouts)
