"""Agents' sessions over HTTP: users who play recorded sessions with their think times.

The same plans (`cato.sim.session_plans.plans_of`) and the same target rules are played in virtual
time by `Users`; here a turn is a chat request with the trace's blocks as text. It is asked again
when it is refused, or when it has no text within its client's patience. The prompts of each run
begin with different words, so that nothing is cached from the run before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

from cato.core.profile import Profile
from cato.lab.live.client import Ask, Seen, TaskClient
from cato.lab.live.prediction import Prediction
from cato.lab.live.prompts import answer_end, stops_for
from cato.lab.live.traffic import SessionTraffic
from cato.lab.live.workflows import MAX_TOKENS, LiveTask
from cato.lab.studies import agent_fleet as study
from cato.sim.fleet import PoolSetup
from cato.sim.playing import RETRIES, Playing, TurnRules
from cato.sim.session_plans import BETWEEN_SESSIONS_S, PlannedSession, UserPlan
from cato.sim.sessions import Users
from cato.sim.tasks import SimTask
from cato.wire.endpoint import Endpoint
from cato.wire.reading import conversation_of

CHAT = "/v1/chat/completions"
# Requests with a tool are agents' turns, which have agents' targets.
_TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "", "parameters": {"type": "object"}},
}
# The words that decide the answer's end are the last of the prompt, which no other prompt shares.
_CHOICE_CHARS = 8


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """The end of a prompt, which makes the simulated engine answer with `output_tokens`."""

    tail: str
    stops: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int


class Prompts:
    """Requests for turns: the trace's blocks as text, and endings that fix the answers' lengths."""

    def __init__(self, model: str, profile: Profile, engine_seed: int, salt: str) -> None:
        self._model = model
        self._profile = profile
        self._engine_seed = engine_seed
        self._tool = {**_TOOL, "function": {**_TOOL["function"], "description": salt}}  # type: ignore[dict-item]
        self._chars = round(study.BLOCK_TOKENS * profile.chars_per_token)
        self._found: dict[str, TurnPrompt] = {}

    def changed(self, task: SimTask) -> SimTask:
        """The task with the lengths of the request actually sent."""
        found = self.find(task)
        (node,) = task.nodes
        node = replace(node, prompt_tokens=found.prompt_tokens, output_tokens=found.output_tokens)
        return replace(task, nodes=(node,))

    def find(self, task: SimTask) -> TurnPrompt:
        """Searched once per turn; takes some milliseconds."""
        known = self._found.get(task.id)
        if known is None:
            known = self._found[task.id] = self._search(task)
        return known

    def ask(self, task: SimTask) -> Ask:
        """The chat request of a turn, with its session, targets and the client's patience."""
        found = self.find(task)
        body = self._body(self._shared(task) + found.tail, found.stops)
        body["cato"] = {"sla": {"metric": "ttft", "target_ms": 1000 * task.target_s}}
        headers = {
            "X-CATO-Session": f"{self._tool['function']['description']}/{task.session}",  # type: ignore[index]
            "X-CATO-TPOT-Ms": f"{1000 * task.tpot_target_s:.3f}",
            "X-Stainless-Timeout": f"{task.patience_s:.1f}",
        }
        return Ask(CHAT, body, is_plain=True, headers=headers)

    def _search(self, task: SimTask) -> TurnPrompt:
        (node,) = task.nodes
        left = round(node.prompt_tokens * self._profile.chars_per_token)
        left -= len(node.blocks) * self._chars + _CHOICE_CHARS
        own = _text(task.id, max(0, left))
        marked = self._rendered(self._shared(task) + own + "\0")
        head, _, end = marked.partition("\0")
        stops = stops_for(node.output_tokens)
        draw = random.Random(task.id)
        choice, output_tokens = answer_end(
            head, end, _CHOICE_CHARS, node.output_tokens, stops, self._engine_seed, draw
        )
        tokens = self._profile.count_tokens(head + choice + end)
        return TurnPrompt(own + choice, stops, tokens, output_tokens)

    def _shared(self, task: SimTask) -> str:
        return "".join([_text(str(block), self._chars) for block in task.nodes[0].blocks])

    def _rendered(self, text: str) -> str:
        return conversation_of(Endpoint.CHAT, self._body(text, ())).prompt()

    def _body(self, text: str, stops: Sequence[str]) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "tools": [self._tool],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": min(MAX_TOKENS, self._profile.context_tokens // 8),
            "stop": list(stops),
            "ignore_eos": True,
        }


def _text(name: str, chars: int) -> str:
    """Text of `chars` characters with a unique beginning."""
    digest = blake2b(name.encode(), digest_size=32).hexdigest()
    return (digest * (chars // len(digest) + 1))[:chars]


class Player:
    """Plays plans on a live application."""

    def __init__(
        self, client: TaskClient, prompts: Prompts, rules: TurnRules, done: Callable[[], None]
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._rules = rules
        self._done = done
        self._start_s = 0.0
        self._seen: dict[str, Seen] = {}
        self._group = asyncio.TaskGroup()

    async def play(self, plans: Sequence[UserPlan]) -> Mapping[str, Seen]:
        """Results by turn id; returns when all turns have ended."""
        self._start_s = time.perf_counter()
        async with self._group:
            for plan in plans:
                begin = partial(self._next, iter(plan.parts))
                self._group.create_task(self._later(plan.start_s, begin))
        return self._seen

    def _next(self, parts: Iterator[PlannedSession]) -> None:
        planned = next(parts, None)
        if planned is None:
            return
        playing = planned.play(0.0, partial(self._next, parts))
        for index in playing.first_turns():
            self._group.create_task(self._turn(playing, index))

    async def _later(self, after_s: float, call: Callable[[], None]) -> None:
        await asyncio.sleep(after_s)
        call()

    async def _turn(self, playing: Playing, index: int) -> None:
        due_s = time.perf_counter() + playing.gap_s(index, self._rules.scale)
        now_s = due_s - self._start_s
        task, _, _ = self._rules.task(playing, index, now_s, 0.0)
        task = self._prompts.changed(task)
        ask = self._prompts.ask(task)
        await asyncio.sleep(due_s - time.perf_counter())
        live = LiveTask(task, {})
        seen = self._seen[task.id] = await self._client.send(ask, live, due_s)
        self._done()
        for _ in range(RETRIES):
            if not seen.is_refused and not seen.is_left:
                break
            await asyncio.sleep(seen.retry_after_s)
            seen = await self._client.send(ask, live, time.perf_counter())
        for follower in playing.end(index):
            self._group.create_task(self._turn(playing, follower))
        if playing.left == 0:
            between_s = self._rules.scale * BETWEEN_SESSIONS_S
            self._group.create_task(self._later(between_s, playing.then))


def predicted(
    traffic: SessionTraffic,
    plans: Sequence[UserPlan],
    setup: PoolSetup,
    rules: TurnRules,
    prompts: Prompts,
    seed: int,
) -> Prediction:
    """The same plans in virtual time, with the lengths of the requests sent."""
    users = Users(
        traffic.sessions(),
        len(plans),
        replace(setup, cache_block_tokens=study.BLOCK_TOKENS),
        rules.length,
        seed,
        prompts.changed,
        plans=plans,
        scale=rules.scale,
    )
    users.run(float("inf"))
    counted = traffic.counted(plans, rules.scale)
    return Prediction([users.played[id].outcome for id in counted])
