"""Rules that keep prompts stable: the prefix survives, and no part of the conversation is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cato.config.schema import IngressArgs
from cato.wire.as_chat import messages_as_chat
from cato.wire.endpoint import Endpoint
from cato.wire.reading import conversation_of
from cato.wire.stable import RULES, stable

CHAT, RESPONSES, MESSAGES = Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.3{}; cc_entrypoint=sdk-cli;"


def a_tool(name: str, **fields: object) -> dict[str, object]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def a_body(session: int = 1, **fields: object) -> dict[str, Any]:
    return {
        "system": [
            {"type": "text", "text": BILLING.format(session)},
            {"type": "text", "text": "INSTRUCTIONS"},
        ],
        "tools": [a_tool("Bash"), a_tool("Read")],
        "messages": [{"role": "user", "content": "QUESTION"}],
        **fields,
    }


def prompt_of(endpoint: Endpoint, body: dict[str, Any]) -> str:
    return conversation_of(endpoint, stable(endpoint, body)[0]).prompt()


def test_two_sessions_share_their_prompt_without_the_billing_block() -> None:
    assert prompt_of(MESSAGES, a_body(1)) == prompt_of(MESSAGES, a_body(2))
    assert conversation_of(MESSAGES, a_body(1)) != conversation_of(MESSAGES, a_body(2))
    body, changed = stable(MESSAGES, a_body())
    assert changed == ["billing-block"]
    assert body["system"] == [{"type": "text", "text": "INSTRUCTIONS"}]


def a_load(*names: str) -> list[dict[str, Any]]:
    """A search for tools, and its result that loads them."""
    found = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": "c", "content": found}
    call = {"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {}}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def test_tools_that_are_loaded_later_follow_all_others_in_the_order_of_loading() -> None:
    first = [{"role": "user", "content": "QUESTION"}, *a_load("Todo")]
    second = [*first, *a_load("Fetch", "Todo")]
    todo = a_tool("Todo", defer_loading=True, description="NOTES")
    fetch = a_tool("Fetch", defer_loading=True, description="FETCHES")
    before = stable(MESSAGES, a_body())[0]["tools"]
    once, changed = stable(
        MESSAGES, a_body(messages=first, tools=[a_tool("Bash"), a_tool("Read"), todo])
    )
    twice, _ = stable(
        MESSAGES, a_body(messages=second, tools=[a_tool("Bash"), fetch, a_tool("Read"), todo])
    )
    assert "deferred-tools" in changed
    # Engines read the names and types of calls from `tools`, so whole definitions remain there.
    assert once["tools"] == [*before, a_tool("Todo", description="NOTES")]  # type: ignore[misc]
    assert twice["tools"] == [*once["tools"], a_tool("Fetch", description="FETCHES")]  # type: ignore[misc]
    whole = conversation_of(MESSAGES, twice).prompt()
    assert whole.count("FETCHES") == whole.count("NOTES") == 1
    assert "The tool Fetch can be called now." in whole
    assert "tool_reference" not in json.dumps(twice)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "d", "name": "Fetch", "input": {}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Fetch"}},
    ],
)
def test_a_tool_that_was_called_or_added_is_loaded(block: dict[str, Any]) -> None:
    said = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": [block]}]
    tools = [a_tool("Fetch", defer_loading=True), a_tool("Bash")]
    body, _ = stable(MESSAGES, a_body(messages=said, tools=tools))
    assert body["tools"] == [a_tool("Bash"), a_tool("Fetch")]


def test_a_deferred_tool_that_nobody_loaded_is_no_part_of_the_prompt() -> None:
    body, changed = stable(
        MESSAGES, a_body(tools=[a_tool("Bash"), a_tool("Later", defer_loading=True)])
    )
    assert "deferred-tools" in changed
    assert [t["name"] for t in body["tools"]] == ["Bash"]  # type: ignore[attr-defined]


def test_a_late_system_text_stays_in_its_place() -> None:
    said: list[dict[str, object]] = [
        {"role": "user", "content": "QUESTION"},
        {"role": "system", "content": "ENVIRONMENT"},
        {"role": "assistant", "content": "ANSWER"},
        {"role": "system", "content": [{"type": "text", "text": "REMINDER"}]},
    ]
    body, changed = stable(MESSAGES, a_body(messages=said))
    assert "late-system" in changed
    messages: Any = body["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    prompt = conversation_of(MESSAGES, body).prompt()
    places = [prompt.index(w) for w in ("QUESTION", "ENVIRONMENT", "ANSWER", "REMINDER")]
    assert places == sorted(places)


def a_change(kind: str, **tool: object) -> dict[str, object]:
    return {"type": kind, "tool": tool}


ADDED = a_change("tool_addition", type="tool_definition", definition=a_tool("Fetch", strict=True))
REMOVED = a_change("tool_removal", type="tool_reference", name="Bash")
CHANGING: list[dict[str, object]] = [
    {"role": "user", "content": "QUESTION"},
    {"role": "system", "content": [{"type": "text", "text": "REMINDER"}, ADDED]},
    {"role": "assistant", "content": "ANSWER"},
    {"role": "user", "content": "MORE"},
    {"role": "system", "content": [REMOVED]},
    {"role": "system", "content": "LAST"},
]


def test_tools_that_are_added_or_removed_later_are() -> None:
    body, _ = stable(MESSAGES, a_body(messages=CHANGING))
    said: Any = body["messages"]
    # vLLM takes changes of tools from system messages alone, and refuses them in others.
    changes = [m["content"] for m in said if m["role"] == "system"]
    assert changes == [[ADDED], [REMOVED]]
    spoken = [(m["role"], str(m["content"])) for m in said if m["role"] != "system"]
    assert [role for role, _ in spoken] == ["user", "assistant", "user"]
    assert "REMINDER" in spoken[0][1]
    assert "LAST" in spoken[2][1]
    assert stable(MESSAGES, body) == (body, []), "and no reminder without words"


def test_an_answer_goes_on_with_the_tools_at_its_beginning() -> None:
    body, _ = stable(MESSAGES, a_body(messages=CHANGING))
    tools = messages_as_chat(body)["tools"]
    assert [t["function"]["name"] for t in tools] == ["Read", "Fetch"]
    assert tools[1]["function"]["strict"] is True


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
def test_arguments_of_calls_have_one_form(endpoint: Endpoint) -> None:
    def a_call(arguments: str) -> dict[str, Any]:
        if endpoint is RESPONSES:
            return {"input": [{"type": "function_call", "name": "f", "arguments": arguments}]}
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "tool_calls": [call]}]}

    compact, spaced = a_call('{"a":[1,2],"b":"é"}'), a_call('{"a": [1, 2], "b": "é"}')
    assert stable(endpoint, compact) == (spaced, ["one-json"])
    assert stable(endpoint, spaced) == (spaced, [])
    broken = a_call('{"a":')
    assert stable(endpoint, broken) == (broken, [])


def test_every_rule_can_be_switched_off() -> None:
    fetch = a_tool("Fetch", defer_loading=True)
    said = [{"role": "user", "content": "Q"}, {"role": "system", "content": "S"}]
    body = a_body(tools=[fetch], messages=said)
    off = {rule.name for rule in RULES}
    assert stable(MESSAGES, body, off) == (body, [])
    for rule in ("billing-block", "deferred-tools", "late-system"):
        assert rule not in stable(MESSAGES, body, {rule})[1]
        assert rule in stable(MESSAGES, body, off - {rule})[1]


def test_a_deployment_file_switches_rules_off_by_their_names() -> None:
    names = sorted({rule.name for rule in RULES})
    args = IngressArgs.model_validate({"prompt_rules_off": names})
    assert args.to_ingress().prompt_rules_off == set(names)
    with pytest.raises(ValidationError):
        IngressArgs.model_validate({"prompt_rules_off": ["billing"]})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": "text", "tools": None, "messages": None},
        {"system": [3], "tools": [3], "messages": [3, {"role": "system"}, {"content": 4}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
    ],
)
def test_odd_bodies_are_left_to_the_readers(body: dict[str, Any]) -> None:
    for endpoint in (CHAT, RESPONSES, MESSAGES):
        json.dumps(stable(endpoint, body)[0])
