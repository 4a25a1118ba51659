"""Batching of a stream's tokens: which are sent when, and what happens at its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable

import pytest
from ingress_kit import until

from cato.core.errors import EngineError
from cato.engines.base import EngineChunk
from cato.serve import coalesce
from cato.serve.coalesce import COALESCE_ABOVE, coalesced

Chunks = AsyncGenerator[EngineChunk, None]


def many() -> int:
    return COALESCE_ABOVE + 1


def few() -> int:
    return COALESCE_ABOVE


def a_chunk(n: int, finish: str | None = None) -> EngineChunk:
    return EngineChunk(f"{n} ", n, finish_reason=finish, raw=b"%d\n" % n)


async def tokens(count: int) -> Chunks:
    for n in range(1, count + 1):
        yield a_chunk(n, "stop" if n == count else None)


def other_tasks() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


class Stalling:
    """Yields `first` tokens, then waits for `goes_on`; `end` is the exception that ended it."""

    def __init__(self, first: int, failure: Exception | None = None) -> None:
        self.goes_on = asyncio.Event()
        self.end: BaseException | None = None
        self._first, self._failure = first, failure

    async def chunks(self) -> Chunks:
        try:
            for n in range(1, self._first + 1):
                yield a_chunk(n)
                await asyncio.sleep(0)
            await self.goes_on.wait()
            if self._failure is not None:
                raise self._failure
            yield a_chunk(self._first + 1, "stop")
        except BaseException as error:
            self.end = error
            raise


async def test_few_streams_send_every_chunk() -> None:
    sent = [c async for c in coalesced(tokens(5), few, raw=False)]
    assert sent == [c async for c in tokens(5)]


async def test_many_streams_send_the_first_chunk_alone_and_merge_later_ones() -> None:
    sent = [c async for c in coalesced(tokens(50), many, raw=False)]
    assert sent[0] == a_chunk(1)
    assert len(sent) < 50
    assert "".join(c.text for c in sent) == "".join(f"{n} " for n in range(1, 51))
    assert b"".join(c.raw for c in sent) == b"".join(b"%d\n" % n for n in range(1, 51))
    assert (sent[-1].output_tokens, sent[-1].finish_reason) == (50, "stop")


async def test_the_last_raw_chunk_stays_alone() -> None:
    sent = [c async for c in coalesced(tokens(50), many, raw=True)]
    assert sent[-1] == a_chunk(50, "stop")
    assert b"".join(c.raw for c in sent) == b"".join(b"%d\n" % n for n in range(1, 51))


async def test_held_back_chunks_are_sent_though_no_other_comes() -> None:
    engine = Stalling(4)
    stream = coalesced(engine.chunks(), many, raw=False)
    text = ""
    async with asyncio.timeout(10):
        while text != "1 2 3 4 ":
            text += (await anext(stream)).text
        engine.goes_on.set()
        assert [c.text async for c in stream] == ["5 "]
    assert not other_tasks()


async def test_held_back_chunks_are_sent_before_the_engines_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coalesce, "COALESCE_S", math.inf)
    engine = Stalling(3, EngineError("gone", status=500))
    engine.goes_on.set()
    stream = coalesced(engine.chunks(), many, raw=False)
    assert [(await anext(stream)).text, (await anext(stream)).text] == ["1 ", "2 3 "]
    with pytest.raises(EngineError, match="gone"):
        await anext(stream)
    assert not other_tasks()


@pytest.mark.parametrize("streams", [few, many])
async def test_closing_a_stream_closes_its_source(streams: Callable[[], int]) -> None:
    engine = Stalling(3)
    stream = coalesced(engine.chunks(), streams, raw=False)
    text = ""
    async with asyncio.timeout(10):
        while "3" not in text:
            text += (await anext(stream)).text
        await stream.aclose()
    assert isinstance(engine.end, (asyncio.CancelledError, GeneratorExit))
    assert not other_tasks()


@pytest.mark.parametrize("streams", [few, many])
async def test_cancelling_the_reader_closes_the_source(streams: Callable[[], int]) -> None:
    engine, texts = Stalling(3), list[str]()

    async def read() -> None:
        async for chunk in coalesced(engine.chunks(), streams, raw=False):
            texts.append(chunk.text)

    reader = asyncio.create_task(read())
    await until(lambda: "3" in "".join(texts), within_s=10)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert isinstance(engine.end, asyncio.CancelledError)
    assert not other_tasks()


async def test_a_reader_cancelled_twice_leaves_nothing_behind() -> None:
    """A second cancellation comes while the source still ends."""
    ends, ended = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> Chunks:
        try:
            for n in range(1, 4):
                yield a_chunk(n)
            await asyncio.Event().wait()
        finally:
            ends.set()
            await asyncio.sleep(0.01)
            ended.set()

    async def read() -> None:
        async for _ in coalesced(slow_to_end(), many, raw=False):
            await asyncio.sleep(0)

    reader = asyncio.create_task(read())
    async with asyncio.timeout(10):
        await asyncio.sleep(0.01)
        reader.cancel()
        await ends.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await ended.wait()
    await until(lambda: not other_tasks(), within_s=10)


async def test_a_source_that_is_cancelled_itself_ends_the_stream() -> None:
    async def cancelled() -> Chunks:
        for n in range(1, 4):
            yield a_chunk(n)
        raise asyncio.CancelledError

    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            async for _ in coalesced(cancelled(), many, raw=False):
                pass
    assert not other_tasks()


async def test_a_slow_reader_stops_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the answers of stopped clients fill the memory."""
    monkeypatch.setattr(coalesce, "COALESCE_S", 0.001)
    count = 0

    async def endless() -> Chunks:
        nonlocal count
        while True:
            count += 1
            yield a_chunk(count)
            await asyncio.sleep(0)

    stream = coalesced(endless(), many, raw=False)
    async with asyncio.timeout(10):
        await anext(stream)
        await anext(stream)
        await asyncio.sleep(0.05)
        before = count
        await asyncio.sleep(0.05)
        assert count == before
        assert (await anext(stream)).output_tokens <= count
        await stream.aclose()
    assert not other_tasks()
