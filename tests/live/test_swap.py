"""Several real models in one slot, by other weights in the same engine and by a new engine."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cato.core.errors import InputError
from cato.core.eviction import CopyId
from cato.core.ids import DeploymentName, ModelName
from cato.core.profile import UNMEASURED
from cato.core.slots import SlotOrder
from cato.core.topology import DeploymentSpec, EngineSpec, HostedModel, ModelSpec
from cato.engines.base import Endpoint, Engine, EngineRequest, EngineState
from cato.engines.vllm.host import Zygote
from cato.engines.vllm.process import VllmEngine
from cato.lab.bench.checkpoints import write_checkpoint
from cato.serve.engine_loader import EngineLoader

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
SWAPS = 50
PROMPT = "def add(a, b):\n    return"
SLOTS = DeploymentSpec(
    DeploymentName("slots"),
    "cpu",
    EngineSpec(
        "vllm",
        zygote=True,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        swap=True,
    ),
)


SLEEPY = replace(SLOTS, engine=replace(SLOTS.engine, swap=False, sleep=True))


@dataclass(frozen=True)
class Fixture:
    loader: EngineLoader
    sleepy: EngineLoader
    models: dict[str, ModelSpec]

    def order(self, name: str, number: int = 0, remembered: tuple[str, ...] = ()) -> SlotOrder:
        hosted = HostedModel(self.models[name])
        return SlotOrder(
            CopyId(f"{name}.{number}"),
            hosted,
            UNMEASURED,
            remembered=tuple(map(ModelName, remembered)),
        )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def made(zygote: Zygote) -> AsyncIterator[Fixture]:
    """Four checkpoints: two seeds of two architectures."""
    with tempfile.TemporaryDirectory(prefix="cato-s-") as name:
        folder = Path(name)
        models = {}
        for architecture in ("narrow", "wide"):
            for seed in (1, 2):
                model = f"{architecture}-{seed}"
                source = write_checkpoint(folder / model, architecture, seed)
                models[model] = ModelSpec(ModelName(model), str(source), "qwen")

        async def socket() -> str:
            return zygote.socket

        loaders = (EngineLoader(s, name, socket) for s in (SLOTS, SLEEPY))
        yield Fixture(*loaders, models)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def narrow(made: Fixture) -> AsyncIterator[VllmEngine]:
    """An engine that began with `narrow-1`; tests leave either narrow model in it."""
    engine = await made.loader.load(made.order("narrow-1"), None)
    assert isinstance(engine, VllmEngine)
    yield engine
    await engine.stop()


async def answer(engine: Engine) -> str:
    """What the model says to the prompt; greedy, so a fingerprint of its weights."""
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    request = EngineRequest("fingerprint", Endpoint.COMPLETIONS, body)
    return "".join([chunk.text async for chunk in engine.generate(request)])


def rss_of(engine: Engine) -> int:
    assert engine.pid is not None
    process = psutil.Process(engine.pid)
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


async def test_every_model_answers_as_in_an_engine_of_its_own(made: Fixture) -> None:
    engine = await made.loader.load(made.order("narrow-1"), None)
    own, swapped = {"narrow-1": await answer(engine)}, {}
    try:
        for name, is_swapped in (
            ("narrow-2", True),
            ("narrow-1", True),
            ("wide-1", False),
            ("wide-2", True),
            ("narrow-2", False),
            ("wide-2", False),
        ):
            before = engine
            engine = await made.loader.load(made.order(name), engine)
            assert (engine is before) == is_swapped
            (swapped if is_swapped else own)[name] = await answer(engine)
            assert engine.facts.served_model == name
    finally:
        await engine.stop()
    assert len(set(own.values())) == len(own) == len(made.models)
    assert swapped == {name: own[name] for name in ("narrow-1", "narrow-2", "wide-2")}


async def test_an_engine_sleeps_and_wakes_as_far_as_memory_goes(made: Fixture) -> None:
    """On a CPU vLLM pauses only, so this says nothing of an accelerator's memory."""
    both = ("narrow-1", "wide-1")
    loader = made.sleepy
    first = await loader.load(made.order("narrow-1"), None)
    said = await answer(first)
    second = await loader.load(made.order("wide-1", 1, both), first)
    try:
        assert second is not first
        assert first.state is EngineState.READY
        assert await answer(second) != said
        cold_s = first.facts.start_s
        assert loader.asleep == ("narrow-1",)
        woken = await loader.load(made.order("narrow-1", 2, both), second)
        assert woken is first
        assert await answer(woken) == said
        assert woken.facts.start_s < cold_s
        # There is room for none any more: what sleeps ends, and what is put away does.
        third = await loader.load(made.order("narrow-2", 3), woken)
        assert (first.state, second.state) == (EngineState.STOPPED,) * 2
        assert await answer(third) not in (said, "")
        # One that died asleep is started again.
        fourth = await loader.load(made.order("wide-1", 4, ("narrow-2",)), third)
        assert third.pid is not None
        os.kill(third.pid, signal.SIGKILL)
        await third.wait_dead()
        assert loader.asleep == ()
        again = await loader.load(made.order("narrow-2", 5, ("narrow-2", "wide-1")), fourth)
        assert again is not third
        assert await answer(again) not in (said, "")
        await again.stop()
        assert loader.asleep == ("wide-1",)
    finally:
        await loader.keep(())
    assert fourth.state is EngineState.STOPPED


async def test_an_answer_names_the_model_that_was_put_in(made: Fixture, narrow: VllmEngine) -> None:
    assert await made.loader.load(made.order("narrow-2"), narrow) is narrow
    for stream in (True, False):
        body = {"prompt": '"model":"narrow-1"', "max_tokens": 4}
        request = EngineRequest("1", Endpoint.COMPLETIONS, body, stream=stream, raw=True)
        raw = b"".join([chunk.raw async for chunk in narrow.generate(request)])
        assert b'"model":"narrow-2"' in raw
        assert b'"model":"narrow-1"' not in raw


async def test_other_architectures_are_refused_and_the_engine_lives_on(
    made: Fixture, narrow: VllmEngine
) -> None:
    said = await answer(narrow)
    wide = made.models["wide-1"]
    with pytest.raises(InputError, match="hidden_size"):
        await narrow.swap(wide, wide.source)
    assert await answer(narrow) == said


async def test_fifty_swaps_leak_nothing(made: Fixture, narrow: VllmEngine) -> None:
    expected = {}
    for i in range(4):
        name = f"narrow-{1 + i % 2}"
        await narrow.swap(made.models[name], made.models[name].source)
        expected[name] = await answer(narrow)
    before = rss_of(narrow)
    for i in range(SWAPS):
        name = f"narrow-{1 + i % 2}"
        await narrow.swap(made.models[name], made.models[name].source)
        assert await answer(narrow) == expected[name]
    assert rss_of(narrow) <= 1.1 * before


async def test_a_broken_checkpoint_is_an_error_and_the_next_order_works(
    made: Fixture, tmp_path: Path
) -> None:
    from cato.core.errors import EngineError

    broken = replace(made.models["narrow-1"], name=ModelName("broken"), source=str(tmp_path))
    order = SlotOrder(CopyId("1"), HostedModel(broken), UNMEASURED)
    engine = await made.loader.load(made.order("narrow-1"), None)
    with pytest.raises(EngineError):
        await made.loader.load(order, engine)
    engine = await made.loader.load(made.order("narrow-2"), None)
    assert await answer(engine)
    await engine.stop()
