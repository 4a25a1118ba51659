"""Drill clients of a real model: expected answers are recorded before any fault.

An answer that was never lost must equal the recorded one. A lost answer must equal it up to the
loss: it is then resumed from the text, which another engine may split into other tokens. It must
end at the requested length.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from cato.lab.chaos.clients import Call, Clients, Wrong, difference
from cato.lab.chaos.plan import Dialect

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def fibonacci(n):\n",
    "import json\n\ndef load(path):\n",
)
_LOST = re.compile(r"(?:lost|taken back) after (\d+) tokens, (\d+) characters")
# The token count where a stream is resumed may be off by one, and there may be several.
_TOKENS_OFF = 3
# An ingress sends its receipts to the Profiler a moment after the answer.
_TOLD_WITHIN_S = 30.0
_POLL_S = 0.2


class RealClients(Clients):
    """All calls are greedy, with few prompts and one length."""

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
        lost, tokens = [], call.tokens
        if call.text != expected:
            lost = await self._losses(session, call)
            tokens = await self._counted(session, call.text)
        if problem := problem_of(call, expected, lost, tokens):
            raise Wrong(problem)

    async def _has_begun_right(self, session: aiohttp.ClientSession, call: Call) -> bool:
        call.is_read = True  # the questions below are not part of it
        call.came(time.monotonic())
        expected = self._expected(call)
        try:
            return begins_right(call.text, expected) or begins_right(
                call.text, expected, await self._losses(session, call)
            )
        except Wrong:
            return False

    async def _losses(self, session: aiohttp.ClientSession, call: Call) -> list[int]:
        """Characters sent at each loss, from the call's receipt."""
        receipt = await self._told(session, "GET", f"v1/requests/{call.request_id}")
        return [int(found[2]) for found in _LOST.finditer(receipt.decode())]

    async def _counted(self, session: aiohttp.ClientSession, text: str) -> int:
        """Number of tokens in `text`, counted by an engine."""
        body = {"model": self._target.model, "prompt": text, "add_special_tokens": False}
        return int(json.loads(await self._told(session, "POST", "tokenize", body))["count"])

    async def _told(
        self, session: aiohttp.ClientSession, method: str, path: str, body: object = None
    ) -> bytes:
        """A fact about an answer; retried while faults or delayed reports hide it."""
        until_s = time.monotonic() + _TOLD_WITHIN_S
        while True:
            url = f"{self._target.url}/{path}"
            try:
                async with session.request(method, url, json=body) as answer:
                    content, status = await answer.read(), f"status {answer.status}"
                if answer.status == 200:
                    return content
            except aiohttp.ClientError as error:  # its proxy was killed
                status = repr(error)
            if time.monotonic() > until_s:
                raise Wrong(f"{status} for {path}")
            await asyncio.sleep(_POLL_S)


def begins_right(text: str, expected: str, lost: Sequence[int] = ()) -> bool:
    """Whether a cut answer is right so far; `lost`: characters sent at each loss."""
    return expected.startswith(text[: min(lost, default=None)])


def problem_of(call: Call, expected: str, lost: Sequence[int], tokens: int) -> str:
    """What is wrong with an answer of `tokens` tokens; `lost`: characters sent at each loss."""
    sent = min(lost, default=None)
    if problem := difference(call.text[:sent], expected[:sent]):
        return problem
    if len(call.ids) != 1 or len(call.ends) != 1:
        return f"{len(call.ids)} ids and ends {call.ends} in one answer"
    if tokens > call.tokens + _TOKENS_OFF:
        return f"{tokens} tokens of text for {call.tokens}"
    if abs((call.usage_tokens or 0) - call.tokens) > (_TOKENS_OFF if lost else 0):
        return f"usage of {call.usage_tokens} tokens for {call.tokens}"
    return ""
