"""Render a script's step as an answer in the request's dialect, token by token."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.scripted.script import Step
from cato.engines.scripted.vocabulary import Vocabulary, pieces
from cato.wire.answer import AnswerWriter, Ending, Part, Text, Thinking, ToolCall
from cato.wire.conversation import Message, PartKind, rendered
from cato.wire.conversation import Part as SaidPart
from cato.wire.events import Event, events_bytes, to_json
from cato.wire.writers import writer_of


@dataclass(frozen=True, slots=True)
class Piece:
    """One output token, belonging to the part with this number."""

    part: int
    text: str


class Answer:
    """A step as an answer in the dialect of its request."""

    def __init__(
        self, request: EngineRequest, model: str, step: Step, vocabulary: Vocabulary
    ) -> None:
        self.step = step
        self._request = request
        self._writer: AnswerWriter = writer_of(
            request.endpoint, request.id, model, int(time.time()), request.body
        )
        seed = hashlib.blake2b(request.id.encode(), digest_size=6).hexdigest()
        said: list[Part] = []
        if step.thinking:
            said.append(Thinking(step.thinking))
        if step.text or not step.calls:
            said.append(Text(step.text))
        for i, call in enumerate(step.calls):
            said.append(ToolCall(f"call_{seed}{i}", call.name, call.arguments))
        self._parts = said
        self.finish_reason = "tool_calls" if step.calls else "stop"
        self.pieces = [
            Piece(i, piece)
            for i, part in enumerate(said)
            for piece in (*pieces(vocabulary, _words_of(part)),) or ("",)
        ]

    def rendered(self, pieces: Sequence[Piece]) -> str:
        """The answer as it appears in the next prompt."""
        kinds = {Text: PartKind.TEXT, Thinking: PartKind.THINKING, ToolCall: PartKind.CALL}
        said = tuple(
            SaidPart(kinds[type(p)], _words_of(p), p.name if isinstance(p, ToolCall) else "")
            for p in self._said(pieces)
        )
        return rendered(Message("assistant", said)).removeprefix("<|assistant|>")

    def chunks(self, pieces: Sequence[Piece], ending: Ending) -> Iterator[EngineChunk]:
        """One chunk per piece, and the final one."""
        if not self._request.stream:
            raw = to_json(self._writer.whole(self._said(pieces), ending))
            text = "".join(p.text for p in self._said(pieces) if isinstance(p, Text))
            yield self._chunk(text, ending.output_tokens, ending, raw, is_last=True)
            return
        events = self._writer.opening(ending.prompt_tokens, ending.cached_tokens)
        begun = -1
        for i, piece in enumerate(pieces):
            part = self._parts[piece.part]
            if isinstance(part, ToolCall) and piece.part != begun:
                events += self._writer.tool_call(part.id, part.name)
            begun = piece.part
            events += self._written(part, piece.text)
            text = piece.text if isinstance(part, Text) else ""
            yield self._chunk(text, i + 1, ending, events_bytes(events))
            events = []
        *closing, last = self._writer.closing(ending)
        yield self._chunk("", ending.output_tokens, ending, events_bytes([*events, *closing]))
        yield self._chunk("", ending.output_tokens, ending, events_bytes([last]), is_last=True)

    def _written(self, part: Part, piece: str) -> list[Event]:
        match part:
            case Text():
                return self._writer.text(piece)
            case Thinking():
                return self._writer.thinking(piece)
            case ToolCall():
                return self._writer.arguments(piece)

    def _said(self, pieces: Sequence[Piece]) -> list[Part]:
        """The parts of the answer, cut after these pieces."""
        found: list[Part] = []
        for i, part in enumerate(self._parts):
            words = "".join(p.text for p in pieces if p.part == i)
            if not words:
                continue
            match part:
                case Text():
                    found.append(Text(words))
                case Thinking():
                    found.append(Thinking(words))
                case ToolCall(id, name):
                    found.append(ToolCall(id, name, words))
        return found

    def _chunk(
        self, text: str, tokens: int, ending: Ending, raw: bytes, *, is_last: bool = False
    ) -> EngineChunk:
        reason = ending.finish_reason if is_last else None
        cached = ending.cached_tokens
        return EngineChunk(text, tokens, ending.prompt_tokens, cached, reason, raw)


def _words_of(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCall) else part.text
