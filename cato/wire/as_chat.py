"""Converts a Messages body to a chat body, as vLLM does, for features that only chat supports.

vLLM 0.32 cannot continue a partial answer in Messages. For the rules of the conversion see
`vllm/entrypoints/anthropic/serving.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cato.core.errors import InputError
from cato.wire.stable import TOOL_CHANGES

_SAME = (
    "temperature", "top_p", "top_k", "max_tokens", "cache_salt", "chat_template_kwargs",
    "kv_transfer_params", "vllm_xargs", "ignore_eos", "min_tokens",
)  # fmt: skip
_BILLING = "x-anthropic-billing-header"  # vLLM leaves such blocks out
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Body = dict[str, Any]


def messages_as_chat(body: Mapping[str, Any]) -> Body:
    """Raise `InputError` for content that has no counterpart in chat."""
    said = [{"role": "system", "content": text}] if (text := _system(body.get("system"))) else []
    for message in body["messages"]:
        said += _messages(message)
    chat: Body = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = said
    if stops := body.get("stop_sequences"):
        chat["stop"] = stops
    if tools := _tools(body):
        chat["tools"] = [_tool(tool) for tool in tools]
    if choice := body.get("tool_choice"):
        chat |= _tool_choice(choice)
    return chat | _effort(body)


def _system(system: object) -> str:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    assert isinstance(blocks, list), "system must be a string or a list of blocks"
    texts = [str(block.get("text") or "") for block in blocks]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _messages(message: Mapping[str, Any]) -> Iterator[Body]:
    role, content = message["role"], message.get("content")
    if role == "system":
        if text := _system(content):
            yield {"role": role, "content": text}
        return
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[Body] = []
    calls: list[Body] = []
    thoughts: list[str] = []
    for block in content or ():
        match block["type"]:
            case "text":
                parts += [{"type": "text", "text": block["text"]}] if block["text"] else []
            case "image":
                parts.append(_image(block["source"]))
            case "thinking":
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                function = {"name": block["name"], "arguments": arguments}
                calls.append({"id": block["id"], "type": "function", "function": function})
            case "tool_result" if role == "user":
                yield from _results(block)
            case kind:
                raise InputError(f"a block of type {kind} has no counterpart in chat", "messages")
    said: Body = {"role": role}
    if thoughts:
        said["reasoning"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        said["content"] = parts[0]["text"] if is_text else parts
    if role != "user" or "content" in said:
        yield said


def _results(block: Mapping[str, Any]) -> Iterator[Body]:
    content, id = block.get("content") or "", block.get("tool_use_id") or ""
    inner: list[Body] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts, images, references = [], [], []
    for part in inner:
        match part["type"]:
            case "text":
                texts.append(part["text"])
            case "image":
                images.append(_image(part["source"]))
            case "tool_reference":
                name = part.get("tool_name") or part.get("name")
                references.append({"type": "tool_reference", "name": name})
            case kind:
                raise InputError(f"a result of type {kind} has no counterpart in chat", "messages")
    yield {"role": "tool", "tool_call_id": id, "content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}
    if references:
        yield {"role": "tool", "tool_call_id": id, "content": references}


def _image(source: Mapping[str, Any]) -> Body:
    url = source.get("url")
    if source.get("type") != "url":
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tools(body: Mapping[str, Any]) -> list[Body]:
    """The tools at the end of the conversation, after its additions and removals."""
    tools: list[Body] = body.get("tools") or []
    changes = [
        block
        for message in body["messages"]
        if isinstance(content := message.get("content"), list)
        for block in content
        if block.get("type") in TOOL_CHANGES
    ]
    if not changes:
        return tools
    known = {tool["name"]: tool for tool in tools}
    removed: set[str] = set()
    for block in changes:
        tool = block["tool"].get("definition") or known[block["tool"]["name"]]
        if block["type"] == "tool_addition":
            known[tool["name"]] = {k: v for k, v in tool.items() if k != "defer_loading"}
            removed.discard(tool["name"])
        else:
            removed.add(tool["name"])
    return [tool for name, tool in known.items() if name not in removed]


def _tool(tool: Mapping[str, Any]) -> Body:
    if "input_schema" not in tool:
        raise InputError(f"tool {tool.get('name')!r} has no counterpart in chat", "tools")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for field in ("description", "strict", "defer_loading"):
        if tool.get(field):
            function[field] = tool[field]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Body:
    chosen: object = _CHOICES.get(choice["type"])
    if choice["type"] == "tool":
        chosen = {"type": "function", "function": {"name": choice["name"]}}
    is_parallel = not choice.get("disable_parallel_tool_use")
    return {"tool_choice": chosen, "parallel_tool_calls": is_parallel}


def _effort(body: Mapping[str, Any]) -> Body:
    """The reasoning effort fields."""
    effort = (body.get("output_config") or {}).get("effort")
    thinking = body.get("thinking") or {}
    match thinking.get("type"):
        case "disabled":
            return {"reasoning_effort": "none"}
        case "enabled" if thinking.get("budget_tokens"):
            more = {"reasoning_effort": effort} if effort else {}
            return {"thinking_token_budget": thinking["budget_tokens"], **more}
    return {"reasoning_effort": effort} if effort else {}
