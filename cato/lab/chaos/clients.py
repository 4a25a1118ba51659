"""Clients of a fault drill: they know every answer, and detect missing, repeated or wrong text.

The simulated engine's text is a function of the prompt, so each answer is compared in full,
whatever failed on the way.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import aiohttp

from cato.engines.simulated import simulated_text
from cato.lab.chaos.plan import LEAST_TOKENS, Dialect, Planned
from cato.lab.client import drawn_words, events

# A stream hangs when it is silent for this long.
HANG_S = 60.0
# A call that begins this long after a fault may still be delayed by it.
AFTERMATH_S = 2.0
# Uvicorn's own error responses name their character set.
PROXYS_500 = (500, "text/plain", b"Internal Server Error")
# Errors that clients are told to retry.
RETRY_STATUSES = (429, 503)


@dataclass(frozen=True, slots=True)
class Target:
    """The application under test; `seed` is that of its engines."""

    url: str
    model: str
    task_model: str
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call ended: `ok`, `refused`, `cut` (its ingress was killed), `wrong`, `failed` or
    `hung`."""

    kind: str
    dialect: Dialect
    problem: str = ""
    request_id: str = ""
    began_s: float = 0.0
    took_s: float = 0.0
    retry_after_s: float | None = None
    first_token_s: float = inf


@dataclass(slots=True)
class Struck:
    """An injected fault, and the stall of each call that it may have affected."""

    planned: Planned
    victim: str
    at_s: float
    waits_s: list[float] = field(default_factory=list)

    @property
    def recovery_s(self) -> float | None:
        """The longest stall; None when no call was in progress."""
        return max(self.waits_s, default=None)


class Wrong(Exception):
    """An answer differs from the expected one."""


class _Refused(Exception):
    """A well-formed error response: its code and its `Retry-After`."""

    def __init__(self, code: str, retry_after_s: float) -> None:
        super().__init__(code)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class Call:
    dialect: Dialect
    prompt: str
    tokens: int
    started_s: float
    text: str = ""
    ids: set[str] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)
    usage_tokens: int | None = None
    request_id: str = ""
    has_news: bool = False
    is_read: bool = False
    first_token_s: float = inf
    # Faults since which nothing has arrived, with the start of the stall.
    waits_for: list[tuple[Struck, float]] = field(default_factory=list)

    def came(self, now_s: float) -> None:
        """Part of the answer arrived."""
        self.has_news = True
        for struck, since_s in self.waits_for:
            struck.waits_s.append(now_s - since_s)
        self.waits_for.clear()


class Clients:
    """`streams` concurrent calls until `stop`.

    Without `keeps_all`, calls that ended well are only counted: in an hour their outcomes would
    take more memory than the application under test may grow.
    """

    def __init__(
        self,
        target: Target,
        *,
        streams: int,
        tokens: int,
        dialects: Mapping[Dialect, float],
        seed: int,
        ingress_killed_since: Callable[[float], bool],
        keeps_all: bool = True,
    ) -> None:
        self._keeps_all = keeps_all
        self._target = target
        self._streams = streams
        self._tokens = tokens
        self._kinds, self._weights = list(dialects), list(dialects.values())
        self._draw = random.Random(seed)
        self._number = 0
        self._ingress_killed_since = ingress_killed_since
        self._open: list[Call] = []
        self._recent: list[Struck] = []
        self._is_stopping = False
        self.begun = asyncio.Event()  # the setup before the first call is done
        self.kinds: Counter[str] = Counter()
        self.outcomes: list[Outcome] = []
        self.first_token_s = array("d")
        self.output_tokens = 0

    @property
    def under_way(self) -> int:
        return len(self._open)

    def strike(self, struck: Struck) -> None:
        """A fault is injected now: measure stalls of calls from here on."""
        for call in self._open:
            is_silent = call.dialect is Dialect.WHOLE  # it sends nothing before its end
            if not is_silent and not call.is_read:
                call.waits_for.append((struck, struck.at_s))
        self._recent = [s for s in self._recent if struck.at_s - s.at_s < AFTERMATH_S]
        self._recent.append(struck)

    def stop(self) -> None:
        """Begin no more calls; `run` returns when those in progress have ended."""
        self._is_stopping = True

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=HANG_S, sock_read=HANG_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            await self._begin(session, group)

    async def _begin(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        self.begun.set()
        for _ in range(self._streams):
            group.create_task(self._ask_forever(session))

    async def _ask_forever(self, session: aiohttp.ClientSession) -> None:
        while not self._is_stopping:
            outcome = await self._ask(session)
            if outcome.kind in ("refused", "cut"):
                await asyncio.sleep(0.5 + self._draw.random())

    async def _ask(self, session: aiohttp.ClientSession) -> Outcome:
        call = self._new_call()
        self._open.append(call)
        kind, problem, retry_after_s = "ok", "", None
        try:
            await self._read(session, call)
            call.is_read = True
            call.came(time.monotonic())
            await self._check(session, call)
        except _Refused as refusal:
            kind, problem, retry_after_s = "refused", str(refusal), refusal.retry_after_s
        except Wrong as wrong:
            kind, problem = "wrong", str(wrong)
        except TimeoutError:
            kind, problem = "hung", f"nothing came for {HANG_S:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            kind, problem = await self._broken(session, call), repr(error)
        finally:
            self._open.remove(call)
            now_s = time.monotonic()
            call.came(now_s)
        self.output_tokens += call.tokens if kind == "ok" else 0
        outcome = Outcome(
            kind, call.dialect, problem, call.request_id,
            call.started_s, now_s - call.started_s, retry_after_s, call.first_token_s,
        )  # fmt: skip
        self.note(outcome)
        return outcome

    def note(self, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        if self._keeps_all or outcome.kind != "ok":
            self.outcomes.append(outcome)

    async def _broken(self, session: aiohttp.ClientSession, call: Call) -> str:
        """A connection broke: expected when its ingress was killed, if the text was right."""
        if not self._ingress_killed_since(call.started_s):
            return "failed"
        return "cut" if await self._has_begun_right(session, call) else "failed"

    async def _has_begun_right(self, session: aiohttp.ClientSession, call: Call) -> bool:
        return self._expected(call).startswith(call.text)

    def _new_call(self) -> Call:
        draw = self._draw
        self._number += 1
        words = drawn_words(draw, 5)
        (dialect,) = draw.choices(self._kinds, self._weights)
        now_s = time.monotonic()
        call = Call(
            dialect, f"# {self._number}: {words}\n", draw.randint(LEAST_TOKENS, self._tokens), now_s
        )
        for struck in self._recent:
            if now_s - struck.at_s < AFTERMATH_S and dialect is not Dialect.WHOLE:
                call.waits_for.append((struck, now_s))
        return call

    def _body(self, call: Call) -> tuple[str, dict[str, Any]]:
        messages = [{"role": "user", "content": call.prompt}]
        asked: dict[str, Any] = {"model": self._target.model, "max_tokens": call.tokens}
        asked |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        match call.dialect:
            case Dialect.COMPLETIONS:
                return "completions", {**asked, "prompt": call.prompt}
            case Dialect.CHAT:
                return "chat/completions", {**asked, "messages": messages}
            case Dialect.TASK:
                return "chat/completions", {
                    **asked,
                    "model": self._target.task_model,
                    "messages": messages,
                }
            case Dialect.WHOLE:
                asked["stream"] = False
                del asked["stream_options"]
                return "completions", {**asked, "prompt": call.prompt}

    def _expected(self, call: Call) -> str:
        prompt = call.prompt
        if call.dialect is Dialect.CHAT:
            prompt = f"<|user|>{prompt}\n<|assistant|>"
        return simulated_text(self._target.seed, prompt, call.tokens)

    async def _read(self, session: aiohttp.ClientSession, call: Call) -> None:
        path, body = self._body(call)
        async with session.post(f"{self._target.url}/v1/{path}", json=body) as answer:
            call.request_id = answer.headers.get("x-request-id", "")
            if answer.status != 200:
                raise _refusal(answer, await answer.read())
            if call.dialect is Dialect.WHOLE:
                _note(call, json.loads(await answer.read()))
                return
            is_done = False
            async for event in events(answer):
                now_s = time.monotonic()
                if not call.has_news:
                    call.first_token_s = now_s - call.started_s
                    self.first_token_s.append(call.first_token_s)
                call.came(now_s)
                is_done = is_done or event is None
                if event is not None:
                    _note(call, event)
        if not is_done:
            raise aiohttp.ClientPayloadError("the stream ended without [DONE]")

    async def _check(self, session: aiohttp.ClientSession, call: Call) -> None:
        if problem := difference(call.text, self._expected(call)):
            raise Wrong(problem)
        if len(call.ids) != 1 or len(call.ends) != 1:
            raise Wrong(f"{len(call.ids)} ids and ends {call.ends} in one answer")
        if call.usage_tokens != call.tokens:
            raise Wrong(f"usage of {call.usage_tokens} tokens for {call.tokens}")


def difference(text: str, expected: str) -> str:
    """Where and how `text` differs from the expected text; empty when equal."""
    if text == expected:
        return ""
    pairs = enumerate(zip(text, expected, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(expected)))
    return (
        f"{len(text)} characters instead of {len(expected)}, different from {same}: "
        f"{text[same : same + 40]!r}, not {expected[same : same + 40]!r}"
    )


def _note(call: Call, value: Mapping[str, Any]) -> None:
    if "error" in value:
        raise Wrong(f"the stream ended with {value['error'].get('code')}")
    call.ids.add(value["id"])
    for choice in value["choices"]:
        delta = choice.get("delta")
        call.text += choice["text"] if delta is None else delta.get("content") or ""
        if choice["finish_reason"] is not None:
            call.ends.append(choice["finish_reason"])
    if value.get("usage"):
        call.usage_tokens = value["usage"]["completion_tokens"]


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> Exception:
    """Classify an error response: a well-formed refusal, or wrong."""
    words = body[:200].decode(errors="replace")
    what = f"status {answer.status}: {words}"
    try:
        error = json.loads(body)["error"]
        code = str(error["code"])
        has_all = {"message", "type", "param", "code"} <= error.keys()
    except (ValueError, KeyError, TypeError):
        # Without ingress replicas the proxy answers; Serve's sends 500 for 502 and 504.
        told = (answer.status, answer.headers.get("Content-Type"), body)
        is_proxy = answer.status in (502, 503, 504) or told == PROXYS_500
        return aiohttp.ClientPayloadError(what) if is_proxy else Wrong(what)
    if answer.status not in RETRY_STATUSES or not has_all:
        return Wrong(what)
    retry_after = answer.headers.get("Retry-After", "")
    if not retry_after.isdecimal():
        return Wrong(f"{what} with Retry-After {retry_after!r}")
    return _Refused(code, float(retry_after))
