"""Requests of each client's shape, by hand: what holds for the real clients holds without them."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.live.agents.conftest import Served
from tests.live.agents.parts import missing
from tests.live.agents.runs import cached_in, of_request, receipt_of
from tests.live.agents.shapes import LONG, RESULT, SHAPES, Body, Said, Shape
from tests.live.agents.test_agents import CACHED_SHARE, FIRST_ERROR, LATER_ERROR

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
each = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
# Of the clients that name their session.
NAMING = [s for s in SHAPES if s.name in ("claude", "codex", "opencode")]


@dataclass(frozen=True)
class Turn:
    """One request, its answer, and what engine and CATO noted of it."""

    body: Body
    said: Said
    note: dict[str, Any]
    receipt: dict[str, Any]

    @property
    def estimate(self) -> float:
        llm = next(n["llm"] for n in self.receipt["nodes"] if n["llm"])
        return float(llm["expected_prompt_tokens"] / self.note["prompt_tokens"])


def asked(served: Served, shape: Shape, body: Body, session: str, agent: str = "") -> Turn:
    headers = {**shape.headers(session, agent), "Authorization": "Bearer none"}
    body = {"model": "cato-auto", **body}
    answer = httpx.post(f"{served.url}{shape.endpoint}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    id = answer.headers["x-request-id"]
    receipt = receipt_of(served.url, id)
    assert receipt is not None, id
    note = next(n for n in reversed(served.notes()) if of_request(n, id))
    said = read(answer.content, note["prompt_tokens"])
    return Turn(body, said, note, receipt)


def worked(served: Served, shape: Shape, session: str, agent: str = "") -> list[Turn]:
    """All turns of the shape's script; the second result is long and full of numbers."""
    turns = [asked(served, shape, shape.first(session), session, agent)]
    for result in (RESULT, LONG, RESULT):
        last = turns[-1]
        assert last.said.calls, last.said
        body = shape.next({k: v for k, v in last.body.items() if k != "model"}, last.said, result)
        turns.append(asked(served, shape, body, session, agent))
    assert turns[-1].said.text == "Done."
    return turns


def read(raw: bytes, prompt_tokens: int) -> Said:
    """An answer's stream, read without CATO's own readers."""
    text, thinking, calls = "", "", []
    for event in events(raw):
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            text += delta.get("content") or ""
            thinking += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if call.get("id"):
                    calls.append([call["id"], call["function"]["name"], ""])
                calls[call["index"]][2] += call["function"].get("arguments") or ""
        match event.get("type"):
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                block = event["content_block"]
                calls.append([block["id"], block["name"], ""])
            case "content_block_delta":
                delta = event["delta"]
                text += delta.get("text", "")
                thinking += delta.get("thinking", "")
                if "partial_json" in delta:
                    calls[-1][2] += delta["partial_json"]
            case "response.output_text.delta":
                text += event["delta"]
            case "response.reasoning_text.delta":
                thinking += event["delta"]
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                item = event["item"]
                calls.append([item["call_id"], item["name"], item["arguments"]])
    found = tuple((id, name, arguments) for id, name, arguments in calls)
    return Said(text, thinking, found, prompt_tokens, cached_in(raw))


def events(raw: bytes) -> Iterator[dict[str, Any]]:
    for line in raw.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def a_session() -> str:
    return str(uuid.uuid4())


@each
def test_turns_of_each_shape_arrive_whole_and_are_counted_and_cached(
    served: Served, shape: Shape
) -> None:
    turns = worked(served, shape, a_session())
    for turn in turns:
        assert not missing(turn.body, turn.note["prompt"]), shape
    first, *later = [turn.estimate for turn in turns]
    assert abs(first - 1) <= FIRST_ERROR, first
    assert all(abs(e - 1) <= LATER_ERROR for e in later), [f"{e:.3f}" for e in later]
    for before, after in itertools.pairwise(turns):
        assert after.said.cached_tokens == after.note["cached_tokens"]
        assert after.note["cached_tokens"] >= CACHED_SHARE * before.note["prompt_tokens"]
    assert len({turn.receipt["session"] for turn in turns}) == 1
    assert turns[0].receipt["session"]
    first_turn = turns[0].receipt["turn"]  # aider's prompt begins with an answer of an example
    assert [turn.receipt["turn"] - first_turn for turn in turns] == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", NAMING, ids=lambda shape: shape.name)
def test_a_sub_agent_has_a_session_under_its_parents(served: Served, shape: Shape) -> None:
    session, agent = a_session(), a_session()
    parent = asked(served, shape, shape.first(session), session)
    child = asked(served, shape, shape.first(agent), session, agent)
    assert child.receipt["session"] != parent.receipt["session"]
    assert child.receipt["parent"] == parent.receipt["session"]


# aider names no session, and its prompts begin with the same examples: those of one key are one.
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.name != "aider"], ids=lambda s: s.name)
def test_two_sessions_of_one_client_stay_two(served: Served, shape: Shape) -> None:
    sessions = [a_session(), a_session()]
    turns = [asked(served, shape, shape.first(s), s) for s in sessions]
    assert len({turn.receipt["session"] for turn in turns}) == 2


def test_what_all_sessions_of_claude_code_share_is_cached(served: Served) -> None:
    """Its billing block differs in every session, in front of tools and instructions."""
    shape = next(s for s in SHAPES if s.name == "claude")
    one, other = (asked(served, shape, shape.first(s), s) for s in (a_session(), a_session()))
    shared = one.note["prompt"].index("Improve the toy")
    assert other.note["prompt"][:shared] == one.note["prompt"][:shared]
    assert "billing" not in other.note["prompt"]
    if other.note["engine"] == one.note["engine"]:
        share = other.note["cached_tokens"] / other.note["prompt_tokens"]
        assert share > 0.8, share


def test_a_loaded_tool_costs_the_cache_once(served: Served) -> None:
    """Claude Code lists a tool that it has loaded among the others, in front of the history. It
    stays a tool of the request, as engines' parsers need its name and types."""
    shape = next(s for s in SHAPES if s.name == "claude")
    session = a_session()
    first = asked(served, shape, shape.first(session), session)
    body = shape.next(
        {k: v for k, v in first.body.items() if k != "model"}, first.said, "It is loaded."
    )
    about = "Reads a page from the web, which is seldom needed."
    schema = {"type": "object", "properties": {"url": {"type": "string"}}}
    loaded = {"name": "fetch", "description": about, "input_schema": schema, "defer_loading": True}
    body["tools"] = [loaded, *body["tools"]]
    reference = {"type": "tool_reference", "tool_name": "fetch"}
    body["messages"][-1]["content"][0]["content"] = [reference]
    later = asked(served, shape, body, session)
    assert later.note["prompt"].count(about) == 1
    body = shape.next(
        {k: v for k, v in later.body.items() if k != "model"}, later.said, "It was called."
    )
    last = asked(served, shape, body, session)
    assert last.note["cached_tokens"] >= CACHED_SHARE * later.note["prompt_tokens"]
    assert last.note["prompt"].count(about) == 1
