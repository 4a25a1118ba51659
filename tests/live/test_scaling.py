"""Pools grow and shrink with their load, and no call is lost on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from cato.engines.simulated import simulated_text
from tests.live.conftest import App
from tests.live.test_control_plane import actor, picture, wait_for_replicas
from tests.live.test_tasks import PYTHON

pytestmark = pytest.mark.live

POOL, DEPLOYMENT, SEED = "elastic", "elastic-sim", 3


@pytest.fixture
def scaling(app: App) -> Iterator[Callable[..., None]]:
    """Changes how the pool is scaled while it runs; undone afterwards."""
    import ray

    @ray.remote(num_cpus=0)
    class Operator:  # an actor: a handle needs an event loop that lasts
        async def change(self, user_config: dict[str, Any]) -> None:
            from ray import serve

            control = serve.get_deployment_handle("control-plane", app_name="engines")
            await control.change.remote(user_config)

    operator = Operator.remote()

    def change(**settings: str) -> None:
        config = {"pools": {POOL: {"scaling": settings}}}
        ray.get(operator.change.remote(config), timeout=30)

    yield change
    ray.get(operator.change.remote({}), timeout=30)
    ray.kill(operator)


def state() -> dict[str, Any]:
    from cato.lab.live.stage import deployment_states

    return asdict(deployment_states()[DEPLOYMENT])


def scale(replicas: int) -> None:
    import ray

    assert ray.get(actor("provisioner").scale.remote(DEPLOYMENT, replicas)) == replicas
    wait_for_replicas(POOL, replicas)


def wait_for(condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition(seen := state()):
        if time.monotonic() > deadline_s:
            seen["history"] = seen["history"][-5:]
            pytest.fail(f"not within a minute: {seen}")
        time.sleep(0.2)


def say(app: App, number: int, tokens: int) -> str:
    """A stream whose text must be all of what the model says to its prompt. Returns its id."""
    prompt = f"# {number}\n{PYTHON}"
    body = {
        "model": "sim-elastic",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [choice["text"] for event in data[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(chunks) == simulated_text(SEED, prompt, tokens)
    return answer.headers["x-request-id"]


def attempts(app: App, request_id: str) -> int:
    """Leases that the call needed: more than one when a replica was lost under it."""
    n: int = app.get(f"/v1/requests/{request_id}").json()["nodes"][0]["llm"]["attempts"]
    return n


def calls(app: App, threads: ThreadPoolExecutor, n: int, tokens: int) -> list[Future[str]]:
    return [threads.submit(say, app, i, tokens) for i in range(n)]


def test_a_sleeping_pool_wakes_for_its_load_grows_and_sleeps_again(
    app: App, scaling: Callable[..., None]
) -> None:
    scaling(policy="forecast", idle_timeout="2s", every="200ms")
    wait_for(lambda s: s["wanted"] == s["running"] == 0)
    wait_for_replicas(POOL, 0)
    assert app.get("/readyz").status_code == 200  # asleep, not broken
    with ThreadPoolExecutor(16) as threads:
        answers = calls(app, threads, 16, tokens=300)
        wait_for(lambda s: s["wanted"] == 3)
        for answer in answers:
            answer.result()
    assert state()["policy"] == "forecast"
    wait_for(lambda s: s["wanted"] == s["running"] == 0)
    seen = state()
    assert "no work" in seen["reason"]
    assert max(p.queued for p in seen["history"]) > 0
    assert {p.wanted for p in seen["history"]} >= {0, 3}


def test_replicas_that_were_idle_for_their_time_go_one_by_one(
    app: App, scaling: Callable[..., None]
) -> None:
    scale(3)
    scaling(policy="cato", idle_timeout="1s", every="200ms")
    with ThreadPoolExecutor(1) as threads:
        answer = calls(app, threads, 1, tokens=1200)[0]
        wait_for(lambda s: s["wanted"] == 1)
        assert not answer.done()
        answer.result()
    wait_for(lambda s: s["wanted"] == 0)


def test_streams_of_replicas_that_go_come_to_their_end(app: App) -> None:
    import ray

    scale(3)
    with ThreadPoolExecutor(9) as threads:
        running = calls(app, threads, 3, tokens=1500)
        wait_until_each_replica_streams()
        assert ray.get(actor("provisioner").scale.remote(DEPLOYMENT, 1)) == 1
        assert not any(answer.done() for answer in running)
        more = [threads.submit(say, app, 100 + i, 100) for i in range(6)]
        assert [attempts(app, answer.result()) for answer in running] == [1] * 3
        for answer in more:
            answer.result()
    wait_for_replicas(POOL, 1)


def wait_until_each_replica_streams() -> None:
    deadline_s = time.monotonic() + 30
    while not all(r.held > 0 and r.prefilling == 0 for r in picture(POOL).replicas):
        if time.monotonic() > deadline_s:
            pytest.fail(f"not all replicas stream: {picture(POOL)}")
        time.sleep(0.02)


def test_a_provisioner_that_is_killed_changes_no_count(app: App) -> None:
    import ray

    scale(2)
    before = {r.id for r in picture(POOL).replicas}
    killed_at_s = time.time()
    ray.kill(actor("provisioner"), no_restart=False)
    deadline_s = time.monotonic() + 30
    while len(history := wanted_since(killed_at_s)) < 4:
        if time.monotonic() > deadline_s:
            pytest.fail("the provisioner does not look again")
        time.sleep(0.2)
    assert set(history) == {2}
    assert {r.id for r in picture(POOL).replicas} == before


def wanted_since(at_s: float) -> list[int]:
    import ray
    from ray.exceptions import RayActorError

    try:
        states = ray.get(actor("provisioner").state.remote(), timeout=10)
    except RayActorError:  # it is being restarted
        return []
    return [p.wanted for p in states[DEPLOYMENT]["history"] if p.at_s > at_s] if states else []


def test_a_wrong_setting_is_refused_and_changes_nothing(
    app: App, scaling: Callable[..., None]
) -> None:
    with pytest.raises(Exception, match=r"scaling\.policy.*forecast"):
        scaling(policy="forecats")
    assert state()["policy"] == "none"
    assert app.get("/readyz").status_code == 200
