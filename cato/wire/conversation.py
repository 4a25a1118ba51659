"""One typed conversation, whatever dialect it came in.

A request is read once (`cato.wire.reading`). The engine's prompt follows from the value: what is
counted, what is hashed, and which session it belongs to. Nothing here knows HTTP or an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cato.core.record import record


class PartKind(StrEnum):
    """What a part of a conversation is to the model."""

    TOOL = "tool"
    """The definition of a tool: its JSON."""
    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"
    """A call of a tool by the model: its arguments as JSON, under the tool's `name`."""
    RESULT = "result"
    """What a tool answered."""
    IMAGE = "image"
    """An image, a document or a sound; its text is empty, for it costs no text tokens."""


@record
class Part:
    """One piece of a message. `text` is what the model reads of it; `call_id` ties a result to its
    call."""

    kind: PartKind
    text: str
    name: str = ""
    call_id: str = ""


@record
class Message:
    """Parts of one speaker: `system`, `user`, `assistant` or `tool`."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """What was said in words; no calls, results or thinking."""
        return "".join(p.text for p in self.parts if p.kind is PartKind.TEXT)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tools, then messages, in the order in which chat templates write them.

    System texts of a dialect's own field come first among the messages. `deferred` tools are known
    to the client only: their definitions are not part of the prompt.
    """

    tools: tuple[Part, ...] = ()
    messages: tuple[Message, ...] = ()
    deferred: tuple[Part, ...] = ()

    @property
    def answers(self) -> int:
        """How often the model has answered; messages of its own that follow each other are one."""
        count, is_answer = 0, False
        for message in self.messages:
            is_next = message.role == "assistant"
            count += is_next and not is_answer
            is_answer = is_next
        return count

    @property
    def system(self) -> str:
        """The system text that the conversation begins with."""
        texts = []
        for message in self.messages:
            if message.role != "system":
                break
            texts.append(message.text)
        return "\n".join(texts)

    @property
    def last_user_text(self) -> str:
        """The last words of the user; empty when there are none."""
        for message in reversed(self.messages):
            if message.role == "user" and message.text:
                return message.text
        return ""

    def sections(self) -> Iterator[str]:
        """The prompt, section by section: one of all tools, then one a message.

        Chat templates differ in their marks, and some write the system text before the tools.
        They agree on this: a conversation with more messages has the same first sections.
        """
        if self.tools:
            yield "<|tools|>" + "\n".join(tool.text for tool in self.tools)
        for message in self.messages:
            yield rendered(message)

    def prompt(self, *, is_begun: bool = False) -> str:
        """All of it as one text; `is_begun`: the last message is an answer to be continued."""
        sections = list(self.sections())
        if not is_begun:
            sections.append("<|assistant|>")
        return "\n".join(sections)


def rendered(message: Message) -> str:
    """A message as a model reads it, in the plain marks of the simulated engine's template."""
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
