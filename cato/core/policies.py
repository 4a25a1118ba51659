"""The questions a pool asks of its policies. Every answer must be pure: values in, values out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from cato.core.decision import Admit, Batch, Defer, Hold, Rank, Route
from cato.core.ids import InvocationId
from cato.core.record import record
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView


class RoutingPolicy(Protocol):
    """Which replica of `pool` should take `invocation` now?

    `pool.replicas` holds only replicas that may be chosen: with late binding those with room.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold: ...


@record
class Work:
    """Expected seconds of an invocation that starts now, alone, on the pool's fastest replica.

    `remaining_s`: to the SLO event, with what lies downstream. `service_s`: to its last token.
    `token_s`: for each token more than expected. Of the queue that it stands in: `ahead_s` until
    all that can still be in time has begun, and the share of work that was `missed` lately.
    """

    remaining_s: float
    service_s: float
    token_s: float
    ahead_s: float = 0.0
    missed: float = 0.0


class OrderingPolicy(Protocol):
    """Where in the queue does `invocation` stand at `now_s`?"""

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank: ...


class AdmissionPolicy(Protocol):
    """May `invocation` join what `replica` runs now?"""

    def admit(
        self, invocation: Invocation, replica: ReplicaView, now_s: float
    ) -> Admit | Defer: ...


class PreemptionPolicy(Protocol):
    """Which of the running invocations should give way to those that wait?

    Asked at every progress report of a replica; `waiting` is the head of the queue, in order, and
    `place_s()` when the pool's next place is expected to be free, in seconds from now.
    """

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
    ) -> Sequence[tuple[InvocationId, str]]: ...


class MappingPolicy(Protocol):
    """Which of `waiting`, who are shown in order, should `replica` start now? It has room."""

    def start(self, waiting: Sequence[Invocation], replica: ReplicaView, now_s: float) -> Batch: ...


@dataclass(frozen=True, slots=True)
class AdmitAlways:
    """Whatever finds a place joins; the engine's own cap is the only bound."""

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        return Admit("has room")


ADMIT_ALWAYS = AdmitAlways()


@dataclass(frozen=True, slots=True)
class Policies:
    """How one pool decides; see `cato.core.topology.PoolPolicies` for the words.

    `window` bounds how many of the queue, in order, are asked about at one event (0: all);
    `shuffled`: those are tried in the order of their draws instead. `strict`: nothing of a larger
    rank value is asked about while something of a smaller one is passed over. `reserve`: the share
    of dispatches that work without an SLO gets while some of it has waited for `reserve_after_s`,
    so that it never starves; late binding only. `corrects`: profiles and beliefs of lengths are
    corrected by what is seen (see `cato.core.pool.pace`). `max_queued_tokens`, `refuse_late`
    and `patience_s` (inf: all may wait) as in `PoolPolicies`. `mapping` chooses of all that waits,
    who is shown in the order of `ordering`: then nobody asks the admission (nor, with late binding,
    the routing), and `window` and `reserve` do not count. `retain_s`: so long the KV blocks of an
    answer that calls a tool are kept from eviction (simulated engines alone: vLLM has no such
    order). `by_turns`: a call may start only after `TurnCame`, for pools that share their replicas.
    """

    routing: RoutingPolicy
    ordering: OrderingPolicy
    late_binding: bool = True
    max_queued: int = 1000
    admission: AdmissionPolicy = ADMIT_ALWAYS
    preemption: PreemptionPolicy | None = None
    window: int = 0
    shuffled: bool = False
    strict: bool = False
    reserve: float = 0.0
    reserve_after_s: float = 0.0
    corrects: bool = False
    max_queued_tokens: int | None = None
    refuse_late: bool = False
    patience_s: float = inf
    mapping: MappingPolicy | None = None
    retain_s: float = 0.0
    by_turns: bool = False
