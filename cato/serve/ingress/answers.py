"""Writes the text of a task's answer in any dialect, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from cato.core.receipt import SlaReceipt
from cato.core.runs import FinishRun
from cato.serve.executor import RunningTask
from cato.serve.ingress import virtual
from cato.serve.ingress.context import Ingress, finish_of
from cato.serve.ingress.exchange import STREAM_HEADERS, Exchange, Shed, streamed, whole
from cato.serve.ingress.failures import Failure
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.receipts import as_json
from cato.serve.invoker import Piece
from cato.wire.answer import AnswerWriter, Ending, Text
from cato.wire.events import events_bytes


class Form(Protocol):
    """Writes one answer in one dialect from its text.

    `sign` is the keep-alive of an idle stream; empty for clients that cannot handle one.
    """

    @property
    def sign(self) -> bytes: ...

    def whole(self, text: str, finish: FinishRun) -> dict[str, object]: ...

    def delta(self, text: str) -> bytes:
        """More text, as events; the first call also opens the stream."""
        ...

    def ending(self, text: str, finish: FinishRun) -> bytes:
        """The last events; `text` is all text sent."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """The events that end a stream which failed after its first text."""
        ...


@dataclass(slots=True)
class WrittenForm:
    """An answer in a dialect that has a writer; its last event carries the receipt as `cato`.

    `stops` are the client's own stop sequences.
    """

    writer: AnswerWriter
    has_signs: bool = True
    stops: tuple[str, ...] = ()
    has_begun: bool = False

    @property
    def sign(self) -> bytes:
        return self.writer.sign if self.has_signs else b""

    def whole(self, text: str, finish: FinishRun) -> dict[str, object]:
        value = self.writer.whole([Text(text)], ending_of(finish, self.stops))
        return {**value, "cato": as_json(finish.receipt)}

    def delta(self, text: str) -> bytes:
        events = [] if self.has_begun else self.writer.opening()
        self.has_begun = True
        if text:
            events += self.writer.text(text)
        return events_bytes(events)

    def ending(self, text: str, finish: FinishRun) -> bytes:
        events = self.writer.closing(ending_of(finish, self.stops))
        self.writer.receipt_place(events[-1])["cato"] = as_json(finish.receipt)
        return events_bytes(events) + self.writer.done

    def failed(self, failure: Failure) -> bytes:
        return events_bytes(self.writer.failed(failure)) + self.writer.done

    def nothing(self, *, is_streamed: bool) -> Response:
        """An empty answer, for a completion that was shed."""
        ending = Ending("stop", 0, 0)
        if not is_streamed:
            return JsonAnswer(self.writer.whole([Text("")], ending))
        data = events_bytes([*self.writer.opening(), *self.writer.closing(ending)])
        return Response(
            data + self.writer.done, headers=STREAM_HEADERS, media_type="text/event-stream"
        )


async def serve_text(
    ingress: Ingress,
    request: Request,
    task: RunningTask,
    form: Form,
    *,
    is_streamed: bool,
    shed: Shed | None = None,
) -> Response:
    """The response with the text of `task`."""
    exchange = Exchange(request, task, ingress.has_replicas)
    if is_streamed:
        return await streamed(request, exchange, partial(_events, form=form), shed, form.sign)
    return await whole(request, exchange, lambda pieces: form.whole(*_text(task, pieces)), shed)


def _text(task: RunningTask, pieces: list[Piece]) -> tuple[str, FinishRun]:
    finish = finish_of(task)
    return virtual.text_of(finish.output), finish


async def _events(
    exchange: Exchange, batch: list[Piece], *, form: Form
) -> AsyncGenerator[bytes, None]:
    """A run as events. Sent text cannot be taken back, only appended to."""
    sent = ""
    while batch:
        text = "".join(piece.text for piece in batch)
        if text:
            sent += text
            yield form.delta(text)
        batch = await exchange.next()
    failure = exchange.failure()
    if failure is not None:
        yield form.failed(failure)
        return
    text, finish = _text(exchange.task, [])
    tail = b""
    if not sent or (len(text) > len(sent) and text.startswith(sent)):
        tail = form.delta(text[len(sent) :])
        sent = text
    yield tail + form.ending(sent, finish)


def ending_of(finish: FinishRun, stops: tuple[str, ...] = ()) -> Ending:
    """The end of a run: the tokens of all its calls, the finish reason, and the stop sequence if it
    is one of the client's own `stops`; a workflow has others."""
    prompt, output, cached = tokens_of(finish.receipt)
    stop = next((call.get("stop_sequence") for call in reversed(_calls_of(finish))), None)
    own = str(stop) if stop in stops else ""
    return Ending(finish_reason_of(finish), prompt, output, cached, own)


def tokens_of(receipt: SlaReceipt) -> tuple[int, int, int]:
    """Prompt, output and cached prompt tokens of all calls of a run."""
    calls = [n.llm for n in receipt.nodes if n.llm is not None]
    return (
        sum(c.prompt_tokens for c in calls),
        sum(c.output_tokens for c in calls),
        sum(c.cached_prompt_tokens for c in calls),
    )


def finish_reason_of(finish: FinishRun) -> str:
    """`length` if the answer was cut at its token limit, else `stop`."""
    is_cut = any(call.get("finish_reason") == "length" for call in _calls_of(finish))
    return "length" if is_cut else "stop"


def _calls_of(finish: FinishRun) -> list[Mapping[str, object]]:
    """Results of the calls that wrote the answer: the output node's, one for each of its items.

    If that node calls no model, such as one that lays out the text, the streamed node's: the
    client's token limit and stop sequences apply to it.
    """
    for result in (finish.output, finish.streamed):
        items = result if isinstance(result, list | tuple) else [result]
        calls = [one for one in items if isinstance(one, Mapping) and "finish_reason" in one]
        if calls:
            return calls
    return []
