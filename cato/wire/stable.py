"""Rules that make agents' prompts stable from call to call, so that prefix caches hit.

Some agents put content into each prompt that no model needs and that changes with every call, so
the engine finds none of the prompt in its prefix cache. Each rule names the client and versions in
which this was seen, rewrites the incoming body, and is listed in the receipt. No rule removes a
tool, an instruction or an output: `tests/unit/wire/test_stable.py` checks this part by part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from cato.wire.endpoint import Endpoint

Body = Mapping[str, object]

LATE_SYSTEM = "late-system"
"""A rule needed only for chat templates that allow no system message after the first."""
BILLING_MARK = "x-anthropic-billing-header"
TOOL_CHANGES = ("tool_addition", "tool_removal")
"""Blocks of system messages after which other tools are offered:
https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages"""


@dataclass(frozen=True, slots=True)
class Rule:
    """`apply` returns the changed body, or None if nothing changes."""

    name: str
    client: str
    versions: str
    endpoints: frozenset[Endpoint]
    what: str
    apply: Callable[[Body], Body | None]


def stable(endpoint: Endpoint, body: Body, off: Collection[str] = ()) -> tuple[Body, list[str]]:
    """`body` after all rules of its dialect that are not `off`, and the rules that changed it."""
    changed = []
    for rule in RULES:
        if endpoint in rule.endpoints and rule.name not in off:
            better = rule.apply(body)
            if better is not None:
                body = better
                changed.append(rule.name)
    return body, changed


def _without_billing(body: Body) -> Body | None:
    system = body.get("system")
    if not isinstance(system, list):
        return None
    kept = [b for b in system if not _text_of(b).startswith(BILLING_MARK)]
    return None if len(kept) == len(system) else {**body, "system": kept}


def _with_loaded_tools_last(body: Body) -> Body | None:
    """Leave out the tools that may be loaded later; put those that were loaded after all others.

    https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/tool-search-tool: a deferred tool
    is not part of the prompt until a `tool_reference` names it. The client inserts it among the
    other tools by its name; at the end, those before it stay the same. It must remain in `tools`:
    vLLM's tool parsers and grammars take the valid names and the types of arguments from there.
    """
    tools = body.get("tools")
    if not isinstance(tools, list):
        return None
    later = {
        str(t.get("name")): t for t in tools if isinstance(t, Mapping) and t.get("defer_loading")
    }
    if not later:
        return None
    kept = [t for t in tools if not (isinstance(t, Mapping) and t.get("defer_loading"))]
    messages = body.get("messages")
    # In the order of loading, so that each one only extends the list.
    for name in dict.fromkeys(_references(messages)):
        if name in later:
            kept.append({k: v for k, v in later[name].items() if k != "defer_loading"})
    return {**body, "tools": kept, "messages": _mapped(messages, _with_words)}


def _references(messages: object) -> Iterator[str]:
    """Names of the tools to which messages refer, in order.

    Calls count too, because a client may have cleared the result that loaded their tool. So does
    the block of a tool's addition or removal: vLLM refuses it if that tool is not in `tools`.
    """
    for message in messages if isinstance(messages, list) else ():
        for block in _blocks(message) if isinstance(message, Mapping) else ():
            if isinstance(block, Mapping):
                content = block.get("content")
                items = content if isinstance(content, list) else []
                yield from filter(None, map(_referred, [*items, block.get("tool")]))
                if block.get("type") == "tool_use":
                    yield str(block.get("name"))


def _with_words(block: object) -> object:
    """A tool result with a sentence in place of each reference: many templates drop references."""
    if not isinstance(block, Mapping) or block.get("type") != "tool_result":
        return block
    content = block.get("content")
    if not isinstance(content, list):
        return block
    said = [
        {"type": "text", "text": f"The tool {name} can be called now."}
        if (name := _referred(item))
        else item
        for item in content
    ]
    return {**block, "content": said}


def _referred(item: object) -> str:
    """The tool that a reference names; empty for anything else."""
    if not isinstance(item, Mapping) or item.get("type") != "tool_reference":
        return ""
    return str(item.get("tool_name") or item.get("name") or "")


def _with_system_in_place(body: Body) -> Body | None:
    """Turn system messages between other messages into reminders in user messages, in place.

    Otherwise, for templates that allow a system message only at the start, the engine moves it
    there. Blocks that add or remove tools remain system messages: engines take them from there
    alone, and write none of them into the prompt.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not any(map(_is_system, messages)):
        return None
    changed: list[object] = []
    for message in messages:
        if not _is_system(message):
            changed.append(message)
            continue
        blocks = _blocks(message)
        if changes := [block for block in blocks if _changes_tools(block)]:
            changed.append({**message, "content": changes})
        if len(changes) == len(blocks) > 0:
            continue
        said = "\n".join(_text_of(block) for block in blocks if not _changes_tools(block))
        reminder = {"type": "text", "text": f"<system-reminder>\n{said}\n</system-reminder>"}
        _add_for_user(changed, reminder)
    return None if changed == messages else {**body, "messages": changed}


def _add_for_user(messages: list[object], block: Mapping[str, object]) -> None:
    """Add `block` to the last message if that is a user's, else as a user's message."""
    at = len(messages) - 1
    while at >= 0 and _is_system(messages[at]):
        at -= 1
    before = messages[at] if at >= 0 else None
    if isinstance(before, Mapping) and before.get("role") == "user":
        messages[at] = {**before, "content": [*_blocks(before), block]}
    else:
        messages.append({"role": "user", "content": [block]})


def _is_system(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "system"


def _changes_tools(block: object) -> bool:
    return isinstance(block, Mapping) and block.get("type") in TOOL_CHANGES


def _blocks(message: Mapping[str, object]) -> list[object]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if isinstance(content, str) and content else []


def _text_of(block: object) -> str:
    text = block.get("text") if isinstance(block, Mapping) else block
    return text if isinstance(text, str) else ""


def _with_one_json_of_chat(body: Body) -> Body | None:
    def one_form(message: object) -> object:
        if not isinstance(message, Mapping) or not isinstance(message.get("tool_calls"), list):
            return message
        return {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}

    def _call(call: object) -> object:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return call
        return {**call, "function": _with_one_json(call["function"])}

    return _changed(body, "messages", one_form)


def _with_one_json_of_responses(body: Body) -> Body | None:
    def one_form(item: object) -> object:
        is_call = isinstance(item, Mapping) and item.get("type") == "function_call"
        return _with_one_json(item) if is_call and isinstance(item, Mapping) else item

    return _changed(body, "input", one_form)


def _with_one_json(call: Mapping[str, object]) -> Mapping[str, object]:
    """A call with its arguments formatted by `json.dumps`, as chat templates do."""
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    text = json.dumps(value, ensure_ascii=False)
    return call if text == arguments else {**call, "arguments": text}


def _changed(body: Body, field: str, change: Callable[[object], object]) -> Body | None:
    items = body.get(field)
    if not isinstance(items, list):
        return None
    changed = [change(item) for item in items]
    return (
        None
        if all(a is b or a == b for a, b in zip(changed, items, strict=True))
        else {**body, field: changed}
    )


def _mapped(messages: object, change: Callable[[object], object]) -> object:
    """`messages`, with `change` applied to every block."""
    if not isinstance(messages, list):
        return messages
    return [
        {**m, "content": [change(block) for block in m["content"]]}
        if isinstance(m, Mapping) and isinstance(m.get("content"), list)
        else m
        for m in messages
    ]


_MESSAGES = frozenset({Endpoint.MESSAGES, Endpoint.COUNT_TOKENS})

RULES = (
    Rule(
        "billing-block",
        "Claude Code",
        "2.1.197 to 2.1.330",
        _MESSAGES,
        "removes the system block with the client's version, which differs for every first prompt",
        _without_billing,
    ),
    Rule(
        "deferred-tools",
        "Claude Code",
        "2.1.330",
        _MESSAGES,
        "leaves out tools that are not loaded yet, and puts loaded ones after all others",
        _with_loaded_tools_last,
    ),
    Rule(
        LATE_SYSTEM,
        "Claude Code",
        "2.1.197 to 2.1.330",
        _MESSAGES,
        "keeps a system message between others in place, as a reminder in a user message",
        _with_system_in_place,
    ),
    Rule(
        "one-json",
        "Qwen Code, cn, opencode",
        "any",
        frozenset({Endpoint.CHAT}),
        "writes the arguments of calls in one form of JSON",
        _with_one_json_of_chat,
    ),
    Rule(
        "one-json",
        "Codex",
        "any",
        frozenset({Endpoint.RESPONSES}),
        "writes the arguments of calls in one form of JSON",
        _with_one_json_of_responses,
    ),
)
