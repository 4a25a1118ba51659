"""`cato status` shows what the control actors tell, also while one of them is away."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError
from typer.testing import CliRunner, Result

from cato.cli import app, status
from cato.cli.control_plane import UnansweredError, ask
from cato.config.deploy_file import load_deploy_file
from cato.control import actors
from cato.core.ids import PoolName
from cato.core.orchestrator import PoolPicture
from cato.core.topology import PoolPolicies

POOL = PoolName("demo")
ROUTER = actors.router_name(POOL)
ANSWERS: dict[tuple[str, str], Any] = {
    (actors.PROVISIONER, "topology"): load_deploy_file("deployments/local-cpu.yaml").topology,
    (actors.PROVISIONER, "state"): {},
    (actors.PROVISIONER, "warnings"): ("the file is refused",),
    (actors.EVICTION_MANAGER, "pictures"): (),
    (actors.EVICTION_MANAGER, "residents"): (),
    (ROUTER, "picture"): PoolPicture(POOL, 0.0, 17, 0, 0, ()),
    (ROUTER, "policies"): PoolPolicies(),
}


class _Actor:
    def __init__(self, name: str, method: str = "") -> None:
        self._name, self._method = name, method

    def __getattr__(self, method: str) -> _Actor:
        return _Actor(self._name, method)

    def remote(self, *args: object) -> tuple[str, str]:
        return self._name, self._method


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Control actors by name, with what Ray says of each that is away."""
    found: dict[str, Exception] = {}

    def get(name: str) -> _Actor:
        if isinstance(found.get(name), ValueError):
            raise found[name]
        return _Actor(name)

    def answer(asked: tuple[str, str], timeout: float | None = None) -> Any:
        assert timeout is not None
        if asked[0] in found:
            raise found[asked[0]]
        return ANSWERS[asked]

    monkeypatch.setattr(actors, "get", get)
    monkeypatch.setattr(ray, "get", answer)
    monkeypatch.setattr(status, "connect", lambda address: address)
    return found


def shown() -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["status"])


def test_all_that_answers_is_shown(away: dict[str, Exception]) -> None:
    result = shown()
    assert result.exit_code == 0, result.output
    assert "demo" in result.output
    assert " 17 " in result.output
    assert "the file is refused" in result.output


@pytest.mark.parametrize("name", [actors.PROVISIONER, actors.EVICTION_MANAGER, ROUTER])
def test_an_actor_that_hangs_hides_no_other(name: str, away: dict[str, Exception]) -> None:
    away[name] = GetTimeoutError("Get timed out")
    result = shown()
    assert result.exit_code == 1
    assert f"no answer from {name}: it takes more than 5 s" in result.output
    assert ("Loaded models" in result.output) == (name != actors.EVICTION_MANAGER)
    assert (" 17 " in result.output) == (name == actors.EVICTION_MANAGER)


def test_commands_say_why_a_control_actor_does_not_answer(away: dict[str, Exception]) -> None:
    away[ROUTER] = ValueError("no actor")
    with pytest.raises(UnansweredError, match="there is no such actor"):
        ask(ROUTER, "picture")
    away[ROUTER] = ActorUnavailableError("it is being restarted", None)
    with pytest.raises(UnansweredError, match="restarted"):
        ask(ROUTER, "picture")
