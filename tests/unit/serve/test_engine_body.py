"""What of a client's body an engine gets."""

from __future__ import annotations

from typing import Any

import pytest

from cato.serve.ingress.calls import engine_body

TOOLS = [{"type": "function", "function": {"name": "read"}}]


@pytest.mark.parametrize(
    "more",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "tool_choice": None},
        {"tool_choice": "none"},
        {"tool_choice": {"type": "auto"}},
        {"n": None, "logprobs": None, "stop": None},
        {"stream_options": {"include_usage": True}},
        {"model": "m", "stream": False, "user": "u", "cato": {}},
    ],
)
def test_fields_that_say_nothing_are_left_out(more: dict[str, Any]) -> None:
    assert engine_body({"prompt": "x", **more}, is_streamed=False) == {"prompt": "x"}


@pytest.mark.parametrize(
    "more",
    [
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "required"},
        {"max_tokens": None},
        {"stream_options": {"include_usage": True}},
        {"temperature": 0, "logprobs": False, "stop": []},
    ],
)
def test_fields_that_say_something_are_passed(more: dict[str, Any]) -> None:
    assert engine_body({"prompt": "x", **more}, is_streamed=True) == {"prompt": "x", **more}


@pytest.mark.parametrize("field", ["messages", "input"])
def test_fields_of_messages_that_say_nothing_are_left_out(field: str) -> None:
    # As the models of OpenAI's SDK and of others are serialized.
    said = [
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "y"}], "id": None},
    ]
    assert engine_body({field: said}, is_streamed=False)[field] == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
    ]
    assert engine_body({field: "x"}, is_streamed=False) == {field: "x"}
