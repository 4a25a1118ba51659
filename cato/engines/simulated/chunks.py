"""Chunks of one answer, with vLLM's bytes on request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cato.engines.base import EngineChunk
from cato.wire.answer import AnswerWriter, Ending, Text
from cato.wire.choices import usage_of
from cato.wire.events import Event, events_bytes, to_json


@dataclass(frozen=True, slots=True)
class Chunks:
    """`ending` is the answer's: only its output tokens differ from chunk to chunk. `echo` comes
    before the first token, or instead of it."""

    writer: AnswerWriter
    ending: Ending
    is_raw: bool
    continuous_usage: bool
    echo: str = ""
    only_echo: bool = False

    def stream(self, tokens: Sequence[str], sent: int, *, is_last: bool) -> list[EngineChunk]:
        """Chunks for the tokens after the first `sent`; the last has only the last event."""
        tokens = self._with_echo(tokens) if sent == 0 else tokens
        text, output_tokens = "".join(tokens), sent + len(tokens)
        if not self.is_raw:
            return [self._chunk(text, output_tokens, is_last=is_last)]
        events: list[Event] = []
        if sent == 0:
            events += self.writer.opening(self.ending.prompt_tokens, self.ending.cached_tokens)
        for i, token in enumerate(tokens):
            events += self._counted(self.writer.text(token), sent + i + 1)
        if not is_last:
            return [self._chunk(text, output_tokens, events)]
        *closing, last = self.writer.closing(self._ending(output_tokens))
        events += self._counted(closing, output_tokens)
        return [
            self._chunk(text, output_tokens, events),
            self._chunk("", output_tokens, [last], is_last=True),
        ]

    def whole(self, pieces: Sequence[str]) -> EngineChunk:
        text, output_tokens = "".join(self._with_echo(pieces)), len(pieces)
        raw = to_json(self.writer.whole([Text(text)], self._ending(output_tokens)))
        return replace(self._chunk(text, output_tokens, is_last=True), raw=raw)

    def _with_echo(self, tokens: Sequence[str]) -> Sequence[str]:
        if not self.echo or not tokens:
            return tokens
        first, *others = tokens
        return [self.echo if self.only_echo else self.echo + first, *others]

    def _ending(self, output_tokens: int) -> Ending:
        return replace(self.ending, output_tokens=output_tokens)

    def _counted(self, events: list[Event], output_tokens: int) -> list[Event]:
        if not self.continuous_usage:
            return events
        usage = usage_of(self._ending(output_tokens))
        del usage["prompt_tokens_details"]  # as in vLLM: only with the final counts
        return [{**event, "usage": usage} for event in events]

    def _chunk(
        self, text: str, output_tokens: int, events: Iterable[Event] = (), *, is_last: bool = False
    ) -> EngineChunk:
        return EngineChunk(
            text,
            output_tokens,
            self.ending.prompt_tokens,
            self.ending.cached_tokens,
            self.ending.finish_reason if is_last else None,
            events_bytes(events),
            self.ending.stop_sequence if is_last else "",
        )
