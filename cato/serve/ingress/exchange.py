"""One run and the client that waits for it: when one ends, so does the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cato.serve.executor import Piece, RunningTask
from cato.serve.ingress.context import finish_of, remember_task
from cato.serve.ingress.errors import (
    CLIENT_LEFT,
    FULL,
    Failure,
    answer,
    failure_of_run,
    known_headers,
)
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.receipts import receipt_headers, run_headers

log = logging.getLogger("cato.ingress")

# What a client gets instead of an error when its work was shed: an empty answer in its dialect.
Shed = Callable[[], Response]

# A client that takes nothing for so long is gone or means harm; its stream holds a connection, and
# in the end memory for the rest of the answer.
READ_WITHIN_S = 60.0

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Exchange:
    """Watches the connection while the answer of `task` is read.

    Create it after the request's body was read: from then on the server has only one thing to
    say, that the client is gone, and that cancels the run down to the engine. Always `close`.
    """

    def __init__(
        self, request: Request, task: RunningTask, has_replicas: Callable[[str], bool]
    ) -> None:
        self.task = task
        self._has_replicas = has_replicas
        self._batches = task.batches()
        remember_task(request, task)
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(_cancel_on_disconnect(request.receive, task))

    async def next(self) -> list[Piece]:
        """All pieces that are there, at least one; empty when the run has finished."""
        return await anext(self._batches, [])

    async def whole(self) -> list[Piece]:
        """All pieces to the end."""
        return [piece async for batch in self._batches for piece in batch]

    def failure(self) -> Failure | None:
        """Why the finished run has no answer; None when it has one."""
        return failure_of_run(self.task, self._has_replicas)

    async def close(self) -> None:
        """Stop watching; a run that is still under way is cancelled."""
        self._watch.cancel()
        self.task.cancel(CLIENT_LEFT)
        await self._batches.aclose()


async def _cancel_on_disconnect(receive: Receive, task: RunningTask) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel(CLIENT_LEFT)  # harmless when the answer was complete


async def whole(
    request: Request,
    exchange: Exchange,
    value: Callable[[list[Piece]], object],
    shed: Shed | None = None,
) -> Response:
    """The answer in one piece: `value` of all pieces once the run is done."""
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
) -> Response:
    """The answer as `events` from the first pieces on.

    Waits for these, so that a run which is refused or fails before them gets its own status.
    """
    try:
        first = await exchange.next()
        failure = None if first else exchange.failure()
    except BaseException:
        await exchange.close()
        raise
    if failure is not None:
        await exchange.close()
        return _refused(request, failure, shed)
    return EventStream(exchange, events(exchange, first))


def _refused(request: Request, failure: Failure, shed: Shed | None) -> Response:
    """The error, or the empty answer of a dialect whose clients show every error to a person."""
    if shed is None or failure.code != FULL:
        return answer(request, failure)
    response = shed()
    response.headers.update(known_headers(request))
    response.headers["X-CATO-Outcome"] = "shed"
    return response


class EventStream(Response):
    """Server-sent events of an exchange.

    Starlette's own StreamingResponse watches the connection too, but only while it streams; here
    one watch covers the time before the first token as well.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._exchange = exchange
        self._events = events
        self.init_headers(run_headers(exchange.task.run) | STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    async with asyncio.timeout(READ_WITHIN_S):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as error:  # it broke, or nobody reads (TimeoutError): there is none to tell
            log.info("request %s: %s", self._exchange.task.run.id, error)
        finally:
            await self._exchange.close()
