"""Reasoning that clients bring back in OpenAI's `encrypted_content`."""

from __future__ import annotations

from typing import Any

import pytest

from cato.core.errors import InputError
from cato.wire.events import events_bytes
from cato.wire.sealed import asks, seal, sealed_events, unsealed


def a_thought(text: str = "Hm, é.") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": "rs_1", "type": "reasoning", "summary": [], "content": content}


def test_what_was_sealed_is_read_again_without_its_content() -> None:
    thought = a_thought()
    seal([thought, {"type": "message"}])
    brought = {k: v for k, v in thought.items() if k != "content"}
    assert unsealed(["x", brought]) == ["x", a_thought()]


def test_only_events_that_end_reasoning_change() -> None:
    ends = {"type": "response.output_item.done", "item": a_thought("a\n\nb")}
    told = {"type": "response.output_text.delta", "delta": "response.output_item.done"}
    raw = events_bytes([told, ends, told])
    changed = sealed_events(raw)
    assert changed.startswith(events_bytes([told]))
    assert changed.endswith(events_bytes([told]))
    assert b'"encrypted_content":"cato1:' in changed
    other = events_bytes([{"type": "response.completed"}])
    assert sealed_events(other) is other


def test_reasoning_that_others_have_encrypted_is_left_out_unless_it_has_words() -> None:
    summary = [{"type": "summary_text", "text": "I thought."}]
    foreign = {"type": "reasoning", "id": "rs_2", "encrypted_content": "gAAAA", "summary": []}
    readable = {**foreign, "summary": summary}
    assert unsealed([foreign, readable]) == [
        {"type": "reasoning", "id": "rs_2", "summary": summary}
    ]


@pytest.mark.parametrize("sealed", ["cato1:%", "cato1:/w=="])
def test_damaged_reasoning_is_refused(sealed: str) -> None:
    with pytest.raises(InputError, match="damaged"):
        unsealed([{"type": "reasoning", "encrypted_content": sealed, "summary": []}])


@pytest.mark.parametrize("items", ["text", None, [], [a_thought()]])
def test_other_input_is_left_as_it_is(items: object) -> None:
    assert unsealed(items) is items


@pytest.mark.parametrize(
    ("include", "is_asked"), [(None, False), (["reasoning.encrypted_content"], True), ("x", False)]
)
def test_the_field_is_for_those_who_ask(include: object, is_asked: bool) -> None:
    assert asks({"include": include}) is is_asked
