"""Relays an engine's own answer to the client, and adds the receipt to its last event."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

from cato.core.runs import FinishRun
from cato.serve.executor import RunningTask
from cato.serve.ingress.answers import WrittenForm
from cato.serve.ingress.body import flag
from cato.serve.ingress.calls import whole_call
from cato.serve.ingress.context import Ingress, finish_of
from cato.serve.ingress.exchange import Exchange, streamed
from cato.serve.ingress.jsons import DONE_EVENT, sse
from cato.serve.ingress.receipts import as_json
from cato.serve.invoker import Piece
from cato.wire.choices import ChoicesWriter, UsageIn
from cato.wire.events import Event, event_bytes
from cato.wire.sealed import seal, sealed_events

RECEIPT_HEADER = "X-CATO-Receipt"


def wants_receipt(request: Request, extra: Mapping[str, object]) -> bool:
    """Whether the client asks for the receipt in its stream; raise `InputError` for a bad field.

    Ask before the run starts: after that, no error may leave it running unread.
    """
    return request.headers.get(RECEIPT_HEADER) == "1" or flag(extra, "receipt")


async def relay_choices(
    ingress: Ingress,
    request: Request,
    task: RunningTask,
    writer: ChoicesWriter,
    *,
    is_streamed: bool,
    has_receipt: bool,
) -> Response:
    """Answers with choices. A stream's receipt is in the usage chunk if the client asked for usage,
    or with `has_receipt` in a chunk without choices."""
    if not is_streamed:
        return await whole_call(ingress, request, task, partial(_with_receipt, extra=writer.extra))
    events = partial(_choices, writer=writer, has_receipt=has_receipt)
    exchange = Exchange(request, task, ingress.has_replicas)
    return await streamed(request, exchange, events, sign=writer.sign)


async def relay_typed(
    ingress: Ingress,
    request: Request,
    task: RunningTask,
    form: WrittenForm,
    *,
    is_streamed: bool,
    last_event: str,
    seals: bool = False,
    extra: Mapping[str, object] = MappingProxyType({}),
) -> Response:
    """Answers with typed events; `last_event` is the type of a stream's last one. `seals`: clients
    can bring reasoning back (`cato.wire.sealed`). `extra` are more fields of the answer."""
    if not is_streamed:
        finished = partial(_typed_whole, seals=seals, extra=extra)
        return await whole_call(ingress, request, task, finished)
    last = f"event: {last_event}\n".encode()
    events = partial(_typed, form=form, last=last, seals=seals, extra=extra)
    exchange = Exchange(request, task, ingress.has_replicas)
    return await streamed(request, exchange, events, sign=form.sign)


def _with_receipt(
    value: dict[str, object], finish: FinishRun, *, extra: Mapping[str, object]
) -> dict[str, object]:
    return {**value, **extra, "cato": as_json(finish.receipt)}


def _typed_whole(
    value: dict[str, object], finish: FinishRun, *, seals: bool, extra: Mapping[str, object]
) -> dict[str, object]:
    if seals:
        seal(value.get("output"))
    return _with_receipt(value, finish, extra=extra)


async def _choices(
    exchange: Exchange, batch: list[Piece], *, writer: ChoicesWriter, has_receipt: bool
) -> AsyncGenerator[bytes, None]:
    """The engine's own events; the usage chunk is held back until the receipt is known."""
    usage: dict[str, object] | None = None
    while batch:
        raw = []
        for piece in batch:
            found = None if piece.text else _usage_chunk(piece.raw)
            if found is None:
                raw.append(piece.raw)
            else:
                usage = found
        if raw:
            yield b"".join(raw)
        batch = await exchange.next()
    failure = exchange.failure()
    if failure is not None:
        yield WrittenForm(exchange.task.writer or writer).failed(failure)
        return
    tail = b""
    has_usage = writer.usage_in is UsageIn.OWN_CHUNK
    if has_usage or has_receipt:
        chunk = usage or writer.without_choices()
        if not has_usage:
            chunk.pop("usage", None)
        tail = sse(_with_receipt(chunk, finish_of(exchange.task), extra=writer.extra))
    yield tail + DONE_EVENT


def _usage_chunk(raw: bytes) -> dict[str, object] | None:
    """The usage-only chunk that an engine sends last, in a piece of its own; None for any other."""
    if b'"usage"' not in raw or raw.count(b"\n\n") != 1:
        return None
    value: dict[str, object] = json.loads(raw.removeprefix(b"data: "))
    return value if value.get("choices") == [] else None


async def _typed(
    exchange: Exchange,
    batch: list[Piece],
    *,
    form: WrittenForm,
    last: bytes,
    seals: bool,
    extra: Mapping[str, object],
) -> AsyncGenerator[bytes, None]:
    """The engine's own events; the last one is held back until the receipt is known."""
    end = b""
    while batch:
        raw = []
        for piece in batch:
            if piece.raw.startswith(last):  # in a piece of its own
                end = piece.raw
            else:
                raw.append(sealed_events(piece.raw) if seals else piece.raw)
        if raw:
            yield b"".join(raw)
        batch = await exchange.next()
    failure = exchange.failure()
    if failure is not None:
        yield WrittenForm(exchange.task.writer or form.writer).failed(failure)
        return
    event: Event = json.loads(end.partition(b"data: ")[2])
    if seals:
        seal(event["response"].get("output"))
    answer = form.writer.receipt_place(event)
    answer |= {**extra, "cato": as_json(finish_of(exchange.task).receipt)}
    yield event_bytes(event)
