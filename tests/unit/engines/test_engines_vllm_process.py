"""Starting, watching, losing and ending vLLM servers, with a stand-in package named `vllm`.

Real processes and sockets, but no vLLM: the stand-in speaks just enough HTTP and misbehaves on
request. The real server is tested in `tests/live/test_engines_vllm.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from kits.engine_conformance import a_request, collect, text_of
from kits.processes import is_alive

from cato.core.errors import EngineDeadError, EngineError
from cato.core.hung import HungRule
from cato.core.ids import ModelName
from cato.core.topology import AdapterSpec, EngineSpec, ModelSpec, TemplateFacts
from cato.engines.base import EngineLoad, EngineState
from cato.engines.vllm import process
from cato.engines.vllm.host import Zygote
from cato.engines.vllm.logs import KEPT_LOGS
from cato.engines.vllm.process import VllmEngine

# The standard library alone: importing a web framework would take most of these tests' time.
STAND_IN = """
import asyncio, json, os, signal, subprocess, sys, time

ANSWERS = {
    "/health": {}, "/version": {"version": "stand-in"},
    "/v1/models": {"data": [{"id": "demo", "max_model_len": 512}]},
    "/metrics": {"env": os.environ.get("FOR_ENGINE")},
    "/collective_rpc": {"results": [0.5]},
    "/sleep?level=1": {}, "/wake_up": {}, "/is_sleeping": {"is_sleeping": False},
}

async def answer(reader, writer):
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
    path = head.split()[1]
    length = head.partition("content-length:")[2].split("\\r\\n")[0]
    body = await reader.readexactly(int(length or 0))
    if b"mute" in body:
        leave_behind()
        await asyncio.sleep(600)
    writer.write(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n")
    writer.write(b"Transfer-Encoding: chunked\\r\\n\\r\\n")
    if path == "/tokenize":
        asked = json.loads(body)
        text = asked.get("prompt")
        told = {"tokens": rendered(asked)} if text is None else {"count": len(text.split())}
        is_whole = await send(writer, json.dumps(told).encode())
    elif path == "/detokenize":
        text = bytes(json.loads(body)["tokens"]).decode()
        is_whole = await send(writer, json.dumps({"prompt": text}).encode())
    elif path == "/v1/completions":
        is_whole = await complete(json.loads(body), writer)
    elif path == "/v1/load_lora_adapter":
        print("ADAPTER", body.decode(), flush=True)
        if b"slow" in body:  # its loop downloads
            time.sleep(4)
        is_whole = await send(writer, b"{}")
    elif path.startswith("/reset_prefix_cache"):
        RESETS.append(path)
        print("RESET", path, flush=True)
        success = "--busy" not in sys.argv or len(RESETS) > 2
        is_whole = await send(writer, json.dumps({"success": success}).encode())
    else:
        is_whole = await send(writer, json.dumps(ANSWERS[path]).encode())
    if is_whole:
        await send(writer, b"")
    writer.close()

def leave_behind():
    # A process that outlives this one and holds its connections open.
    if (pid := os.fork()) == 0:
        os.setsid()
        while True:
            signal.pause()
    print("HOLDER", pid, flush=True)

def rendered(body):
    tools, said = body.get("tools", []), body["messages"]
    if "--forgetful" in sys.argv:
        tools, said = [], [m for m in said if m["role"] != "system"]
    return list(json.dumps([tools, said]).encode())

async def send(writer, data):
    writer.write(b"%x\\r\\n%b\\r\\n" % (len(data), data))
    await writer.drain()
    return True

async def complete(body, writer):
    async def event(value):
        await send(writer, b"data: " + json.dumps(value).encode() + b"\\n\\n")
    prompt = body["prompt"]
    if "--deadlock" in sys.argv:
        await asyncio.sleep(600)
    if prompt == "compile":  # in a child process, as of a step that everything waits for
        burn = "import time\\nwhile time.process_time() < 2.0: pass"
        subprocess.run([sys.executable, "-c", burn])
    if prompt == "#":
        print("PROBE", flush=True)
    print("LIMIT", body.get("max_tokens"), flush=True)
    print("XARGS", body.get("vllm_xargs"), flush=True)
    if CORE is not None:  # what computes is another process, as on accelerators
        CORE.stdin.write(b"a")
        await CORE.stdin.drain()
        await CORE.stdout.readexactly(1)
    if prompt == "die":
        os._exit(3)
    if prompt == "deaf":
        SERVER.close()
    if prompt == "core":  # has ended, which the server sees, and stays
        await event({"error": {"message": "EngineCore encountered an issue.", "code": 500}})
    await event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})
    if "--left-behind" in sys.argv:
        leave_behind()
    if prompt == "compute":
        until_s = time.process_time() + 2.0
        while time.process_time() < until_s:
            pass
    if prompt == "hang":
        await asyncio.sleep(600)
    if prompt == "break":
        return False
    if prompt != "unfinished":
        await event({"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        await event({"choices": [], "usage": usage, "priority": body.get("priority")})
    return await send(writer, b"data: [DONE]\\n\\n")

CORE, RESETS, SERVER = None, [], None

async def serve(path):
    global CORE, SERVER
    if "--core" in sys.argv:
        CORE = await asyncio.create_subprocess_exec(
            "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    SERVER = await asyncio.start_unix_server(answer, path)
    await asyncio.Event().wait()

def main():
    if "--fail" in sys.argv:
        sys.exit("there is no room on the card")
    if "--slow" in sys.argv:
        signal.pause()
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        print("CHILD", child.pid, flush=True)
    asyncio.run(serve(sys.argv[sys.argv.index("--uds") + 1]))
"""


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        package = Path(folder, "vllm/entrypoints/launchers/api_server")
        package.mkdir(parents=True)
        for parent in (package, *package.parents[:3]):
            (parent / "__init__.py").touch()
        (package / "entry.py").write_text(STAND_IN)
        patch.setenv("PYTHONPATH", folder)
        yield


@pytest_asyncio.fixture
async def zygote() -> AsyncIterator[Zygote]:
    with tempfile.TemporaryDirectory(prefix="cato-e-") as folder:
        zygote = Zygote(f"{folder}/z.sock", accelerator="gpu", preload=False)
        await zygote.ready()
        yield zygote
        await zygote.stop()


SPEC = EngineSpec("vllm", start_timeout_s=20.0)


def an_engine(
    zygote: Zygote | None,
    *args: str,
    folder: str = "",
    spec: EngineSpec = SPEC,
    hung: HungRule = HungRule(),  # noqa: B008  # frozen
) -> VllmEngine:
    model = ModelSpec(ModelName("demo"), "demo", "qwen")
    folder = folder or os.path.dirname(zygote.socket if zygote else "")
    socket = zygote.socket if zygote else None
    return VllmEngine(
        replace(spec, args=args), model, "/m", folder, socket, accelerator="gpu", hung=hung
    )


async def test_starts_serves_and_stops(zygote: Zygote) -> None:
    engine = an_engine(zygote)
    await engine.start()
    assert engine.facts.version == "stand-in"
    assert engine.facts.context_tokens == 512
    chunks = await collect(engine, a_request(priority=3))
    assert text_of(chunks) == "ab"
    assert chunks[-1].finish_reason == "stop"
    assert await engine.load() == EngineLoad(0, 0, 0.0)
    pid = engine.pid
    await engine.stop()
    assert pid is not None
    assert not is_alive(pid)


async def test_a_client_cannot_ask_the_engine_to_tell_of_blocks_twice(zygote: Zygote) -> None:
    engine = an_engine(zygote)
    await engine.start()
    xargs = {"kv_cache_report_mode": "full", "other": 1}
    await collect(engine, a_request(vllm_xargs=xargs))
    assert "XARGS {'other': 1}\n" in Path(engine.log).read_text()
    await engine.stop()


@pytest.mark.parametrize(("counted", "asked"), [(4, 5), (2, 5), (0, 5)])
async def test_an_answer_that_others_began_ends_where_it_would_have_ended(
    zygote: Zygote, counted: int, asked: int
) -> None:
    """Four tokens are there, in fewer events, of nine that were asked for."""
    engine = an_engine(zygote)
    await engine.start()
    request = a_request(prompt="x a b c d", max_tokens=9 - counted)
    request = replace(request, begun="a b c d", begun_tokens=counted)
    last = (await collect(engine, request))[-1]
    assert f"LIMIT {asked}\n" in Path(engine.log).read_text()
    assert counted + last.output_tokens == 4 + 2
    await engine.stop()


async def test_an_answer_that_others_wrote_to_its_limit_has_an_end_and_no_more(
    zygote: Zygote,
) -> None:
    engine = an_engine(zygote)
    await engine.start()
    request = a_request(prompt="x a b c d", max_tokens=2)
    chunks = await collect(engine, replace(request, begun="a b c d", begun_tokens=2))
    assert [(c.text, c.finish_reason) for c in chunks] == [("", "length")]
    assert 2 + chunks[0].output_tokens == 4
    assert "LIMIT" not in Path(engine.log).read_text()
    await engine.stop()


async def test_learns_what_its_chat_template_renders(
    zygote: Zygote, caplog: pytest.LogCaptureFixture
) -> None:
    engine = an_engine(zygote)
    await engine.start()
    assert engine.facts.template == TemplateFacts(
        renders_tools=True, renders_system=True, is_system_first=False, takes_late_system=True
    )
    await engine.stop()
    assert "drops" not in caplog.text


async def test_says_at_its_start_what_its_chat_template_drops(
    zygote: Zygote, caplog: pytest.LogCaptureFixture
) -> None:
    engine = an_engine(zygote, "--forgetful")
    await engine.start()
    assert engine.facts.template == TemplateFacts(
        renders_tools=False, renders_system=False, is_system_first=False, takes_late_system=False
    )
    await engine.stop()
    assert "model demo: its chat template drops tools and system texts" in caplog.text


async def test_one_zygote_holds_several_engines_apart(zygote: Zygote) -> None:
    engines = [an_engine(zygote) for _ in range(3)]
    await asyncio.gather(*(e.start() for e in engines))
    pids = [e.pid or 0 for e in engines]
    await engines[1].stop()
    assert [is_alive(pid) for pid in pids] == [True, False, True]
    assert text_of(await collect(engines[2], a_request())) == "ab"
    await zygote.stop()
    assert "zygote" in await engines[0].wait_dead() or engines[0].state is EngineState.DEAD
    assert not any(map(is_alive, pids))
    for engine in engines:
        await engine.stop()


async def test_works_without_a_zygote_of_its_host() -> None:
    with tempfile.TemporaryDirectory(prefix="cato-e-") as folder:
        engine = an_engine(None, folder=folder)
        await engine.start()
        assert text_of(await collect(engine, a_request())) == "ab"
        await engine.stop()
        assert [p for p in os.listdir(folder) if not p.endswith(".log")] == []


async def test_stubborn_engine_is_killed_with_its_children(zygote: Zygote) -> None:
    engine = an_engine(zygote, "--stubborn")
    await engine.start()
    words = Path(engine.log).read_text().split()
    child = int(words[words.index("CHILD") + 1])
    assert is_alive(child)
    pid = engine.pid or 0
    await engine.stop()
    assert not is_alive(pid)
    await until(lambda: not is_alive(child))


async def test_failing_start_gives_the_last_words(zygote: Zygote) -> None:
    engine = an_engine(zygote, "--fail")
    with pytest.raises(EngineError, match="there is no room on the card"):
        await engine.start()
    assert engine.state is EngineState.DEAD


async def test_environment_of_the_spec_reaches_the_engine(zygote: Zygote) -> None:
    engine = an_engine(zygote, spec=replace(SPEC, env={"FOR_ENGINE": "42"}))
    await engine.start()
    assert b"42" in await engine._ask("GET", "/metrics")
    await engine.stop()


@pytest.mark.parametrize("prompt", ["break", "unfinished", "die"])
async def test_answer_that_breaks_off_is_a_dead_engine(zygote: Zygote, prompt: str) -> None:
    engine = an_engine(zygote)
    await engine.start()
    with pytest.raises(EngineDeadError):
        await collect(engine, a_request(prompt=prompt))
    if prompt == "die":
        assert "status 3" in await engine.wait_dead()
        assert engine.state is EngineState.DEAD
    await engine.stop()


async def test_a_server_that_lost_its_core_is_killed_at_once(zygote: Zygote) -> None:
    engine = an_engine(zygote)
    await engine.start()
    with pytest.raises(EngineDeadError):
        await collect(engine, a_request(prompt="core"))
    assert engine.state is EngineState.DEAD
    assert "lost its engine core; it was killed" in await engine.wait_dead()
    await engine.stop()


async def test_a_server_that_no_longer_listens_gets_no_calls_and_ends(zygote: Zygote) -> None:
    """vLLM's own end takes seconds, in which a call would be lost as often as it is sent."""
    engine = an_engine(zygote)
    await engine.start()
    assert text_of(await collect(engine, a_request(prompt="deaf"))) == "ab"
    with pytest.raises(EngineDeadError, match="lost the engine"):
        await collect(engine, a_request())
    assert engine.state is EngineState.DEAD
    await engine.wait_dead()
    await engine.stop()


async def test_stop_ends_an_answer_that_hangs(zygote: Zygote) -> None:
    engine = an_engine(zygote)
    await engine.start()
    async with aclosing(engine.generate(a_request(prompt="hang"))) as chunks:
        assert (await anext(chunks)).text == "a"
        stopping = asyncio.create_task(engine.stop())
        with pytest.raises(EngineDeadError):
            await anext(chunks)
        await stopping


@pytest.mark.parametrize("prompt", ["hang", "mute"])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_answers_end_with_the_zygote_while_its_server_still_holds_their_connections(
    zygote: Zygote, prompt: str, is_streamed: bool
) -> None:
    engine = an_engine(zygote, "--left-behind")
    await engine.start()
    answers = [
        asyncio.ensure_future(collect(engine, a_request(prompt=prompt, stream=is_streamed)))
        for _ in range(4)
    ]
    log = Path(engine.log)
    await until(lambda: log.read_text().count("HOLDER") == 4)
    words = log.read_text().split()
    holders = [int(pid) for word, pid in pairwise(words) if word == "HOLDER"]
    assert zygote.pid is not None
    os.kill(zygote.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        assert "ended with its zygote" in await engine.wait_dead()
        await engine.stop()
        ended, _ = await asyncio.wait(answers, timeout=2)
    are_held = [is_alive(pid) for pid in holders]
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
    assert all(are_held)  # no end of a connection has woken them
    assert len(ended) == 4
    ends = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDeadError] * 4


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_stop_during_start_ends_the_engine(zygote: Zygote, is_cancelled: bool) -> None:
    engine = an_engine(zygote, "--slow")
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.pid is not None)
    pid = engine.pid or 0
    if is_cancelled:
        starting.cancel()
    async with asyncio.timeout(5):
        await engine.stop()
    with pytest.raises(asyncio.CancelledError if is_cancelled else EngineError):
        await starting
    assert not is_alive(pid)
    assert engine.state is EngineState.STOPPED


async def test_interpreter_that_does_not_exist_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="no-such-python"):
        await Zygote(f"{tempfile.gettempdir()}/z.sock", python="/no-such-python").ready()


async def test_zygote_that_fails_to_preload_gives_its_last_words() -> None:
    with tempfile.TemporaryDirectory(prefix="cato-e-") as folder:
        Path(folder, "torch.py").write_text("raise ImportError('torch is broken')")
        zygote = Zygote(f"{folder}/z.sock", env={"PYTHONPATH": folder})
        with pytest.raises(EngineError, match="torch is broken"):
            await zygote.ready()
        assert not zygote.is_alive


async def test_zygote_is_ready_anew_as_soon_as_it_was_killed() -> None:
    with tempfile.TemporaryDirectory(prefix="cato-e-") as folder:
        zygote = Zygote(f"{folder}/z.sock", preload=False)
        await zygote.ready()
        for _ in range(8):  # its connections end a moment before the event loop learns of its end
            reader, writer = await asyncio.open_unix_connection(zygote.socket)
            killed = zygote.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
            await zygote.ready()
            assert zygote.pid != killed
        await zygote.stop()


# A hundred times as hasty as usual: the stand-in has nothing to compute.
HASTY = HungRule(times=0.0, least_s=0.02, watched_s=1.0, working_s=600.0, stopped_s=0.1)


async def collect_and(stop: Callable[[], None], engine: VllmEngine) -> None:
    """Read an answer that hangs; `stop` once it has begun."""
    async for _ in engine.generate(a_request(prompt="hang")):
        stop()


@pytest.mark.parametrize("prompt", ["hang", "mute"])
async def test_an_engine_that_stands_still_is_killed_and_its_calls_end(
    zygote: Zygote, prompt: str
) -> None:
    engine = an_engine(zygote, hung=HASTY)
    await engine.start()
    assert engine.pid is not None
    pid = engine.pid
    if prompt == "mute":  # not even the head of its answer comes
        os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDeadError):
            await collect_and(lambda: os.kill(pid, signal.SIGSTOP), engine)
        why = await engine.wait_dead()
    assert "vLLM hung: a signal stopped its process" in why
    assert "it was killed" in why
    assert engine.state is EngineState.DEAD
    await until(lambda: not is_alive(pid))
    await engine.start()
    assert text_of(await collect(engine, a_request())) == "ab"
    await engine.stop()


async def test_an_engine_that_stands_still_behind_a_server_that_answers_is_killed(
    zygote: Zygote,
) -> None:
    engine = an_engine(zygote, "--core", hung=HASTY)
    await engine.start()
    async with asyncio.timeout(60):
        (core,) = psutil.Process(engine.pid).children()
        with pytest.raises(EngineDeadError):
            await collect_and(core.suspend, engine)
        assert "hung" in await engine.wait_dead()
    await until(lambda: not is_alive(core.pid))
    await engine.stop()


async def test_an_idle_engine_that_is_stopped_is_killed_before_a_call_waits(
    zygote: Zygote,
) -> None:
    engine = an_engine(zygote, hung=replace(HASTY, idle_s=0.5))
    await engine.start()
    log = Path(engine.log)
    await until(lambda: log.read_text().count("PROBE") > 1)
    assert engine.state is EngineState.READY
    os.kill(engine.pid or 0, signal.SIGSTOP)
    async with asyncio.timeout(60):
        assert "vLLM hung: a signal stopped its process" in await engine.wait_dead()
    await engine.stop()


async def test_an_engine_that_hangs_is_killed_while_calls_come_and_go(zygote: Zygote) -> None:
    hung = replace(HASTY, least_s=1.0, watched_s=0.5, idle_s=1.5)
    engine = an_engine(zygote, "--deadlock", hung=hung)
    await engine.start()
    async with asyncio.timeout(60):
        while engine.state is EngineState.READY:
            with contextlib.suppress(TimeoutError, EngineDeadError):
                async with asyncio.timeout(0.3):
                    await collect(engine, a_request())
            await asyncio.sleep(0.1)
        assert "hung" in await engine.wait_dead()
    await engine.stop()


async def test_an_engine_whose_child_compiles_a_kernel_goes_on(zygote: Zygote) -> None:
    engine = an_engine(zygote, hung=replace(HASTY, watched_s=0.5))
    await engine.start()
    assert text_of(await collect(engine, a_request(prompt="compile"))) == "ab"
    await engine.stop()


async def test_the_log_of_an_engine_goes_with_it_unless_it_failed(zygote: Zygote) -> None:
    engine = an_engine(zygote)
    await engine.start()
    assert Path(engine.log).exists()
    await engine.stop()
    assert not Path(engine.log).exists()
    broken = an_engine(zygote)
    await broken.start()
    with pytest.raises(EngineDeadError):
        await collect(broken, a_request(prompt="die"))
    await broken.wait_dead()
    for _ in range(2):
        await broken.stop()
    assert Path(broken.log).exists()


async def test_the_last_logs_of_failed_engines_are_kept(zygote: Zygote) -> None:
    folder = Path(zygote.socket).parent
    running = an_engine(zygote)
    await running.start()
    os.utime(running.log, (0, 0))
    for n in range(KEPT_LOGS + 3):
        log = folder / f"vllm-{n}.log"
        log.touch()
        os.utime(log, (1000 + n, 1000 + n))
    failing = an_engine(zygote, "--fail")
    with pytest.raises(EngineError):
        await failing.start()
    await failing.stop()
    left = {log.name for log in folder.glob("vllm-*.log")}
    kept = {f"vllm-{n}.log" for n in range(3, KEPT_LOGS + 3)}
    assert left == kept | {Path(failing.log).name, Path(running.log).name}
    await running.stop()


async def test_an_engine_that_sleeps_is_not_asked_for_a_sign(zygote: Zygote) -> None:
    engine = an_engine(zygote, hung=replace(HASTY, idle_s=0.1))
    await engine.start()
    await engine.sleep()
    log = Path(engine.log)
    await asyncio.sleep(0.5)
    asked = log.read_text().count("PROBE")
    await asyncio.sleep(1.0)
    assert log.read_text().count("PROBE") == asked
    assert engine.state is EngineState.READY
    await engine.wake()
    await until(lambda: log.read_text().count("PROBE") > asked)
    await engine.stop()


def told(engine: VllmEngine, word: str) -> list[str]:
    """What the stand-in has printed after `word`."""
    lines = Path(engine.log).read_text().splitlines()
    return [line.removeprefix(word).strip() for line in lines if line.split(" ")[0] == word]


async def test_each_version_of_an_adapter_has_a_path_of_its_own(
    zygote: Zygote, tmp_path: Path
) -> None:
    engine = an_engine(zygote)
    await engine.start()
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "weights").write_text("x")
    team = AdapterSpec(ModelName("team"), str(tmp_path / "lora"), version=3)
    other = replace(team, name=ModelName("a/b" * 80))
    for adapter in (team, team, replace(team, version=4), team, other):
        await collect(engine, replace(a_request(), adapter=adapter))
    loads = [json.loads(line) for line in told(engine, "ADAPTER")]
    assert [load["lora_name"] for load in loads] == ["team", "team", other.name]
    assert [load["load_inplace"] for load in loads] == [False, True, False]
    links = {load["lora_path"] for load in loads}
    assert len(links) == 3
    assert all(os.path.isabs(link) for link in links)
    assert all((Path(link) / "weights").read_text() == "x" for link in links)
    assert told(engine, "RESET") == [], "blocks of old versions are never found"
    await engine.stop()
    assert not any(os.path.lexists(link) for link in links)
    assert (tmp_path / "lora" / "weights").exists()


async def test_an_adapter_from_the_hub_comes_again_once_the_old_blocks_are_gone(
    zygote: Zygote,
) -> None:
    engine = an_engine(zygote, "--busy")
    await engine.start()
    team = AdapterSpec(ModelName("team"), "acme/cobol-lora", version=3)
    for version in (3, 4):
        await collect(engine, replace(a_request(), adapter=replace(team, version=version)))
    loads = [json.loads(line) for line in told(engine, "ADAPTER")]
    assert [load["lora_path"] for load in loads] == ["acme/cobol-lora"] * 2
    resets = told(engine, "RESET")
    assert len(resets) == 3
    assert "reset_running_requests=true" in resets[0]
    await engine.stop()


async def test_an_engine_that_loads_an_adapter_may_be_silent(zygote: Zygote) -> None:
    engine = an_engine(zygote, hung=replace(HASTY, idle_s=0.1))
    await engine.start()
    pid = engine.pid
    slow = AdapterSpec(ModelName("slow"), "acme/slow-lora", version=1)
    assert text_of(await collect(engine, replace(a_request(), adapter=slow))) == "ab"
    assert engine.pid == pid
    asked = len(told(engine, "PROBE"))
    await until(lambda: len(told(engine, "PROBE")) > asked)
    await engine.stop()


@pytest.mark.parametrize("busy", [True, False])
async def test_a_swap_that_leaves_old_blocks_is_an_error(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(process, "why_not_swappable", lambda *_: None)
    engine = an_engine(zygote, *(["--busy"] if busy else []))
    await engine.start()
    model = ModelSpec(ModelName("other"), "demo", "qwen")
    if busy:
        with pytest.raises(EngineError, match="keeps KV of the old weights"):
            await engine.swap(model, "/n")
    else:
        assert await engine.swap(model, "/n") == 0.5
    await engine.stop()


async def test_an_engine_that_is_silent_and_answers_a_probe_goes_on(zygote: Zygote) -> None:
    engine = an_engine(zygote, hung=HASTY)
    await engine.start()
    pid = engine.pid
    asking = asyncio.create_task(collect(engine, a_request(prompt="hang")))
    log = Path(engine.log)
    await until(lambda: log.read_text().count("PROBE") > 3, within_s=60.0)
    assert engine.state is EngineState.READY
    assert engine.pid == pid
    asking.cancel()
    await asyncio.wait([asking])
    await engine.stop()


async def test_an_engine_outlives_a_watcher_that_stands_still(zygote: Zygote) -> None:
    """Asking takes several turns of the event loop."""
    engine = an_engine(zygote, hung=replace(HASTY, idle_s=0.1, watched_s=1.5))
    await engine.start()
    log = Path(engine.log)
    while log.read_text().count("PROBE") < 2 and engine.state is EngineState.READY:
        await asyncio.sleep(0)
        time.sleep(0.4)  # noqa: ASYNC251  # it is this process that stands still
    assert engine.state is EngineState.READY
    await engine.stop()


async def test_an_engine_that_computes_in_silence_goes_on(zygote: Zygote) -> None:
    engine = an_engine(zygote, hung=replace(HASTY, watched_s=0.3))
    await engine.start()
    asking = asyncio.create_task(collect(engine, a_request(prompt="compute")))
    assert text_of(await asking) == "ab"
    await engine.stop()


async def test_socket_path_that_is_too_long_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="shorter socket folder"):
        await Zygote("/tmp/" + "x" * 120, preload=False).ready()


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # a process table sends no events
            await asyncio.sleep(0.02)
