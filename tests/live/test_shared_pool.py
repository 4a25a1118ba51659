"""Three models in two slots on a real cluster: who answers, and what losses do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from math import floor
from typing import Any

import httpx
import pytest

from cato.core.ids import ModelName
from cato.core.slots import SharedPoolPicture, SlotState
from cato.engines.simulated import simulated_seed, simulated_text
from tests.live.conftest import App
from tests.live.test_profile import run_cato

pytestmark = pytest.mark.live

MODELS = ("hosted-a", "hosted-b", "hosted-c")
SEED = 5  # of the slots' engines in conftest
PROMPT = "def f(x):\n    return"
TOKENS = 12
WAIT_S = 60.0


def ask(app: App, model: str, tokens: int = TOKENS) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}
    return app.post("/v1/completions", body)


def text_of(model: str, tokens: int = TOKENS) -> str:
    """What only this model says."""
    return simulated_text(simulated_seed(SEED, ModelName(model)), PROMPT, tokens)


def manager() -> Any:
    from cato.control import actors

    return actors.get(actors.EVICTION_MANAGER)


def picture() -> SharedPoolPicture:
    import ray

    found = ray.get(manager().pictures.remote(), timeout=30)
    (one,) = [p for p in found if p.name == "cards"]
    assert isinstance(one, SharedPoolPicture)
    return one


def test_every_call_is_answered_by_the_model_that_was_asked(app: App) -> None:
    models = [MODELS[i % 3] for i in range(18)]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda m: ask(app, m), models))
    for model, answer in zip(models, answers, strict=True):
        assert answer.status_code == 200, answer.text
        value = answer.json()
        assert value["model"] == model
        assert value["choices"][0]["text"] == text_of(model)
    counts = picture().counts
    assert counts.served >= 18
    assert counts.evictions >= 1
    receipt = app.get(f"/v1/requests/{answers[0].headers['x-request-id']}").json()
    (node,) = receipt["nodes"]
    assert node["llm"]["pool"] == f"cards/{models[0]}"
    assert node["llm"]["deployment"] == "cards-slots"
    assert node["llm"]["reasons"][-1].startswith(("hit: ", "miss: "))
    assert "through Serve" not in node["llm"]["reasons"][-1]


def test_the_models_are_listed(app: App) -> None:
    listed = {m["id"] for m in app.get("/v1/models").json()["data"]}
    assert set(MODELS) <= listed


def test_a_killed_eviction_manager_learns_what_is_loaded_and_loses_no_call(app: App) -> None:
    import ray

    assert ask(app, "hosted-a").status_code == 200
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(ask, app, "hosted-a", 200) for _ in range(4)]
        time.sleep(0.5)
        ray.kill(manager(), no_restart=False)
        calls += [threads.submit(ask, app, m) for m in MODELS]
        answers = [call.result() for call in calls]
    assert [a.status_code for a in answers] == [200] * 7, [a.text for a in answers]
    assert answers[0].json()["choices"][0]["text"] == text_of("hosted-a", 200)


def test_a_killed_slot_is_replaced_and_its_call_goes_on(app: App) -> None:
    import ray

    assert ask(app, "hosted-b").status_code == 200
    slots = {s.slot for s in picture().slots}
    (holder,) = [s.slot for s in picture().slots if s.model == "hosted-b"]
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(ask, app, "hosted-b", 400)
        deadline_s = time.monotonic() + WAIT_S
        while not any(s.running for s in picture().slots) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        ray.kill(_replica_actor(holder), no_restart=True)
        answer = call.result()
    if answer.status_code != 200:
        id = answer.headers["x-request-id"]
        pytest.fail(answer.text + httpx.get(f"{app.url}/v1/requests/{id}", timeout=30).text)
    assert answer.json()["choices"][0]["text"] == text_of("hosted-b", 400)
    while time.monotonic() < deadline_s:
        now = {s.slot for s in picture().slots}
        if len(now) == 2 and now != slots:
            return
        time.sleep(0.2)
    pytest.fail(f"the lost slot {holder} was not replaced: {picture()}")


def _replica_actor(slot: str) -> Any:
    import ray

    (name,) = [
        a["name"]
        for a in ray.util.list_named_actors(all_namespaces=True)
        if a["namespace"] == "serve" and a["name"].endswith(slot)
    ]
    return ray.get_actor(name, namespace="serve")


@pytest.mark.timeout(400)
def test_a_model_is_added_measured_listed_and_removed_while_others_are_served(app: App) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    where = ("--address", ray.get_runtime_context().gcs_address)
    added = run_cato(
        "models", "add", "hosted-new", "--source=simulated", "--profile=saber@gpu",
        "--family=qwen", *where, timeout_s=200,
    )  # fmt: skip
    assert "hosted-new is served by cards" in added
    answer = _until_known(app, "hosted-new")
    assert answer.json()["choices"][0]["text"] == text_of("hosted-new")
    assert "version 1" in run_cato("models", "list", *where, timeout_s=100)
    # Without room for one more slot an idle one of the pool is lent.
    free = floor(100 * ray.available_resources()["CPU"]) / 100
    taken = placement_group([{"CPU": free}])
    ray.get(taken.ready(), timeout=60)
    try:
        again = run_cato("models", "profile", "hosted-new", *where, timeout_s=200)
    finally:
        remove_placement_group(taken)
    assert "hosted-new is served by cards" in again
    assert any("lent to measure hosted-new" in d.reason for d in _decisions())
    _until_two_slots_serve()
    assert ask(app, "hosted-b").json()["choices"][0]["text"] == text_of("hosted-b")
    run_cato("models", "remove", "hosted-new", *where, timeout_s=100)
    deadline_s = time.monotonic() + WAIT_S
    while ask(app, "hosted-new").status_code != 404:
        assert time.monotonic() < deadline_s, "the removed model is still served"
        time.sleep(0.2)
    assert ask(app, "hosted-a").status_code == 200


def _decisions() -> Any:
    import ray

    return ray.get(manager().decisions.remote(), timeout=30)["cards"].newest


def _until_two_slots_serve() -> None:
    import ray

    deadline_s = time.monotonic() + WAIT_S
    while "hosted-new" in {s.model for s in picture().slots if s.state is SlotState.LOADING}:
        assert time.monotonic() < deadline_s, f"a slot measures for ever: {picture()}"
        time.sleep(0.2)
    parts = ray.get(manager().parts.remote(), timeout=30)
    assert {p.slots for p in parts if p.pool == "cards"} == {2}


def _until_known(app: App, model: str) -> httpx.Response:
    """Ingresses hear of a new model within a second or two."""
    deadline_s = time.monotonic() + WAIT_S
    while (answer := ask(app, model)).status_code == 404 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert answer.status_code == 200, answer.text
    return answer
