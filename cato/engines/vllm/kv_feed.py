"""Reads the KV events of a vLLM server: its publisher of ZeroMQ messages, over Unix sockets.

Each message is a topic, a sequence number and a batch of events. A reader that is slow or late
misses messages; the server's replay socket has the newest again. The sockets lie beside the
server's own, in a folder that only this user can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
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
from cato.core.topology import EngineSpec, flags_set

log = logging.getLogger("cato.engines")

# Sent as a call's session, which vLLM copies into the events of the blocks that the call stores.
CALL_HEADER = "X-Session-Id"
_FLAG = "--kv-events-config"
# With these the server has several engine cores, or is one of several servers.
_PARALLEL_FLAGS = (
    "--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl",
    "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr",
    "--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe",
    "--data-parallel-multi-port-external-lb", "-dpm",
)  # fmt: skip
# Set to "full" in a request's `vllm_xargs`, its cached blocks are told again as stored.
_REPORT_MODE = "kv_cache_report_mode"
# The server looks for replay requests ten times a second.
_REPLAY_S = 2.0
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
# Other groups of a hybrid model hold parts of a prompt; a prompt is cached as far as these are.
_WHOLE_PROMPT = ("full_attention", "mla_attention", "sink_full_attention")


class KvFeedError(Exception):
    """A message that is not understood."""


def has_events(spec: EngineSpec) -> bool:
    """Whether engines of the deployment publish events to CATO.

    `spec.args` may configure the publisher for another reader, or several engine cores, which would
    publish on one socket each.
    """
    return spec.prefix_caching and not flags_set(spec.args, (_FLAG, *_PARALLEL_FLAGS))


def feed_argv(uds: str) -> list[str]:
    """vLLM's flags, for the server with the socket `uds`."""
    live, replay = _paths(uds)
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{live}",
        "replay_endpoint": f"ipc://{replay}",
    }
    return [_FLAG, json.dumps(config)]


def without_repeats(body: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a client's body that does not ask vLLM to tell of cached blocks again.

    A reader of the events takes each repeat for one more copy of the block.
    """
    asked = body.get("vllm_xargs")
    if not isinstance(asked, dict) or _REPORT_MODE not in asked:
        return dict(body)
    kept = {name: value for name, value in asked.items() if name != _REPORT_MODE}
    return {**body, "vllm_xargs": kept}


def _paths(uds: str) -> tuple[str, str]:
    return f"{uds}.kv", f"{uds}.kvr"


class KvFeed:
    """The events of one start of a server, in order. Belongs to one asyncio loop."""

    def __init__(self, uds: str, heard: Callable[[KvEvent], None]) -> None:
        self._live, self._replay = _paths(uds)
        self._heard = heard
        self._next = 0  # sequence number
        self._group: int | None = None
        self._context = zmq.asyncio.Context()

    async def read_forever(self) -> None:
        """Call `heard` with the events; with `BlocksCleared` when some are lost for good."""
        try:
            with self._context.socket(zmq.SUB) as socket:
                socket.subscribe(b"")
                socket.connect(f"ipc://{self._live}")
                while True:
                    _, number, batch = await socket.recv_multipart()
                    await self._take(int.from_bytes(number, "big"), batch)
        except (KvFeedError, ValueError, zmq.ZMQError) as error:
            log.warning("KV events end, so predictions alone track this engine's cache: %s", error)
            self._heard(BlocksCleared())

    def close(self) -> None:
        """Free the sockets, also the files of a server that was killed."""
        self._context.destroy(linger=0)
        for path in (self._live, self._replay):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    async def _take(self, number: int, batch: bytes) -> None:
        if number < self._next:
            return  # it was in a replay
        if number > self._next and not await self._catch_up(number):
            log.warning("KV events %d to %d are lost", self._next, number - 1)
            self._heard(BlocksCleared())
        self._tell(number, batch)

    def _tell(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        try:
            events = list(self._events(batch))
        except (KeyError, TypeError) as error:
            raise KvFeedError(f"an event lacks a field or has another type: {error!r}") from error
        for event in events:
            self._heard(event)

    async def _catch_up(self, end: int) -> bool:
        """Read the missed messages before `end` again; False if they are gone."""
        missed: list[bytes] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPLAY_S):
                with self._context.socket(zmq.DEALER) as socket:
                    socket.connect(f"ipc://{self._replay}")
                    start = self._next.to_bytes(_SEQUENCE_BYTES, "big")
                    await socket.send_multipart([b"", start])
                    while True:
                        _, _, number, batch = await socket.recv_multipart()
                        if number == _END:
                            break
                        if int.from_bytes(number, "big") == self._next + len(missed):
                            missed.append(batch)
        missed = missed[: end - self._next]
        if self._next + len(missed) < end:
            return False
        for batch in missed:
            self._tell(self._next, batch)
        return True

    def _events(self, batch: bytes) -> Iterator[KvEvent]:
        """Raise `KvFeedError` for another format, as older servers have."""
        _, events, *_ = msgpack.unpackb(batch, strict_map_key=False)
        for event in events:
            if not isinstance(event, dict):
                raise KvFeedError(f"an event is a {type(event).__name__}")
            yield from self._event(event)

    def _event(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        kind = event.get("type")
        if kind == "AllBlocksCleared":
            yield BlocksCleared()
            return
        if kind not in ("BlockStored", "BlockRemoved"):
            raise KvFeedError(f"an event has the type {kind!r}")
        is_device = event.get("medium") in (None, "GPU")
        is_host = event.get("medium") == "CPU"
        if not is_host and not (is_device and self._is_whole_prompt(event)):
            return
        hashes = tuple(_number(h) for h in event["block_hashes"])
        if kind == "BlockRemoved":
            yield BlocksRemoved(hashes, KvTier.HOST if is_host else KvTier.ACCELERATOR)
        elif is_host:
            yield BlocksCopied(hashes)
        elif hashes:
            parent = event.get("parent_block_hash")
            yield BlocksStored(
                hashes,
                None if parent is None else _number(parent),
                int(event["block_size"]),
                event.get("session_id") or "",
            )

    def _is_whole_prompt(self, event: Mapping[str, Any]) -> bool:
        """Whether the event is about the group of layers that holds whole prompts."""
        group = event.get("group_idx")
        kind = event.get("kv_cache_spec_kind")
        is_stored = event["type"] == "BlockStored"
        if self._group is None and is_stored and (kind is None or kind in _WHOLE_PROMPT):
            self._group = group
        return bool(group == self._group)


def _number(hash: int | bytes) -> int:
    return int.from_bytes(hash, "big") if isinstance(hash, bytes) else hash
