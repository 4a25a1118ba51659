"""Prompts by due date inside a real vLLM: the same answers as in its own order, and short prompts
that do not wait for long ones. A model with random weights."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from kits.engine_conformance import until_running

from cato.core.ids import ModelName
from cato.core.pool.prefill import MOST_DOUBLINGS, NO_TARGET_S, CallTarget
from cato.core.topology import DUE_DATE, EngineSpec, ModelSpec
from cato.engines.base import Endpoint, EngineRequest
from cato.engines.vllm.host import Zygote
from cato.engines.vllm.process import VllmEngine
from cato.lab.bench.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.live,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

CONTEXT_TOKENS = 16_384
MODEL = ModelSpec(ModelName("random"), "random", "qwen")
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + (m.content | string) + '\\n' }}{% endfor %}"
STOCK = EngineSpec(
    "vllm",
    zygote=True,
    dtype="float32",
    max_num_seqs=16,
    max_model_len=CONTEXT_TOKENS,
    kv_cache_memory_bytes=512 << 20,
    start_timeout_s=120.0,
)
DUE = replace(STOCK, scheduler=DUE_DATE)


@dataclass(frozen=True)
class Place:
    """Where engines of the two models of this file can be started."""

    folder: Path
    zygote: Zygote
    template: Path

    def engine(self, spec: EngineSpec, model: str = "deep") -> VllmEngine:
        source = str(self.folder / model)
        args = (*spec.args, "--chat-template", str(self.template))
        made = replace(spec, args=args)
        return VllmEngine(made, MODEL, source, str(self.folder), self.zygote.socket)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place(zygote: Zygote) -> AsyncIterator[Place]:
    with tempfile.TemporaryDirectory(prefix="cato-s-") as name:  # short: it holds sockets
        folder = Path(name)
        for model in ("narrow", "deep"):
            write_checkpoint(folder / model, model, 1, CONTEXT_TOKENS)
        template = folder / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        yield Place(folder, zygote, template)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def due(place: Place) -> AsyncIterator[VllmEngine]:
    """One engine with the rule; tests leave it idle."""
    engine = place.engine(DUE)
    await engine.start()
    yield engine
    await engine.stop()


def asked(
    id: str,
    tokens: int,
    target_s: float,
    *,
    output: int = 8,
    seed: int = 0,
    shared: int = 0,
) -> EngineRequest:
    """A prompt of random ids, of which the first `shared` are those of every other prompt."""
    own, all_ = random.Random(f"{id}{seed}"), random.Random(seed)
    ids = [all_.randrange(300, 2900) for _ in range(shared)]
    ids += [own.randrange(300, 2900) for _ in range(tokens - shared)]
    body = {"prompt": ids, "max_tokens": output, "temperature": 0.0, "ignore_eos": True}
    target = CallTarget(target_s)
    return EngineRequest(id, Endpoint.COMPLETIONS, body, prompt_tokens=tokens, target=target)


async def said(engine: VllmEngine, request: EngineRequest, ended: list[str]) -> str:
    text = "".join([chunk.text async for chunk in engine.generate(request)])
    ended.append(request.id)
    return text


async def test_answers_equal_those_of_the_own_order(place: Place) -> None:
    """Cold, with a warm prefix cache, and with so little KV cache that requests are preempted."""
    requests = [
        asked(f"r{i}", tokens, (0.05, 1.0, 20.0)[i % 3], output=24, shared=256 if i % 2 else 0)
        for i, tokens in enumerate((40, 3000, 700, 5000, 90, 1500, 300, 2200, 60, 4000))
    ]
    answers = []
    for spec in (STOCK, DUE):
        # 65 blocks of 128 tokens: little more than half of what is asked for at a time.
        engine = place.engine(
            replace(spec, kv_cache_memory_bytes=18 << 20, max_model_len=6144), "narrow"
        )
        await engine.start()
        runs = [
            await asyncio.gather(
                *(said(engine, replace(r, id=f"{r.id}.{run}"), []) for r in requests)
            )
            for run in range(2)
        ]
        assert (await engine.load()).kv_cache_usage == 0.0
        await engine.stop()
        answers.append(runs)
    stock, due = answers
    assert stock[0] == stock[1]
    assert due == stock


async def test_short_prompts_pass_long_ones(due: VllmEngine) -> None:
    ended: list[str] = []
    longs = [asked(f"long{i}", 6_000, 60.0, output=2) for i in range(2)]
    running = [asyncio.create_task(said(due, long, ended)) for long in longs]
    await until_running(due, 1, 10.0)
    shorts = [asked(f"short{i}", 100, 0.5, output=2) for i in range(4)]
    await asyncio.gather(*(said(due, short, ended) for short in shorts))
    assert not {"long0", "long1"} & set(ended)
    await asyncio.gather(*running)
    assert ended[-2:] == ["long0", "long1"]  # equal ones end one after the other


# More tokens than the least piece of a prompt: what a step leaves of its time holds a word or two.
HELLO = "Hello " * 100
BODIES: dict[Endpoint, dict[str, object]] = {
    Endpoint.COMPLETIONS: {"prompt": HELLO, "max_tokens": 2},
    Endpoint.CHAT: {"messages": [{"role": "user", "content": HELLO}], "max_tokens": 2},
    Endpoint.MESSAGES: {"messages": [{"role": "user", "content": HELLO}], "max_tokens": 2},
    Endpoint.RESPONSES: {"input": HELLO, "max_output_tokens": 2},
}


async def test_the_due_date_arrives_in_every_dialect(place: Place) -> None:
    """A prompt without one waits for the long one, whose last due date is before `NO_TARGET_S`."""
    long_s = 0.05 * NO_TARGET_S
    assert long_s * 2**MOST_DOUBLINGS < NO_TARGET_S
    engine = place.engine(DUE)
    await engine.start()
    for endpoint, body in BODIES.items():
        for target, passes in ((CallTarget(0.02), True), (CallTarget(), False)):
            ended: list[str] = []
            long = asked("long", 3_000, long_s, output=2, seed=len(endpoint) + passes)
            running = asyncio.create_task(said(engine, long, ended))
            await until_running(engine, 1, 10.0)
            short = EngineRequest("short", endpoint, body, stream=False, raw=True, target=target)
            await said(engine, short, ended)
            await running
            assert (ended[0] == "short") is passes, endpoint
    await engine.stop()


async def test_a_call_that_leaves_while_it_is_paused_leaves_nothing_behind(due: VllmEngine) -> None:
    ended: list[str] = []
    paused = asyncio.create_task(said(due, asked("late", 6_000, 60.0), ended))
    await until_running(due, 1, 10.0)
    sooner = asyncio.create_task(said(due, asked("sooner", 4_000, 5.0), ended))
    assert (await until_running(due, 2, 10.0)).running == 2
    paused.cancel()
    await asyncio.gather(paused, return_exceptions=True)
    await sooner
    assert (await until_running(due, 0, 10.0)).running == 0
    assert ended == ["sooner"]
    assert (await due.load()).kv_cache_usage == 0.0


async def test_where_the_rule_cannot_be_had_the_engine_starts_without(place: Place) -> None:
    whole = replace(DUE, max_model_len=512, args=("--no-enable-chunked-prefill",))
    engine = place.engine(whole, "narrow")
    await engine.start()
    assert await said(engine, asked("r", 100, 1.0), [])
    log = Path(engine.log).read_text(encoding="utf-8", errors="replace")
    await engine.stop()
    assert "prompts run in vLLM's order" in log
