"""Anthropic's Messages, as Claude Code sends them.

Tool results are part of user messages in this dialect; chat templates get them as messages with the
role `tool`, so they become that here. System messages may occur between other messages.
"""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.errors import InputError
from cato.wire.conversation import Conversation, Message, Part, PartKind
from cato.wire.reading.common import (
    Block,
    as_text,
    objects,
    parts_of,
    role_of,
    system_message,
    text_block,
    tool_part,
)

_FIELD = "messages"


def read_messages(body: Mapping[str, object]) -> Conversation:
    """Raise `InputError` for invalid messages."""
    said = objects(body.get(_FIELD), _FIELD)
    if not said:
        raise InputError("messages must not be empty", _FIELD)
    messages = system_message(
        "\n".join(part.text for part in parts_of(body.get("system"), "system", text_block))
    )
    for block in said:
        messages += _messages(block)
    tools = body.get("tools")
    listed = objects(tools, "tools") if tools is not None else []
    return Conversation(
        tuple(tool_part(t, t.get("name")) for t in listed if not t.get("defer_loading")),
        tuple(messages),
        tuple(tool_part(t, t.get("name")) for t in listed if t.get("defer_loading")),
    )


def _messages(block: Block) -> list[Message]:
    """One message of the dialect; its tool results become separate messages before the rest."""
    role = role_of(block, _FIELD)
    parts = parts_of(block.get("content"), "messages.content", _part)
    if role == "assistant":
        return [Message(role, tuple(parts))]
    results = [p for p in parts if p.kind is PartKind.RESULT]
    rest = tuple([p for p in parts if p.kind is not PartKind.RESULT])
    found = [Message("tool", (result,)) for result in results]
    if rest or not results:
        found.append(Message(role, rest))
    return found


def _part(block: Block) -> list[Part]:
    match block.get("type"):
        case "thinking":
            return [Part(PartKind.THINKING, as_text(block.get("thinking")))]
        case "redacted_thinking":
            return []  # encrypted: templates do not render it
        case "tool_use":
            name, id = str(block.get("name") or ""), str(block.get("id") or "")
            return [Part(PartKind.CALL, as_text(block.get("input")), name, id)]
        case "tool_result":
            id, said = str(block.get("tool_use_id") or ""), block.get("content")
            if isinstance(said, str):
                return [Part(PartKind.RESULT, said, "", id)]
            content = parts_of(said, "messages.content", text_block)
            text = "\n".join(part.text for part in content if part.kind is PartKind.TEXT)
            images = [part for part in content if part.kind is PartKind.IMAGE]
            return [Part(PartKind.RESULT, text, "", id), *images]
        case _:
            return text_block(block)
