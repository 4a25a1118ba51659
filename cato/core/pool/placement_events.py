"""Events and orders of a shared pool's placement."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.arrival_rates import UsualArrivals
from cato.core.eviction import (
    Card,
    CardId,
    CardPolicies,
    CopyId,
    HostMemory,
    ModelFacts,
)
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName
from cato.core.profile import Profile


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """The copy can serve. Ignored if it is unknown, superseded or already ready."""

    now_s: float
    copy_id: CopyId


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The copy failed to load, or its engine died; its accelerators are empty."""

    now_s: float
    copy_id: CopyId
    problem: str


@dataclass(frozen=True, slots=True)
class CopyFound:
    """A loaded copy that this incarnation did not load, after a restart of its keeper.

    `held` are the invocations that run there. With `host` and `deployment` the accelerators need
    not be known.
    """

    now_s: float
    copy_id: CopyId
    model: ModelName
    cards: tuple[CardId, ...]
    held: tuple[InvocationId, ...] = ()
    host: HostId | None = None
    deployment: DeploymentName | None = None


@dataclass(frozen=True, slots=True)
class CopyReported:
    """The copy serves and holds the invocations `held`. Ignored if it is unknown."""

    now_s: float
    copy_id: CopyId
    held: tuple[InvocationId, ...]


@dataclass(frozen=True, slots=True)
class CardAdded:
    """An empty accelerator; a known one stays unchanged."""

    now_s: float
    card: Card


@dataclass(frozen=True, slots=True)
class CardLost:
    """The accelerator is gone with every copy that used it; leases there end."""

    now_s: float
    card_id: CardId


@dataclass(frozen=True, slots=True)
class CardLent:
    """The idle accelerator serves another purpose until it is added again.

    Its copy is unloaded; weights in its host's memory stay.
    """

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
    """The model can no longer be called. Its copies, which must be idle, are unloaded."""

    now_s: float
    model: ModelName


@dataclass(frozen=True, slots=True)
class HostMemorySized:
    """The room for weights in a host's memory; weights that no longer fit are forgotten."""

    now_s: float
    memory: HostMemory


@dataclass(frozen=True, slots=True)
class HostMemoryHeld:
    """The host's memory holds only these of the weights that the placement believes to be there."""

    now_s: float
    host: HostId
    models: frozenset[ModelName]


@dataclass(frozen=True, slots=True)
class CardPoliciesChanged:
    """Use these policies from now on."""

    now_s: float
    policies: CardPolicies


@dataclass(frozen=True, slots=True)
class ClockTold:
    """The wall clock: seconds since 1970 of a clock that shows local time."""

    now_s: float
    local_s: float


@dataclass(frozen=True, slots=True)
class ArrivalsRemembered:
    """Arrival patterns learned by an earlier incarnation."""

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
    """A copy to unload; if it is still loading (only prefetches), the load is aborted."""

    copy_id: CopyId
    model: ModelName


@dataclass(frozen=True, slots=True)
class Load:
    """Unload `evicted`, then load `model` on `cards` of `host`; report with `copy_id`."""

    copy_id: CopyId
    model: ModelName
    host: HostId
    deployment: DeploymentName
    cards: tuple[CardId, ...]
    evicted: tuple[Evicted, ...]
    from_host_memory: bool
    is_prefetch: bool
    expected_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The invocation cannot be served because its model does not load.

    The next try is in `retry_after_s`.
    """

    id: InvocationId
    model: ModelName
    problem: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class CopyPicture:
    """A copy, for operators."""

    id: CopyId
    model: ModelName
    host: HostId
    cards: tuple[CardId, ...]
    is_ready: bool
    is_prefetch: bool
    running: tuple[InvocationId, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served on the accelerators of `deployment`; its copies there are replicas."""

    facts: ModelFacts
    profile: Profile
    deployment: DeploymentName
    prefix_caching: bool = False
    step_tokens: int = 0
    mixes_prompts: bool = False
