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
