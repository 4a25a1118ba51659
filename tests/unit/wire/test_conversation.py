"""Bodies of three dialects as one typed conversation: nothing that a model should read is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cato.core.errors import InputError
from cato.wire.conversation import Conversation, PartKind
from cato.wire.reading import conversation_of

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}

CHAT_BODY: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}],
    "messages": [
        {"role": "developer", "content": "SYSTEM"},
        {"role": "user", "content": [{"type": "text", "text": "QUESTION"}]},
        {
            "role": "assistant",
            "reasoning_content": "THOUGHT",
            "content": "WORDS",
            "tool_calls": [
                {"id": "c1", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "OUTPUT"},
    ],
}
RESPONSES_BODY: dict[str, Any] = {
    "tools": [
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read"}]},
        {"type": "custom", "name": "patch", "parameters": SCHEMA},
    ],
    "instructions": "SYSTEM",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "QUESTION"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "THOUGHT"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "WORDS"}]},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a.py"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "OUTPUT"},
    ],
}
MESSAGES_BODY: dict[str, Any] = {
    "tools": [
        {"name": "read", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        {"name": "fetch", "defer_loading": True, "input_schema": SCHEMA},
    ],
    "system": [{"type": "text", "text": "SYSTEM"}],
    "messages": [
        {"role": "user", "content": "QUESTION"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "THOUGHT", "signature": "x"},
                {"type": "text", "text": "WORDS"},
                {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "OUTPUT"}],
                }
            ],
        },
    ],
}
BODIES = [(CHAT, CHAT_BODY), (RESPONSES, RESPONSES_BODY), (MESSAGES, MESSAGES_BODY)]


@pytest.mark.parametrize(("dialect", "body"), BODIES)
def test_every_part_stands_once_in_the_prompt_and_in_order(
    dialect: str, body: dict[str, Any]
) -> None:
    prompt = conversation_of(dialect, body).prompt()
    words = ("read", "SYSTEM", "QUESTION", "THOUGHT", "WORDS", '{"path": "a.py"}', "OUTPUT")
    places = [prompt.index(word) for word in words]
    assert places == sorted(places)
    assert [prompt.count(word) for word in words[1:]] == [1] * (len(words) - 1)


@pytest.mark.parametrize(("dialect", "body"), BODIES)
def test_the_dialects_agree_on_what_was_said(dialect: str, body: dict[str, Any]) -> None:
    conversation = conversation_of(dialect, body)
    assert conversation.system == "SYSTEM"
    assert conversation.last_user_text == "QUESTION"
    assert conversation.answers == 1
    calls = [p for m in conversation.messages for p in m.parts if p.kind is PartKind.CALL]
    results = [p for m in conversation.messages for p in m.parts if p.kind is PartKind.RESULT]
    assert [(c.name, json.loads(c.text), c.call_id) for c in calls] == [
        ("read", {"path": "a.py"}, "c1")
    ]
    assert [(r.text, r.call_id) for r in results] == [("OUTPUT", "c1")]


def test_more_messages_leave_the_first_sections_as_they_are() -> None:
    whole = list(conversation_of(CHAT, CHAT_BODY).sections())
    for n in range(1, len(CHAT_BODY["messages"])):
        shorter = {**CHAT_BODY, "messages": CHAT_BODY["messages"][:n]}
        assert list(conversation_of(CHAT, shorter).sections()) == whole[: n + 1]


def test_marks_that_no_model_reads_are_not_in_a_tools_text() -> None:
    conversation = conversation_of(MESSAGES, MESSAGES_BODY)
    assert "cache_control" not in conversation.tools[0].text
    assert [t.name for t in conversation.tools] == ["read"]
    assert [t.name for t in conversation.deferred] == ["fetch"]
    assert "fetch" not in conversation.prompt()


def test_tools_of_a_namespace_have_its_name_and_its_description_stays() -> None:
    space = {
        "type": "namespace",
        "name": "agents",
        "description": "SPAWNS",
        "tools": [{"type": "function", "name": "spawn"}],
    }
    call = {"type": "function_call", "namespace": "agents", "name": "spawn", "arguments": "{}"}
    said = conversation_of(RESPONSES, {"tools": [space], "input": [call]})
    assert [t.name for t in said.tools] == ["agents", "agents__spawn"]
    assert said.prompt().count("SPAWNS") == 1
    assert said.messages[0].parts[0].name == "agents__spawn"


def test_an_image_costs_no_text_and_what_is_unknown_is_counted_as_json() -> None:
    content = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "novelty", "value": 3},
    ]
    said = conversation_of(CHAT, {"messages": [{"role": "user", "content": content}]})
    image, unknown = said.messages[0].parts
    assert (image.kind, image.text) == (PartKind.IMAGE, "")
    assert '"novelty"' in unknown.text


def test_calls_that_follow_each_other_are_one_answer() -> None:
    call = {"type": "function_call", "name": "read", "arguments": "{}", "call_id": "c"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    said = conversation_of(RESPONSES, {"input": [call, call, output, output, call]})
    assert said.answers == 2


@pytest.mark.parametrize(
    ("dialect", "body", "field"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [3]}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.content"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (MESSAGES, {"messages": [{"role": "user", "content": [4]}]}, "messages.content"),
    ],
)
def test_what_is_no_conversation_is_refused_by_field(
    dialect: str, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as error:
        conversation_of(dialect, body)
    assert error.value.param == field


def test_a_second_step_of_vercels_ai_sdk_names_the_setting_that_sends_items() -> None:
    """As `@ai-sdk/openai` sends it by default, from its first call of a tool on."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is Paris?"}]},
        {"type": "item_reference", "id": "rs_1"},
        {"type": "item_reference", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    with pytest.raises(InputError, match="store: false"):
        conversation_of(RESPONSES, {"input": items})


def test_an_empty_conversation_has_no_words() -> None:
    assert Conversation().last_user_text == Conversation().system == ""
    assert Conversation().prompt() == "<|assistant|>"
