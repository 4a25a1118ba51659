"""What a body asks for besides its conversation, in every dialect."""

from __future__ import annotations

from typing import Any

import pytest

from cato.core.errors import InputError
from cato.estimators.prompt_features import Asked, asked_of
from cato.wire.asked import format_of, last_message, tools_of

HELLO = {"role": "user", "content": "Hello."}
TOOL = {"type": "function", "function": {"name": "ls"}}


@pytest.mark.parametrize(
    ("endpoint", "body", "role", "text"),
    [
        ("completions", {"prompt": "def f("}, "user", "def f("),
        ("completions", {"prompt": [1, 2, 3]}, "user", ""),
        (
            "chat/completions",
            {"messages": [HELLO, {"role": "assistant", "content": "Hi."}]},
            "assistant",
            "Hi.",
        ),
        (
            "chat/completions",
            {"messages": [HELLO, {"role": "tool", "tool_call_id": "1", "content": "a.py"}]},
            "tool",
            "a.py",
        ),
        (
            "messages",
            {
                "messages": [
                    HELLO,
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "1", "content": "a.py"},
                        ],
                    },
                ]
            },
            "tool",
            "a.py",
        ),
        ("responses", {"input": "Hello."}, "user", "Hello."),
        (
            "responses",
            {
                "input": [
                    HELLO,
                    {"type": "function_call_output", "call_id": "1", "output": "a.py"},
                ]
            },
            "tool",
            "a.py",
        ),
        # Reasoning that is encrypted, or has no summary, has no text.
        (
            "responses",
            {"input": [HELLO, {"type": "reasoning", "id": "rs_1", "summary": []}]},
            "user",
            "Hello.",
        ),
        ("responses", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "user", ""),
        ("responses", {"input": []}, "user", ""),
    ],
)
def test_the_last_message_is_found_in_every_dialect(
    endpoint: str, body: dict[str, Any], role: str, text: str
) -> None:
    asked = asked_of(endpoint, body, 7, 2, (5,))
    assert (asked.role, asked.text) == (role, text)
    assert (asked.prompt_tokens, asked.turn, asked.earlier) == (7, 2, (5,))


def test_only_the_last_message_is_read() -> None:
    body = {"messages": [{"no": "role"}] * 3 + [HELLO]}
    assert last_message("chat/completions", body).text == "Hello."
    with pytest.raises(InputError, match="must have a role"):
        last_message("chat/completions", {"messages": [HELLO, {"no": "role"}]})


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, ""),
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "json_schema"),
        ({"text": {"format": {"type": "json_object"}}}, "json_object"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "json_schema"),
        ({"structured_outputs": {"json": {}, "regex": None}}, "json_schema"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice"),
        ({"guided_regex": "a+"}, "regex"),
    ],
)
def test_the_form_of_the_answer_has_one_name_in_every_dialect(
    body: dict[str, object], form: str
) -> None:
    assert format_of(body) == form


def test_a_call_has_its_tools_and_its_own_limit() -> None:
    body = {"messages": [HELLO], "tools": [TOOL, TOOL], "max_completion_tokens": 9}
    assert tools_of(body) == 2
    assert asked_of("chat/completions", body, 1, 0, ()) == Asked(1, "Hello.", max_tokens=9, tools=2)
