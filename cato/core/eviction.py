"""Model eviction, loading and placement: the snapshot that policies see, and their answers.

Every answer must be pure: values in, values out, with the reason shown to operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NewType, Protocol

from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName

CardId = NewType("CardId", str)
CopyId = NewType("CopyId", str)


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator of one host. It holds one model, or a shard of one, at a time.

    All accelerators of a `deployment` have the same shape: kind, memory and speed.
    """

    id: CardId
    host: HostId
    deployment: DeploymentName


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Room for weights in a host's memory; with 0 bytes every load comes from storage."""

    id: HostId
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What it takes to load and serve a model on one shape of accelerator.

    `load_s` from storage, `reload_s` from the host's memory. A copy takes `cards` accelerators of
    one host and runs at most `max_running` invocations at once. `call_s` is the time of a typical
    call without other load (0: unknown). The rest is the same on all shapes. At least `min_copies`
    stay loaded; at most `max_copies` are loaded. `slo_s` is the time to first token that its users
    expect: it determines how much a cold start hurts.
    """

    name: ModelName
    load_s: float
    reload_s: float
    weights_bytes: int
    slo_s: float
    cards: int = 1
    max_running: int = 8
    min_copies: int = 0
    max_copies: int = 1
    call_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on a shape where it fits; `load_s` is the time to load it there now."""

    facts: ModelFacts
    load_s: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """An invocation that waits for a copy of `model`; `value` is the value of meeting its SLO.

    `deadline_s` is when its first token is due, `expected_tokens` its expected output. `user` is
    the caller, used to predict the next model; empty when unknown.
    """

    id: InvocationId
    model: ModelName
    arrived_at_s: float
    deadline_s: float
    expected_tokens: float
    value: float = 1.0
    user: str = ""


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model at one instant.

    `idle_s`: since its last dispatch, or since the start if there was none. `uses`: dispatches so
    far. `rate_per_s`: learned arrival rate; `evidence`: the arrivals behind it, older ones weighted
    less. `queue_position`: place of its first waiting invocation in the common queue, from 1; None
    when none waits. `waiting` are those not yet given to a copy, by arrival. `expected_tokens`:
    mean expected output of its invocations. `load_s`: the time to load it now. `copies`: loaded or
    loading. `facts` and `load_s` are those of its fastest shape, or of the shape of
    `FleetSnapshot.on`; `fits` has those of all shapes where it fits.
    """

    facts: ModelFacts
    load_s: float
    idle_s: float
    uses: int
    rate_per_s: float
    evidence: float
    expected_tokens: float
    queue_position: int | None
    waiting: tuple[Wanted, ...]
    copies: int
    fits: Mapping[DeploymentName, Fit] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All models at `now_s`, in a fixed order so that ties always break the same way.

    `cards`: number of accelerators of each shape.
    """

    now_s: float
    models: Mapping[ModelName, ModelState]
    cards: Mapping[DeploymentName, int] = field(default_factory=dict)

    def on(self, deployment: DeploymentName) -> FleetSnapshot:
        """As seen from one shape: the models that fit there have its facts and load times."""
        if all(len(state.fits) < 2 for state in self.models.values()):
            return self
        models = {
            name: state
            if (fit := state.fits.get(deployment)) is None
            else replace(state, facts=fit.facts, load_s=fit.load_s)
            for name, state in self.models.items()
        }
        return replace(self, models=models)


def in_units(fleet: FleetSnapshot, unit_s: float) -> FleetSnapshot:
    """The same snapshot with all times in units of `unit_s`."""
    return FleetSnapshot(
        fleet.now_s / unit_s,
        {name: _in_units(m, unit_s) for name, m in fleet.models.items()},
        fleet.cards,
    )


def _facts_in_units(facts: ModelFacts, unit_s: float) -> ModelFacts:
    return replace(
        facts,
        load_s=facts.load_s / unit_s,
        reload_s=facts.reload_s / unit_s,
        slo_s=facts.slo_s / unit_s,
        call_s=facts.call_s / unit_s,
    )


def _in_units(state: ModelState, unit_s: float) -> ModelState:
    return replace(
        state,
        facts=_facts_in_units(state.facts, unit_s),
        fits={
            name: Fit(_facts_in_units(fit.facts, unit_s), fit.load_s / unit_s)
            for name, fit in state.fits.items()
        },
        load_s=state.load_s / unit_s,
        idle_s=state.idle_s / unit_s,
        rate_per_s=state.rate_per_s * unit_s,
        waiting=tuple(
            replace(w, arrived_at_s=w.arrived_at_s / unit_s, deadline_s=w.deadline_s / unit_s)
            for w in state.waiting
        ),
    )


@dataclass(frozen=True, slots=True)
class Keep:
    """The value of keeping a copy, in the policy's own unit: the least is evicted first."""

    worth: float
    reason: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Load `model` ahead of demand, in place of copies each worth less than `above`."""

    model: ModelName
    above: float
    reason: str


@dataclass(frozen=True, slots=True)
class Want:
    """Load `model` next, for waiting invocations."""

    model: ModelName
    reason: str


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a copy of a model could be loaded: accelerators of one shape on one host.

    `victims` copies are evicted there, each worth at most `worth` (-inf: none is evicted, or all
    are worthless). `is_cold`: the weights are not in the host's memory.
    """

    host: HostId
    deployment: DeploymentName
    worth: float = -inf
    victims: int = 0
    is_cold: bool = True


@dataclass(frozen=True, slots=True)
class SiteRank:
    """How good a site is: the least `key` wins. `reason`: empty where there is no other shape."""

    key: tuple[float, ...]
    reason: str = ""


class EvictionPolicy(Protocol):
    """Rates the value of keeping a loaded copy of `model`. Must be pure."""

    def keep(self, model: ModelName, fleet: FleetSnapshot) -> Keep: ...

    def prefetch(self, fleet: FleetSnapshot) -> Prefetch | None:
        """The model to load while accelerators are idle and nothing waits; None: load nothing."""
        ...


class DispatchOrder(Protocol):
    """Decides the order of service, and which model to load next. Must be pure.

    `in_order`: only the head of the queue is considered, and it is bound to a copy even while that
    loads; calls behind it wait until it has its slot. Otherwise an invocation whose model is loaded
    is served at once, ahead of those that wait for a load, and `wants` orders the models that have
    `waiting` invocations.
    """

    @property
    def in_order(self) -> bool: ...

    def wants(self, fleet: FleetSnapshot) -> tuple[Want, ...]: ...


class SitePolicy(Protocol):
    """Ranks a site for the next copy of `model`, among all where it fits. Must be pure."""

    def rank(self, model: ModelName, site: Site, fleet: FleetSnapshot) -> SiteRank: ...


@dataclass(frozen=True, slots=True)
class CardPolicies:
    """The policies of a shared pool's accelerators."""

    eviction: EvictionPolicy
    order: DispatchOrder
    sites: SitePolicy
