"""The Replica Router actor of one pool: a thin driver of `PoolOrchestrator`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, assert_never

from cato.control.links import Leased
from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.demand import PoolDemand, PoolMeter
from cato.core.errors import CapacityError, SupersededError
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReported,
    Ticked,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator, PoolPicture
from cato.core.pool.prefixes import SessionPrefixes
from cato.core.profile import Profile
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of
from cato.telemetry.decisions import DecisionBook, PoolDecisions
from cato.telemetry.event_log import EventLog
from cato.wire.link.endpoints import Address

log = logging.getLogger("cato.router")
TICK_S = 0.5
# Ingresses show that they live every second; what waits for one that does not is nobody's.
INGRESS_SILENCE_S = 15.0
# Longer than an ingress looks for a replica that it does not know yet.
ORDERED_FOR_S = 10.0


class Ended(NamedTuple):
    """An invocation that has left its replica; what its engine said of its prompt, if it did."""

    id: InvocationId
    attempt: int
    output_tokens: int
    outcome: str
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass(slots=True)
class _Asked:
    """What an ingress waits for: a lease for its invocation, in this attempt."""

    answer: asyncio.Future[Dispatch | Refuse]
    attempt: int
    ingress: str


class ReplicaRouter:
    """Leases replicas of one pool. All methods are safe to call again with the same ids."""

    def __init__(
        self,
        pool: PoolName,
        policies: PoolPolicies,
        profile: Profile,
        log_folder: str | None = None,
        secret: bytes = b"",
    ) -> None:
        """`profile` is that of the pool's fastest deployment; policies that need a model of the
        engine take it. All events and commands are logged in `log_folder`, if one is given.
        `secret` is that of the pool's links, in all lives of the actor.
        """
        self._names, self._profile = policies, profile
        self._core = PoolOrchestrator(pool, policies_of(policies, profile))
        self._meter = PoolMeter(profile, profile.max_running)
        self._prefixes = SessionPrefixes()
        self._log = _event_log(log_folder, pool, policies, profile)
        self._decisions = DecisionBook(pool)
        self._asked: dict[InvocationId, _Asked] = {}
        # What was taken back from replicas: its attempt, and until when they are told.
        self._to_stop: dict[ReplicaId, dict[InvocationId, tuple[int, float]]] = {}
        self._gone: set[ReplicaId] = set()
        self._ingress_seen_s: dict[str, float] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._life = uuid.uuid4().hex
        self._has_dealt = False
        self._secret = secret
        self._addresses: dict[ReplicaId, Address] = {}

    async def configure(self, policies: PoolPolicies, profile: Profile) -> None:
        """Change how the pool decides, or the profile that its policies take (a new measurement);
        raise `UnknownNameError` for a name that is none.
        """
        if (policies, profile) != (self._names, self._profile):
            fresh = policies_of(policies, profile)
            self._names, self._profile = policies, profile
            self._handle(PoliciesChanged(_now_s(), fresh))

    async def offer(
        self, invocation: Invocation, ingress: str = "", shared_blocks: int = 0
    ) -> Dispatch:
        """Wait for a lease; raise `CapacityError` when the queue is full, `SupersededError` when a
        newer run of its buffer takes its place, and `PrefixUnknownError` when its prefix lacks the
        first of the `shared_blocks` that it shares with the prompt before, and they are not known.

        Times of `invocation` count from the moment of the call; here they become this clock's.
        When `ingress` dies, what it has waiting is withdrawn.
        """
        now_s = _now_s()
        self._ensure_ticking()
        prefix = self._prefixes.whole(invocation.session, shared_blocks, invocation.prefix)
        mine = replace(invocation.on_clock(now_s), prefix=prefix)
        asked = self._asked.get(mine.id)
        if asked is None or asked.answer.done():
            answer = asyncio.get_running_loop().create_future()
            asked = self._asked[mine.id] = _Asked(answer, mine.attempt, ingress)
        asked.attempt, asked.ingress = max(asked.attempt, mine.attempt), ingress
        if ingress:
            self._ingress_seen_s[ingress] = now_s
        self._handle(InvocationOffered(now_s, mine))
        command = await asyncio.shield(asked.answer)
        if isinstance(command, Refuse) and command.superseded:
            raise SupersededError(command.reason)
        if isinstance(command, Refuse):
            raise CapacityError(self._core.name, command.reason, command.retry_after_s)
        return command

    async def lease(
        self, invocation: Invocation, ingress: str = "", shared_blocks: int = 0
    ) -> Leased:
        """As `offer`, with the address of the replica."""
        dispatch = await self.offer(invocation, ingress, shared_blocks)
        return Leased(dispatch, self._addresses.get(dispatch.replica_id))

    async def secret(self) -> bytes:
        """What opens the pool's links."""
        return self._secret

    async def withdraw(self, id: InvocationId, attempt: int, reason: str) -> None:
        """Its ingress gives up `attempt`; nothing happens when it has asked for a newer one."""
        asked = self._asked.get(id)
        if asked is not None and asked.attempt > attempt:
            return  # calls of one ingress may overtake each other
        self._handle(InvocationWithdrawn(_now_s(), id, attempt, reason))
        if asked is not None:
            del self._asked[id]
            asked.answer.cancel()

    async def report(
        self, report: ReplicaReported, address: Address | None = None
    ) -> tuple[tuple[InvocationId, int], ...]:
        """A replica's heartbeat; `report.now_s` is replaced by this clock's. It takes links at
        `address`.

        Returns what it has to stop, as `progress` does: answers that come whole show no progress.
        """
        self._ensure_ticking()
        if report.replica_id in self._gone:
            return ()
        if address is not None:
            self._addresses[report.replica_id] = address
        self._handle(replace(report, now_s=_now_s()))
        return self._orders(report.replica_id, report.held)

    async def progress(
        self, replica: ReplicaId, tokens: tuple[tuple[InvocationId, int], ...]
    ) -> tuple[tuple[InvocationId, int], ...]:
        """Tokens of what runs on `replica`, by invocation, in its present attempt.

        Returns what the replica has to stop, as (id, attempt): it waits again and goes on from
        the text it has, here or elsewhere, unless its run was superseded.
        """
        self._handle(ReplicaProgressed(_now_s(), replica, tokens))
        return self._orders(replica, [id for id, _ in tokens])

    def _orders(
        self, replica: ReplicaId, held: Iterable[InvocationId]
    ) -> tuple[tuple[InvocationId, int], ...]:
        """What it should stop of what it holds. Told again and again: a call that was taken back as
        soon as it had its lease may reach the replica after the order."""
        orders = self._to_stop.get(replica)
        if not orders:
            return ()
        now_s = _now_s()
        for id in [id for id, (_, until_s) in orders.items() if until_s < now_s]:
            del orders[id]
        return tuple((id, orders[id][0]) for id in held if id in orders)

    async def news(self, first_tokens: tuple[InvocationId, ...], ended: tuple[Ended, ...]) -> None:
        """What happened on a replica since it last told."""
        for id in first_tokens:
            self._handle(FirstTokenSent(_now_s(), id))
        for call in ended:
            self._handle(InvocationEnded(_now_s(), *call))

    async def lost(self, replica: ReplicaId, reason: str) -> None:
        """A stream to the replica broke; if it lives, its next report brings it back."""
        self._to_stop.pop(replica, None)
        log.warning("replica %s lost: %s", replica, reason)
        self._handle(ReplicaLost(_now_s(), replica, reason))

    async def left(self, replicas: frozenset[ReplicaId]) -> None:
        """Serve no longer lists these replicas; they get no new work, whatever they report."""
        for replica in replicas - self._gone:
            self._gone.add(replica)
            self._to_stop.pop(replica, None)
            self._addresses.pop(replica, None)
            self._handle(ReplicaLost(_now_s(), replica, "left the deployment"))

    async def alive(self, ingress: str) -> str:
        """`ingress` is there for what it has waiting. Returns a name of this life of the actor."""
        self._ingress_seen_s[ingress] = _now_s()
        return self._life

    async def picture(self) -> PoolPicture:
        return self._core.picture(_now_s())

    async def demand(self) -> PoolDemand:
        """What arrived, waits and ended since the last call; there is one caller."""
        return self._meter.look(self._core.picture(_now_s()), self._core.leased)

    async def policies(self) -> PoolPolicies:
        return self._names

    async def why_waiting(self, id: InvocationId) -> str:
        return self._core.why_waiting(id)

    async def decisions(self) -> PoolDecisions:
        """The newest decisions with their reasons, and all counted."""
        return self._decisions.all()

    def _handle(self, event: Event) -> tuple[Command, ...]:
        self._meter.handle(event)
        commands = self._core.handle(event)
        self._decisions.note(time.time(), event, commands, self._core)
        if self._log is not None:
            self._log.write(event, commands, self._names, self._profile)
        for command in commands:
            match command:
                case Dispatch():
                    self._answer(command)
                case Refuse():
                    self._meter.refused(command.invocation_id)
                    self._answer(command)
                case Preempt():
                    # Its replica is told by the answer to its report, the ingress by the replica.
                    stopped = self._to_stop.setdefault(command.replica_id, {})
                    until_s = _now_s() + ORDERED_FOR_S
                    stopped[command.invocation_id] = (command.attempt, until_s)
                    log.info("preempt %s: %s", command.invocation_id, command.reason)
                case _:
                    assert_never(command)
        return commands

    def _answer(self, command: Dispatch | Refuse) -> None:
        # One that was taken back and has a place again before its ingress asked gets it then.
        asked = self._asked.pop(command.invocation_id, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(command)

    def _ensure_ticking(self) -> None:
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Ticked(_now_s()))
            self._deal_anew()
            await self._forget_dead_ingresses()
            self._decisions.note_silent(time.time(), self._core.replicas)
            if self._log is not None:
                self._log.flush()

    def _deal_anew(self) -> None:
        """Once in a life: early binding gave all that waited to the replica that reported first."""
        if self._has_dealt or not self._core.replicas:
            return
        self._has_dealt = True
        policies = policies_of(self._names, self._profile)
        if not policies.late_binding:
            self._handle(PoliciesChanged(_now_s(), policies))

    async def _forget_dead_ingresses(self) -> None:
        """A place in the queue must not come to one that nobody reads."""
        silent_since_s = _now_s() - INGRESS_SILENCE_S
        dead = {i for i, seen_s in self._ingress_seen_s.items() if seen_s < silent_since_s}
        for ingress in dead:
            del self._ingress_seen_s[ingress]
        if not dead:
            return
        left = [(id, asked) for id, asked in self._asked.items() if asked.ingress in dead]
        for id, asked in left:
            # One that was only slow tells its client to ask again.
            error = CapacityError(self._core.name, "its ingress was silent", 1.0)
            if not asked.answer.done():
                asked.answer.set_exception(error)
                asked.answer.exception()  # seen: there may be nobody to whom it could be told
            await self.withdraw(id, asked.attempt, "its ingress is gone")
        log.warning("%d ingresses are silent; %d invocations withdrawn", len(dead), len(left))


def _event_log(
    folder: str | None, pool: PoolName, names: PoolPolicies, profile: Profile
) -> EventLog | None:
    if folder is None:
        return None
    # One file for each life of the router: a log is read from empty books on.
    name = f"{pool}-{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns()}.jsonl"
    try:
        return EventLog(Path(folder) / name, pool, names, profile)
    except OSError as error:
        log.warning("pool %s is not logged: %s", pool, error)
        return None


def _now_s() -> float:
    return time.monotonic()
