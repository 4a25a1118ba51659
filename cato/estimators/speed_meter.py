"""Speeds of finished calls by load, from a pool's events and commands.

SABER fits its law of speed to such pairs of load and speed, measured with the engine (its offline
phase). A router measures them all the time, so that the law follows the engine and the work that it
has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from cato.core.commands import Command, Dispatch, Preempt
from cato.core.events import (
    Event,
    InvocationEnded,
    InvocationWithdrawn,
    ReplicaLost,
    ReplicaReported,
    StreamLost,
)
from cato.core.ids import InvocationId, ReplicaId
from cato.core.pool.leases import LEASE_GRACE_S

Speeds = Mapping[int, float]
"""Tokens per second of one call, by the calls that run together, itself included."""
NO_SPEEDS: Speeds = MappingProxyType({})

# Calls of a load before its mean counts, and calls that a mean remembers.
LEAST_CALLS, CALLS_KEPT = 5, 50


@dataclass(slots=True)
class _Mean:
    calls: int = 0
    tokens_per_s: float = 0.0

    def saw(self, tokens_per_s: float) -> None:
        self.calls += 1
        weight = 1 / min(self.calls, CALLS_KEPT)
        self.tokens_per_s += weight * (tokens_per_s - self.tokens_per_s)


@dataclass(slots=True)
class _Replica:
    """`held_s`: integral of its number of calls over time, until `at_s`."""

    at_s: float
    held: int = 0
    held_s: float = 0.0

    def changes(self, now_s: float, calls: int) -> float:
        self.held_s += self.held * (now_s - self.at_s)
        self.at_s, self.held = now_s, self.held + calls
        return self.held_s


@dataclass(slots=True)
class _Call:
    replica: ReplicaId
    attempt: int
    at_s: float
    held_before_s: float


@dataclass(slots=True)
class SpeedMeter:
    """Mean speeds by load, over a pool's replicas. Mutable; one owner.

    As in the paper (Section IV-B, step 1) a call's speed is its tokens by its time at the replica,
    prompts included, and its load the mean number of calls there meanwhile. Calls that continue
    elsewhere, after a preemption or a loss, have no speed.
    """

    _replicas: dict[ReplicaId, _Replica] = field(default_factory=dict)
    _calls: dict[InvocationId, _Call] = field(default_factory=dict)
    _means: dict[int, _Mean] = field(default_factory=dict)
    _is_new: bool = False

    def handle(self, event: Event, commands: Sequence[Command]) -> None:
        now_s = event.now_s
        match event:
            case InvocationEnded(invocation_id=id):
                self._end(event)
            case InvocationWithdrawn(invocation_id=id) | StreamLost(invocation_id=id):
                self._stop(id, now_s)
            case ReplicaLost(replica_id=replica):
                self._stop_all(now_s, lambda _, call: call.replica == replica)
            case ReplicaReported(replica_id=replica, held=held):
                # As the pool does: such a lease never reached its replica.
                before_s, known = now_s - LEASE_GRACE_S, frozenset(held)
                self._stop_all(
                    now_s,
                    lambda id, call: (
                        call.replica == replica and call.at_s < before_s and id not in known
                    ),
                )
            case _:
                pass
        for command in commands:
            match command:
                case Dispatch(invocation_id=id):
                    self._start(command, now_s)
                case Preempt(invocation_id=id):
                    self._stop(id, now_s)
                case _:
                    pass

    def news(self) -> Speeds | None:
        """All speeds, if calls ended since the last look and a load has enough of them."""
        if not self._is_new:
            return None
        self._is_new = False
        known = {
            load: mean.tokens_per_s
            for load, mean in sorted(self._means.items())
            if mean.calls >= LEAST_CALLS
        }
        return known or None

    def _start(self, command: Dispatch, now_s: float) -> None:
        id, call = command.invocation_id, self._calls.get(command.invocation_id)
        if call is not None and (call.attempt, call.replica) == (
            command.attempt,
            command.replica_id,
        ):
            return  # the answer was lost: the lease is told again
        self._stop(id, now_s)
        replica = self._replicas.setdefault(command.replica_id, _Replica(now_s))
        held_s = replica.changes(now_s, 1)
        self._calls[id] = _Call(command.replica_id, command.attempt, now_s, held_s)

    def _end(self, event: InvocationEnded) -> None:
        call = self._calls.get(event.invocation_id)
        if call is None or call.attempt != event.attempt:
            return
        held_s = self._stop(event.invocation_id, event.now_s)
        took_s = event.now_s - call.at_s
        if event.outcome != "done" or call.attempt > 1 or took_s <= 0 or event.output_tokens < 1:
            return
        load = max(1, round((held_s - call.held_before_s) / took_s))
        self._means.setdefault(load, _Mean()).saw(event.output_tokens / took_s)
        self._is_new = True

    def _stop(self, id: InvocationId, now_s: float) -> float:
        """The call is not there any more; returns its replica's integral."""
        call = self._calls.pop(id, None)
        return 0.0 if call is None else self._replicas[call.replica].changes(now_s, -1)

    def _stop_all(self, now_s: float, is_gone: Callable[[InvocationId, _Call], bool]) -> None:
        for id in [id for id, call in self._calls.items() if is_gone(id, call)]:
            self._stop(id, now_s)
