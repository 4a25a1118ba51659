"""The Replica Router actor of a pool, or of one of its shards: a driver of `PoolOrchestrator`."""

from __future__ import annotations

import asyncio
import logging
import time
from math import inf
from typing import assert_never

from cato.control.leases import Leases
from cato.control.messages import Door, Told
from cato.control.replica_sets import MAX_LEFT
from cato.control.router_links import RouterLinks
from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.demand import PoolDemand, PoolMeter
from cato.core.events import (
    Event,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaLost,
    ReplicaReported,
    Ticked,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator, PoolPicture
from cato.core.profile import Profile
from cato.core.record import changed
from cato.core.shards import ShardLoad, load_now
from cato.core.snapshot import Invocation
from cato.core.topology import ONE_SHARD, PoolPolicies, Shards
from cato.estimators.speed_meter import NO_SPEEDS, SpeedMeter
from cato.policies.registry import policies_of, refits
from cato.telemetry.decisions import DecisionBook, PoolDecisions
from cato.telemetry.event_log import opened_log

log = logging.getLogger("cato.router")
TICK_S = 0.5
# Shortest time between two fits of the speed of engines; a fit takes about 10 ms.
REFIT_S = 5.0
LEFT_REASON = "left the deployment"


class ReplicaRouter:
    """Leases replicas of one pool. All methods are safe to call again with the same ids."""

    def __init__(
        self,
        pool: PoolName,
        policies: PoolPolicies,
        profile: Profile,
        log_folder: str | None = None,
        secret: bytes = b"",
        shard: int = 0,
        shards: Shards = ONE_SHARD,
    ) -> None:
        """`profile` is that of the pool's fastest deployment; used by policies that model it.
        All events and commands are logged in `log_folder`, if given. `secret` is that of the pool's
        links and stays the same over restarts. `shard` is this router's number among the pool's
        `shards`. A restarted router has these until it is configured: its replicas must know at
        once where to go if it is killed again.
        """
        self._names, self._profile = policies, profile
        self._speeds, self._meter_of_speed, self._refitted_at_s = NO_SPEEDS, SpeedMeter(), -inf
        self._core = PoolOrchestrator(pool, policies_of(policies, profile))
        self._meter = PoolMeter(profile, profile.max_running)
        log_name = PoolName(f"{pool}.{shard}") if shard else pool
        self._log = opened_log(log_folder, log_name, policies, profile)
        self._decisions = DecisionBook(pool)
        self._leases = Leases(pool, self._handle)
        # Serve does not list these replicas, the latest last; they keep reporting while they drain.
        self._gone: dict[ReplicaId, None] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._has_dealt = False
        self._unnoted: tuple[Event, tuple[Command, ...]] | None = None
        self.links = RouterLinks(pool, secret, self, shards)

    async def door(self) -> Door:
        """Where this incarnation of the actor accepts links, and their secret."""
        return await self.links.door()

    async def configure(
        self, policies: PoolPolicies, profile: Profile, shards: Shards = ONE_SHARD
    ) -> None:
        """Change the pool's policies, the profile that they use (a new measurement), or its shards;
        raise `UnknownNameError` for an unknown policy.
        """
        self.links.resize(shards)
        if (policies, profile) != (self._names, self._profile):
            fresh = policies_of(policies, profile, self._speeds)
            self._note_last()  # of the policies before
            self._names, self._profile = policies, profile
            self._handle(PoliciesChanged(_now_s(), fresh))

    async def offer(self, invocation: Invocation, shared_blocks: int = 0) -> Dispatch:
        """See `Leases.offer`."""
        self._ensure_ticking()
        return await self._leases.offer(invocation, shared_blocks)

    def take(self, told: Told) -> None:
        """Handle an event from a replica or an ingress; its `now_s` is replaced by this clock's.

        Reports of replicas that have left are ignored.
        """
        match told:
            case InvocationWithdrawn(_, id, attempt, reason):
                self._leases.withdraw(id, attempt, reason)
            case ReplicaReported(replica_id=replica) if replica in self._gone:
                pass
            case _:
                self._ensure_ticking()
                self._handle(changed(told, now_s=_now_s()))

    def lose(self, replica: ReplicaId, reason: str) -> None:
        """End the replica's leases; if it is alive, its next report brings it back."""
        level = logging.INFO if replica in self._gone else logging.WARNING  # it ends as planned
        log.log(level, "replica %s lost: %s", replica, reason)
        self._handle(ReplicaLost(_now_s(), replica, reason))

    def leave(self, replica: ReplicaId) -> None:
        """Serve no longer lists the replica: it gets no new work, whatever it reports, until Serve
        lists it again."""
        if replica not in self._gone:
            self._gone[replica] = None
            if len(self._gone) > MAX_LEFT:
                del self._gone[next(iter(self._gone))]
            log.info("replica %s %s", replica, LEFT_REASON)
            self._note_last()
            self._decisions.note_left(time.time(), replica, LEFT_REASON)
            self._handle(ReplicaLost(_now_s(), replica, LEFT_REASON))

    async def left(self, replicas: frozenset[ReplicaId]) -> None:
        """As `leave`."""
        for replica in replicas:
            self.leave(replica)

    async def listed(self, replicas: frozenset[ReplicaId]) -> None:
        """Serve lists these replicas: each gets work from its next report on."""
        for replica in replicas:
            self._gone.pop(replica, None)

    def load(self) -> ShardLoad:
        """The load by which ingresses choose between shards."""
        return load_now(self._core)

    async def picture(self) -> PoolPicture:
        return self._core.picture(_now_s())

    async def demand(self) -> PoolDemand:
        """Arrivals, queue and completions since the last call; there is only one caller."""
        self._note_last()
        return self._meter.look(self._core.picture(_now_s()), self._core.leased)

    async def policies(self) -> PoolPolicies:
        return self._names

    async def why_waiting(self, id: InvocationId) -> str:
        return self._core.why_waiting(id)

    async def frames(self) -> int:
        """As `RouterLinks.frames`, for benchmarks."""
        return self.links.frames

    async def decisions(self) -> PoolDecisions:
        """The newest decisions with their reasons, and the counts of all."""
        self._note_last()
        return self._decisions.all()

    def _handle(self, event: Event) -> tuple[Command, ...]:
        self._note_last()
        commands = self._core.handle(event)
        self._unnoted = (event, commands)
        # After the answer has left: an ingress waits for it, and nothing for the notes.
        asyncio.get_running_loop().call_soon(self._note_last)
        for command in commands:
            match command:
                case Dispatch() | Refuse():
                    self._leases.answer(command)
                case Preempt():
                    self.links.order(command)  # the replica tells the ingress
                    log.info("preempt %s: %s", command.invocation_id, command.reason)
                case _:
                    assert_never(command)
        return commands

    def _note_last(self) -> None:
        """Measure and log the latest event and what was decided, unless that has been done."""
        if self._unnoted is None:
            return
        (event, commands), self._unnoted = self._unnoted, None
        self._meter.handle(event)
        if refits(self._names):
            self._meter_of_speed.handle(event, commands)
        self._decisions.note(time.time(), event, commands, self._core)
        if self._log is not None:
            self._log.write(event, commands, self._names, self._profile, self._speeds)
        for command in commands:
            if isinstance(command, Refuse):
                self._meter.refused(command.invocation_id)

    def _ensure_ticking(self) -> None:
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Ticked(_now_s()))
            self._deal_anew()
            await self._refit()
            self._decisions.note_silent(time.time(), self._core.replicas)
            self._note_last()
            if self._log is not None:
                self._log.flush()

    def _deal_anew(self) -> None:
        """Once after a time without replicas: early binding gave all calls to the first one."""
        if not self._core.replicas:
            self._has_dealt = False
            return
        if self._has_dealt:
            return
        self._has_dealt = True
        policies = policies_of(self._names, self._profile, self._speeds)
        if not policies.late_binding:
            self._handle(PoliciesChanged(_now_s(), policies))

    async def _refit(self) -> None:
        """Fit the scheduler's model of the engine to the speeds measured so far, in a thread."""
        names, profile, now_s = self._names, self._profile, _now_s()
        if not refits(names) or now_s - self._refitted_at_s < REFIT_S:
            return
        speeds = self._meter_of_speed.news()
        if speeds is None:
            return
        self._refitted_at_s = now_s
        fresh = await asyncio.to_thread(policies_of, names, profile, speeds)
        self._note_last()
        self._speeds = speeds
        if (names, profile) == (self._names, self._profile):  # else it is fitted next time
            self._handle(PoliciesChanged(_now_s(), fresh))


def _now_s() -> float:
    return time.monotonic()
