"""A shared pool in virtual time: models that take turns on a host's accelerators.

The calls of each model form an ordinary pool, its *line*. Events of a line go through
`SharedOrchestrator`, whose finished loads become replicas of lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cato.core.events import Event
from cato.core.eviction import CopyId
from cato.core.ids import InvocationId, ModelName, PoolName, ReplicaId
from cato.core.pool.placement_events import Load, LoadFinished
from cato.core.shared import ModelAdded, OfLine, SharedEvent, SharedOrchestrator, Told
from cato.sim.pool import PoolSetup, SimPool

if TYPE_CHECKING:
    from cato.sim.fleet import Fleet


@dataclass(frozen=True, slots=True)
class SharedSetup:
    """A shared pool of a fleet: its orchestrator, and the events it was told at the start.

    `chunk_tokens`: see `PoolSetup`.
    """

    name: PoolName
    orchestrator: SharedOrchestrator
    opened: Sequence[SharedEvent]
    chunk_tokens: int | None = None


class SharedPool:
    """The lines of a shared pool, and the loads of its models.

    `load_s`: time that accelerators spent loading. `hits`: calls whose model was loaded when their
    turn came. `events`: everything the orchestrator was told; they replay it.
    """

    def __init__(self, fleet: Fleet, setup: SharedSetup) -> None:
        self.setup = setup
        self.orchestrator = setup.orchestrator
        self.lines: dict[ModelName, _Line] = {}
        self.loads: list[Load] = []
        self.load_s = 0.0
        self.hits: set[InvocationId] = set()
        self.events: list[SharedEvent] = list(setup.opened)
        self._fleet = fleet
        self._loading: dict[CopyId, tuple[float, Load]] = {}
        self._ready: dict[CopyId, Load] = {}
        for event in setup.opened:
            if isinstance(event, ModelAdded):
                self._add_line(event)

    def _add_line(self, added: ModelAdded) -> None:
        facts, profile = added.served.facts, added.served.profile
        setup = PoolSetup(
            added.line, (profile,), added.policies, facts.max_running, self.setup.chunk_tokens
        )
        line = self.lines[facts.name] = _Line(self._fleet, setup, self, facts.name)
        line.orchestrator = self.orchestrator.lines[facts.name]

    def handle(self, event: SharedEvent) -> None:
        self.events.append(event)
        for step in self.orchestrator.handle(event):
            match step:
                case Told(model=model, commands=commands, hits=hits):
                    self.hits.update(hits)
                    for command in commands:
                        self.lines[model].perform(command)
                case Load():
                    self._load(step)
                case _:
                    raise AssertionError("no simulated load fails")

    def _load(self, load: Load) -> None:
        now_s = self._fleet.kernel.now_s
        for victim in load.evicted:
            aborted = self._loading.pop(victim.copy_id, None)
            gone = self._ready.pop(victim.copy_id, None)
            if aborted is not None:
                self.load_s += now_s - aborted[0]
            if gone is not None:
                self.lines[gone.model].close(_replica_of(gone))
        self.loads.append(load)
        self._loading[load.copy_id] = now_s, load
        self._fleet.kernel.at(now_s + load.expected_s, self._loaded, load)

    def _loaded(self, load: Load) -> None:
        if self._loading.pop(load.copy_id, None) is not None:
            self.load_s += load.expected_s
            self._ready[load.copy_id] = load
            self.lines[load.model].open(_replica_of(load))
        self.handle(LoadFinished(self._fleet.kernel.now_s, load.copy_id))


class _Line(SimPool):
    """The calls of one model of a shared pool; `setup.profiles` are its replicas' profiles."""

    def __init__(
        self, fleet: Fleet, setup: PoolSetup, shared: SharedPool, model: ModelName
    ) -> None:
        super().__init__(fleet, setup)
        self._shared = shared
        self._model = model

    def handle(self, event: Event) -> None:
        if self._fleet.recorder is not None:
            self._fleet.recorder(self.setup.name, event)
        self._shared.handle(OfLine(self._model, event))

    def open(self, id: ReplicaId) -> None:
        """A replica of the model is loaded."""
        self._open(id, self.setup.profiles[0])

    def close(self, id: ReplicaId) -> None:
        """An idle replica was evicted."""
        replica = self.replicas.pop(id)
        assert not replica.engine.held, f"{id} is busy"
        replica.ended_s = self._kernel.now_s
        replica.version += 1
        self.retired.append(replica)


def _replica_of(load: Load) -> ReplicaId:
    """The id of a loaded replica in its model's line."""
    return ReplicaId(load.cards[0])
