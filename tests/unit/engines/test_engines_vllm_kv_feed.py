"""KV events of a vLLM server: read, read again after a gap, or given up.

Real ZeroMQ sockets, with a publisher that behaves like vLLM's `ZmqEventPublisher`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from cato.core.kv_events import (
    BlocksCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvTier,
)
from cato.core.topology import EngineSpec
from cato.engines.vllm.kv_feed import KvFeed, feed_argv, has_events, without_repeats

CLEARED = {"type": "AllBlocksCleared"}


def stored(*hashes: int, parent: int | None = None, **others: Any) -> dict[str, Any]:
    tokens = list(range(16 * len(hashes)))
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    event |= {"token_ids": tokens, "block_size": 16, "lora_id": None, "medium": "GPU"}
    return {**event, "group_idx": 0, "session_id": "call-1", **others}


def removed(*hashes: int, **others: Any) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": "GPU",
        "group_idx": 0,
        **others,
    }


class Server:
    """Publishes numbered batches, and sends the newest `kept` again when asked."""

    def __init__(self, uds: str, kept: int) -> None:
        self._context = zmq.asyncio.Context()
        config = json.loads(feed_argv(uds)[1])
        self._live = self._context.socket(zmq.XPUB)  # a PUB that shows when a reader has come
        self._live.bind(config["endpoint"])
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(config["replay_endpoint"])
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=kept)
        self._number = 0
        self._answering = asyncio.ensure_future(self._answer())

    async def has_reader(self) -> None:
        assert await self._live.recv() == b"\x01"

    async def publish(self, *events: object, is_lost: bool = False) -> None:
        number = self._number.to_bytes(8, "big")
        batch = msgpack.packb([0.0, events, 0])
        self._kept.append((number, batch))
        self._number += 1
        if not is_lost:
            await self._live.send_multipart([b"", number, batch])

    async def _answer(self) -> None:
        while True:
            reader, _, start = await self._replay.recv_multipart()
            for number, batch in self._kept:
                if number >= start:
                    await self._replay.send_multipart([reader, b"", b"", number, batch])
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replay.send_multipart([reader, b"", b"", end, b""])

    def close(self) -> None:
        self._answering.cancel()
        self._context.destroy(linger=0)


class Reading:
    """A server, and what the feed heard of it."""

    def __init__(self, folder: str, kept: int) -> None:
        uds = f"{folder}/e.sock"
        self.server = Server(uds, kept)
        self._events: asyncio.Queue[KvEvent] = asyncio.Queue()
        self.feed = KvFeed(uds, self._events.put_nowait)
        self.task = asyncio.ensure_future(self.feed.read_forever())

    async def heard(self, events: int) -> list[KvEvent]:
        async with asyncio.timeout(20):
            return [await self._events.get() for _ in range(events)]

    def close(self) -> None:
        self.task.cancel()
        self.feed.close()
        self.server.close()


@pytest_asyncio.fixture(params=[10])
async def reading(request: pytest.FixtureRequest) -> AsyncIterator[Reading]:
    with tempfile.TemporaryDirectory(prefix="cato-k-") as folder:  # short: it holds sockets
        reading = Reading(folder, request.param)
        await reading.server.has_reader()
        yield reading
        reading.close()
        assert not list(Path(folder).iterdir())


async def test_events_of_the_layers_that_hold_whole_prompts_are_read(reading: Reading) -> None:
    await reading.server.publish(
        stored(5, 6, group_idx=1, kv_cache_spec_kind="sliding_window"),
        stored(1, 2, kv_cache_spec_kind="full_attention"),
        stored(3, parent=2, session_id=None),
        stored(2, medium="CPU", parent=None, token_ids=[], block_size=0),
        removed(6, group_idx=1),
        removed(2),
        removed(2, medium="CPU"),
        removed(2, medium="STORAGE"),
        CLEARED,
    )
    assert await reading.heard(6) == [
        BlocksStored((1, 2), None, 16, "call-1"),
        BlocksStored((3,), 2, 16),
        BlocksCopied((2,)),
        BlocksRemoved((2,)),
        BlocksRemoved((2,), KvTier.HOST),
        BlocksCleared(),
    ]


async def test_missed_messages_are_read_again_in_order(reading: Reading) -> None:
    await reading.server.publish(stored(1), is_lost=True)
    for hash in (2, 3):
        await reading.server.publish(removed(hash), is_lost=True)
    await reading.server.publish(removed(4))
    await reading.server.publish(removed(5))
    first, *others = await reading.heard(5)
    assert first == BlocksStored((1,), None, 16, "call-1")
    assert others == [BlocksRemoved((hash,)) for hash in (2, 3, 4, 5)]


@pytest.mark.parametrize("reading", [2], indirect=True)
async def test_after_messages_that_are_gone_for_good_nothing_is_known(reading: Reading) -> None:
    await reading.server.publish(stored(1))
    for hash in (2, 3, 4):
        await reading.server.publish(removed(hash), is_lost=True)
    await reading.server.publish(removed(5))
    stored_first, *others = await reading.heard(3)
    assert isinstance(stored_first, BlocksStored)
    assert others == [BlocksCleared(), BlocksRemoved((5,))]


@pytest.mark.parametrize(
    "event",
    [
        ["BlockRemoved", [1], "GPU"],
        {"type": "BlockMoved"},
        {"type": "BlockRemoved"},
        {"type": "BlockStored", "block_hashes": 1, "block_size": 16},
    ],
)
async def test_a_format_that_is_not_known_ends_the_events(reading: Reading, event: object) -> None:
    await reading.server.publish(event)
    assert await reading.heard(1) == [BlocksCleared()]
    await reading.task


def test_engines_publish_unless_they_cache_nothing_or_their_arguments_say_otherwise() -> None:
    spec = EngineSpec("vllm", prefix_caching=True)
    assert has_events(spec)
    assert not has_events(replace(spec, prefix_caching=False))
    assert has_events(replace(spec, args=("--kv-cache-dtype", "fp8", "--seed=1")))


@pytest.mark.parametrize(
    "args",
    [
        ("--kv-events-config={}",),
        ("--kv_events_config", "{}"),
        ("--kv-events", "{}"),
        ("--kv-events-config.publisher", "null"),
        ("--data-parallel-size", "2"),
        ("--data_parallel_size=2",),
        ("--data_parallel_size_local", "2"),
        ("-dp", "2"),
        ("-dp=2",),
        ("-dpn", "1"),
    ],
)
def test_arguments_for_another_reader_or_several_cores_are_seen_in_any_spelling(
    args: tuple[str, ...],
) -> None:
    assert not has_events(EngineSpec("vllm", args=args))


def test_a_client_cannot_have_blocks_told_twice() -> None:
    asked = {"prompt": "a", "vllm_xargs": {"kv_cache_report_mode": "full", "other": 1}}
    assert without_repeats(asked) == {"prompt": "a", "vllm_xargs": {"other": 1}}
    assert "kv_cache_report_mode" in asked["vllm_xargs"]
    assert without_repeats({"vllm_xargs": 3}) == {"vllm_xargs": 3}
