"""Messages between a slot of a shared pool and the keeper of the pool's state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cato.core.eviction import CopyId
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName, PoolName, ReplicaId
from cato.core.profile import Profile
from cato.core.topology import HostedModel, ModelSpec, TemplateFacts


class SlotState(StrEnum):
    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class SlotReport:
    """The state of a slot; a report with a smaller `number` is an older one.

    `copy_id` and `model` are its last order. If that failed or its engine died, the slot is empty
    and `problem` says why. `held` are the invocations that run there, with their attempts. `load_s`
    is the duration of the last load. `asleep` are models whose engines sleep there. `template`
    describes the chat template of the loaded model.
    """

    slot: ReplicaId
    number: int
    host: HostId
    deployment: DeploymentName
    state: SlotState
    copy_id: CopyId | None = None
    model: ModelName | None = None
    problem: str = ""
    held: tuple[tuple[InvocationId, int], ...] = ()
    load_s: float = 0.0
    pid: int | None = None
    asleep: tuple[ModelName, ...] = ()
    template: TemplateFacts | None = None


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """Hold `model` as `copy_id` from now on, and nothing else; without a model, hold nothing.

    `measure`: load the model to measure it, report the result, then hold nothing. `remembered`:
    models whose engines may sleep in this slot; engines of others end. An order for the copy that
    is already loaded only updates this.
    """

    copy_id: CopyId
    model: HostedModel | None = None
    profile: Profile | None = None
    from_host_memory: bool = False
    expected_s: float = 0.0
    measure: bool = False
    remembered: tuple[ModelName, ...] = ()


@dataclass(frozen=True, slots=True)
class HostedPart:
    """One model of a shared pool, for ingresses.

    `deployments` are those where it fits, `profile` is that of the fastest; `slots` of them can
    hold a model now. `template` is known once a slot has held it.
    """

    name: PoolName
    pool: PoolName
    deployments: tuple[DeploymentName, ...]
    model: ModelSpec
    profile: Profile
    simulated: bool
    slots: int
    template: TemplateFacts | None = None


FAILING = "the latest load failed"


@dataclass(frozen=True, slots=True)
class SlotPicture:
    """A slot, for operators.

    `is_failing`: the latest load there failed, or its engine died at once; models are loaded there
    if there is no other place.
    """

    slot: ReplicaId
    host: HostId
    deployment: DeploymentName
    state: SlotState
    model: ModelName | None
    running: int
    pid: int | None
    is_failing: bool


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """Counts since the keeper started. A hit found its model loaded when its turn came. `refused`
    counts neither superseded calls nor those whose model did not load.

    `load_s`: seconds in which a slot loaded, including aborted and failed loads.
    """

    served: int = 0
    hits: int = 0
    loads: int = 0
    from_host_memory: int = 0
    prefetches: int = 0
    evictions: int = 0
    failures: int = 0
    load_s: float = 0.0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class SharedPoolPicture:
    """A shared pool, for operators; `in_host_memory` are models whose weights are there."""

    name: PoolName
    queued: int
    waiting: tuple[tuple[ModelName, int], ...]
    slots: tuple[SlotPicture, ...]
    in_host_memory: tuple[tuple[HostId, tuple[ModelName, ...]], ...]
    counts: LoadCounts
