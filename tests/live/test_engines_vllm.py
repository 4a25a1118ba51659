"""The vLLM engine on CPU: the conformance kit, and that no process outlives its owner.

`CATO_TEST_MODEL` names another model folder than the demo model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from kits.engine_conformance import EngineConformance, a_request, collect
from kits.processes import is_alive

from cato.core.errors import EngineDeadError, EngineError
from cato.core.ids import ModelName
from cato.core.topology import AdapterSpec, EngineSpec, ModelSpec, TemplateFacts
from cato.demo import demo_model_path
from cato.engines.base import EngineState
from cato.engines.vllm.host import Zygote
from cato.engines.vllm.process import VllmEngine
from cato.lab.bench.checkpoints import write_adapter

ROOT = Path(__file__).parents[2]
MODEL_PATH = Path(os.environ.get("CATO_TEST_MODEL") or demo_model_path())
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not (MODEL_PATH / "config.json").exists(), reason=f"no model in {MODEL_PATH}"
    ),
]

MODEL = ModelSpec(ModelName("demo"), "demo", "qwen")
SPEC = EngineSpec(
    "vllm",
    zygote=True,
    dtype="float32",
    max_num_seqs=4,
    max_model_len=512,
    kv_cache_memory_bytes=128 << 20,
    start_timeout_s=90.0,
)


def an_engine(socket_dir: str, zygote_socket: str | None, spec: EngineSpec = SPEC) -> VllmEngine:
    return VllmEngine(spec, MODEL, str(MODEL_PATH), socket_dir, zygote_socket)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(zygote: Zygote) -> AsyncIterator[VllmEngine]:
    engine = an_engine(os.path.dirname(zygote.socket), zygote.socket)
    await engine.start()
    yield engine
    await engine.stop()


class TestVllmEngine(EngineConformance):
    async def kill(self, engine: VllmEngine) -> None:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)

    async def test_counts_tokens_as_the_engine_does(self, engine: VllmEngine) -> None:
        text = "def read(path):\n    return open(path).read()\n"
        (answer,) = await collect(engine, a_request(prompt=text, stream=False))
        assert await engine.count_tokens(text) == answer.prompt_tokens

    @pytest.mark.skipif("CATO_TEST_MODEL" in os.environ, reason="another model's template")
    async def test_demo_models_template_drops_tools_and_system_texts(
        self, engine: VllmEngine
    ) -> None:
        assert engine.facts.template == TemplateFacts(
            renders_tools=False,
            renders_system=False,
            is_system_first=False,
            takes_late_system=False,
        )

    async def test_another_template_renders_all(self, zygote: Zygote, tmp_path: Path) -> None:
        file = tmp_path / "template.jinja"
        file.write_text(
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n"
            "{% if loop.first %}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% endif %}"
            "{% endfor %}<assistant>"
        )
        folder = os.path.dirname(zygote.socket)
        engine = an_engine(
            folder, zygote.socket, replace(SPEC, args=("--chat-template", str(file)))
        )
        await engine.start()
        assert engine.facts.template == TemplateFacts(
            renders_tools=True, renders_system=True, is_system_first=True, takes_late_system=True
        )
        await engine.stop()

    async def test_failed_start_gives_the_engines_last_words(self, zygote: Zygote) -> None:
        folder = os.path.dirname(zygote.socket)
        broken = an_engine(folder, zygote.socket, replace(SPEC, args=("--no-such-flag",)))
        with pytest.raises(EngineError, match="no-such-flag"):
            await broken.start()
        assert broken.state is EngineState.DEAD

    async def test_start_without_a_zygote_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(EngineError, match="zygote"):
            await an_engine(tempfile.gettempdir(), str(tmp_path / "none.sock")).start()

    async def test_engine_ends_when_its_start_times_out(self, zygote: Zygote) -> None:
        folder = os.path.dirname(zygote.socket)
        slow = an_engine(folder, zygote.socket, replace(SPEC, start_timeout_s=0.2))
        before = processes_of(zygote)
        with pytest.raises(EngineError, match=r"within 0\.2 s"):
            await slow.start()
        await until(lambda: processes_of(zygote) <= before)

    async def test_adapters_share_an_engine_and_answer_each_in_its_own_words(
        self, zygote: Zygote, tmp_path: Path
    ) -> None:
        names = ("team-a", "team-b")
        adapters = tuple(
            AdapterSpec(ModelName(name), str(write_adapter(tmp_path / name, seed)))
            for seed, name in enumerate(names)
        )
        model = replace(MODEL, adapters=adapters)
        folder = os.path.dirname(zygote.socket)
        engine = VllmEngine(SPEC, model, str(MODEL_PATH), folder, zygote.socket)
        await engine.start()

        by_name = {str(a.name): a for a in adapters}

        async def answer(name: str) -> str:
            request = a_request(prompt="def add(a, b):\n", max_tokens=24, temperature=0)
            chunks = await collect(
                engine, replace(request, id=f"{request.id}-{name}", adapter=by_name.get(name))
            )
            return "".join(chunk.text for chunk in chunks)

        try:
            alone = [await answer(name) for name in ("", *names)]
            together = await asyncio.gather(*map(answer, ("", *names)))
        finally:
            await engine.stop()
        assert len(set(alone)) == 3
        assert together == alone

    async def test_adapters_come_and_change_while_the_engine_runs(
        self, zygote: Zygote, tmp_path: Path
    ) -> None:
        def an_adapter(name: str, seed: int, version: int) -> AdapterSpec:
            path = write_adapter(tmp_path / name, seed)
            return AdapterSpec(ModelName(name), str(path), version=version)

        model = replace(MODEL, adapter_places=2)
        folder = os.path.dirname(zygote.socket)
        engine = VllmEngine(SPEC, model, str(MODEL_PATH), folder, zygote.socket)
        await engine.start()

        async def answer(adapter: AdapterSpec | None) -> str:
            request = a_request(prompt="def add(a, b):\n", max_tokens=24, temperature=0)
            asked = replace(request, id=f"{request.id}-{uuid.uuid4().hex}", adapter=adapter)
            return "".join(chunk.text for chunk in await collect(engine, asked))

        try:
            own = await answer(None)
            with pytest.raises(EngineError, match="nowhere"):
                await answer(AdapterSpec(ModelName("x"), "nowhere/at-all", version=1))
            team = an_adapter("team", 0, 2)
            first = await asyncio.gather(*(answer(team) for _ in range(3)))
            changed = await answer(an_adapter("team", 1, 3))
            other = an_adapter("other", 2, 4)
            assert len({own, *first, changed, await answer(other)}) == 4
            assert await answer(team) == changed, "an older one does not come back"
            with pytest.raises(EngineError, match="2 places"):
                await answer(an_adapter("third", 3, 5))
            together = await asyncio.gather(answer(None), answer(other), answer(None))
            assert together == [own, await answer(other), own]
        finally:
            await engine.stop()


# The tests below end what the fixtures made, so they come last and make their own.

OWNER = """
import asyncio, sys
from tests.live.test_engines_vllm import Zygote, an_engine
async def own():
    folder, mode = sys.argv[1:]
    socket = None
    if mode == "zygote":
        zygote = Zygote(f"{folder}/owned.sock")
        await zygote.ready()
        socket = zygote.socket
    engine = an_engine(folder, socket)
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(own())
"""


@pytest.mark.parametrize("mode", ["zygote", "plain"])
async def test_no_process_outlives_a_killed_owner(mode: str) -> None:
    with tempfile.TemporaryDirectory(prefix="cato-e-") as folder:
        owner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", OWNER, folder, mode),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},  # where `kits` is
        )
        assert owner.stdout is not None
        async with asyncio.timeout(100):
            pid = int(await owner.stdout.readline())
        tree = descendants(owner.pid)
        assert pid in tree
        assert len(tree) >= 3  # zygote, server, engine core
        owner.kill()
        await owner.wait()
        await until(lambda: not any(is_alive(p) for p in tree))


@pytest.mark.timeout(400)  # vLLM is imported three times
async def test_a_killed_zygote_ends_its_engines_and_their_streams_and_starts_again() -> None:
    with tempfile.TemporaryDirectory(prefix="cato-e-") as folder:
        zygote = Zygote(f"{folder}/z.sock")
        engine = an_engine(folder, zygote.socket)
        # A restart stops the engine before its server's sockets close.
        for is_stopped_at_once in (True, True, False):
            await zygote.ready()
            await engine.start()
            assert (await collect(engine, a_request()))[-1].output_tokens > 0
            streams = [
                asyncio.ensure_future(collect(engine, a_request(max_tokens=400, ignore_eos=True)))
                for _ in range(4)
            ]
            async with asyncio.timeout(30):
                while (await engine.load()).running < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert zygote.pid is not None
            tree = descendants(zygote.pid)
            os.kill(zygote.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                assert "zygote" in await engine.wait_dead()
            if is_stopped_at_once:
                await engine.stop()
            ended, _ = await asyncio.wait(streams, timeout=5)
            assert len(ended) == 4
            ends = await asyncio.gather(*streams, return_exceptions=True)
            assert {type(end) for end in ends} == {EngineDeadError}
            await until(lambda tree=tree: not any(is_alive(p) for p in tree))
            with pytest.raises(EngineDeadError):
                await collect(engine, a_request())
        await engine.stop()
        await zygote.stop()


def descendants(pid: int) -> set[int]:
    children: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            children.add(int(stat.parent.name))
    return children.union(*(descendants(child) for child in children))


def processes_of(zygote: Zygote) -> set[int]:
    assert zygote.pid is not None
    return descendants(zygote.pid)


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # a process table sends no events
            await asyncio.sleep(0.05)
