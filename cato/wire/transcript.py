"""Tracks a streamed answer as the client has received it, and continues it on another engine.

The first engine's events pass unchanged. If that engine is lost, another one continues: its events
are read and rewritten as a continuation of the first stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cato.wire.answer import AnswerWriter, Arguments, Delta, Ending, Text, Thinking, ToolCall
from cato.wire.choices import usage_of
from cato.wire.endpoint import Endpoint
from cato.wire.events import Event
from cato.wire.writers import WRITERS, writer_of


@dataclass(slots=True)
class Transcript:
    """The events of the answer to the body `asked`, in the dialect of `endpoint`."""

    endpoint: Endpoint
    asked: Mapping[str, Any]
    has_thinking: bool = False
    # Number of tool calls begun; the last may be incomplete.
    calls: int = 0
    # The finish reason, once sent: then only the counts or the last event are missing.
    finish_reason: str = ""
    # Continues the stream; None before its first bytes.
    writer: AnswerWriter | None = None
    _is_call_ended: bool = False
    _is_custom: bool = False  # the last call, to a custom tool: its input is free text
    _arguments: list[str] = field(default_factory=list)

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer ends with a complete tool call, which the client can execute."""
        if self.calls == 0 or self._is_call_ended:
            return self.calls > 0
        # Free text that reads like JSON may still go on.
        return not self._is_custom and _is_object("".join(self._arguments))

    def sent(self, raw: bytes, text: str) -> None:
        """Record the first engine's events and their text."""
        if self.writer is not None and self.writer.is_plain(raw):
            self.writer.adopt_text(text, raw.count(b"\n\n"))
            return
        for event in events_of(raw):
            writer = self.writer = self.writer or self._new_writer()
            for delta in writer.deltas(event):
                self._note(delta)
            if event.get("type") in writer.ends_of_parts:
                self._is_call_ended = self.calls > 0
            self.finish_reason = self.finish_reason or writer.finish_reason(event)
            writer.adopt(event)

    def _new_writer(self) -> AnswerWriter:
        # It takes ids, model and time from the engine's events; its own are never sent.
        return writer_of(self.endpoint, "", "", 0, self.asked)

    def more(self, delta: Delta) -> list[Event]:
        """Another engine's output, as events of this answer."""
        self._note(delta)
        writer = self.writer
        assert writer is not None, "no event was sent yet: nothing to continue"
        match delta:
            case Text(text):
                return writer.text(text)
            case Thinking(text):
                return writer.thinking(text)
            case ToolCall(id, name):
                return writer.tool_call(id, name)
            case Arguments(text):
                return writer.arguments(text)

    def closing(self, ending: Ending) -> list[Event]:
        assert self.writer is not None, "no event was sent yet: nothing to end"
        return self.writer.closing(ending)

    def _note(self, delta: Delta) -> None:
        match delta:
            case Thinking():
                self.has_thinking = True
            case ToolCall(is_custom=is_custom):
                self.calls += 1
                self._is_call_ended, self._is_custom = False, is_custom
                self._arguments.clear()
            case Arguments(text):
                self._arguments.append(text)


def events_of(raw: bytes) -> list[Event]:
    """The events in a stream's bytes, which must not end inside an event."""
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


def deltas_of(endpoint: Endpoint, event: Event) -> list[Delta]:
    """The output that an event in the dialect of `endpoint` adds."""
    return WRITERS[endpoint].deltas(event)


def with_usage(event: Event, ending: Ending) -> Event:
    """A chunk with the counts so far, for clients that want them in every chunk."""
    return {**event, "usage": usage_of(ending)}


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
