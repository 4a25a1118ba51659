"""A shared pool's models with their queues, and the copies of them on accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from cato.core.eviction import CardId, CopyId, ModelFacts, Wanted
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.placement_events import Served
from cato.core.snapshot import Invocation

# A copy that dies within this time and before its first whole answer has failed to load, as far as
# retries are concerned; so has an engine of its own pool. Loads alone prove nothing: the first call
# may kill every engine.
STEADY_AFTER_S = 60.0
# A model that failed to load at more places than this in a row is likely to be the cause itself.
MOST_BROKEN_PLACES = 2

BY_ARRIVAL: Callable[[Wanted], tuple[float, str]] = attrgetter("arrived_at_s", "id")


@dataclass(slots=True)
class Copy:
    """A model on its accelerators, loaded or loading."""

    id: CopyId
    model: ModelName
    host: HostId
    deployment: DeploymentName
    cards: tuple[CardId, ...]
    is_ready: bool
    is_prefetch: bool = False
    from_host_memory: bool = False
    ready_at_s: float = -inf
    # Has answered a call, or been ready for `STEADY_AFTER_S`.
    is_steady: bool = False
    # Accepts no new calls, so that it empties and a long-waiting model can take its place.
    is_closing: bool = False

    @property
    def replica_id(self) -> ReplicaId:
        """Its replica id in the model's line."""
        return ReplicaId(self.cards[0])


@dataclass(slots=True)
class HostedState:
    """A model of the pool: how each shape serves it, its line, and what was learned about it.

    Shapes where it does not fit are missing in `shapes`; there is at least one.
    """

    shapes: dict[DeploymentName, Served]
    line: PoolOrchestrator
    served: Served = field(init=False)  # on its fastest shape
    pinned: bool = False
    uses: int = 0
    last_use_s: float | None = None
    arrivals: int = 0
    mean_tokens: float = 0.0
    retry_at_s: float = -inf
    failures: int = 0  # in a row, without a steady copy between them
    failed_on: set[CardId] = field(default_factory=set)  # by those failures
    _made: dict[InvocationId, tuple[Invocation, Wanted]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.serve(self.shapes)

    def serve(self, shapes: dict[DeploymentName, Served]) -> None:
        """Set how each shape serves it."""
        self.shapes, self.served = shapes, fastest(shapes.values())

    @property
    def facts(self) -> ModelFacts:
        """As on its fastest shape."""
        return self.served.facts

    @property
    def is_suspect(self) -> bool:
        """Whether its loads fail because of the model, as far as is known, not of accelerators."""
        return len(self.failed_on) > MOST_BROKEN_PLACES * self.facts.cards

    def use(self, now_s: float) -> None:
        """A call was dispatched."""
        self.uses += 1
        self.last_use_s = now_s

    @property
    def waits(self) -> int:
        """Number of calls waiting for a copy."""
        return len(self.line.unplaced)

    def queue(self) -> tuple[Wanted, ...]:
        """Waiting calls by arrival."""
        known, self._made = self._made, {}
        for waiting in self.line.unplaced.values():
            invocation = waiting.invocation
            made = known.get(invocation.id)
            if made is None or made[0] is not invocation:
                made = invocation, wanted_of(self.served, invocation)
            self._made[invocation.id] = made
        return tuple(sorted((w for _, w in self._made.values()), key=BY_ARRIVAL))


def wanted_of(served: Served, invocation: Invocation) -> Wanted:
    """The latest first token with which the rest of the answer still meets the SLO."""
    profile = served.profile
    after_first_s = invocation.own_s(profile) - profile.first_token_s(invocation.prompt_tokens)
    return Wanted(
        id=invocation.id,
        model=served.facts.name,
        arrived_at_s=invocation.arrived_at_s,
        deadline_s=invocation.deadline_s - invocation.downstream_s - after_first_s,
        expected_tokens=float(invocation.expected_tokens),
        value=invocation.weight,
        user=invocation.user,
    )


def fastest(shapes: Iterable[Served]) -> Served:
    """The shape with the shortest typical call; the first one of equal ones."""
    return min(shapes, key=lambda served: served.profile.typical_call_s)
