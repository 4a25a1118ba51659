"""Continuous batching with a profile's timings: which requests run, and what a step costs.

As in vLLM, one step is the next chunk of waiting prompts plus one token for every running request.
A request is admitted when its prompt and whole answer fit the KV cache. The answer's length is
known here, so nothing is ever preempted, which makes a full cache look slightly too good. Cached
prompt tokens cost no time, unless they lie in host memory: then they are loaded first, one request
after the other, beside the steps. A `DueDateRule`, if given, plans each step, as it does in vLLM.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cato.core.errors import ContextLengthError
from cato.core.kv_events import KvEvent
from cato.core.pool.prefill import NOTHING_DUE, CallTarget, DecodingCall, DueDateRule, PromptCall
from cato.core.prefix_cache import Holding, PrefixCache
from cato.core.profile import Profile
from cato.engines.simulated.asked import Prompt

DEFAULT_BATCHED_TOKENS = 2048  # vLLM's server default: prompt tokens per step


@dataclass(eq=False, slots=True)
class Run:
    """One request inside the engine. Its answer is known from the start, its timing is not.

    `hashes` are those of the whole blocks of its prompt and answer; empty without a cache.
    """

    prompt: Prompt
    pieces: Sequence[str]
    hashes: Sequence[int] = ()
    id: str = ""
    target: CallTarget = NOTHING_DUE
    asked_at_s: float = 0.0
    # Time of its first token; None before.
    begun_at_s: float | None = None
    prefilled_tokens: int = 0
    emitted_tokens: int = 0
    emitted_chars: int = 0
    holding: Holding | None = None
    # When its blocks will have been loaded from host memory; -inf: it waits for none.
    loaded_s: float = -math.inf
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kv_tokens(self) -> int:
        return self.prompt.tokens + len(self.pieces)

    @property
    def is_finished(self) -> bool:
        return self.emitted_tokens >= len(self.pieces)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache at admission."""
        return self.holding.cached_tokens if self.holding else 0


class Batch:
    """The waiting and running requests of one engine. Callers pass in the time."""

    def __init__(
        self,
        profile: Profile,
        max_running: int,
        batched_tokens: int,
        block_tokens: int,
        prompt_cap_tokens: int = 0,
        host_tokens: int = 0,
        rule: DueDateRule | None = None,
        tell: Callable[[KvEvent], None] | None = None,
    ) -> None:
        """`batched_tokens` is the token budget of a step, `prompt_cap_tokens` the most that one
        prompt gets of it beside other requests (0: all). `host_tokens` tokens evicted from the KV
        cache stay in host memory. `rule` plans the steps (None: prompts get the whole budget, in
        order of arrival or priority). `tell` is called with the cache's events."""
        self._rule = rule
        self._profile = profile
        self._max_running = max_running
        self._batched_tokens = batched_tokens
        self._prompt_cap_tokens = prompt_cap_tokens
        self._cache = PrefixCache(profile.kv_capacity_tokens, block_tokens, host_tokens, tell)
        self._loads_end_s = -math.inf
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Run]] = []
        self.running: list[Run] = []

    @property
    def is_idle(self) -> bool:
        return not self.running and not self._waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_cache_usage(self) -> float:
        return min(1.0, self._cache.usage)

    def add(self, run: Run, priority: int) -> None:
        """Raise `ContextLengthError` for a request that can never fit."""
        blocks = self._cache.blocks_for(run.kv_tokens)
        if blocks > self._cache.capacity_blocks:
            raise ContextLengthError(
                f"prompt and answer of {run.kv_tokens} tokens do not fit the "
                f"{self._profile.kv_capacity_tokens} tokens of the KV cache"
            )
        heapq.heappush(self._waiting, (priority, next(self._arrivals), run))

    def remove(self, run: Run) -> None:
        """Remove a request that ended or was aborted. Idempotent."""
        if run in self.running:
            self.running.remove(run)
        elif not run.is_finished:
            self._waiting = [entry for entry in self._waiting if entry[2] is not run]
            heapq.heapify(self._waiting)
        if run.holding is not None and run.holding.reserved:
            self._cache.release(run.holding)

    def clear(self) -> list[Run]:
        """Drop all requests and the cache; returns the requests."""
        runs = [*self.running, *(entry[2] for entry in self._waiting)]
        self.running, self._waiting = [], []
        for run in runs:
            run.holding = None
        old, self._loads_end_s = self._cache, -math.inf
        self._cache = PrefixCache(old.capacity_tokens, old.block_tokens, old.host_tokens, old.tell)
        return runs

    def plan_step(self, now_s: float) -> tuple[list[Run], float | None]:
        """The requests that get a token in the next step, and its duration: `Profile.step_s`.

        None when nothing can run before `next_load_s`: all wait for blocks from host memory.
        """
        planned: dict[str, int] | None = None
        if self._rule is None:
            self._admit(now_s)
            self._join(now_s)
        else:
            self._join(now_s)
            planned = self._planned(self._rule, now_s)
        running = [run for run in self.running if run.loaded_s <= now_s]
        if not running:
            return [], None
        emitting = [run for run in running if run.prefilled_tokens >= run.prompt.tokens]
        held = sum(run.prefilled_tokens + run.emitted_tokens for run in running)
        batch, prompt_tokens, attended = len(emitting), 0, 0.0
        pieces: list[tuple[int, int]] = []  # tokens, and tokens before them
        most = room = max(1, self._batched_tokens - batch)  # decoding comes first
        if (
            planned is None
            and self._prompt_cap_tokens
            and len(self.running) + len(self._waiting) > 1
        ):
            most = min(room, self._prompt_cap_tokens)
        for run in running:
            piece = min(run.prompt.tokens - run.prefilled_tokens, room, most)
            if planned is not None:
                piece = min(piece, planned.get(run.id, 0))
            if piece > 0:
                pieces.append((piece, run.prefilled_tokens))
                room -= piece
                prompt_tokens += piece
                attended += piece * (run.prefilled_tokens + piece / 2)
                run.prefilled_tokens += piece
                self._note_computed(run, run.prefilled_tokens)
                if run.prefilled_tokens == run.prompt.tokens:
                    emitting.append(run)
        ended = len(emitting) - batch
        step_s = self._profile.step_s(batch, held, prompt_tokens, ended, attended)
        if self._rule is not None:
            self._rule.law.saw(step_s, batch, pieces)
        return emitting, step_s

    def _planned(self, rule: DueDateRule, now_s: float) -> dict[str, int]:
        """The tokens that each prompt gets; newly admitted prompts start running."""
        while True:
            loaded = [run for run in self.running if run.loaded_s <= now_s]
            decoding = []
            for run in loaded:
                if run.emitted_tokens:
                    run.begun_at_s = now_s if run.begun_at_s is None else run.begun_at_s
                    elapsed_s = now_s - run.begun_at_s
                    decoding.append(DecodingCall(run.emitted_tokens, elapsed_s, run.target.tpot_s))
            waiting = {run.id: entry for entry in self._waiting if (run := entry[2])}
            prompts = [self._asked(run, 0) for run in loaded if not run.emitted_tokens]
            prompts += [self._asked(run, priority) for priority, _, run in waiting.values()]
            pieces = rule.plan(
                now_s,
                decoding,
                prompts,
                room_tokens=self._batched_tokens,
                places=self._max_running - (len(self.running) - len(loaded)),
                free_blocks=self._cache.free_blocks,
            )
            for id in [id for id in pieces if id in waiting]:
                if not self._let_in(waiting[id][2], now_s):
                    return pieces
                self._waiting.remove(waiting[id])
                heapq.heapify(self._waiting)
                if self.running[-1].loaded_s > now_s:
                    break  # others get its budget until its blocks are loaded
            else:
                return pieces

    def _asked(self, run: Run, priority: int) -> PromptCall:
        computed, blocks = run.prefilled_tokens, 0  # a running request has its blocks reserved
        if run.holding is None:
            tokens = run.prompt.tokens
            computed = self._cache.cached_tokens(run.hashes, tokens)
            blocks = self._cache.needed_blocks(run.hashes, tokens, run.kv_tokens)
        return PromptCall(
            run.id,
            run.asked_at_s,
            run.prompt.tokens - computed,
            computed,
            run.target,
            priority,
            blocks,
            is_running=run.holding is not None,
        )

    def end_step(self, emitting: Sequence[Run]) -> None:
        """End the step: one token for each request that is still wanted."""
        for run in emitting:
            if run not in self.running:
                continue
            run.emitted_chars += len(run.pieces[run.emitted_tokens])
            run.emitted_tokens += 1
            # The newest token has no keys and values yet.
            self._note_computed(run, run.prompt.tokens + run.emitted_tokens - 1)
            run.news.set()
            if run.is_finished:
                self.remove(run)

    def _note_computed(self, run: Run, tokens: int) -> None:
        """Record that `tokens` are computed. A block is complete when its text was sent, too."""
        assert run.holding is not None, "a running request holds blocks"
        self._cache.compute(run.holding, min(tokens, run.prompt.tokens_with(run.emitted_chars)))

    @property
    def next_load_s(self) -> float:
        """When the next waiting request has its blocks loaded."""
        return min(run.loaded_s for run in self.running)

    def _admit(self, now_s: float) -> None:
        while self._waiting and len(self.running) < self._max_running:
            if not self._let_in(self._waiting[0][2], now_s):
                return  # strict order: a smaller one behind it must not starve it
            heapq.heappop(self._waiting)

    def _join(self, now_s: float) -> None:
        """Requests whose blocks have been loaded come behind those that run, as in vLLM."""
        ready = [run for run in self.running if -math.inf < run.loaded_s <= now_s]
        for run in ready:
            run.loaded_s = -math.inf
            self.running.remove(run)
            self.running.append(run)

    def _let_in(self, run: Run, now_s: float) -> bool:
        """Start the request if there is room for it."""
        run.holding = self._cache.admit(run.hashes, run.prompt.tokens, run.kv_tokens, run.id)
        if run.holding is None:
            return False
        run.prefilled_tokens = run.holding.cached_tokens
        if run.holding.loaded_tokens:
            load_s = run.holding.loaded_tokens * self._profile.host_load_token_s
            self._loads_end_s = run.loaded_s = max(now_s, self._loads_end_s) + load_s
        self.running.append(run)
        return True
