"""Several ingress replicas in front of the same pools."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from threading import Event
from typing import Any

import httpx
import pytest

from cato.engines.simulated import simulated_text
from tests.live.conftest import App, wait_ready
from tests.live.test_control_plane import picture, wait_for_replicas
from tests.live.test_losses import Stream, kill_replica, until

pytestmark = pytest.mark.live

EDITORS, KEYSTROKES = 6, 5
MANY_TOKENS, LAST_TOKENS = 2000, 8
STREAMED, WHOLE = 60, 400
PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def pair(app: App) -> Iterator[str]:
    """A second application with two ingress replicas; yields its URL."""
    from ray import serve

    deploy_pair(app)
    url = f"{app.url}/pair"
    wait_ready(url)
    yield url
    serve.delete("pair")


def deploy_pair(app: App, **fields: Any) -> None:
    """Deploy it, or what of it is new; returns when that serves."""
    from ray import serve

    from cato.config.schema import IngressArgs
    from cato.serve.app import build_ingress

    args = IngressArgs(workflows=str(app.workflows), replicas=2, **fields)
    serve.run(build_ingress(args), name="pair", route_prefix="/pair")


def deploy_engines(args: dict[str, Any]) -> None:
    from ray import serve

    from cato.config.schema import EnginesArgs
    from cato.serve.app import build_engines

    application = build_engines(EnginesArgs.model_validate(args))
    serve.run(application, name="engines", route_prefix=None, external_scaler_enabled=True)


def ingress_ids() -> set[str]:
    """Of the actors that serve it, or still drain."""
    import ray

    names = (a["name"] for a in ray.util.list_named_actors(all_namespaces=True))
    return {name for name in names if "pair#ingress#" in name}


def running_ingresses() -> int:
    from ray import serve

    deployment = serve.status().applications["pair"].deployments["ingress"]
    return int(deployment.replica_states.get("RUNNING", 0))


def calls_in(pool: str) -> int:
    now = picture(pool)
    return now.queued + sum(r.held for r in now.replicas)


def completion(url: str, editor: int, prompt: str, tokens: int) -> httpx.Response:
    """On a connection of its own, which the proxy gives to the ingress with the fewest."""
    body = {"model": "sim-small", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    headers = {"X-CATO-Buffer": f"pair-{editor}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def test_a_newer_completion_replaces_the_older_one_at_another_ingress(pair: str) -> None:
    wait_for_replicas("small", 2)
    assert running_ingresses() == 2
    under_way: list[Future[httpx.Response]] = []
    ends: list[httpx.Response] = []
    with ThreadPoolExecutor(2 * EDITORS) as threads:
        for stroke in range(KEYSTROKES):
            is_last = stroke == KEYSTROKES - 1
            tokens = LAST_TOKENS if is_last else MANY_TOKENS
            prompts = [f"editor {n} typed " + "x" * stroke for n in range(EDITORS)]
            newer = [threads.submit(completion, pair, n, p, tokens) for n, p in enumerate(prompts)]
            if stroke == 0:
                until(lambda: calls_in("small") == EDITORS, PATIENCE_S)
            ends += [answer.result() for answer in under_way]  # the newer ones have arrived
            under_way = newer
        last = dict(zip(prompts, [answer.result() for answer in under_way], strict=True))
    for answer in ends:
        assert answer.status_code == 499, answer.text[:500]
        assert answer.json()["error"]["code"] == "superseded"
    for prompt, answer in last.items():
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        assert text == simulated_text(0, prompt, LAST_TOKENS)
    until(lambda: calls_in("small") == 0)


def stream(url: str, prompt: str) -> str:
    """The text of a whole stream; fails for any other end."""
    body = {"prompt": prompt, "max_tokens": STREAMED, "ignore_eos": True}
    read = Stream(App(url), "sim-small", "completions", body).read()
    assert read.ends == ["length"], f"the stream broke off after {read.text!r}"
    return read.text


@contextmanager
def clients(url: str) -> Iterator[list[tuple[str, str]]]:
    """Four that ask without a pause, each stream on a new connection; prompts and texts."""
    done, answers = Event(), []

    def ask(number: int) -> None:
        count = 0
        while not done.is_set():
            prompt = f"client {number} asks {count}"
            answers.append((prompt, stream(url, prompt)))
            count += 1

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, number) for number in range(4)]
        try:
            yield answers
        finally:
            done.set()
        for client in asked:
            client.result()


def test_a_killed_ingress_costs_no_request_that_had_no_answer_yet(pair: str) -> None:
    until(lambda: running_ingresses() == 2 and len(ingress_ids()) == 2, PATIENCE_S)
    # One is longer than a buffer of Serve's own HAProxy.
    prompts = [f"caller {n} " + "x" * (20_000 if n == 0 else 0) for n in range(EDITORS)]
    before = picture("small").dispatched
    with ThreadPoolExecutor(EDITORS) as threads:
        asked = [threads.submit(completion, pair, n, p, WHOLE) for n, p in enumerate(prompts)]
        until(lambda: calls_in("small") == EDITORS, PATIENCE_S)
        kill_replica(sorted(ingress_ids())[0])
        answers = [answer.result() for answer in asked]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == simulated_text(0, prompt, WHOLE)
    assert picture("small").dispatched > before + EDITORS, "the one that died had none of them"
    until(lambda: calls_in("small") == 0)


def test_an_update_of_the_ingress_costs_no_request(app: App, pair: str) -> None:
    with clients(pair) as answers:
        before = ingress_ids()
        deploy_pair(app, max_body=3_000_000)
        until(lambda: running_ingresses() == 2 and not ingress_ids() & before, PATIENCE_S)
        during = len(answers)
        until(lambda: len(answers) > during + 8, PATIENCE_S)
    for prompt, text in answers:
        assert text == simulated_text(0, prompt, STREAMED)


def test_an_update_of_the_engines_costs_no_request(app: App) -> None:
    wait_for_replicas("small", 2)
    changed = deepcopy(app.engines)
    changed["pools"]["small"]["deployments"]["small-sim"]["engine"]["max_num_seqs"] = 24
    with clients(app.url) as answers:
        for args in (changed, app.engines):
            before = {r.id for r in picture("small").replicas}
            deploy_engines(args)
            until(lambda: not {r.id for r in picture("small").replicas} & before, PATIENCE_S)  # noqa: B023
        wait_for_replicas("small", 2)
        during = len(answers)
        until(lambda: len(answers) > during + 8, PATIENCE_S)
    for prompt, text in answers:
        assert text == simulated_text(0, prompt, STREAMED)
