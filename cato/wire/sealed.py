"""Reasoning that clients bring back as OpenAI's `encrypted_content`, since nothing is stored.

The Vercel AI SDK with `store: false`, and Codex, return reasoning only in this field: without it
the model reads none of what it thought before its calls of tools. Here it is the text itself,
encoded: the client has read it anyway. https://platform.openai.com/docs/guides/reasoning
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from cato.core.errors import InputError
from cato.wire.events import Event, event_bytes
from cato.wire.reading.responses import texts_of

_ASKED = "reasoning.encrypted_content"
# OpenAI's own, which no model here can read, begin otherwise.
_MARK = "cato1:"
_ENDS = b"response.output_item.done"


def asks(body: Mapping[str, object]) -> bool:
    """Whether the client wants reasoning that it can bring back."""
    include = body.get("include")
    return isinstance(include, list) and _ASKED in include


def seal(items: object) -> None:
    """Add the field to each item of reasoning in an answer's `output`."""
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") == "reasoning":
            text = "\n".join(texts_of(item, "content"))
            if text:
                item["encrypted_content"] = _MARK + base64.b64encode(text.encode()).decode()


def sealed_events(raw: bytes) -> bytes:
    """Whole events of a stream, with the field in each item of reasoning that ends."""
    if _ENDS not in raw:
        return raw
    *events, rest = raw.split(b"\n\n")
    return b"".join([*map(_sealed_event, events), rest])


def _sealed_event(raw: bytes) -> bytes:
    if _ENDS not in raw:
        return raw + b"\n\n"
    event: Event = json.loads(raw.partition(b"data: ")[2])
    seal([event.get("item")])
    return event_bytes(event)


def unsealed(items: object) -> object:
    """A body's `input` with the text of such items as their content.

    Reasoning that others have encrypted is left out. Raise `InputError` if ours is damaged.
    """
    if not isinstance(items, list):
        return items
    if not any(isinstance(i, Mapping) and i.get("encrypted_content") for i in items):
        return items
    return [item for one in items if (item := _unsealed(one)) is not None]


def _unsealed(item: object) -> object:
    """The item; None when nothing of it can be read."""
    if not isinstance(item, Mapping) or item.get("type") != "reasoning":
        return item
    sealed = item.get("encrypted_content")
    rest: dict[str, Any] = {k: v for k, v in item.items() if k != "encrypted_content"}
    if isinstance(sealed, str) and sealed.startswith(_MARK):
        try:
            text = base64.b64decode(sealed.removeprefix(_MARK), validate=True).decode()
        except (binascii.Error, ValueError) as exc:
            rule = "encrypted_content is damaged: send it as it came, or leave the item out"
            raise InputError(rule, "input") from exc
        return {**rest, "content": [{"type": "reasoning_text", "text": text}]}
    return rest if any(texts_of(rest, field) for field in ("content", "summary")) else None
