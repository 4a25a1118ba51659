"""An ingress over pools in one process, and workflows small enough to see through."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from cato.core.ids import ModelName, TaskName
from cato.core.length import LengthBelief
from cato.core.prices import NO_PRICES, Prices
from cato.core.profile import Profile
from cato.core.reuse import ReuseLimits
from cato.core.session import Prompt
from cato.core.tenancy import Access
from cato.core.topology import ModelSpec, PoolPolicies
from cato.core.workflow import Workflow
from cato.lab.chaos.local_pools import LocalPool, LocalPools, LocalRecords
from cato.serve import loopback
from cato.serve.access.control import AccessControl
from cato.serve.batches.folder import BatchRoom
from cato.serve.ingress.app import create_app
from cato.serve.ingress.feedback import Feedback
from cato.serve.nodes.runner import NodeRunner
from cato.serve.service import ModelCall, TaskService
from cato.store.store import MetadataStore
from cato.wire.endpoint import Endpoint
from cato.workflows.load import load_workflows

MAX_BODY_BYTES = 100_000
OF_JSON = {"Content-Type": "application/json"}

COMPLETION = """
name: code-completion
description: Fill in the middle.
sla: {metric: ttft, target: 10s}
inputs:
  prefix: {type: str}
  suffix: {type: str, default: ""}
nodes:
  fill:
    type: llm
    model: fast
    fim: {prefix: "{{ prefix }}", suffix: "{{ suffix }}"}
    max_tokens: 12
stream: fill
output: fill
"""

COMPLETION_WITH_CONTEXT = """
name: code-completion
description: Fill in the middle, with code of other files.
sla: {metric: ttft, target: 10s}
inputs:
  prefix: {type: str}
  suffix: {type: str, default: ""}
  context: {type: str, default: ""}
nodes:
  fill:
    type: llm
    model: fast
    fim: {prefix: "{{ prefix }}", suffix: "{{ suffix }}", context: "{{ context }}"}
    max_tokens: 12
stream: fill
output: fill
"""

GENERATION = """
name: code-generation
description: Write code, then state how much.
sla: {metric: ttft, target: 10s}
inputs:
  instruction: {type: str}
  language: {type: str, default: python}
nodes:
  draft: {type: llm, model: fast, prompt: "{{ language }}: {{ instruction }}", max_tokens: 8}
  final: {type: transform, needs: [draft], text: "{{ draft.text }} # {{ draft.tokens }} tokens"}
stream: draft
output: final
"""

SLOW = """
name: slow
description: An answer that takes a minute.
sla: {metric: ttft, target: 10s}
inputs: {instruction: {type: str}}
nodes:
  draft:
    type: llm
    model: slow
    prompt: "{{ instruction }}"
    max_tokens: 3000
    extra: {ignore_eos: true}
stream: draft
output: draft
"""


def a_profile(*, step_s: float = 0.0, prefill_s: float = 0.0) -> Profile:
    """Each token takes `step_s`, each prompt `prefill_s`."""
    return Profile(
        model="sim",
        accelerator="none",
        engine="simulated",
        prefill_per_batch_token_s=0.0,
        prefill_per_request_s=0.0,
        prefill_per_token_s=0.0,
        prefill_base_s=prefill_s,
        decode_per_context_token_s=0.0,
        decode_per_request_s=0.0,
        decode_base_s=step_s,
        kv_capacity_tokens=10**9,
        max_running=1000,
        context_tokens=4096,
        load_s=0.0,
    )


def a_pool(
    name: str,
    *aliases: str,
    step_s: float = 0.0,
    prefill_s: float = 0.0,
    replicas: int = 1,
    slots: int = 64,
    max_queued: int = 1000,
    family: str = "starcoder",
    scheduler: str = "foresight",
) -> LocalPool:
    return LocalPool(
        ModelSpec(ModelName(name), "demo", family, aliases),
        a_profile(step_s=step_s, prefill_s=prefill_s),
        replicas=replicas,
        slots=slots,
        policies=PoolPolicies(scheduler, max_queued=max_queued),
    )


def a_fast_pool() -> LocalPool:
    return a_pool("sim-fast", "fast")


def a_slow_pool(
    *, slots: int = 64, max_queued: int = 1000, scheduler: str = "foresight"
) -> LocalPool:
    """20 ms a token."""
    return a_pool(
        "sim-slow", "slow", step_s=0.02, slots=slots, max_queued=max_queued, scheduler=scheduler
    )


def workflows_of(folder: Path, *texts: str) -> dict[TaskName, Workflow]:
    """The workflows written in `texts`, through files in `folder`."""
    for i, text in enumerate(texts):
        (folder / f"{i}.yaml").write_text(text, encoding="utf-8")
    return dict(load_workflows(folder))


def an_access(access: Access = Access(), **settings: Any) -> AccessControl:  # noqa: B008  # frozen
    """An access control that knows `access`."""
    control = AccessControl(**settings)
    control.learn(access)
    return control


class KeptFeedback:
    """All feedback, in order."""

    def __init__(self) -> None:
        self.noted: list[Feedback] = []

    def note(self, feedback: Feedback) -> None:
        self.noted.append(feedback)


class Kit:
    """A started service, its application, and what the application did."""

    def __init__(
        self, service: TaskService, records: LocalRecords, app: FastAPI, feedback: KeptFeedback
    ) -> None:
        self.service = service
        self.records = records
        self.app = app
        self.feedback = feedback

    def http(self) -> httpx.AsyncClient:
        """A client of the application itself; answers come whole, even streamed ones."""
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost", headers=OF_JSON
        )

    def server(self) -> contextlib.AbstractAsyncContextManager[str]:
        """A real server on a free port of this machine; gives its URL."""
        return loopback.served(self.app)


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    *pools: LocalPool,
    workflows: tuple[str, ...],
    belief: LengthBelief | None = None,
    access: AccessControl | None = None,
    reuse: ReuseLimits | None = None,
    batches: BatchRoom | None = None,
    store: MetadataStore | None = None,
    prices: Prices = NO_PRICES,
) -> AsyncIterator[Kit]:
    """An ingress over `pools` with `workflows`; `access` is None where no key is configured. With
    `reuse` identical calls share answers. Keys are administered in `store`."""
    async with LocalPools(*pools) as local:
        access = access or an_access()
        records = LocalRecords(local, belief, store=store, access=access)
        service = TaskService(
            workflows_of(folder, *workflows), local, NodeRunner({}), records, seed=1, reuse=reuse
        )
        feedback = KeptFeedback()
        app = create_app(
            service,
            max_body_bytes=MAX_BODY_BYTES,
            ready=lambda: (True, ""),
            access=access,
            feedback=feedback,
            batches=batches,
            prices=prices,
        )
        yield Kit(service, records, app, feedback)


@contextlib.contextmanager
def served(folder: Path, *pools: LocalPool, workflows: tuple[str, ...]) -> Iterator[str]:
    """A server in a thread of its own, for tests that are not asynchronous; gives its URL."""
    loop = asyncio.new_event_loop()
    started: asyncio.Future[str] = loop.create_future()
    stop = asyncio.Event()

    async def serve() -> None:
        async with running(folder, *pools, workflows=workflows) as kit, kit.server() as url:
            started.set_result(url)
            await stop.wait()

    async def url() -> str:
        return await asyncio.wait_for(started, 30)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(url(), loop).result()
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def until(
    holds: Callable[[], bool] | Callable[[], Awaitable[bool]], *, within_s: float
) -> float:
    """Wait until `holds`; how long it took. Fails after `within_s`."""
    started_s = time.monotonic()
    while True:
        value = holds()
        if value if isinstance(value, bool) else await value:
            return time.monotonic() - started_s
        assert time.monotonic() - started_s < within_s, f"not so within {within_s} s"
        await asyncio.sleep(0.005)


async def until_idle(pool: LocalPool, *, within_s: float) -> float:
    """Wait until the engines of `pool` hold nothing; how long it took."""

    async def is_idle() -> bool:
        return await pool.running() == 0

    return await until(is_idle, within_s=within_s)


async def until_busy(pool: LocalPool, *, requests: int = 1) -> None:
    async def is_busy() -> bool:
        return await pool.running() >= requests

    await until(is_busy, within_s=5)


def sse_events(text: str) -> list[tuple[str, Any]]:
    """A whole event stream as (event name, value); `[DONE]` stays text."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, value = "", None
        for line in block.split("\n"):
            field, _, rest = line.partition(": ")
            if field == "event":
                name = rest
            else:
                assert field == "data", f"not an event: {block!r}"
                value = rest if rest == "[DONE]" else json.loads(rest)
        events.append((name, value))
    return events


def a_model_call(
    model: str, endpoint: str, body: dict[str, object], *, is_streamed: bool = True
) -> ModelCall:
    """A direct call of a short prompt."""
    prompt = Prompt(tokens=10, new_tokens=10)
    return ModelCall(model, Endpoint(endpoint), body, prompt, is_streamed=is_streamed)
