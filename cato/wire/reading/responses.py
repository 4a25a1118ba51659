"""OpenAI's Responses, as Codex sends them: a list of items instead of messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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

_FIELD = "input"


def read_responses(body: Mapping[str, object]) -> Conversation:
    """Raise `InputError` for invalid input."""
    said = body.get(_FIELD)
    messages = system_message(as_text(body.get("instructions")))
    if isinstance(said, str):
        messages.append(Message("user", (Part(PartKind.TEXT, said),)))
    else:
        items = [message for item in objects(said, _FIELD) for message in _messages(item)]
        if not items:  # an item of reasoning may have no text
            raise InputError("input must not be empty", _FIELD)
        messages += items
    tools = body.get("tools")
    listed = objects(tools, "tools") if tools is not None else []
    return Conversation(tuple(_tools(listed)), tuple(messages))


def _tools(listed: Iterable[Block]) -> list[Part]:
    """All tools; those of a `namespace` follow its description and get its name as a prefix."""
    found: list[Part] = []
    for tool in listed:
        inner = tool.get("tools")
        if tool.get("type") != "namespace" or not isinstance(inner, list):
            found.append(tool_part(tool, tool.get("name")))
            continue
        space = {key: value for key, value in tool.items() if key != "tools"}
        found.append(tool_part(space, space.get("name")))
        for one in inner:
            if isinstance(one, Mapping):
                name = f"{space.get('name')}__{one.get('name')}"  # as vLLM calls it
                found.append(tool_part({**one, "name": name}, name))
    return found


def _messages(item: Block) -> list[Message]:
    kind = item.get("type", "message")
    id = str(item.get("call_id") or item.get("id") or "")
    match kind:
        case "message":
            parts = parts_of(item.get("content"), "input.content", text_block)
            return [Message(role_of(item, _FIELD), tuple(parts))]
        case "reasoning":
            texts = [*texts_of(item, "summary"), *texts_of(item, "content")]
            thought = "\n".join(texts)
            return [Message("assistant", (Part(PartKind.THINKING, thought),))] if thought else []
        case "item_reference":
            # The Vercel AI SDK refers to items unless it is told that nothing is stored.
            rule = (
                "item_reference is not supported: items are not stored; send the item itself, as "
                "SDKs do with the option store: false"
            )
            raise InputError(rule, _FIELD)
    if isinstance(kind, str) and kind.endswith("_output"):
        parts = parts_of(_output(item), "input.output", text_block)
        text = "\n".join(part.text for part in parts if part.kind is PartKind.TEXT)
        images = [part for part in parts if part.kind is PartKind.IMAGE]
        return [Message("tool", (Part(PartKind.RESULT, text, "", id), *images))]
    if isinstance(kind, str) and kind.endswith("_call"):
        arguments = next((item[f] for f in ("arguments", "input", "action") if f in item), {})
        name = "__".join(str(n) for n in (item.get("namespace"), item.get("name") or kind) if n)
        call = Part(PartKind.CALL, as_text(arguments), name, id)
        return [Message("assistant", (call,))]
    return [Message("user", (Part(PartKind.TEXT, as_text(item)),))]


def is_silent(item: object) -> bool:
    """Whether an item is reasoning without text, such as encrypted reasoning: it is no message."""
    return isinstance(item, Mapping) and item.get("type") == "reasoning" and not _messages(item)


def _output(item: Block) -> object:
    """A tool's output: a text, blocks, or (custom tools) any other value, as JSON."""
    output = item.get("output")
    return output if isinstance(output, str | list | None) else as_text(output)


def texts_of(item: Block, field: str) -> list[str]:
    """The texts of an item's blocks in `field`."""
    inner = item.get(field)
    blocks = inner if isinstance(inner, list) else []
    return [b["text"] for b in blocks if isinstance(b, Mapping) and isinstance(b.get("text"), str)]
