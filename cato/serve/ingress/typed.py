"""Answers in dialects whose events have types (Responses, Messages): written here, or relayed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from cato.core.runs import FinishRun
from cato.core.slo import Slo
from cato.engines.answers import Event, TypedAnswer, event_bytes
from cato.engines.base import Endpoint
from cato.serve.executor import Piece
from cato.serve.ingress.answers import ending_of
from cato.serve.ingress.calls import start_call, whole_call
from cato.serve.ingress.context import Ingress, finish_of
from cato.serve.ingress.errors import Failure
from cato.serve.ingress.exchange import Exchange, streamed
from cato.serve.ingress.receipts import as_json


@dataclass(slots=True)
class TypedForm:
    """A form of `TypedAnswer`.

    `receipt_in` finds the object of a stream's last event that the receipt goes into, and
    `failure_event` writes a failure; `sign` as in `Form`.
    """

    answer: TypedAnswer
    receipt_in: Callable[[Event], Event]
    failure_event: Callable[[Failure], Event]
    sign: bytes
    has_begun: bool = False

    def whole(self, text: str, finish: FinishRun) -> dict[str, object]:
        value = self.answer.whole(text, ending_of(finish))
        return {**value, "cato": as_json(finish.receipt)}

    def delta(self, text: str) -> bytes:
        events = [] if self.has_begun else self.answer.opening()
        self.has_begun = True
        if text:
            events += self.answer.delta(text)
        return b"".join(map(event_bytes, events))

    def ending(self, text: str, finish: FinishRun) -> bytes:
        events = self.answer.closing(text, ending_of(finish))
        self.receipt_in(events[-1])["cato"] = as_json(finish.receipt)
        return b"".join(map(event_bytes, events))

    def failed(self, failure: Failure) -> bytes:
        return event_bytes(self.failure_event(failure))


async def serve_typed_call(
    ingress: Ingress,
    request: Request,
    model: str,
    endpoint: Endpoint,
    body: dict[str, object],
    slo: Slo,
    form: TypedForm,
    *,
    is_streamed: bool,
    last_event: str,
) -> Response:
    """Pass `body` to `model`; `last_event` is the type of the event that ends a stream."""
    task = start_call(ingress, request, model, endpoint, body, slo, is_streamed=is_streamed)
    if not is_streamed:
        return await whole_call(ingress, request, task, with_receipt)
    relay = partial(_relayed, form=form, last=f"event: {last_event}\n".encode())
    exchange = Exchange(request, task, ingress.has_replicas)
    return await streamed(request, exchange, relay, sign=form.sign)


def with_receipt(value: dict[str, object], finish: FinishRun) -> dict[str, object]:
    return {**value, "cato": as_json(finish.receipt)}


async def _relayed(
    exchange: Exchange, batch: list[Piece], *, form: TypedForm, last: bytes
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
    form.receipt_in(event)["cato"] = as_json(finish_of(exchange.task).receipt)
    yield event_bytes(event)
