"""Every part that a client sent, read without CATO's own readers, and where an engine saw it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# Claude Code's, which CATO leaves out: it changes with every prompt and says nothing to a model.
LEFT_OUT = ("x-anthropic-billing-header",)
# Of a tool or a message, what no model reads.
_MARKS = frozenset(
    {"type", "cache_control", "defer_loading", "strict", "id", "role", "signature", "status"}
)


def missing(body: dict[str, Any], prompt: str) -> list[str]:
    """The parts of a request that are not in an engine's prompt, in their order."""
    tools = [t for t in body.get("tools") or [] if not t.get("defer_loading")]
    lost = [part for tool in tools for part in _strings(tool) if not _has(prompt, part)]
    at = 0
    for part in said(body):
        found = _find(prompt, part, at)
        if found < 0:
            place = "out of order" if _has(prompt, part) else "missing"
            lost.append(f"{place}: {part[:300]}")
        else:
            at = found
    return lost


def said(body: dict[str, Any]) -> Iterator[str]:
    """What was said, part by part, in the order of the body."""
    for field in ("instructions", "system"):
        yield from _texts(body.get(field))
    for item in body.get("input") or body.get("messages") or []:
        if isinstance(item, str):
            yield item
            continue
        for field in ("reasoning", "reasoning_content"):
            if isinstance(item.get(field), str):
                yield item[field]
                break
        yield from _texts(item.get("content"))
        for call in item.get("tool_calls") or []:
            yield call["function"]["name"]
            yield from _strings(json.loads(call["function"]["arguments"] or "{}"))
        if item.get("type") == "function_call":
            yield item["name"]
            yield from _strings(json.loads(item["arguments"] or "{}"))
        if item.get("type") == "function_call_output":
            yield from _texts(item.get("output"))


def _texts(content: Any) -> Iterator[str]:
    match content:
        case str():
            if content.strip():
                yield content
        case list():
            for block in content:
                yield from _block(block)


def _block(block: Any) -> Iterator[str]:
    match block:
        case str():
            yield block
        case {"text": str(text)}:
            if text.strip() and not text.startswith(LEFT_OUT):
                yield text
        case {"type": "thinking", "thinking": str(text)}:
            if text.strip():
                yield text
        case {"type": "tool_use", "name": str(name), "input": given}:
            yield name
            yield from _strings(given)
        case {"type": "tool_result", "content": content}:
            yield from _texts(content)
        case {"type": "tool_reference", "tool_name": str(name)}:
            yield name


def _strings(value: Any) -> Iterator[str]:
    """The texts inside a value that is written as JSON, and the names of its fields."""
    match value:
        case str():
            if value.strip():
                yield value
        case dict():
            for key, inner in value.items():
                if key in _MARKS and not isinstance(inner, dict | list):
                    continue
                yield key
                yield from _strings(inner)
        case list():
            for inner in value:
                yield from _strings(inner)


def _has(prompt: str, part: str) -> bool:
    return _find(prompt, part, 0) >= 0


def _find(prompt: str, part: str, at: int) -> int:
    """Where `part` stands from `at` on, as it is or inside JSON; negative when it does not."""
    forms = (part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
    places = [place for form in forms if (place := prompt.find(form, at)) >= 0]
    return min(places, default=-1)
