"""What a pool was told can be written down, read, and told again: it decides alike."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from fleet_kit import POOL, a_fleet, a_task
from kits.builders import a_profile

from cato.core.commands import Command, Preempt
from cato.core.errors import ConfigError
from cato.core.events import Event, PoliciesChanged
from cato.core.length import LengthBelief
from cato.core.orchestrator import PoolOrchestrator
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of
from cato.sim.replay import differences, replay_core, replay_simulated
from cato.sim.tasks import SimTask
from cato.telemetry.event_log import EventLog, Recording, read_log

PROFILE = replace(a_profile(prefill_s=0.04, token_s=0.01), load_s=0.0)
LATER = PoolPolicies("saber", max_queued=5)
MEASURED_LATER = PROFILE.slowed(3.0)
SPEEDS = {1: 20.5, 2: 1 / 3, 7: 0.1}


class _Logged:
    """An orchestrator whose events and commands are written down."""

    def __init__(self, orchestrator: PoolOrchestrator, log: EventLog) -> None:
        self._orchestrator, self._log = orchestrator, log

    def handle(self, event: Event) -> tuple[Command, ...]:
        commands = self._orchestrator.handle(event)
        self._log.write(event, commands, LATER, MEASURED_LATER, SPEEDS)
        return commands


def some_tasks() -> list[SimTask]:
    """More than fit; some with a belief about their length, some without an SLO."""
    tasks = []
    for i in range(60):
        target_s = (0.3, 2.0, 8.0, inf)[i % 4]
        task = a_task(f"t{i}", at_s=0.05 * i, prompt=10, output=5 + 7 * (i % 9), target_s=target_s)
        belief = LengthBelief((5.0, 20.0, 60.0)) if i % 3 else None
        tasks.append(replace(task, nodes=(replace(task.nodes[0], length=belief),)))
    return tasks


def a_log(folder: Path, names: PoolPolicies, max_bytes: int = 1 << 20) -> Path:
    """Two replicas, of which one is lost; the policies and their profile change under way."""
    path = folder / "log.jsonl"
    fleet = a_fleet(policies_of(names, PROFILE), replicas=2, max_running=2, profile=PROFILE)
    pool = fleet.pools[POOL]
    log = EventLog(path, POOL, names, PROFILE, max_bytes)
    # What made the replicas known was told before the log: the books begin empty.
    pool.orchestrator = _Logged(PoolOrchestrator(POOL, policies_of(names, PROFILE)), log)  # type: ignore[assignment]
    for host in pool.replicas.values():
        pool._report(host)
    fleet.kernel.at(1.0, lambda: pool.lose_replica(next(iter(pool.replicas))))
    change = PoliciesChanged(2.0, policies_of(LATER, MEASURED_LATER, SPEEDS))
    fleet.kernel.at(2.0, lambda: pool.handle(change))
    fleet.run(some_tasks())
    log.close()
    return path


@pytest.mark.parametrize("scheduler", ["foresight", "saber", "cato", "tempo"])
def test_a_log_replays_to_the_same_commands_in_core_and_simulator(
    tmp_path: Path, scheduler: str
) -> None:
    recording = read_log(a_log(tmp_path, PoolPolicies(scheduler)))
    assert sum(len(s.commands) for s in recording.steps) >= 60
    assert differences(recording, replay_core(recording)) == []
    assert differences(recording, replay_simulated(recording)) == []


def test_a_log_holds_preemptions_too(tmp_path: Path) -> None:
    recording = read_log(a_log(tmp_path, PoolPolicies("foresight")))
    assert any(isinstance(c, Preempt) for s in recording.steps for c in s.commands)


def test_another_policy_decides_otherwise_and_the_first_step_is_named(tmp_path: Path) -> None:
    recording = read_log(a_log(tmp_path, PoolPolicies("foresight")))
    other = Recording(recording.pool, PoolPolicies("sjf"), recording.profile, recording.steps)
    found = differences(other, replay_core(other))
    assert found
    assert found[0].recorded != found[0].replayed


def test_a_log_that_is_cut_off_gives_what_was_whole(tmp_path: Path) -> None:
    path = a_log(tmp_path, PoolPolicies())
    whole = read_log(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_log(path).steps == whole.steps[:-1]


def test_a_full_log_ends_and_what_it_has_can_be_read(tmp_path: Path) -> None:
    path = a_log(tmp_path, PoolPolicies(), max_bytes=20_000)
    assert 10_000 < path.stat().st_size <= 20_000
    recording = read_log(path)
    assert differences(recording, replay_core(recording)) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x\n",
        b"[]\n",
        b'{"version":9}\n',
        b'{"version":1}\n',
        b'{"pool":"a"}\n',
        b"\xff\xfe\n",
        b"1" * 5000 + b"\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_not_a_log_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.jsonl"):
        read_log(path)
