"""One end of a link: calls, answers, streams and notes, multiplexed over one connection.

A frame has a length, a kind, a call number and a packed value. Each side may ask the other (one
answer), call it (a stream of answers) and send it notes. A stream's reader grants the writer a
window of bytes, so that an unread stream blocks only itself. A peer that is silent for `MISSED`
heartbeats is considered gone; when the connection ends, all calls of both sides end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import struct
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol, cast

from cato.core.errors import CatoError, LinkCallError, LinkError
from cato.wire.link.codec import Codec, CodecError
from cato.wire.link.handshake import Handshake, Refused

log = logging.getLogger("cato.link")

HEARTBEAT_S = 1.0
MISSED = 3
# Time limit of the handshake.
HANDSHAKE_S = 5.0
# Unread bytes allowed per stream; the reader grants more after reading half of them.
WINDOW_BYTES = 256 * 1024
# Enough for the largest prompts and some images. Larger values take another way than a link.
MAX_FRAME_BYTES = 64 * 1024 * 1024
_MAX_HANDSHAKE_BYTES = 128

_HEAD = struct.Struct(">IBI")
(_BEAT, _ASK, _CALL, _NOTE, _ANSWER, _ITEM, _END, _FAIL, _CANCEL, _MORE) = range(10)


class Handler(Protocol):
    """Serves the other end of a link. All methods run in the link's event loop.

    `answer` and `stream` are cancelled when the other end gives up the call or disconnects. A
    `CatoError` that they raise is raised at the other end.
    """

    async def answer(self, peer: Connection, asked: object) -> object: ...

    def stream(self, peer: Connection, asked: object) -> AsyncGenerator[object, None]: ...

    def note(self, peer: Connection, note: object) -> None: ...

    def ended(self, peer: Connection) -> None:
        """The connection has ended; called once, if its handshake had succeeded."""
        ...


class Passive:
    """The handler of an end that serves no calls."""

    async def answer(self, peer: Connection, asked: object) -> object:
        raise CodecError(f"nothing here answers a {type(asked).__name__}")

    def stream(self, peer: Connection, asked: object) -> AsyncGenerator[object, None]:
        raise CodecError(f"nothing here answers a {type(asked).__name__}")

    def note(self, peer: Connection, note: object) -> None:
        log.warning("unexpected note of type %s ignored", type(note).__name__)

    def ended(self, peer: Connection) -> None:
        pass


@dataclass(slots=True)
class Frames:
    """How many frames connections have sent and received, apart from heartbeats."""

    count: int = 0


class Connection(asyncio.Protocol):
    """Both ends differ only in the handshake. `name` identifies the peer in logs and errors."""

    def __init__(
        self,
        codec: Codec,
        secret: bytes,
        handler: Handler,
        name: str,
        *,
        is_server: bool,
        frames: Frames | None = None,
    ) -> None:
        """Frames are also counted in `frames`, if given."""
        self.name = name
        self._frames = frames or Frames()
        self.is_open = False
        self._codec, self._handler = codec, handler
        self._handshake = Handshake(secret, codec.version, is_server=is_server)
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._why = ""
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Incoming] = {}  # by this end
        self._served: dict[int, _Served] = {}  # by this end, for the other
        self._missed = 0
        self._has_written = False
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    async def opened(self) -> None:
        """Return once the other end is authenticated; raise `LinkError` if that fails."""
        await self._opened

    # Public calls

    async def ask(self, value: object) -> Any:
        """The other end's answer; cancelling the wait cancels the call there. Raise `LinkError` if
        the connection ends first, any error raised by the other end, and `LinkCallError` if the
        call or its answer cannot be read or served."""
        incoming = await self._begin(_ASK, value)
        try:
            return await incoming.next()
        finally:
            self._finish(incoming)

    async def call(self, value: object) -> AsyncGenerator[Any, None]:
        """The other end's stream of answers; cancellation and errors as in `ask`."""
        incoming = await self._begin(_CALL, value)
        try:
            while True:
                item = await incoming.next()
                if item is _END_OF_STREAM:
                    return
                yield item
        finally:
            self._finish(incoming)

    def note(self, value: object) -> None:
        """Send a note to the other end; it is lost if the connection ends."""
        if self.is_open:
            self._write(_NOTE, 0, self._codec.pack(value))

    def close(self, why: str) -> None:
        """End the connection; no effect if it has already ended."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    async def _begin(self, kind: int, value: object) -> _Incoming:
        data = self._codec.pack(value)
        if len(data) > MAX_FRAME_BYTES:
            raise CodecError(f"{len(data)} bytes exceed a link's limit of {MAX_FRAME_BYTES} bytes")
        await self._writable.wait()
        if not self.is_open:
            raise self._error()
        number = next(self._numbers) & 0xFFFFFFFF
        incoming = self._asked[number] = _Incoming(self, number)
        self._write(kind, number, data)
        return incoming

    def _finish(self, incoming: _Incoming) -> None:
        self._asked.pop(incoming.number, None)
        if not incoming.has_ended and self.is_open:
            self._write(_CANCEL, incoming.number)

    def _error(self) -> LinkError:
        return LinkError(self.name, self._why or "it is not connected")

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_S, self.close, "the handshake took too long")
        if (opening := self._handshake.opening()) is not None:
            self._write(_BEAT, 0, opening)

    def data_received(self, data: bytes) -> None:
        self._missed = 0
        buffer = self._buffer
        buffer += data
        at, have = 0, len(buffer)
        while have - at >= _HEAD.size:
            size, kind, number = _HEAD.unpack_from(buffer, at)
            limit = MAX_FRAME_BYTES if self._handshake.is_done else _MAX_HANDSHAKE_BYTES
            if size > limit:
                self.close("the other end sent a frame that is too long")
                return
            start = at + _HEAD.size
            if have - start < size:
                break
            payload = bytes(memoryview(buffer)[start : start + size])
            at = start + size
            if not self._take(kind, number, payload):
                return
        if at:
            del buffer[:at]

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        was_open, self.is_open = self.is_open, False
        self._why = self._why or "the connection ended"
        if self._timer is not None:
            self._timer.cancel()
        self._writable.set()  # wake writers, so that they see the end
        if not self._opened.done():
            self._opened.set_exception(self._error())
            self._opened.exception()  # mark as retrieved: perhaps nothing awaits it
        for incoming in list(self._asked.values()):
            incoming.fail(self._error())
        for served in list(self._served.values()):
            served.task.cancel()
        if was_open:
            self._handler.ended(self)

    # Frames

    def _write(self, kind: int, number: int, data: bytes = b"") -> None:
        assert self._transport is not None
        self._has_written = True
        self._frames.count += kind != _BEAT
        self._transport.write(_HEAD.pack(len(data), kind, number) + data)

    def _take(self, kind: int, number: int, payload: bytes) -> bool:
        """Handle a frame; False if the connection must not be read any further."""
        if not self._handshake.is_done:
            return self._shake_hands(payload)
        self._dispatch(kind, number, payload)
        return True

    def _shake_hands(self, payload: bytes) -> bool:
        try:
            answer = self._handshake.step(payload)
        except Refused:
            self.close("refused: its secret or its version differs from this end's")
            return False
        if answer is not None:
            self._write(_BEAT, 0, answer)
        if self._handshake.is_done:
            self.is_open = True
            assert self._timer is not None
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
            self._opened.set_result(None)
        return True

    def _dispatch(self, kind: int, number: int, payload: bytes) -> None:
        if kind == _BEAT:
            return
        self._frames.count += 1
        if kind == _NOTE:
            self._hear(payload)
        elif kind in (_ASK, _CALL):
            self._serve(kind, number, payload)
        elif kind in (_CANCEL, _MORE):
            served = self._served.get(number)
            if served is None:
                return  # it has just ended
            if kind == _CANCEL:
                served.task.cancel()
                del self._served[number]  # a task that never began does not do this itself
            else:
                served.grant(int.from_bytes(payload, "big"))
        else:
            incoming = self._asked.get(number)
            if incoming is None:
                return  # it was just given up
            try:
                self._receive(kind, incoming, payload)
            except CodecError as error:
                self._finish(incoming)
                incoming.fail(LinkCallError(f"its answer was {error}"))

    def _hear(self, payload: bytes) -> None:
        """Pass on a note. One that cannot be read or handled is lost; the link stays open."""
        what = "that cannot be read"
        try:
            note = self._codec.unpack(payload)
            what = type(note).__name__
            self._handler.note(self, note)
        except Exception:
            log.exception("link %s: the note %s failed", self.name, what)

    def _receive(self, kind: int, incoming: _Incoming, payload: bytes) -> None:
        """Raise `CodecError` when the payload cannot be read."""
        if kind == _FAIL:
            incoming.fail(self._codec.unpack(payload))
        elif kind == _END:
            incoming.end(_END_OF_STREAM)
        elif kind == _ANSWER:
            incoming.end(self._codec.unpack(payload))
        elif kind == _ITEM:
            incoming.put(self._codec.unpack(payload), len(payload))

    def _beat(self) -> None:
        """Once a second. If this event loop itself stalls, it counts one missed beat, not many."""
        if self._missed >= MISSED:
            self.close(f"no heartbeat for {MISSED * HEARTBEAT_S:g} s")
            return
        self._missed += 1
        if not self._has_written:
            self._write(_BEAT, 0)
        self._has_written = False
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    # Calls of the other end

    def _serve(self, kind: int, number: int, payload: bytes) -> None:
        try:
            asked = self._codec.unpack(payload)
        except CodecError as error:
            log.error("link %s: a call was %s", self.name, error)
            self._fail(number, LinkCallError(f"the call was {error}"))
            return
        served = _Served()
        run = self._run(kind, served, number, asked)
        served.task = asyncio.get_running_loop().create_task(run)
        self._served[number] = served

    async def _run(self, kind: int, served: _Served, number: int, asked: object) -> None:
        """Serve a call; send its error to the other end."""
        try:
            if kind == _ASK:
                await self._answer(number, asked)
            else:
                await self._stream(served, number, asked)
        except CatoError as error:
            self._fail(number, error)
        except asyncio.CancelledError:
            # Ignored by the other end if it cancelled the call itself.
            self._fail(number, LinkError(self.name, "the call was cancelled there"))
            raise
        except Exception as error:
            log.exception("link %s: a call failed", self.name)
            self._fail(number, LinkCallError(f"the call failed: {error!r}"))
        finally:
            self._served.pop(number, None)

    async def _answer(self, number: int, asked: object) -> None:
        data = self._codec.pack(await self._handler.answer(self, asked))
        if self.is_open:
            self._write(_ANSWER, number, data)

    async def _stream(self, served: _Served, number: int, asked: object) -> None:
        async with contextlib.aclosing(self._handler.stream(self, asked)) as items:
            async for item in items:
                data = self._codec.pack(item)
                await served.room()
                served.ahead += len(data)
                if self.is_open:
                    self._write(_ITEM, number, data)
        if self.is_open:
            self._write(_END, number)

    def _fail(self, number: int, error: CatoError) -> None:
        if not self.is_open:
            return
        try:
            data = self._codec.pack(error)
        except CodecError:
            data = self._codec.pack(LinkCallError(f"the call failed: {error}"))
        self._write(_FAIL, number, data)


_END_OF_STREAM = object()


class _Incoming:
    """Answers to one call, in order of arrival."""

    __slots__ = ("_connection", "_items", "_read_bytes", "_waiter", "has_ended", "number")

    def __init__(self, connection: Connection, number: int) -> None:
        self.number = number
        self.has_ended = False
        self._connection = connection
        self._items: deque[tuple[object, int]] = deque()
        self._read_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: object, size: int) -> None:
        self._items.append((item, size))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, last: object) -> None:
        self.has_ended = True
        self.put(last, 0)

    def fail(self, error: CatoError) -> None:
        self.end(_Raised(error))

    async def next(self) -> object:
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item, size = self._items.popleft()
        if isinstance(item, _Raised):
            raise item.error
        self._read_bytes += size
        if self._read_bytes >= WINDOW_BYTES // 2 and not self.has_ended:
            granted, self._read_bytes = self._read_bytes, 0
            if self._connection.is_open:
                self._connection._write(_MORE, self.number, granted.to_bytes(4, "big"))
        return item


class _Raised:
    __slots__ = ("error",)

    def __init__(self, error: CatoError) -> None:
        self.error = error


class _Served:
    """A call from the other end: its task, and the bytes sent that the other end has not read."""

    __slots__ = ("_has_room", "ahead", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None]
        self.ahead = 0
        self._has_room: asyncio.Future[None] | None = None

    def grant(self, size: int) -> None:
        self.ahead -= size
        if self._has_room is not None and not self._has_room.done():
            self._has_room.set_result(None)

    async def room(self) -> None:
        while self.ahead >= WINDOW_BYTES:
            self._has_room = asyncio.get_running_loop().create_future()
            await self._has_room
