"""What the live routers decided is what the core and the simulator decide, told the same."""

from __future__ import annotations

import concurrent.futures
import time

import pytest

from cato.core.commands import Dispatch
from cato.core.events import FirstTokenSent, InvocationEnded, InvocationOffered, ReplicaProgressed
from cato.sim.replay import differences, replay_core, replay_simulated
from cato.telemetry.event_log import read_log
from tests.live.conftest import App
from tests.live.test_tasks import INPUTS

pytestmark = pytest.mark.live


def test_recorded_events_replay_to_the_same_commands(app: App) -> None:
    """With whatever the tests before did to the pools: kills, policies, overload."""
    assert app.events is not None
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda task: app.post(f"/v1/tasks/{task}", {"inputs": INPUTS[task]}), [*INPUTS] * 4
        )
    assert [a.status_code for a in answers] == [200] * 4 * len(INPUTS)
    time.sleep(1.5)  # logs are flushed twice a second
    kinds: dict[type, int] = {}
    leases = 0
    for path in sorted(app.events.iterdir()):
        recording = read_log(path)
        assert differences(recording, replay_core(recording)) == []
        assert differences(recording, replay_simulated(recording)) == []
        for step in recording.steps:
            kinds[type(step.event)] = kinds.get(type(step.event), 0) + 1
            leases += sum(isinstance(c, Dispatch) for c in step.commands)
    assert leases >= 4 * len(INPUTS)
    for kind in (InvocationOffered, FirstTokenSent, ReplicaProgressed, InvocationEnded):
        assert kinds.get(kind, 0) > 0, kind
