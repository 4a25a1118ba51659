"""Streams outlive what serves them: an engine, a replica, an ingress' neighbour."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from signal import SIGKILL, SIGSTOP
from typing import Any

import httpx
import pytest

from cato.core.ids import ReplicaId
from cato.engines.simulated import simulated_text
from tests.live.conftest import App
from tests.live.test_control_plane import (
    actor,
    engine_pids,
    llm_facts,
    picture,
    wait_for_replicas,
)
from tests.live.test_tasks import PYTHON

pytestmark = pytest.mark.live

TOKENS = 400
REAL_TOKENS = 100  # of a model that is really computed
REAL_FAULTS = int(os.environ.get("CATO_REAL_FAULTS", "4"))
PATIENCE_S = 180.0  # with one that restarts on a busy machine
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": PYTHON},
    "chat/completions": {"messages": [{"role": "user", "content": PYTHON}]},
}


class Stream:
    """One answer as a client gets it; `text` grows while it is read."""

    def __init__(self, app: App, model: str, endpoint: str, body: dict[str, Any]) -> None:
        self._app = app
        self._url = f"{app.url}/v1/{endpoint}"
        self._body = {"model": model, "stream": True, **body}
        self.text = ""
        self.ids: set[str] = set()
        self.ends: list[str] = []
        self.request_id = ""
        self.error: dict[str, Any] = {}

    def read(self) -> Stream:
        with httpx.stream("POST", self._url, json=self._body, timeout=180) as answer:
            assert answer.status_code == 200, answer.read()
            self.request_id = answer.headers["x-request-id"]
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self._note(json.loads(line[6:]))
        assert not self.error, f"{self.error}; {httpx.get(self._receipt_url()).text}"
        return self

    def _receipt_url(self) -> str:
        return f"{self._app.url}/v1/requests/{self.request_id}"

    def _note(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        self.ids.add(event["id"])
        for choice in event["choices"]:
            delta = choice.get("delta")
            self.text += choice["text"] if delta is None else delta.get("content") or ""
            if choice["finish_reason"] is not None:
                self.ends.append(choice["finish_reason"])


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not so within {within_s} s"
        time.sleep(0.01)


def kill_replica(replica: str) -> None:
    import ray

    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
    name = next(name for name in names if replica in name)
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)


@pytest.mark.parametrize("endpoint", sorted(BODIES))
def test_a_replica_that_is_killed_breaks_no_stream(app: App, endpoint: str) -> None:
    wait_for_replicas("small", 2)
    body = {**BODIES[endpoint], "max_tokens": TOKENS, "ignore_eos": True}
    streams = [Stream(app, "sim-small", endpoint, body) for _ in range(6)]
    with ThreadPoolExecutor(len(streams)) as threads:
        read = [threads.submit(stream.read) for stream in streams]
        until(lambda: all(len(stream.text) > 40 for stream in streams))
        kill_replica(next(r.id for r in picture("small").replicas if r.held))
        for answer in read:
            answer.result()
    prompt = PYTHON if endpoint == "completions" else f"<|user|>{PYTHON}\n<|assistant|>"
    for stream in streams:
        assert stream.text == simulated_text(0, prompt, TOKENS)
        assert (len(stream.ids), stream.ends) == (1, ["length"])
    facts = [llm_facts(app, stream.request_id) for stream in streams]
    moved = [f for f in facts if f["attempts"] > 1]
    assert moved, "the killed replica held streams"
    assert all("lost after" in f["reasons"][0] for f in moved)
    assert {f["output_tokens"] for f in facts} == {TOKENS}
    wait_for_replicas("small", 2)


def test_a_router_that_is_killed_breaks_no_stream_and_leases_again_soon(app: App) -> None:
    import ray

    wait_for_replicas("small", 2)
    body = {**BODIES["completions"], "max_tokens": TOKENS, "ignore_eos": True}
    streams = [Stream(app, "sim-small", "completions", body) for _ in range(6)]
    with ThreadPoolExecutor(len(streams)) as threads:
        read = [threads.submit(stream.read) for stream in streams]
        until(lambda: all(stream.text for stream in streams))
        ray.kill(actor("router:small"), no_restart=False)
        later = Stream(app, "sim-small", "completions", {**body, "max_tokens": 4}).read()
        assert later.text == simulated_text(0, PYTHON, 4)
        for answer in read:
            answer.result()
    assert {stream.text for stream in streams} == {simulated_text(0, PYTHON, TOKENS)}
    assert [llm_facts(app, s.request_id)["attempts"] for s in streams] == [1] * len(streams)
    until(lambda: not any(r.held for r in picture("small").replicas), within_s=10)


@pytest.mark.vllm
def test_an_engine_that_dies_while_its_router_is_away_comes_back(app: App) -> None:
    import ray

    wait_for_replicas("demo", 1)
    (replica, pid), *others = engine_pids("demo").items()
    assert not others
    ray.kill(actor("router:demo"), no_restart=False)
    os.kill(pid, SIGKILL)
    until(lambda: engine_pids("demo").get(ReplicaId(replica), pid) != pid)
    wait_for_replicas("demo", 1)


@pytest.mark.vllm
@pytest.mark.parametrize("endpoint", sorted(BODIES))
def test_a_killed_vllm_engine_goes_on_after_what_it_had_sent(app: App, endpoint: str) -> None:
    """`kill -9` in the middle of a greedy answer: no text is lost or doubled where it goes on.

    What follows is what the model says to the prompt and the text so far. That may differ from
    what it would have said undisturbed, where it had split the same text into other tokens.
    """
    wait_for_replicas("demo", 1)
    body = {**BODIES[endpoint], "max_tokens": REAL_TOKENS, "temperature": 0, "ignore_eos": True}
    whole = Stream(app, "demo-coder", endpoint, body).read()
    lost = 0
    for after_chars in (5, 120):
        stream = Stream(app, "demo-coder", endpoint, body)
        (pid,) = engine_pids("demo").values()  # before: it takes as long as half an answer
        with ThreadPoolExecutor(1) as threads:
            read = threads.submit(stream.read)
            until(lambda s=stream, n=after_chars: len(s.text) >= n or bool(s.ends), PATIENCE_S)
            os.kill(pid, SIGKILL)
            read.result()
        wait_for_replicas("demo", 1)
        assert (len(stream.ids), stream.ends) == (1, ["length"])
        for tokens, chars in losses(llm_facts(app, stream.request_id)):
            lost += 1
            assert stream.text[:chars] == whole.text[:chars]
            before = stream.text[:chars]
            if endpoint == "chat/completions":
                before = before.rstrip()
            # An event of a busy engine may have several tokens.
            tokens = max(tokens, tokens_of(app, before))
            rest = said_after(app, endpoint, body, before, max(1, REAL_TOKENS - tokens))
            same = min(len(stream.text), len(before + rest))
            assert stream.text[:same] == (before + rest)[:same]
            assert abs(len(stream.text) - len(before + rest)) < 12, "a token or two"
    assert lost > 0, "all engines died after their answers"


@pytest.fixture
def two_engines(app: App) -> Iterator[None]:
    import ray

    provisioner = actor("provisioner")
    assert ray.get(provisioner.scale.remote("demo-cpu", 2)) == 2
    wait_for_replicas("demo", 2)
    yield
    assert ray.get(provisioner.scale.remote("demo-cpu", 1)) == 1
    wait_for_replicas("demo", 1)


@pytest.mark.vllm
@pytest.mark.timeout(240 + 60 * REAL_FAULTS)
@pytest.mark.usefixtures("two_engines")
def test_lost_and_hung_vllm_engines_cost_no_answer(app: App) -> None:
    """`CATO_REAL_FAULTS=20` for a long drill. What runs elsewhere is not disturbed at all; what was
    hit goes on after what it had sent. An engine that stands still is replaced like a dead one.
    """
    body = {**BODIES["completions"], "max_tokens": REAL_TOKENS, "temperature": 0}
    body["ignore_eos"] = True
    whole = Stream(app, "demo-coder", "completions", body).read().text
    spared, hit, stopped = 0, 0, 0
    for number in range(REAL_FAULTS):
        streams = [Stream(app, "demo-coder", "completions", body) for _ in range(4)]
        with ThreadPoolExecutor(len(streams)) as threads:
            read = [threads.submit(stream.read) for stream in streams]
            until(lambda: all(s.text or s.ends for s in streams), PATIENCE_S)  # noqa: B023
            victim = next((r.id for r in picture("demo").replicas if r.held), None)
            if victim is not None and number % 3 == 1:
                kill_replica(victim)
            elif victim is not None:
                is_stopped = number % 3 == 2
                os.kill(engine_pids("demo")[victim], SIGSTOP if is_stopped else SIGKILL)
                stopped += is_stopped
            for answer in read:
                answer.result()
        for stream in streams:
            assert (len(stream.ids), stream.ends) == (1, ["length"])
            lost = losses(llm_facts(app, stream.request_id))
            sent = min((chars for _, chars in lost), default=len(whole))
            assert stream.text[:sent] == whole[:sent]
            assert tokens_of(app, stream.text) <= REAL_TOKENS + 3
            spared, hit = spared + (not lost), hit + bool(lost)
        wait_for_replicas("demo", 2)
        if number % 3 == 2:
            until(lambda: any("hung" in note for note in notes(app, "demo")))
    assert spared
    assert hit
    assert stopped
    print(f"{REAL_FAULTS} faults: {hit} streams went on elsewhere, {spared} were not disturbed")


def notes(app: App, pool: str) -> list[str]:
    """What the status page says of the pool's replicas."""
    now = app.get("/ui/state").json()
    (shown,) = (p for p in now["pools"] if p["name"] == pool)
    return [replica["note"] for replica in shown["replicas"]]


def losses(facts: dict[str, Any]) -> list[tuple[int, int]]:
    """Tokens and characters that had been sent at each loss of a stream that was begun."""
    found = re.findall(r"lost after (\d+) tokens, (\d+) characters", " ".join(facts["reasons"]))
    return [(int(tokens), int(chars)) for tokens, chars in found if chars != "0"]


def tokens_of(app: App, text: str) -> int:
    body = {"model": "demo-coder", "prompt": text, "add_special_tokens": False}
    return int(app.post("/tokenize", body).json()["count"])


def said_after(app: App, endpoint: str, body: dict[str, Any], text: str, tokens: int) -> str:
    """What the model says, undisturbed, after an answer that has begun with `text`."""
    asked = {**body, "model": "demo-coder", "max_tokens": tokens}
    if endpoint == "completions":
        asked["prompt"] += text
        choice = app.post("/v1/completions", asked).json()["choices"][0]
        return str(choice["text"])
    asked["messages"] = [*asked["messages"], {"role": "assistant", "content": text}]
    asked |= {"continue_final_message": True, "add_generation_prompt": False}
    choice = app.post("/v1/chat/completions", asked).json()["choices"][0]
    return str(choice["message"]["content"])
