"""A shared pool: several models take turns on the same accelerators.

Each model has its own pool state, called its *line*, so every feature of a pool works for a model
of a shared pool. `Placement` gives replicas to lines and takes them away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from cato.core.commands import Command, Dispatch, Refuse
from cato.core.errors import UnknownNameError
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaProgressed,
    Ticked,
)
from cato.core.ids import InvocationId, ModelName, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.policies import Policies
from cato.core.pool.placement import Placement
from cato.core.pool.placement_events import GiveUp, Load, ModelRemoved, PlacementEvent, Served


@dataclass(frozen=True, slots=True)
class OfLine:
    """Pass an event of a call or replica to the line of `model`."""

    model: ModelName
    event: Event

    @property
    def now_s(self) -> float:
        return self.event.now_s


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """Add a model, with a line of that name.

    A known model gets these new facts, and its weights in hosts' memory are forgotten, even if the
    facts are equal: its files may differ.

    `served`: how it is served on each shape where it fits; at least one.
    """

    now_s: float
    line: PoolName
    served: tuple[Served, ...]
    policies: Policies


@dataclass(frozen=True, slots=True)
class ModelPoliciesChanged:
    """The line of `model` uses these policies from now on; its weights stay."""

    now_s: float
    model: ModelName
    policies: Policies


@dataclass(frozen=True, slots=True)
class Looked:
    """Time has passed for all lines; failed loads may be retried."""

    now_s: float


SharedEvent = PlacementEvent | OfLine | ModelAdded | ModelPoliciesChanged | Looked


@dataclass(frozen=True, slots=True)
class Told:
    """The line of `model` has handled `event`; its answer is `commands`.

    The calls in `started` were dispatched; `hits` of them found their model loaded at their turn.
    """

    model: ModelName
    event: Event
    commands: tuple[Command, ...]
    started: tuple[InvocationId, ...] = ()
    hits: tuple[InvocationId, ...] = ()


Step = Told | Load | GiveUp

_NEWS = (FirstTokenSent, ReplicaProgressed)


class SharedOrchestrator:
    """The lines of a shared pool, and its placement.

    `handle` is deterministic: the same events give the same steps, in the order in which to carry
    them out. `placed` creates the placement, which passes its decisions to the lines.
    """

    def __init__(self, placed: Callable[[Callable[[ModelName, Event], None]], Placement]) -> None:
        self.placement = placed(self._tell)
        self.lines: dict[ModelName, PoolOrchestrator] = {}
        self._policies: dict[ModelName, Policies] = {}
        self._steps: list[Step] = []

    def handle(self, event: SharedEvent) -> tuple[Step, ...]:
        """Raise `UnknownNameError` for an unknown model.

        Raise `InputError` if a model's facts are impossible, or if a model to be removed is in use.
        """
        self._steps = []
        self.placement.open(event.now_s)
        match event:
            case OfLine(model, told):
                self._line(model)
                self._tell(model, told)
            case ModelAdded():
                self._add(event)
            case ModelPoliciesChanged(now_s, model, policies):
                self._line(model)
                self._change_policies(model, policies, now_s)
            case Looked():
                for model, line in self.lines.items():
                    if line.queued:
                        self._tell(model, Ticked(event.now_s))
            case _:
                had_turns = self.placement.in_order
                self._steps += self.placement.handle(event)
                if self.placement.in_order != had_turns:
                    self._change_turns(event.now_s)
                if isinstance(event, ModelRemoved):
                    del self.lines[event.model], self._policies[event.model]
        if isinstance(event, OfLine) and isinstance(event.event, _NEWS) and not self._has_decided():
            return tuple(self._steps)  # no room was freed and no call arrived
        self.placement.decide(event.now_s, self._steps.append)
        return tuple(self._steps)

    def _has_decided(self) -> bool:
        return any(isinstance(step, Told) and step.commands for step in self._steps)

    def _line(self, model: ModelName) -> PoolOrchestrator:
        if model not in self.lines:
            raise UnknownNameError("model", model, tuple(sorted(self.lines)))
        return self.lines[model]

    def _tell(self, model: ModelName, event: Event) -> None:
        """Pass an event to the line of `model`, from outside or from the placement."""
        line = self.lines[model]
        told_again: InvocationId | None = None
        if isinstance(event, InvocationOffered):
            offered, known = event.invocation, line.invocation(event.invocation.id)
            if known is None:
                self.placement.arrived(model, offered, event.now_s)
            elif offered.id in line.leased and offered.attempt <= known.attempt:
                told_again = offered.id  # the answer was lost
        elif isinstance(event, InvocationEnded) and event.outcome == "done":
            self.placement.answered(model, event.invocation_id)
        commands = line.handle(event)
        self.placement.see_queue(model)
        started = [
            c.invocation_id
            for c in commands
            if isinstance(c, Dispatch) and c.invocation_id != told_again
        ]
        hits = [id for id in started if self.placement.started(model, id, event.now_s)]
        for command in commands:
            if isinstance(command, Refuse):
                self.placement.forget(command.invocation_id)
        if isinstance(event, InvocationWithdrawn):
            self.placement.forget(event.invocation_id)
        self._steps.append(Told(model, event, commands, tuple(started), tuple(hits)))

    def _add(self, event: ModelAdded) -> None:
        name = event.served[0].facts.name
        line = self.lines.get(name)
        if line is None:
            self._policies[name] = event.policies
            policies = replace(event.policies, by_turns=self.placement.in_order)
            # The placement decides when its replicas come and go.
            line = PoolOrchestrator(event.line, policies, silence_s=inf)
            self.placement.serve(event.served, line, event.now_s)
            self.lines[name] = line
        else:
            self.placement.serve(event.served, line, event.now_s)
            self._change_policies(name, event.policies, event.now_s)

    def _change_policies(self, name: ModelName, policies: Policies, now_s: float) -> None:
        self._policies[name] = policies
        changed = replace(policies, by_turns=self.placement.in_order)
        self._tell(name, PoliciesChanged(now_s, changed))

    def _change_turns(self, now_s: float) -> None:
        """Whether calls take turns depends on the dispatch order."""
        for name, policies in self._policies.items():
            self._change_policies(name, policies, now_s)

    def check_invariants(self) -> None:
        """Assert that lines and placement agree; for tests."""
        copies = self.placement.copies()
        for name, line in self.lines.items():
            line.check_invariants()
            ready = {ReplicaId(c.cards[0]) for c in copies if c.model == name and c.is_ready}
            assert set(line.replicas) == ready, f"{name}: {sorted(line.replicas)}"
        used = [card for c in copies for card in c.cards]
        assert len(used) == len(set(used)), "an accelerator holds one model"
        self.placement.check_invariants()
