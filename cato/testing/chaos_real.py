"""Clients of a model that really computes: what it says undisturbed is asked before any fault.

An answer that was not lost must be that. One that was lost on its way must be that up to where it
was lost: what follows goes on from the text, which another engine may split into other tokens.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from cato.testing.chaos_clients import Call, Clients, Wrong, difference
from cato.testing.chaos_plan import Dialect

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def fibonacci(n):\n",
    "import json\n\ndef load(path):\n",
)
_LOST = re.compile(r"lost after (\d+) tokens, (\d+) characters")
# The count of tokens at a seam may be off by one, and there may be several.
_TOKENS_OFF = 3


class RealClients(Clients):
    """All calls are greedy, of few prompts and one length."""

    def __init__(self, tokens: int, **fields: Any) -> None:
        super().__init__(tokens=tokens, **fields)
        self._said: dict[tuple[Dialect, str], str] = {}

    async def _begin(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        for dialect in self._kinds:
            for prompt in PROMPTS:
                call = Call(dialect, prompt, self._tokens, time.monotonic())
                await self._read(session, call)
                self._said[dialect, prompt] = call.text
        await super()._begin(session, group)

    def _new_call(self) -> Call:
        call = super()._new_call()
        call.prompt, call.tokens = self._draw.choice(PROMPTS), self._tokens
        return call

    def _body(self, call: Call) -> tuple[str, dict[str, Any]]:
        path, body = super()._body(call)
        return path, {**body, "temperature": 0}

    def _expected(self, call: Call) -> str:
        return self._said[call.dialect, call.prompt]

    async def _check(self, session: aiohttp.ClientSession, call: Call) -> None:
        expected = self._expected(call)
        lost = [] if call.text == expected else await self._losses(session, call)
        if problem := problem_of(call, expected, lost):
            raise Wrong(problem)

    async def _losses(self, session: aiohttp.ClientSession, call: Call) -> list[int]:
        """Characters that had been sent at each loss, by the call's receipt."""
        url = f"{self._target.url}/v1/requests/{call.request_id}"
        async with session.get(url) as answer:
            return [int(found[2]) for found in _LOST.finditer(await answer.text())]


def problem_of(call: Call, expected: str, lost: Sequence[int]) -> str:
    """What is wrong with an answer that was lost after so many characters each time."""
    sent = min(lost, default=None)
    if problem := difference(call.text[:sent], expected[:sent]):
        return problem
    if len(call.ids) != 1 or len(call.ends) != 1:
        return f"{len(call.ids)} ids and ends {call.ends} in one answer"
    if abs((call.usage_tokens or 0) - call.tokens) > (_TOKENS_OFF if lost else 0):
        return f"usage of {call.usage_tokens} tokens for {call.tokens}"
    return ""
