"""Ingress CPU time for an agent's prompt, excluding JSON parsing."""

from __future__ import annotations

from random import Random
from time import thread_time_ns
from typing import Any

from cato.serve.sessions import Hashing, SessionMemory
from cato.wire.endpoint import Endpoint
from cato.wire.prefix import block_chars
from cato.wire.reading import conversation_of
from cato.wire.stable import stable

PROMPT_TOKENS = 200_000
CHARS_PER_TOKEN = 3.5
FIRST_GOAL_US = 8_000.0
LATER_GOAL_US = 2_000.0

Body = dict[str, Any]


def turns(n: int = 20, seed: int = 0) -> tuple[list[int], list[int]]:
    """Nanoseconds for the first and for the next turn of a 200,000-token session; `n` each."""
    first = _body(Random(seed))
    more = [
        {"role": "assistant", "content": "I have read it. " * 20},
        {"role": "user", "content": "total += values[i] " * 60},
    ]
    later = {**first, "messages": [*first["messages"], *more]}
    firsts, laters = [], []
    for _ in range(n):
        memory = SessionMemory()
        firsts.append(_read(memory, first))
        laters.append(_read(memory, later))
    return firsts, laters


def _read(memory: SessionMemory, body: Body) -> int:
    began_ns = thread_time_ns()
    better, _ = stable(Endpoint.MESSAGES, body)
    conversation = conversation_of(Endpoint.MESSAGES, better)
    hashing = Hashing(block_chars(CHARS_PER_TOKEN), "m")
    memory.read("s", tuple(conversation.sections()), hashing, kind="k")
    return thread_time_ns() - began_ns


def _body(random: Random) -> Body:
    """Messages of Claude Code's sizes: 14 tools, a system text, results of 7,000 characters."""
    words = ["".join(random.choices("etaoinshrdlu_", k=random.randrange(2, 9))) for _ in range(999)]

    def text(chars: int) -> str:
        return " ".join(random.choices(words, k=chars // 6))

    said: list[Body] = [{"role": "user", "content": text(4_000)}]
    chars = 0
    while chars < PROMPT_TOKENS * CHARS_PER_TOKEN:
        id = f"c{len(said)}"
        call = {"type": "tool_use", "id": id, "name": "Read", "input": {"path": f"{id}.py"}}
        words_of_answer = {"type": "text", "text": text(300)}
        result = {"type": "tool_result", "tool_use_id": id, "content": text(7_000)}
        said.append({"role": "assistant", "content": [words_of_answer, call]})
        said.append({"role": "user", "content": [result]})
        chars += 7_300
    tools = [
        {"name": f"t{i}", "description": text(2_500), "input_schema": {"type": "object"}}
        for i in range(14)
    ]
    return {"system": [{"type": "text", "text": text(8_000)}], "tools": tools, "messages": said}
