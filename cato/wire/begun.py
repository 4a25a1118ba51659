"""Bodies whose answer has begun: the engine continues it instead of beginning another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def begun_chat(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Chat fields whose last message is an unfinished answer starting with `text`."""
    messages = list(body["messages"])
    if body.get("continue_final_message") and messages:
        *messages, last = messages
        text = f"{last.get('content') or ''}{text}"
    messages.append({"role": "assistant", "content": text})
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def begun_response(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The same for a Responses body."""
    said = body["input"]
    items = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    content = [{"type": "output_text", "text": text, "annotations": []}]
    begun = {"id": "msg_begun", "type": "message", "role": "assistant", "status": "in_progress"}
    return {"input": [*items, {**begun, "content": content}]}
