"""What the control plane promises when parts of it die or change."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from cato.core.errors import LinkError
from cato.serve.service import CALL_SLO
from cato.wire.link.connection import Passive
from cato.wire.link.endpoints import connect
from tests.live.conftest import App
from tests.live.test_tasks import PYTHON

pytestmark = pytest.mark.live


def actor(name: str) -> Any:
    from cato.control import actors

    return actors.get(name)


def picture(pool: str) -> Any:
    import ray

    return ray.get(actor(f"router:{pool}").picture.remote(), timeout=10)


def complete(app: App) -> httpx.Response:
    """A call that may come late but must come: no hard deadline of two seconds."""
    body = {"model": "sim-small", "prompt": PYTHON, "max_tokens": 24}
    return app.post("/v1/completions", body)


def llm_facts(app: App, request_id: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + 20
    while (answer := app.get(f"/v1/requests/{request_id}")).status_code != 200:
        assert time.monotonic() < deadline_s, answer.text
        time.sleep(0.2)
    facts: dict[str, Any] = answer.json()["nodes"][0]["llm"]
    return facts


def test_a_killed_router_is_whole_again_and_no_task_is_lost(app: App) -> None:
    import ray

    assert complete(app).status_code == 200
    with ThreadPoolExecutor(20) as threads:
        asked = [threads.submit(complete, app) for _ in range(20)]
        ray.kill(actor("router:small"), no_restart=False)
        asked += [threads.submit(complete, app) for _ in range(20)]
        answers = [a.result() for a in asked]
    assert [a.status_code for a in answers] == [200] * 40
    assert {r.deployment for r in picture("small").replicas} == {"small-sim"}
    # The clock of a call's SLO goes on while there is no router.
    calls = [llm_facts(app, a.headers["x-request-id"]) for a in answers]
    targets_s = [call["slack_s"] + call["queue_s"] for call in calls]
    assert targets_s == pytest.approx([CALL_SLO.target_s] * 40, abs=0.8)


def test_leases_and_tokens_travel_over_links_of_those_who_know_the_secret(app: App) -> None:
    import ray

    from cato.control.messages import CODEC

    for _ in range(2):  # an ingress may not have known the replicas before
        facts = llm_facts(app, complete(app).headers["x-request-id"])
    assert not [reason for reason in facts["reasons"] if "handle" in reason]
    door = ray.get(actor("router:small").door.remote(), timeout=10)

    async def is_let_in(secret: bytes, host: str) -> bool:
        try:
            link = await connect(door.address, CODEC, secret, Passive(), name="door", host=host)
        except LinkError:
            return False
        link.close("the test is over")
        return True

    for host in (door.address.host, "another host"):
        assert asyncio.run(is_let_in(door.secret, host))
        assert not asyncio.run(is_let_in(b"of another pool", host))


def test_slots_do_not_leak(app: App) -> None:
    with ThreadPoolExecutor(20) as threads:
        assert all(r.status_code == 200 for r in threads.map(lambda _: complete(app), range(60)))
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s and any(r.held for r in picture("small").replicas):
        time.sleep(0.1)
    assert [r.held for r in picture("small").replicas] == [0] * len(picture("small").replicas)


def test_the_provisioner_keeps_replicas_within_the_bounds(app: App) -> None:
    import ray

    provisioner = actor("provisioner")
    assert ray.get(provisioner.scale.remote("small-sim", 99)) == 3
    try:
        wait_for_replicas("small", 3)
    finally:
        assert ray.get(provisioner.scale.remote("small-sim", 0)) == 1
    wait_for_replicas("small", 1)
    assert complete(app).status_code == 200
    assert ray.get(provisioner.scale.remote("small-sim", 2)) == 2
    wait_for_replicas("small", 2)


def engine_pids(pool: str) -> dict[str, int]:
    """Processes of the pool's engines by replica, as the replicas report them.

    A replica that was killed tells nobody: its last report stands for ten seconds more.
    """
    import ray

    residents = ray.get(actor("eviction-manager").residents.remote(), timeout=10)
    return {
        r.replica_id: r.pid
        for r in residents
        if r.pool == pool and r.pid and psutil.pid_exists(r.pid)
    }


def wait_for_replicas(pool: str, n: int) -> None:
    from ray.exceptions import ActorUnavailableError

    deadline_s, accepting = time.monotonic() + 180, 0
    while time.monotonic() < deadline_s:
        with suppress(ActorUnavailableError):  # the router restarts
            accepting = sum(r.accepting for r in picture(pool).replicas)
            if accepting == n:
                return
        time.sleep(0.2)
    pytest.fail(f"{accepting} replicas of {pool}, not {n}")


def test_a_killed_replica_costs_no_task(app: App) -> None:
    import ray

    wait_for_replicas("small", 2)
    victim = picture("small").replicas[0].id
    name = next(
        a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if victim in a["name"]
    )
    with ThreadPoolExecutor(20) as threads:
        answers = [threads.submit(complete, app) for _ in range(20)]
        time.sleep(0.1)
        ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)
        answers += [threads.submit(complete, app) for _ in range(20)]
        assert [a.result().status_code for a in answers] == [200] * 40
    wait_for_replicas("small", 2)


def test_forty_pinned_calls_from_one_request_all_reach_their_replica(app: App) -> None:
    """Guards the private method that `cato.control.ray_private` overrides."""
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class FanOut:
        async def __call__(self, replicas: list[str]) -> list[tuple[str, str]]:
            handle = serve.get_deployment_handle("small-sim", app_name="engines")

            async def one(i: int) -> tuple[str, str]:
                wanted = replicas[i % len(replicas)]
                facts = await handle.load.remote(cato={"replica": wanted})
                return wanted, facts["replica"]

            return await asyncio.gather(*[one(i) for i in range(40)])

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Http:
        def __init__(self, fan_out: Any) -> None:
            self.fan_out = fan_out

        async def __call__(self, request: Any) -> list[tuple[str, str]]:
            return await self.fan_out.remote(await request.json())

    wait_for_replicas("small", 2)
    replicas = [r.id for r in picture("small").replicas]
    serve.run(Http.bind(FanOut.bind()), name="fan-out", route_prefix="/fan-out")
    try:
        pairs = httpx.post(f"{app.url}/fan-out", json=replicas, timeout=20).json()
    finally:
        serve.delete("fan-out")
    assert len(pairs) == 40
    assert all(wanted == got for wanted, got in pairs)
