"""OpenAI's chat completions, with the fields that vLLM and agents add (`reasoning`)."""

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
    text_block,
    tool_part,
)

_FIELD = "messages"


def read_chat(body: Mapping[str, object]) -> Conversation:
    """Raise `InputError` for invalid messages."""
    messages = objects(body.get(_FIELD), _FIELD)
    if not messages:
        raise InputError("messages must not be empty", _FIELD)
    return Conversation(_tools(body), tuple(map(_message, messages)))


def _tools(body: Mapping[str, object]) -> tuple[Part, ...]:
    tools = [*_listed(body, "tools"), *_listed(body, "functions")]
    return tuple(tool_part(tool, _function(tool).get("name")) for tool in tools)


def _listed(body: Mapping[str, object], field: str) -> list[Block]:
    value = body.get(field)
    return [] if value is None else objects(value, field)


def _function(value: Block) -> Block:
    inner = value.get("function")
    return inner if isinstance(inner, Mapping) else value


def _message(block: Block) -> Message:
    role = role_of(block, _FIELD)
    parts = []
    for field in ("reasoning", "reasoning_content"):
        if isinstance(thought := block.get(field), str) and thought:
            parts.append(Part(PartKind.THINKING, thought))
            break
    content = parts_of(block.get("content"), "messages.content", text_block)
    if role in ("tool", "function"):
        role, id = "tool", str(block.get("tool_call_id") or block.get("name") or "")
        content = [_result(part, id) for part in content]
    parts += content
    calls = block.get("tool_calls")
    for call in objects(calls, "messages.tool_calls") if calls else []:
        function = _function(call)
        parts.append(
            Part(
                PartKind.CALL,
                as_text(function.get("arguments")),
                str(function.get("name") or ""),
                str(call.get("id") or ""),
            )
        )
    return Message(role, tuple(parts))


def _result(part: Part, call_id: str) -> Part:
    return Part(PartKind.RESULT, part.text, "", call_id) if part.kind is PartKind.TEXT else part
