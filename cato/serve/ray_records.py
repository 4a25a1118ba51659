"""Receipts, estimates and API keys on Ray: an ingress replica's client of the Profiler actor."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, RayTaskError

from cato.control import actors, ray_private
from cato.control.profiler import Finished, News
from cato.core.administration import AuditEntry, Change
from cato.core.errors import CatoError
from cato.core.estimates import ByModel
from cato.core.ids import NodeId, TaskName
from cato.core.length import LengthBelief
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.rollout import Rollout
from cato.core.rollout_book import RolloutOrder
from cato.core.tenancy import LAST_DAY, Access, ApiKey, CardTime, Tenant, TurnUsage, Usage
from cato.core.usage_outbox import UsageOutbox
from cato.estimators.dag_match import StageShare
from cato.estimators.output_lengths import OutputLengths
from cato.estimators.stages import PastRuns
from cato.serve.access.control import AccessControl
from cato.serve.access.early import stored_access
from cato.serve.ingress.feedback import Feedback
from cato.serve.ray_fleet import fleet_state
from cato.serve.ray_pools import REFRESH_S, RayPools
from cato.store.errors import StoreUnavailableError
from cato.telemetry.metrics import render_fleet
from cato.telemetry.overview import Overview, overview
from cato.telemetry.recent import RecentOverview

log = logging.getLogger("cato.records")

# Receipts and usage are sent together: an actor call costs both sides a millisecond of CPU. A
# killed ingress loses those of this time.
RECORD_WITHIN_S = 0.25
# Receipts kept while the Profiler is away, the newest; usage is kept without this bound.
MAX_UNSENT = 2_000


class RayRecords:
    """See `cato.serve.records.Records`; backed by the Profiler actor."""

    def __init__(
        self,
        pools: RayPools,
        nodes_of: Mapping[TaskName, tuple[NodeId, ...]],
        access: AccessControl,
    ) -> None:
        """`access` gets the API keys as they change."""
        self._pools = pools
        self._access = access
        self._nodes_of = nodes_of
        self._table: Mapping[TaskName, ByModel] = {}
        self._lengths = OutputLengths()
        self._past_runs = PastRuns()
        self._profiler: Any = None
        self._finished: deque[Finished] = deque(maxlen=MAX_UNSENT)
        self._usage = UsageOutbox(secrets.token_hex(8))
        self._told: list[Feedback] = []
        self._rollouts: dict[str, Rollout] = {}
        self._changes = 0  # of keys, tenants and rollouts, made here
        self._refresher: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None

    def follow(self, nodes_of: Mapping[TaskName, tuple[NodeId, ...]]) -> None:
        """Use the nodes of changed workflows."""
        self._nodes_of = nodes_of

    def start(self) -> None:
        """Start following the Profiler; call once, inside the event loop."""
        self._refresher = asyncio.get_running_loop().create_task(self._refresh_forever())

    def record(self, receipt: SlaReceipt, usage: Sequence[Usage]) -> None:
        self._usage.add(usage)
        if self._profiler is None:
            log.warning("no profiler yet: the receipt of %s is lost", receipt.request_id)
            return
        self._send_soon()
        self._finished.append((receipt, self._nodes_of.get(receipt.task, ())))

    def note(self, feedback: Feedback) -> None:
        """Record what a user did with a completion; lost while there is no profiler."""
        if self._profiler is not None:
            self._send_soon()
            self._told.append(feedback)

    def _send_soon(self) -> None:
        if not self._finished and not self._told:
            asyncio.get_running_loop().call_later(RECORD_WITHIN_S, self._send)

    def _send(self) -> None:
        if self._profiler is None:
            return
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_all())
        told, self._told = tuple(self._told), []
        if told:
            self._profiler.react.remote(told)

    async def _send_all(self) -> None:
        """Send receipts and usage, one call after the other, so that parcels stay in order. What a
        lost call held of usage is sent again after the next news."""
        while (parcels := self._usage.parcels()) or self._finished:
            finished, to = tuple(self._finished), self._usage.receiver
            self._finished.clear()
            try:
                answered = await self._profiler.record.remote(finished, parcels, to)
            except RayError as error:
                log.info("profiler: %s", error)
                return
            self._usage.sent(parcels, to, answered)

    async def flush(self) -> None:
        """Send all, so that an answer of the profiler includes it."""
        self._send()
        if self._sending is not None:
            await asyncio.shield(self._sending)

    def estimates(self, task: TaskName) -> ByModel:
        return self._table.get(task, {})

    def length(
        self, task: TaskName, node: NodeId, model: str, features: tuple[float, ...], max_tokens: int
    ) -> LengthBelief | None:
        return self._lengths.belief(task, node, model, features, max_tokens)

    def stage_share(self, task: TaskName, executions: Iterable[NodeReceipt]) -> StageShare | None:
        return self._past_runs.share(task, executions)

    async def receipt(self, request_id: str, tenant: str | None) -> Mapping[str, object] | None:
        def ask(profiler: Any) -> Any:
            return profiler.receipt.remote(request_id, tenant)

        receipt: Mapping[str, object] | None = await self._asked(ask)
        if receipt is None:  # perhaps another ingress has yet to send it
            await asyncio.sleep(RECORD_WITHIN_S)
            receipt = await self._asked(ask)
        return receipt

    async def usage(
        self, tenant: str | None, since: str = "", until: str = LAST_DAY
    ) -> Sequence[Usage]:
        usage: tuple[Usage, ...] = await self._asked(lambda p: p.usage.remote(tenant, since, until))
        return usage

    async def card_time(self, since: str, until: str) -> Sequence[CardTime]:
        held: tuple[CardTime, ...] = await self._asked(lambda p: p.card_time.remote(since, until))
        return held

    async def access(self) -> Access:
        access: Access | None = await self._asked(lambda p: p.access.remote())
        if access is None:
            raise StoreUnavailableError("", "the API keys have never been readable")
        return access

    async def administer(
        self, change: Change, by: str, within: str | None
    ) -> ApiKey | Tenant | None:
        about: ApiKey | Tenant | None = await self._asked(
            lambda p: p.administer.remote(change, by, within)
        )
        self._changes += 1
        try:
            self._access.learn(await self.access())  # takes effect at once on this ingress
        except StoreUnavailableError as error:
            log.info("the next news will tell of a change that was made: %s", error)
        return about

    async def audit(
        self, tenant: str | None, limit: int, below: int | None
    ) -> Sequence[AuditEntry]:
        entries: tuple[AuditEntry, ...] = await self._asked(
            lambda p: p.audit.remote(tenant, limit, below)
        )
        return entries

    async def turns(self, session: str, tenant: str | None) -> Sequence[TurnUsage]:
        turns: tuple[TurnUsage, ...] = await self._asked(lambda p: p.turns.remote(session, tenant))
        return turns

    def rollouts(self) -> Mapping[str, Rollout]:
        return self._rollouts

    async def order_rollout(self, order: RolloutOrder, by: str) -> Rollout:
        changed: Rollout = await self._asked(lambda p: p.order_rollout.remote(order, by))
        self._changes += 1
        self._rollouts = {**self._rollouts, changed.name: changed}
        return changed

    async def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """Flush, then ask the profiler; raise `StoreError`."""
        if self._profiler is None:
            raise StoreUnavailableError("", "no profiler yet")
        await self.flush()
        try:
            return await ask(self._profiler)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, CatoError) else error from error
        except RayError as error:
            raise StoreUnavailableError("", "the profiler is being restarted") from error

    async def overview(self, tenant: str | None) -> Overview:
        await self.flush()  # so that the latest runs are shown
        pictures = self._pools.pictures()
        fleet = await fleet_state(self._pools.shards())
        recent = RecentOverview()
        try:
            if self._profiler is not None:
                recent = await self._profiler.recent.remote(tenant)
        except RayError as error:
            log.info("profiler: %s", error)
            fleet = replace(fleet, missing=(*fleet.missing, actors.PROFILER))
        return overview(pictures, fleet, recent, tenant=tenant)

    async def metrics(self) -> bytes:
        await self.flush()
        pictures = self._pools.pictures()
        fleet, runs = await fleet_state(self._pools.shards()), b""
        try:
            if self._profiler is not None:
                runs = await self._profiler.metrics.remote()
        except RayError as error:
            log.info("profiler: %s", error)
            fleet = replace(fleet, missing=(*fleet.missing, actors.PROFILER))
        return runs + render_fleet(pictures, fleet)

    async def _refresh_forever(self) -> None:
        while True:
            try:
                await self._refresh()
            except Exception:
                log.exception("refreshing from the profiler failed; trying again")
            await asyncio.sleep(REFRESH_S)

    async def _refresh(self) -> None:
        try:
            if self._profiler is None:
                self._profiler = actors.get(actors.PROFILER)
            changes = self._changes
            news = await self._profiler.news.remote(
                self._lengths.version, self._past_runs.version, self._usage.sender
            )
            await self._learn(news, is_older=changes != self._changes)
            self._send()  # what an earlier profiler has lost
        except (ValueError, RayError) as error:
            log.info("profiler: %s", error)
            await self._learn_keys_early()

    async def _learn_keys_early(self) -> None:
        """Read the keys from the store itself until there is a Profiler."""
        args = self._pools.deployed_args
        if args is None or not self._access.why_not_ready():
            return
        here = await asyncio.to_thread(ray_private.is_on_head_node)
        access = await stored_access(args, is_on_head_node=here)
        if access is not None:
            self._access.learn(access)

    async def _learn(self, news: News, *, is_older: bool) -> None:
        """`is_older`: it was asked for before the latest change made here, and may lack it."""
        if not is_older:
            if news.rollouts is not None:
                self._rollouts = {r.name: r for r in news.rollouts}
            self._access.learn(news.access)
        self._usage.kept(news.profiler, news.kept_usage)
        self._table = news.estimates
        if news.lengths is not None:
            await asyncio.to_thread(news.lengths.warm_up)
            self._lengths = news.lengths
        if news.past_runs is not None:
            await asyncio.to_thread(news.past_runs.warm_up)
            self._past_runs = news.past_runs
