"""Answers in dialects whose events have types (Responses, Messages): written here, or relayed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from cato.core.runs import FinishRun
from cato.core.slo import Slo
from cato.engines.base import Endpoint
from cato.serve.executor import Piece
from cato.serve.ingress.answers import WrittenForm
from cato.serve.ingress.calls import start_call, whole_call
from cato.serve.ingress.context import Ingress, finish_of
from cato.serve.ingress.exchange import Exchange, streamed
from cato.serve.ingress.naming import Target
from cato.serve.ingress.receipts import as_json
from cato.wire.events import Event, event_bytes


async def serve_typed_call(
    ingress: Ingress,
    request: Request,
    target: Target,
    endpoint: Endpoint,
    body: dict[str, object],
    slo: Slo,
    form: WrittenForm,
    *,
    is_streamed: bool,
    last_event: str,
) -> Response:
    """Pass `body` to `target`'s model; `last_event` is the type of the event that ends a stream."""
    task = start_call(
        ingress, request, target.model, endpoint, body, slo,
        is_streamed=is_streamed, why=target.why,
    )  # fmt: skip
    if not is_streamed:
        return await whole_call(ingress, request, task, with_receipt)
    relay = partial(_relayed, form=form, last=f"event: {last_event}\n".encode())
    exchange = Exchange(request, task, ingress.has_replicas)
    return await streamed(request, exchange, relay, sign=form.sign)


def with_receipt(value: dict[str, object], finish: FinishRun) -> dict[str, object]:
    return {**value, "cato": as_json(finish.receipt)}


async def _relayed(
    exchange: Exchange, batch: list[Piece], *, form: WrittenForm, last: bytes
) -> AsyncGenerator[bytes, None]:
    """The engine's own events; the last one waits for the receipt."""
    end = b""
    while batch:
        raw = []
        for piece in batch:
            if piece.raw.startswith(last):  # alone in its piece
                end = piece.raw
            else:
                raw.append(piece.raw)
        if raw:
            yield b"".join(raw)
        batch = await exchange.next()
    failure = exchange.failure()
    if failure is not None:
        yield form.failed(failure)
        return
    event: Event = json.loads(end.partition(b"data: ")[2])
    form.writer.receipt_place(event)["cato"] = as_json(finish_of(exchange.task).receipt)
    yield event_bytes(event)
