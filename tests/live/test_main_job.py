"""Real vLLM on CPU behind the whole of CATO, asked by the openai SDK as a black-box client."""

from __future__ import annotations

import ast
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.live.conftest import App
from tests.live.test_control_plane import engine_pids, picture
from tests.live.test_tasks import PYTHON

pytestmark = [pytest.mark.live, pytest.mark.vllm]


HALF_WRITTEN = [
    (
        "class Log:\n    def close(self):\n        if self._file is not None:\n            ",
        "\n            self._file = None\n",
    ),
    (
        "class Table:\n    def get(self, name):\n        try:\n"
        "            return self._data[name]\n        except KeyError:\n            ",
        "\n",
    ),
    (
        "import sys\n\n\ndef main():\n    if len(sys.argv) < 2:\n        ",
        "\n        sys.exit(2)\n",
    ),
    ("def read(path):\n    with open(path) as file:\n        return ", "\n"),
]


@pytest.fixture
def sdk(app: App) -> OpenAI:
    return OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def engine(app: App) -> httpx.Client:
    """The engine's own server, past CATO, to see what it really runs."""
    for socket in Path(os.environ["CATO_RUN_DIR"]).glob("*.sock"):
        client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://engine"
        )
        try:
            if client.get("/version", timeout=2).status_code == 200:
                return client
        except httpx.HTTPError:
            continue
    pytest.fail("no engine answers on a socket")


def running(engine: httpx.Client) -> int:
    for line in engine.get("/metrics", timeout=5).text.splitlines():
        if line.startswith("vllm:num_requests_running{"):
            return int(float(line.rsplit(" ", 1)[1]))
    raise AssertionError("the engine does not say how many requests run")


def seconds_until(condition: Callable[[], bool], limit_s: float) -> float:
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > limit_s:
            pytest.fail(f"not true after {limit_s} s")
        time.sleep(0.01)
    return time.monotonic() - started_s


def test_a_half_written_function_is_completed_with_plausible_python(sdk: OpenAI) -> None:
    sound = 0
    for before, after in HALF_WRITTEN:
        answer = sdk.completions.create(
            model="demo-coder", prompt=before, suffix=after, max_tokens=32, temperature=0
        )
        text = answer.choices[0].text
        assert text.strip()
        try:
            ast.parse(f"{before}{text}{after}")
        except SyntaxError:
            continue
        sound += 1
    assert sound >= 3  # of 4: the model is small, and rounding differs between processors
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 20


def test_a_plain_model_streams_the_same_text_as_it_answers_at_once(sdk: OpenAI) -> None:
    ask = {"model": "demo-coder", "prompt": PYTHON, "max_tokens": 24, "temperature": 0}
    whole = sdk.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(
        sdk.completions.create(**ask, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    receipt = chunks[-1].model_extra["cato"]
    assert receipt["status"] == "done"
    assert receipt["simulated"] is False


def test_chat_is_answered_by_the_models_own_template(sdk: OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="demo-coder",
        messages=[{"role": "user", "content": "Read a file."}],
        max_tokens=16,
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_models_list_the_real_and_the_virtual_ones(sdk: OpenAI) -> None:
    names = {m.id for m in sdk.models.list()}
    assert {"demo-coder", "cato-completion", "cato-translation"} <= names


def test_killing_the_client_frees_the_slot_within_half_a_second(
    app: App, engine: httpx.Client
) -> None:
    body = {
        "model": "demo-coder",
        "prompt": "x = 1\n",
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        assert running(engine) == 1
    assert seconds_until(lambda: running(engine) == 0, 5) < 2.0  # left alone it takes longer
    seconds_until(lambda: picture("demo").replicas[0].held == 0, 5)


def test_killing_a_client_that_waits_for_a_whole_answer_frees_the_slot_too(
    app: App, engine: httpx.Client
) -> None:
    body = {"model": "demo-coder", "prompt": "x = 1\n", "max_tokens": 900, "ignore_eos": True}
    client = httpx.Client()

    def ask() -> None:
        with pytest.raises(httpx.HTTPError):
            client.post(f"{app.url}/v1/completions", json=body, timeout=1.0)

    thread = threading.Thread(target=ask)
    thread.start()
    seconds_until(lambda: running(engine) == 1, 5)
    thread.join()
    assert seconds_until(lambda: running(engine) == 0, 5) < 2.0  # left alone it takes longer


def test_a_dead_engine_is_restarted_and_the_task_it_had_is_served_again(app: App) -> None:
    """kill -9 of the engine: the ingress asks for another lease until it is back."""
    body = {
        "model": "demo-coder",
        "prompt": PYTHON,
        "max_tokens": 8,
        "temperature": 0,
    }
    undisturbed = app.post("/v1/completions", body).json()["choices"][0]["text"]
    seconds_until(lambda: bool(demo_pids()), 10)  # an engine just started reports every second
    before = demo_pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    answer = app.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == undisturbed
    seconds_until(lambda: bool(demo_pids()) and not demo_pids() & before, 10)


def demo_pids() -> set[int]:
    return set(engine_pids("demo").values())
