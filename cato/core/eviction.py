"""Which model to unload, which to load next: what a policy sees, and what it answers.

Every answer must be pure: values in, values out, with the reason that an operator reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NewType, Protocol

from cato.core.ids import HostId, InvocationId, ModelName

CardId = NewType("CardId", str)
CopyId = NewType("CopyId", str)


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator of one host. It holds one model, or a part of one, at a time."""

    id: CardId
    host: HostId


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Room for weights in a host's memory; 0 bytes: every load comes from storage."""

    id: HostId
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What it takes to load and serve a model.

    `load_s` from storage, `reload_s` when the weights are in the host's memory. A copy takes
    `cards` cards of one host and runs at most `max_running` invocations together. At least
    `min_copies` are kept loaded and at most `max_copies` are loaded. `slo_s` is the time to the
    first token that its users expect: it says how much a cold start hurts.
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """An invocation that waits for a copy of `model`; `value` is what meeting its SLO is worth.

    `deadline_s` is the instant of its first token's SLO, `expected_tokens` its expected output.
    `user` is the one who asks, to predict the next model; empty when unknown.
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

    `idle_s`: since its last dispatch, or since the books were opened when there was none.
    `uses`: dispatches so far. `rate_per_s`: learned arrival rate; `evidence`: the arrivals that
    it rests on, old ones counting less. `queue_position`: place of its first waiting invocation
    in the queue of all, from 1; None when none waits. `waiting` are those not given to a copy
    yet, by arrival. `expected_tokens`: mean expected output of its invocations. `load_s`: what
    loading it now would take. `copies`: loaded or loading.
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


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All models at `now_s`, in a fixed order so that ties break the same way every time."""

    now_s: float
    models: Mapping[ModelName, ModelState]


def in_units(fleet: FleetSnapshot, unit_s: float) -> FleetSnapshot:
    """The same fleet with all times in units of `unit_s`."""
    return FleetSnapshot(
        fleet.now_s / unit_s, {name: _in_units(m, unit_s) for name, m in fleet.models.items()}
    )


def _in_units(state: ModelState, unit_s: float) -> ModelState:
    facts = state.facts
    return replace(
        state,
        facts=replace(
            facts,
            load_s=facts.load_s / unit_s,
            reload_s=facts.reload_s / unit_s,
            slo_s=facts.slo_s / unit_s,
        ),
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
    """What keeping a copy is worth, in the policy's own unit: the least is evicted first."""

    worth: float
    reason: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Load `model` before anybody asks, in place of copies each worth less than `above`."""

    model: ModelName
    above: float
    reason: str


@dataclass(frozen=True, slots=True)
class Want:
    """Load `model` next, for invocations that wait."""

    model: ModelName
    reason: str


class EvictionPolicy(Protocol):
    """What is a loaded copy of `model` worth keeping? Must be pure."""

    def keep(self, model: ModelName, fleet: FleetSnapshot) -> Keep: ...

    def prefetch(self, fleet: FleetSnapshot) -> Prefetch | None:
        """What to load while cards are idle and nothing waits; None: leave them as they are."""
        ...


class DispatchOrder(Protocol):
    """Who is served when, and which model is loaded next? Must be pure.

    `in_order`: only the head of the queue is looked at, and is bound to a copy even while that
    loads; those behind it wait until the head has its place. Otherwise an invocation whose
    model is loaded is served at once, past those that wait for a load, and `wants` orders the
    models that have `waiting` invocations.
    """

    @property
    def in_order(self) -> bool: ...

    def wants(self, fleet: FleetSnapshot) -> tuple[Want, ...]: ...
