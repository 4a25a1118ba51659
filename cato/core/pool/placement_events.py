"""What happens to the cards of a shared pool, and what its placement orders."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.arrival_rates import UsualArrivals
from cato.core.eviction import (
    Card,
    CardId,
    CopyId,
    DispatchOrder,
    EvictionPolicy,
    HostMemory,
    ModelFacts,
)
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName
from cato.core.profile import Profile


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """The copy can serve. Harmless when it is unknown, superseded, or ready already."""

    now_s: float
    copy_id: CopyId


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The copy never came up, or its engine died; its cards are empty."""

    now_s: float
    copy_id: CopyId
    problem: str


@dataclass(frozen=True, slots=True)
class CopyFound:
    """A loaded copy that these books did not load: after a restart of their keeper.

    `held` are the invocations that run there. With `host` the cards need not be known.
    """

    now_s: float
    copy_id: CopyId
    model: ModelName
    cards: tuple[CardId, ...]
    held: tuple[InvocationId, ...] = ()
    host: HostId | None = None


@dataclass(frozen=True, slots=True)
class CopyReported:
    """The copy serves, and holds the invocations `held`. Harmless when it is unknown."""

    now_s: float
    copy_id: CopyId
    held: tuple[InvocationId, ...]


@dataclass(frozen=True, slots=True)
class CardAdded:
    """An empty card; one that is known stays as it is."""

    now_s: float
    card: Card


@dataclass(frozen=True, slots=True)
class CardLost:
    """The card is gone with every copy that used it; leases there end."""

    now_s: float
    card_id: CardId


@dataclass(frozen=True, slots=True)
class CardLent:
    """The card, on which nothing runs, serves another purpose until it is added again. Its copy is
    unloaded; what its host's memory holds stays."""

    now_s: float
    card_id: CardId


@dataclass(frozen=True, slots=True)
class ModelPinned:
    """While `pinned`, no copy of the model is evicted."""

    now_s: float
    model: ModelName
    pinned: bool


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """The model can no longer be asked for. Its copies, which must be idle, leave their cards."""

    now_s: float
    model: ModelName


@dataclass(frozen=True, slots=True)
class HostMemorySized:
    """How much room for weights a host has; what does not fit any more is forgotten."""

    now_s: float
    memory: HostMemory


@dataclass(frozen=True, slots=True)
class HostMemoryHeld:
    """Of the weights that these books believe in a host's memory no others than those are there."""

    now_s: float
    host: HostId
    models: frozenset[ModelName]


@dataclass(frozen=True, slots=True)
class CardPoliciesChanged:
    """From now on these decide."""

    now_s: float
    eviction: EvictionPolicy
    order: DispatchOrder


@dataclass(frozen=True, slots=True)
class ClockTold:
    """What the wall clock shows: seconds since 1970 of a clock that has local time."""

    now_s: float
    local_s: float


@dataclass(frozen=True, slots=True)
class ArrivalsRemembered:
    """What was learnt before these books were opened."""

    now_s: float
    slices: tuple[UsualArrivals, ...]


PlacementEvent = (
    LoadFinished
    | LoadFailed
    | CopyFound
    | CopyReported
    | CardAdded
    | CardLost
    | CardLent
    | ModelPinned
    | ModelRemoved
    | HostMemorySized
    | HostMemoryHeld
    | CardPoliciesChanged
    | ClockTold
    | ArrivalsRemembered
)


@dataclass(frozen=True, slots=True)
class Evicted:
    """A copy that goes; one still loading is aborted (only a prefetch ever is)."""

    copy_id: CopyId
    model: ModelName


@dataclass(frozen=True, slots=True)
class Load:
    """Unload `evicted`, then load `model` on `cards` of `host`; report with `copy_id`."""

    copy_id: CopyId
    model: ModelName
    host: HostId
    cards: tuple[CardId, ...]
    evicted: tuple[Evicted, ...]
    from_host_memory: bool
    is_prefetch: bool
    expected_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The invocation cannot be served: its model does not load. The next try is in
    `retry_after_s`."""

    id: InvocationId
    model: ModelName
    problem: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class CopyPicture:
    """What an operator sees of a copy."""

    id: CopyId
    model: ModelName
    host: HostId
    cards: tuple[CardId, ...]
    is_ready: bool
    is_prefetch: bool
    running: tuple[InvocationId, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served where it is loaded; its copies are replicas of `deployment`."""

    facts: ModelFacts
    profile: Profile
    deployment: DeploymentName
    prefix_caching: bool = False
    step_tokens: int = 0
