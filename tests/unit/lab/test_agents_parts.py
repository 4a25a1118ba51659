"""The check that nothing of a request is lost must itself find what is lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.live.agents.parts import missing

LONG = "Say what you are about to do, and afterwards whether it has worked. " * 4
TOOL = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}
FETCH = {"name": "fetch", "description": "Reads a page.", "defer_loading": True}
BODY: dict[str, Any] = {
    "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"text": LONG}],
    "tools": [TOOL, FETCH],
    "messages": [
        {"role": "user", "content": "Begin."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "name": "read", "input": {"path": "a b"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "content": "a\tb"}]},
    ],
}
PROMPT = (
    f'name read description Reads a file. input_schema object {LONG}\nBegin.\nread path "a b"\na\tb'
)


def test_a_whole_prompt_misses_nothing() -> None:
    assert missing(BODY, PROMPT) == []


@pytest.mark.parametrize(
    ("prompt", "lost"),
    [
        (PROMPT.replace("Reads a file.", ""), "Reads a file."),
        (PROMPT.replace("a\tb", ""), "missing: a\tb"),
        (PROMPT.replace("Begin.\n", "") + "Begin.", "out of order: read"),
        (PROMPT + LONG, f"more than 1 times: {LONG}"),
    ],
)
def test_what_is_lost_moved_or_doubled_is_named(prompt: str, lost: str) -> None:
    assert any(found.startswith(lost) for found in missing(BODY, prompt)), missing(BODY, prompt)


def test_a_deferred_tool_is_looked_for_once_it_was_loaded() -> None:
    reference = {"type": "tool_reference", "tool_name": "fetch"}
    result = {"type": "tool_result", "content": [reference]}
    body = {**BODY, "messages": [*BODY["messages"], {"role": "user", "content": [result]}]}
    assert missing(body, f"{PROMPT} fetch") == ["Reads a page."]
    assert missing(body, f"{PROMPT} fetch Reads a page.") == []
