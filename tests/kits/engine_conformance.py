"""What every engine must do, as tests: subclass `EngineConformance` and give it an engine.

    @pytest_asyncio.fixture(loop_scope="module", scope="module")
    async def engine(): ...                   # started; stopped afterwards

    @pytest.mark.asyncio(loop_scope="module")  # that of the fixture
    class TestMyEngine(EngineConformance):
        async def kill(self, engine): ...     # make it crash

The engine must be able to start again after a death and a stop, have room for at least 300 tokens
and three blocks of its prefix cache in a request, and run between 2 and 16 requests at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import pytest

from cato.core.errors import ContextLengthError, EngineDeadError, EngineError
from cato.core.kv_events import BlocksStored, KvEvent
from cato.engines.base import (
    Endpoint,
    Engine,
    EngineChunk,
    EngineLoad,
    EngineRequest,
    EngineState,
)

PROMPT = "def read_config(path):\n"
MESSAGES = [{"role": "user", "content": "Write a function that reads a file."}]
# Generous, since hosts that run tests are busy: nothing here measures speed.
SLOT_FREE_S = 0.5
PATIENCE_S = 60.0

_ids = itertools.count(1)


def a_request(
    body: Mapping[str, object] | None = None,
    *,
    endpoint: Endpoint = Endpoint.COMPLETIONS,
    priority: int = 0,
    stream: bool = True,
    raw: bool = False,
    **fields: object,
) -> EngineRequest:
    """A request with a fresh id; `fields` are added to a short greedy completion."""
    if body is None:
        asked = {"prompt": PROMPT} if endpoint is Endpoint.COMPLETIONS else {"messages": MESSAGES}
        body = {**asked, "max_tokens": 24, "temperature": 0}
    number = next(_ids)
    return EngineRequest(
        f"conformance-{number}", endpoint, {**body, **fields}, priority, stream, raw
    )


async def collect(engine: Engine, request: EngineRequest) -> list[EngineChunk]:
    return [chunk async for chunk in engine.generate(request)]


def text_of(chunks: list[EngineChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def events_of(chunks: list[EngineChunk]) -> list[dict[str, Any]]:
    """The events in the raw bytes; fails where they are not whole server-sent events."""
    raw = b"".join(chunk.raw for chunk in chunks)
    assert raw.endswith(b"\n\n")
    lines = raw[:-2].split(b"\n\n")
    assert all(line.startswith(b"data: {") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def cached_in(endpoint: Endpoint, raw: bytes, *, stream: bool) -> int:
    """The cached tokens that an answer's bytes tell in its dialect."""
    values = (
        [json.loads(raw)]
        if not stream
        else [
            json.loads(event.partition(b"data: ")[2])
            for event in raw.removesuffix(b"\n\n").split(b"\n\n")
        ]
    )
    match endpoint:
        case Endpoint.MESSAGES:
            value = values[-2 if stream else -1]
            return int(value["usage"]["cache_read_input_tokens"])
        case Endpoint.RESPONSES:
            value = values[-1]["response"] if stream else values[-1]
            return int(value["usage"]["input_tokens_details"]["cached_tokens"])
        case _:
            return int(values[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until_running(engine: Engine, running: int, within_s: float) -> EngineLoad:
    """Return the load once that many requests run, or the last one seen when time is up."""
    end_s = time.monotonic() + within_s
    while True:
        load = await engine.load()
        if load.running == running or time.monotonic() > end_s:
            return load
        await asyncio.sleep(0.01)


class EngineConformance:
    """One engine serves all tests of a class; each leaves it idle and ready."""

    async def kill(self, engine: Any) -> None:
        """Make the engine die as a crash would."""
        raise NotImplementedError

    async def test_says_what_it_is(self, engine: Engine) -> None:
        facts = engine.facts
        assert engine.state is EngineState.READY
        assert facts.kind and facts.served_model and facts.version
        assert facts.max_running >= 2 and facts.context_tokens >= 300

    async def test_streams_the_text_it_would_give_at_once(self, engine: Engine) -> None:
        streamed = await collect(engine, a_request())
        (whole,) = await collect(engine, a_request(stream=False))
        assert text_of(streamed) == whole.text
        assert streamed[-1].finish_reason == whole.finish_reason
        assert streamed[-1].output_tokens == whole.output_tokens
        assert streamed[-1].prompt_tokens == whole.prompt_tokens > 0

    async def test_says_the_finish_and_all_counts_on_the_last_chunk(self, engine: Engine) -> None:
        chunks = await collect(engine, a_request(ignore_eos=True))
        counts = [chunk.output_tokens for chunk in chunks]
        last = chunks[-1]
        assert counts == sorted(counts)
        assert last.output_tokens == 24 and last.finish_reason == "length"
        assert last.prompt_tokens > 0 and last.cached_tokens >= 0
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])

    async def test_streams_in_more_than_one_piece(self, engine: Engine) -> None:
        # A reader that lags gets several tokens at once: only many tokens are sure to be divided.
        chunks = await collect(engine, a_request(ignore_eos=True, max_tokens=256))
        assert len(chunks) > 1

    async def test_answers_chat(self, engine: Engine) -> None:
        streamed = await collect(engine, a_request(endpoint=Endpoint.CHAT))
        (whole,) = await collect(engine, a_request(endpoint=Endpoint.CHAT, stream=False))
        assert text_of(streamed) == whole.text
        assert streamed[-1].output_tokens == whole.output_tokens > 0

    async def test_stops_before_a_stop_string(self, engine: Engine) -> None:
        (free,) = await collect(engine, a_request(ignore_eos=True, stream=False))
        stop = free.text[len(free.text) // 2 :][:3]
        stopped = await collect(engine, a_request(ignore_eos=True, stop=[stop]))
        assert text_of(stopped) == free.text[: free.text.index(stop)]
        assert stopped[-1].finish_reason == "stop"

    async def test_raw_stream_is_the_dialect_of_completions(self, engine: Engine) -> None:
        chunks = await collect(engine, a_request(raw=True, ignore_eos=True))
        *events, usage = events_of(chunks)
        assert "".join(e["choices"][0]["text"] for e in events) == text_of(chunks)
        assert [e["choices"][0]["finish_reason"] for e in events][-1] == "length"
        assert all(e["object"] == "text_completion" for e in events)
        assert all("usage" not in e for e in events)
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24

    async def test_raw_stream_is_the_dialect_of_chat(self, engine: Engine) -> None:
        chunks = await collect(engine, a_request(endpoint=Endpoint.CHAT, raw=True))
        first, *events, _ = events_of(chunks)
        assert first["choices"][0]["delta"]["role"] == "assistant"
        texts = [e["choices"][0]["delta"].get("content") or "" for e in events]
        assert "".join(texts) == text_of(chunks)

    async def test_last_raw_chunk_is_the_usage_event_alone(self, engine: Engine) -> None:
        chunks = await collect(engine, a_request(raw=True))
        (usage,) = events_of(chunks[-1:])
        assert usage["usage"]["completion_tokens"] == chunks[-1].output_tokens
        assert chunks[-1].finish_reason is not None

    async def test_raw_stream_carries_running_usage_only_when_asked(self, engine: Engine) -> None:
        options = {"continuous_usage_stats": True}
        chunks = await collect(engine, a_request(raw=True, stream_options=options))
        assert all("usage" in e for e in events_of(chunks)[1:])

    async def test_raw_answer_is_json_with_usage(self, engine: Engine) -> None:
        for endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT):
            request = a_request(endpoint=endpoint, raw=True, stream=False)
            (chunk,) = await collect(engine, request)
            value = json.loads(chunk.raw)
            assert value["usage"]["completion_tokens"] == chunk.output_tokens
            choice = value["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert text == chunk.text and choice["finish_reason"] == chunk.finish_reason

    async def test_says_how_much_of_a_prompt_was_cached(self, engine: Engine) -> None:
        block = engine.facts.block_tokens
        if not block:
            pytest.skip("the engine does not say how large its blocks are")
        prompt = [100 + i % 100 for i in range(2 * block)]

        async def cached_of(prompt: list[int], salt: str) -> int:
            request = a_request(prompt=prompt, max_tokens=2, cache_salt=salt)
            last = (await collect(engine, request))[-1]
            assert last.prompt_tokens == len(prompt)
            return last.cached_tokens

        salt = f"conformance {time.monotonic_ns()}"
        assert await cached_of(prompt, salt) == 0
        # The last token is always computed, and with it its block.
        assert await cached_of(prompt, salt) == block
        assert await cached_of([*prompt, 7], salt) == 2 * block
        assert await cached_of([7, *prompt[1:]], salt) == 0
        assert await cached_of(prompt, f"{salt}, other") == 0

    async def test_tells_which_blocks_each_call_stores(self, engine: Engine) -> None:
        block = engine.facts.block_tokens
        if not block:
            pytest.skip("the engine does not say how large its blocks are")
        heard: list[KvEvent] = []
        engine.watch_cache(heard.append)
        salt = f"conformance {time.monotonic_ns()}"
        prompt = [100 + i % 100 for i in range(3 * block)]

        async def stored_by(prompt: list[int], blocks: int) -> list[BlocksStored]:
            request = a_request(prompt=prompt, max_tokens=2, cache_salt=salt, session_id="mine")
            await collect(engine, request)
            stored: list[BlocksStored] = []
            async with asyncio.timeout(PATIENCE_S):
                while sum(len(event.hashes) for event in stored) < blocks:
                    await asyncio.sleep(0.01)
                    stored = [e for e in heard if isinstance(e, BlocksStored)]
                    stored = [e for e in stored if e.call == request.id]
            return stored

        first = await stored_by(prompt[: 2 * block], 2)
        names = [name for event in first for name in event.hashes]
        assert [event.parent for event in first[:1]] == [None]
        assert {event.block_tokens for event in first} == {block}
        (second,) = await stored_by(prompt, 1)
        assert (second.parent, len(second.hashes)) == (names[1], 1)
        assert second.hashes[0] not in names

    async def test_every_dialect_says_how_much_was_cached(self, engine: Engine) -> None:
        block = engine.facts.block_tokens
        if not block:
            pytest.skip("the engine does not say how large its blocks are")
        said = [
            {
                "role": "user",
                "content": "alpha beta gamma delta omega sigma kappa theta " * (block // 8),
            }
        ]
        asked: dict[Endpoint, dict[str, object]] = {
            Endpoint.CHAT: {"messages": said, "max_tokens": 2},
            Endpoint.RESPONSES: {"input": said, "max_output_tokens": 2, "store": False},
            Endpoint.MESSAGES: {"messages": said, "max_tokens": 2},
        }
        for endpoint, body in asked.items():
            for stream in (True, False):
                await collect(engine, a_request(body, endpoint=endpoint, raw=True, stream=stream))
                again = a_request(body, endpoint=endpoint, raw=True, stream=stream)
                chunks = await collect(engine, again)
                last = chunks[-1]
                assert last.cached_tokens > 0
                assert last.cached_tokens % block == 0
                assert last.cached_tokens < last.prompt_tokens
                raw = b"".join(chunk.raw for chunk in chunks)
                assert cached_in(endpoint, raw, stream=stream) == last.cached_tokens

    async def test_refuses_a_bad_request_with_status_400(self, engine: Engine) -> None:
        for stream in (True, False):
            with pytest.raises(EngineError) as refused:
                await collect(engine, a_request(stream=stream, temperature=-1))
            assert refused.value.status == 400 and "temperature" in refused.value.problem

    async def test_refuses_what_exceeds_the_context(self, engine: Engine) -> None:
        long_prompt = "word " * (4 * engine.facts.context_tokens)
        with pytest.raises(ContextLengthError):
            await collect(engine, a_request(prompt=long_prompt))
        with pytest.raises(ContextLengthError):
            await collect(engine, a_request(max_tokens=engine.facts.context_tokens + 1))

    async def test_closing_the_iterator_frees_the_slot(self, engine: Engine) -> None:
        request = a_request(ignore_eos=True, max_tokens=250)
        async with aclosing(engine.generate(request)) as chunks:
            await anext(chunks)
            assert (await until_running(engine, 1, PATIENCE_S)).running == 1
        assert (await until_running(engine, 0, SLOT_FREE_S)).running == 0

    async def test_cancelling_the_reader_frees_the_slot(self, engine: Engine) -> None:
        for stream in (True, False):
            request = a_request(ignore_eos=True, max_tokens=250, stream=stream)
            reader = asyncio.create_task(collect(engine, request))
            assert (await until_running(engine, 1, PATIENCE_S)).running == 1
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert (await until_running(engine, 0, SLOT_FREE_S)).running == 0

    async def test_serves_twenty_at_once(self, engine: Engine) -> None:
        requests = [a_request(prompt=f"# {i}\n", ignore_eos=True) for i in range(20)]
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*(collect(engine, r) for r in requests))
        assert [chunks[-1].output_tokens for chunks in answers] == [24] * 20
        assert (await engine.load()).waiting == 0

    async def test_lets_the_urgent_overtake_those_that_wait(self, engine: Engine) -> None:
        if "priority" not in engine.facts.capabilities:
            pytest.skip("the engine has no priorities")
        order: list[str] = []

        async def first_chunk(name: str, priority: int, max_tokens: int) -> None:
            request = a_request(priority=priority, ignore_eos=True, max_tokens=max_tokens)
            async for _ in engine.generate(request):
                if name not in order:
                    order.append(name)

        slots = engine.facts.max_running
        running = [asyncio.create_task(first_chunk(f"running {i}", 5, 250)) for i in range(slots)]
        await until_running(engine, slots, PATIENCE_S)
        waiting = [asyncio.create_task(first_chunk(f"waiting {i}", 5, 24)) for i in range(slots)]
        while (await engine.load()).waiting < slots:
            assert not all(task.done() for task in running), "the running ones ended too soon"
            await asyncio.sleep(0.005)
        urgent = asyncio.create_task(first_chunk("urgent", 0, 24))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*running, *waiting, urgent)
        # Slots fall free one after another while the urgent one is on its way: not all can be
        # asked to come after it, but most.
        assert order.index("urgent") < slots + slots / 2

    async def test_dies_loudly_and_starts_again(self, engine: Engine) -> None:
        request = a_request(ignore_eos=True, max_tokens=250)
        watcher = asyncio.create_task(engine.wait_dead())
        async with aclosing(engine.generate(request)) as chunks:
            await anext(chunks)
            assert not watcher.done()
            await self.kill(engine)
            with pytest.raises(EngineDeadError):
                async for _ in chunks:
                    pass
        async with asyncio.timeout(PATIENCE_S):
            assert await watcher
        assert engine.state is EngineState.DEAD
        with pytest.raises(EngineDeadError):
            await collect(engine, a_request())
        await engine.start()
        assert (await collect(engine, a_request()))[-1].finish_reason is not None

    async def test_stops_twice_and_starts_again(self, engine: Engine) -> None:
        watcher = asyncio.create_task(engine.wait_dead())
        await engine.stop()
        await engine.stop()
        assert engine.state is EngineState.STOPPED
        with pytest.raises(EngineDeadError):
            await collect(engine, a_request())
        assert not watcher.done(), "a stop is not a death"
        watcher.cancel()
        await engine.start()
        assert (await collect(engine, a_request()))[-1].finish_reason is not None

    async def test_stopping_ends_running_requests(self, engine: Engine) -> None:
        request = a_request(ignore_eos=True, max_tokens=250)
        async with aclosing(engine.generate(request)) as chunks:
            await anext(chunks)
            stopping = asyncio.create_task(engine.stop())
            with pytest.raises(EngineDeadError):
                async for _ in chunks:
                    pass
            await stopping
        await engine.start()
