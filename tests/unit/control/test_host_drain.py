"""A drain waits for the last replica of its host."""

from __future__ import annotations

import pytest
from ray.exceptions import RayActorError

from cato.control import host_drain, ray_private


def test_a_drain_waits_on_while_the_controller_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([["d#1", "d#2"], None, ["d#2"], []])

    def replicas_on(node: str) -> list[str]:
        answer = next(answers)
        if answer is None:
            raise RayActorError
        return answer

    monkeypatch.setattr(ray_private, "replicas_on", replicas_on)
    monkeypatch.setattr(host_drain, "POLL_S", 0.0)
    said: list[str] = []
    assert host_drain.wait("node", 60.0, said.append)
    assert said == [
        "2 replicas still running: d#1, d#2",
        "Serve's controller is being restarted",
        "1 replicas still running: d#2",
    ]
