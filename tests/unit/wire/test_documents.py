"""Blocks of Messages that the engine cannot read become text, or are refused in plain words."""

from __future__ import annotations

from typing import Any

import pytest

from cato.core.errors import InputError
from cato.wire.documents import with_plain_blocks


def a_body(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": [*blocks]}]}


def said(body: dict[str, Any]) -> Any:
    return body["messages"][1]["content"]


def test_a_body_of_plain_blocks_is_left_as_it_is() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "u"}}
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}
    body = a_body({"type": "text", "text": "a"}, image, use, result)
    body["tools"] = [{"name": "read", "input_schema": {"type": "object"}}]
    assert with_plain_blocks(body) is body


def test_documents_and_search_results_become_text_also_in_results_of_tools() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    document = {
        "type": "document", "source": {"type": "content", "content": parts},
        "title": "T", "context": "From a wiki.", "citations": {"enabled": True},
    }  # fmt: skip
    found = {"type": "search_result", "title": "S", "source": "http://s", "content": parts}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": [document]}
    body = a_body(found, result)
    changed = with_plain_blocks(body)
    assert said(changed) == [
        {"type": "text", "text": "Search result: S http://s\none\ntwo"},
        {**result, "content": [{"type": "text", "text": "Document: T\nFrom a wiki.\none\ntwo"}]},
    ]
    assert said(body) == [found, result], "the client's own body is not changed"


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"type": "document", "source": {"type": "url", "url": "u"}}, "source of type url"),
        ({"type": "document"}, "source of type None"),
        ({"type": "search_result", "content": []}, "must consist of text blocks"),
        ({"type": "server_tool_use", "id": "s", "name": "web_search"}, "type server_tool_use"),
        ({"type": "web_search_tool_result", "content": []}, "type web_search_tool_result"),
    ],
)
def test_what_cannot_be_text_is_refused_by_name(block: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        with_plain_blocks(a_body(block))
