"""Every part that a client sent, read without CATO's own readers, and where an engine saw it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# Claude Code's, which CATO leaves out: it changes with every prompt and says nothing to a model.
LEFT_OUT = ("x-anthropic-billing-header",)
# Shorter parts are found by chance.
LONG_CHARS = 200
# Of a tool or a message, what no model reads.
_MARKS = frozenset(
    {"type", "cache_control", "defer_loading", "strict", "id", "role", "signature", "status"}
)


def missing(body: dict[str, Any], prompt: str) -> list[str]:
    """The parts of a request that are not in an engine's prompt, in their order, and long ones that
    are there more often than they were sent.

    A tool that is deferred is sent when it was loaded: then a result names it.
    """
    loaded = set(_loaded(body))
    offered = body.get("tools") or []
    tools = [t for t in offered if not t.get("defer_loading") or t.get("name") in loaded]
    sent = [*(part for tool in tools for part in _of_tool(tool)), *said(body)]
    lost = [part for tool in tools for part in _of_tool(tool) if not _has(prompt, part)]
    for part in {part for part in sent if len(part) >= LONG_CHARS}:
        times = sum(other.count(part) for other in sent)
        if sum(prompt.count(form) for form in set(_forms(part))) > times:
            lost.append(f"more than {times} times: {part[:300]}")
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
            space = f"{item['namespace']}__" if item.get("namespace") else ""
            yield f"{space}{item['name']}"
            yield from _strings(json.loads(item["arguments"] or "{}"))
        if item.get("type") == "function_call_output":
            yield from _texts(item.get("output"))


def _of_tool(tool: dict[str, Any]) -> Iterator[str]:
    if tool.get("type") != "namespace":
        yield from _strings(tool)
        return
    yield from _strings({key: value for key, value in tool.items() if key != "tools"})
    for inner in tool["tools"]:
        yield f"{tool['name']}__{inner['name']}"  # as vLLM names it
        yield from _strings({k: v for k, v in inner.items() if k != "name"})


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


def _loaded(body: dict[str, Any]) -> Iterator[str]:
    """Names of the tools that results name as loaded."""
    for message in body.get("messages") or []:
        blocks = message.get("content")
        for block in blocks if isinstance(blocks, list) else []:
            inner = block.get("content") if isinstance(block, dict) else None
            for one in inner if isinstance(inner, list) else []:
                if isinstance(one, dict) and one.get("type") == "tool_reference":
                    yield one["tool_name"]


def _has(prompt: str, part: str) -> bool:
    return _find(prompt, part, 0) >= 0


def _find(prompt: str, part: str, at: int) -> int:
    """Where `part` stands from `at` on, as it is or inside JSON; negative when it does not."""
    places = [place for form in _forms(part) if (place := prompt.find(form, at)) >= 0]
    return min(places, default=-1)


def _forms(part: str) -> tuple[str, str, str]:
    """As it is, and inside JSON."""
    return part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]
