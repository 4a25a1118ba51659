"""Replay a recorded pool in virtual time: the same events at the same instants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cato.core.commands import Command
from cato.core.events import Event
from cato.core.orchestrator import PoolOrchestrator
from cato.policies.registry import policies_of
from cato.sim.fleet import Fleet, PoolSetup, SimPool
from cato.telemetry.event_log import Recorded, Recording


@dataclass(frozen=True, slots=True)
class Difference:
    """A step (from 0) at which a replay decides differently, with both answers."""

    step: int
    event: Event
    recorded: tuple[Command, ...]
    replayed: tuple[Command, ...]


class _RecordedPool(SimPool):
    """The simulator's pool without replicas of its own: the log holds their events."""

    def __init__(self, fleet: Fleet, setup: PoolSetup) -> None:
        super().__init__(fleet, setup)
        self.ordered: list[Command] = []

    def perform(self, command: Command) -> None:
        self.ordered.append(command)


def replay_core(recording: Recording) -> list[tuple[Command, ...]]:
    """The commands of a fresh orchestrator, step by step."""
    policies = policies_of(recording.names, recording.profile)
    orchestrator = PoolOrchestrator(recording.pool, policies)
    return [orchestrator.handle(step.event) for step in recording.steps]


def replay_simulated(recording: Recording) -> list[tuple[Command, ...]]:
    """The same commands through the simulator: its clock, its pool."""
    fleet = Fleet(())
    setup = PoolSetup(recording.pool, (), policies_of(recording.names, recording.profile))
    pool = _RecordedPool(fleet, setup)
    answers: list[tuple[Command, ...]] = []

    def tell(step: Recorded) -> None:
        pool.ordered.clear()
        pool.handle(step.event)
        answers.append(tuple(pool.ordered))

    for step in recording.steps:
        fleet.kernel.at(step.event.now_s, lambda step=step: tell(step))  # type: ignore[misc]
    fleet.run(())
    return answers


def differences(recording: Recording, replayed: Sequence[tuple[Command, ...]]) -> list[Difference]:
    """Steps at which `replayed` is not what was recorded."""
    return [
        Difference(i, step.event, step.commands, commands)
        for i, (step, commands) in enumerate(zip(recording.steps, replayed, strict=True))
        if step.commands != commands
    ]
