"""Bodies whose answer has begun: the engine continues it instead of beginning another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def begun_chat(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Chat fields whose last message is an unfinished answer starting with `text`."""
    messages = list(body["messages"])
    if body.get("continue_final_message") and messages:
        last = messages.pop()
        messages.append({**last, "content": _extended(last.get("content"), text)})
    else:
        messages.append({"role": "assistant", "content": text})
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def _extended(content: object, text: str) -> object:
    """Content with `text` at its end.

    In a list, the last text part is extended: vLLM puts a line break between parts for most
    templates.
    """
    if not isinstance(content, list):
        return f"{content or ''}{text}"
    match content:
        case [*before, {"text": str(said)} as last]:
            return [*before, {**last, "text": said + text}]
        case [*before, str(said)]:
            return [*before, said + text]
    return [*content, {"type": "text", "text": text}]


def begun_response(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The same for a Responses body."""
    said = body["input"]
    items = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    content = [{"type": "output_text", "text": text, "annotations": []}]
    begun = {"id": "msg_begun", "type": "message", "role": "assistant", "status": "in_progress"}
    return {"input": [*items, {**begun, "content": content}]}
