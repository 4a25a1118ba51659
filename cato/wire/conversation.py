"""`Conversation`: the typed content of a chat request, independent of its dialect.

A request is read once (`cato.wire.reading`). The prompt that is counted and hashed, and the
session, follow from this value. Nothing here depends on HTTP or an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cato.core.record import record


class PartKind(StrEnum):
    """The kind of a message part, as the model sees it."""

    TOOL = "tool"
    """A tool definition as JSON."""
    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"
    """A tool call by the model: its arguments as JSON, with the tool's `name`."""
    RESULT = "result"
    """The result of a tool call."""
    IMAGE = "image"
    """An image, document or audio; its text is empty, since it costs no text tokens."""


@record
class Part:
    """A part of a message. `text` is what the model reads; `call_id` links a result to its call."""

    kind: PartKind
    text: str
    name: str = ""
    call_id: str = ""


@record
class Message:
    """The parts of one message; the role is `system`, `user`, `assistant` or `tool`."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The plain text, without calls, results and thinking."""
        return "".join(p.text for p in self.parts if p.kind is PartKind.TEXT)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tools, then messages, in the order in which chat templates write them.

    A system prompt from a separate field comes first among the messages. `deferred` tools are known
    only to the client: their definitions are not part of the prompt.
    """

    tools: tuple[Part, ...] = ()
    messages: tuple[Message, ...] = ()
    deferred: tuple[Part, ...] = ()

    @property
    def answers(self) -> int:
        """How often the model has answered; consecutive assistant messages count once."""
        count, is_answer = 0, False
        for message in self.messages:
            is_next = message.role == "assistant"
            count += is_next and not is_answer
            is_answer = is_next
        return count

    @property
    def system(self) -> str:
        """The system prompt at the start of the conversation."""
        texts = []
        for message in self.messages:
            if message.role != "system":
                break
            texts.append(message.text)
        return "\n".join(texts)

    @property
    def last_user_text(self) -> str:
        """The text of the last user message; empty if there is none."""
        for message in reversed(self.messages):
            if message.role == "user" and message.text:
                return message.text
        return ""

    def sections(self) -> Iterator[str]:
        """The prompt in sections: one for all tools, then one per message.

        Chat templates differ in their markers, and some put the system prompt before the tools. In
        all of them, a longer conversation keeps the same first sections.
        """
        if self.tools:
            yield "<|tools|>" + "\n".join(tool.text for tool in self.tools)
        for message in self.messages:
            yield rendered(message)

    def prompt(self, *, is_begun: bool = False) -> str:
        """The whole prompt as one text; `is_begun`: the last message is an answer to continue."""
        sections = list(self.sections())
        if not is_begun:
            sections.append("<|assistant|>")
        return "\n".join(sections)


def rendered(message: Message) -> str:
    """A message as a model reads it, with the markers of the simulated engine's template."""
    pieces = [f"<|{message.role}|>"]
    for part in message.parts:
        match part.kind:
            case PartKind.TEXT:
                pieces.append(part.text)
            case PartKind.CALL:
                pieces.append(f'<|call|>{{"name": "{part.name}", "arguments": {part.text}}}')
            case PartKind.IMAGE:
                pieces.append("<|image|>")
            case _:
                pieces.append(f"<|{part.kind}|>{part.text}")
    return "".join(pieces)
