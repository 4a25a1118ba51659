"""Helpers shared by the readers of all dialects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from cato.core.errors import InputError
from cato.wire.conversation import Message, Part, PartKind

Block = Mapping[str, object]

# Created once, since `json.dumps` with an argument creates an encoder for every call.
_to_json = json.JSONEncoder(ensure_ascii=False).encode


def as_text(value: object) -> str:
    """`value` as a model reads it: a string unchanged, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else _to_json(value)


def objects(value: object, field: str) -> list[Block]:
    """A list of objects; raise `InputError` for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{field} must be a list of objects", field)
    return value


def parts_of(content: object, field: str, part_of: Callable[[Block], Iterable[Part]]) -> list[Part]:
    """A message's content: one text, or a list of blocks."""
    match content:
        case None | "":
            return []
        case str():
            return [Part(PartKind.TEXT, content)]
        case list():
            found: list[Part] = []
            for block in content:
                match block:
                    case str():
                        found.append(Part(PartKind.TEXT, block))
                    case dict():
                        found += part_of(block)
                    case _:
                        raise InputError(f"{field} must contain strings or objects", field)
            return found
    raise InputError(f"{field} must be a string or a list", field)


def text_block(block: Block) -> list[Part]:
    """A block of text, an image, or an unknown block (counted as JSON)."""
    text = block.get("text")
    if isinstance(text, str):
        return [Part(PartKind.TEXT, text)]
    kind = str(block.get("type", "text"))
    if isinstance(refusal := block.get("refusal"), str):
        return [Part(PartKind.TEXT, refusal)]
    if any(word in kind for word in ("image", "audio", "file", "document", "video")):
        return [Part(PartKind.IMAGE, "")]
    return [Part(PartKind.TEXT, as_text(block))]


def role_of(block: Block, field: str, default: str | None = None) -> str:
    """The role of a message; `developer` becomes `system`."""
    role = block.get("role", default)
    if not isinstance(role, str):
        raise InputError(f"each item of {field} must have a role", field)
    return "system" if role == "developer" else role


def tool_part(tool: object, name: object) -> Part:
    """A tool's definition without fields that no model reads."""
    if isinstance(tool, Mapping):
        tool = {k: v for k, v in tool.items() if k not in ("cache_control", "defer_loading")}
    return Part(PartKind.TOOL, as_text(tool), name if isinstance(name, str) else "")


def system_message(text: str) -> list[Message]:
    return [Message("system", (Part(PartKind.TEXT, text),))] if text else []
