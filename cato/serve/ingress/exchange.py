"""Ties a run to its client's connection: the run is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cato.core.receipt import CLIENT_LEFT
from cato.serve.executor import RunningTask
from cato.serve.ingress.context import finish_of, remember_task
from cato.serve.ingress.errors import answer, known_headers
from cato.serve.ingress.failures import FULL, Failure, failure_of_run
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.receipts import receipt_headers, run_headers
from cato.serve.invoker import Piece
from cato.serve.one_write import FOLLOWED

log = logging.getLogger("cato.ingress")

# Makes the empty answer that a client gets instead of an error when its request was shed.
Shed = Callable[[], Response]

# A client that reads nothing for this long is gone or malicious; its stream holds a connection, and
# eventually memory for the rest of the answer.
READ_WITHIN_S = 60.0

# Agents disconnect after 120 s (Qwen Code) to 354 s (Claude Code) without response headers, and
# after 240 s to 300 s without a new byte.
SIGN_AFTER_S = 5.0
SIGN_EVERY_S = 10.0

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Exchange:
    """Watches the connection while the answer of `task` is read.

    Create it after reading the request's body: from then on the only message from the server is a
    disconnect, which cancels the run down to the engine. Always `close` it.
    """

    def __init__(
        self, request: Request, task: RunningTask, has_replicas: Callable[[str], bool]
    ) -> None:
        self.task = task
        self.is_over = False  # all pieces have been read
        self._has_replicas = has_replicas
        remember_task(request, task)
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(_cancel_on_disconnect(request.receive, task))

    async def next(self) -> list[Piece]:
        """All available pieces, at least one; empty once the run has finished."""
        pieces = await self.task.next()
        self.is_over = not pieces
        return pieces

    async def whole(self) -> list[Piece]:
        """All pieces of the run."""
        return [piece async for piece in self.task.pieces()]

    def failure(self) -> Failure | None:
        """Why the finished run has no answer; None if it has one."""
        return failure_of_run(self.task, self._has_replicas)

    async def close(self) -> None:
        """Stop watching; cancel the run if it is still in progress."""
        self._watch.cancel()
        self.task.cancel(CLIENT_LEFT)


async def _cancel_on_disconnect(receive: Receive, task: RunningTask) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel(CLIENT_LEFT)  # no effect on a complete answer


async def whole(
    request: Request,
    exchange: Exchange,
    value: Callable[[list[Piece]], object],
    shed: Shed | None = None,
) -> Response:
    """The whole answer: `value` of all pieces once the run is done."""
    try:
        pieces = await exchange.whole()
    finally:
        await exchange.close()
    failure = exchange.failure()
    if failure is not None:
        return _refused(request, failure, shed)
    task = exchange.task
    headers = run_headers(task.run) | receipt_headers(finish_of(task).receipt)
    return JsonAnswer(value(pieces), headers=headers)


async def streamed(
    request: Request,
    exchange: Exchange,
    events: Callable[[Exchange, list[Piece]], AsyncGenerator[bytes, None]],
    shed: Shed | None = None,
    sign: bytes = b"",
) -> Response:
    """The answer as a stream of `events`, from the first pieces on. They yield once more after the
    last pieces; that ends the response.

    A run that is refused or fails before its first piece gets an HTTP error status, unless a
    keep-alive (`sign`) was already sent; then the failure is an event. Without a `sign`, nothing is
    sent before the first piece.
    """
    await asyncio.sleep(0)  # the run asks for its lease now; the response is prepared meanwhile
    return EventStream(request, exchange, events, shed, sign)


def _refused(request: Request, failure: Failure, shed: Shed | None) -> Response:
    """The error, or the empty answer for dialects whose clients show every error to the user."""
    if shed is None or failure.code != FULL:
        return answer(request, failure)
    response = shed()
    response.headers.update(known_headers(request))
    response.headers["X-CATO-Outcome"] = "shed"
    return response


class EventStream(Response):
    """Server-sent events of an exchange.

    Starlette's StreamingResponse watches the connection only while it streams; this one also
    watches it before the first token.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        exchange: Exchange,
        events: Callable[[Exchange, list[Piece]], AsyncGenerator[bytes, None]],
        shed: Shed | None,
        sign: bytes,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._request = request
        self._exchange = exchange
        self._events = events
        self._shed = shed
        self._sign = sign
        self.init_headers(run_headers(exchange.task.run) | STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        out = _EventSender(send, self.raw_headers, self._sign, exchange.task)
        try:
            first = await exchange.next()
            failure = None if first else exchange.failure()
            if failure is not None:
                await out.end_signs()
                if not out.has_begun:
                    await _refused(self._request, failure, self._shed)(scope, receive, send)
                    return
            async with contextlib.aclosing(self._events(exchange, first)) as events:
                async for data in events:
                    await out.send(data, is_last=exchange.is_over)
        except OSError as error:  # disconnected, or not reading (TimeoutError): no one to tell
            log.info("request %s: %s", exchange.task.run.id, error)
        finally:
            out.close()
            await exchange.close()


class _EventSender:
    """Sends whole events, and the keep-alive `sign` after a long pause (empty: never).

    The response headers go out with the first data.
    """

    def __init__(
        self, send: Send, headers: list[tuple[bytes, bytes]], sign: bytes, task: RunningTask
    ) -> None:
        self.has_begun = False
        self._send = send
        self._headers = headers
        self._sign = sign
        self._task = task
        self._sending = asyncio.Lock()
        self._last_s = 0.0
        self._problem: OSError | None = None
        self._showing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall = _Stall()
        if sign:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SIGN_AFTER_S, self._show_life_when_due)

    async def send(self, data: bytes, *, is_last: bool) -> None:
        """Send `data`, and end the response if it `is_last`; raise OSError if the client has
        stopped reading."""
        async with self._sending:
            if self._problem is not None:
                raise self._problem
            if is_last:
                self._sign = b""
            await self._put(data, more=not is_last)

    async def end_signs(self) -> None:
        """Stop keep-alives; when this returns, none is still being sent."""
        async with self._sending:
            self._sign = b""

    def close(self) -> None:
        """Stop all timers."""
        self._sign = b""
        self._stall.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._showing is not None:
            self._showing.cancel()

    def _show_life_when_due(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._last_s + SIGN_EVERY_S if self.has_begun else 0.0
        if loop.time() >= due_s:
            self._showing = loop.create_task(self._show_life())
            due_s = loop.time() + SIGN_EVERY_S
        self._timer = loop.call_at(due_s, self._show_life_when_due)

    async def _show_life(self) -> None:
        async with self._sending:
            if not self._sign or self._problem is not None:
                return
            try:
                await self._put(self._sign)
            except OSError as error:
                self._problem = error
                self._task.cancel(CLIENT_LEFT)

    async def _put(self, data: bytes, *, more: bool = True) -> None:
        with self._stall:
            if not self.has_begun:
                self.has_begun = True
                head = {"type": "http.response.start", "status": 200, "headers": self._headers}
                head[FOLLOWED] = True
                await self._send(head)
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._last_s = asyncio.get_running_loop().time()


class _Stall:
    """Raises `TimeoutError` out of a block that takes longer than `READ_WITHIN_S`.

    Like `asyncio.timeout`, but with one timer for all blocks of a stream instead of one each.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None  # that runs the current block
        self._until_s = 0.0
        self._has_stalled = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._task, self._until_s = asyncio.current_task(), loop.time() + READ_WITHIN_S
        if self._timer is None:
            self._timer = loop.call_at(self._until_s, self._check)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._task = self._task, None
        if self._has_stalled and kind is asyncio.CancelledError:
            self._has_stalled = False
            if task is not None and task.uncancel() <= 0:
                raise TimeoutError

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next block sets another
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until_s:
            self._has_stalled = True
            self._task.cancel()
        else:
            self._timer = loop.call_at(self._until_s, self._check)
