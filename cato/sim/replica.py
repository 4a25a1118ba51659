"""A simulated engine: one replica with iteration-level continuous batching, in virtual time.

The engine runs steps. A step gives each decoding sequence one token and may process prompts.
Without chunking a prompt step stalls decoding (vLLM's first scheduler, SABER's testbed); with
chunking each step has a token budget that decoding uses first (vLLM V1). Step times come from a
`Profile` (`Profile.step_s`).

Equal steps are computed as one stretch (`cato.sim.steps`). A new request cuts the stretch at the
end of the current step.

With a prefix cache a request is admitted when there are free blocks for its prompt and its answer:
the length is known here, so nothing is preempted, as in the simulated engine. Cached prompt tokens
are not computed. Those in host memory are loaded first, one request after the other, in parallel
to the steps. A request may ask to retain its blocks for a time after its end. They are released by
the next request of its session, by the end of that time, or for a request that would find no room
although nothing runs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from cato.core.ids import InvocationId
from cato.core.pool.prefill import DecodingCall, DueDateRule, PromptCall
from cato.core.prefix_cache import Holding, PrefixCache
from cato.core.profile import Profile
from cato.sim.steps import Sequence, Stretch, attended, stretch_of

__all__ = ["MAX_BATCHED_TOKENS", "FactKind", "Sequence", "SimReplica"]

# vLLM's default token budget of a step; prompts beyond it wait for the next.
MAX_BATCHED_TOKENS = 8192


# Prompts of a step, with their tokens in it.
Pieces = tuple[tuple[Sequence, int], ...]


class FactKind(Enum):
    FIRST_TOKEN = 1
    DONE = 2


@dataclass(slots=True, eq=False)
class SimReplica:
    """`chunk_tokens` None: a prompt step stalls decoding. `report_steps`: steps between two token
    reports (0: none). `cache`: KV blocks that later prompts may reuse (None: prompts are computed
    whole). `prompt_cap_tokens`: maximum tokens of one prompt per step beside other requests
    (vLLM's `long_prefill_token_threshold`; 0: the whole budget). `fetchable`: number of a prompt's
    tokens that other replicas hold (None: no fetching). `rule` plans the steps with prompts, as in
    vLLM (None: prompts get the whole budget in order of arrival or priority). The caller wakes it
    at `wake_s` and acts on the facts.
    """

    profile: Profile
    max_running: int
    chunk_tokens: int | None = None
    report_steps: int = 0
    prefill_together: bool = True
    cache: PrefixCache | None = None
    prompt_cap_tokens: int = 0
    fetchable: Callable[[Sequence], int] | None = None
    rule: DueDateRule | None = None
    wake_s: float = math.inf
    busy_s: float = 0.0
    preemptions: int = 0
    tokens_out: int = 0
    _waiting: list[tuple[int, int, Sequence]] = field(default_factory=list)
    _prefilling: list[Sequence] = field(default_factory=list)
    # Admitted, waiting for blocks from host memory; with the time when these are loaded.
    _loading: deque[tuple[float, Sequence]] = field(default_factory=deque)
    _loads_end_s: float = -math.inf
    _decoding: dict[InvocationId, Sequence] = field(default_factory=dict)
    _ends: list[tuple[int, int, Sequence]] = field(default_factory=list)
    _context_tokens: int = 0
    _step: int = 0
    _reported_step: int = 0
    _count: int = 0
    _stretch: Stretch | None = None
    _at_boundary: bool = False
    _cancelled: list[Sequence] = field(default_factory=list)
    # The first waiting request found too few free blocks, and none were freed since.
    _lacks_blocks: Sequence | None = None
    # By session, in order of expiry: when it expires, and the blocks.
    _retained: dict[str, tuple[float, Holding]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rule is not None and (self.cache is None or self.chunk_tokens is None):
            raise ValueError("a rule for steps needs a prefix cache and a step's token budget")

    @property
    def held(self) -> int:
        return len(self._waiting) + self._running

    @property
    def _running(self) -> int:
        return len(self._loading) + len(self._prefilling) + len(self._decoding)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and no step is planned."""
        return self._stretch is None and not self._at_boundary

    def submit(self, now_s: float, sequence: Sequence) -> None:
        """Give the engine a request; it joins at the end of the current step."""
        assert sequence.prompt_tokens > 0, f"{sequence.id} has no prompt"
        sequence.prefill_left = sequence.prompt_tokens + sequence.generated
        sequence.asked_at_s = now_s
        if self.cache is not None:
            blocks = self.cache.blocks_for(sequence.prompt_tokens + sequence.output_tokens)
            assert blocks <= self.cache.capacity_blocks, f"{sequence.id} can never fit"
        self._count += 1
        heapq.heappush(self._waiting, (sequence.priority, self._count, sequence))
        self._cut(now_s)

    def cancel(self, now_s: float, id: InvocationId) -> None:
        """Remove a request at the end of the current step; it is not reported again.

        The same id may be submitted again at once. No-op when it has ended.
        """
        decoding = self._decoding.get(id)
        held = [] if decoding is None else [decoding]
        held += self._prefilling
        held += [s for _, s in self._loading]
        held += [s for _, _, s in self._waiting]
        for sequence in held:
            if sequence.id == id and not sequence._is_cancelled:
                sequence._is_cancelled = True
                self._cancelled.append(sequence)
                self._cut(now_s)
                return

    def tokens(self, now_s: float) -> Iterable[tuple[InvocationId, int]]:
        """Tokens that each request has generated by `now_s`, earlier attempts included."""
        step, stretch = self._step, self._stretch
        if stretch is not None and stretch.batch:
            step += stretch.steps_over(now_s)
        found = [
            (id, step - s._zero_step) for id, s in self._decoding.items() if not s._is_cancelled
        ]
        if self._prefilling or self._waiting or self._loading:
            loading = (s for _, s in self._loading)
            others = (*self._prefilling, *loading, *(s for _, _, s in self._waiting))
            found += [(s.id, s.generated) for s in others if not s._is_cancelled]
        return found

    def busy_until_s(self, now_s: float) -> float:
        """Seconds computed by `now_s`, including the current step."""
        stretch = self._stretch
        if stretch is None:
            return self.busy_s
        return self.busy_s + min(now_s, stretch.end_s) - stretch.start_s

    def wake(self, now_s: float) -> tuple[list[tuple[FactKind, Sequence]], bool]:
        """End the stretch: returns what happened, and whether a token report is due.

        The engine pauses until `go_on`, so that requests submitted now join the next step.
        """
        facts: list[tuple[FactKind, Sequence]] = []
        stretch, self._stretch = self._stretch, None
        self._at_boundary = True
        self.wake_s = math.inf
        if stretch is None:
            return facts, False
        self.busy_s += now_s - stretch.start_s
        batch, steps = stretch.batch, stretch.steps
        for sequence, tokens in stretch.prefilled:
            sequence.prefill_left -= tokens * steps
            self._context_tokens += tokens * steps
            if self.cache is not None and sequence._holding is not None:
                whole = sequence.prompt_tokens + sequence.generated
                self.cache.compute(sequence._holding, whole - sequence.prefill_left)
        if batch:
            step = self._step = self._step + steps
            grown = batch * steps
            self._context_tokens += grown
            self.tokens_out += grown
            ends = self._ends
            while ends and ends[0][0] <= step:
                sequence = heapq.heappop(ends)[2]
                if not sequence._is_gone:
                    self._end(sequence, now_s)
                    facts.append((FactKind.DONE, sequence))
        for sequence, _ in stretch.prefilled:
            if sequence.prefill_left == 0:
                self._prefilling.remove(sequence)
                facts += self._first_token(sequence, now_s)
        is_due = 0 < self.report_steps <= self._step - self._reported_step and bool(self._decoding)
        if is_due:
            self._reported_step = self._step
        if self._cancelled:
            facts = [fact for fact in facts if not fact[1]._is_cancelled]
        return facts, is_due

    def go_on(self, now_s: float) -> None:
        """Plan the next stretch; `wake_s` is its end (inf: nothing to do)."""
        self._at_boundary = False
        if self._cancelled:
            for sequence in self._cancelled:
                self._remove(sequence)
            self._cancelled.clear()
        if self._waiting:
            self._release_retained(now_s)
            self._take_blocks()
            if self.rule is None:
                self._admit(now_s)
        while self._loading and self._loading[0][0] <= now_s:
            self._join(self._loading.popleft()[1])
        planned: Pieces = ()
        if self.rule is not None and self.cache is not None and (self._waiting or self._prefilling):
            planned = self._planned(self.rule, self.cache, now_s)
        running = len(self._decoding) + len(self._prefilling)
        if running == 0:
            self._stretch = None
            self.wake_s = self._loading[0][0] if self._loading else math.inf
            return
        has_freed = running > 1 and self.cache is None and self._make_room()
        stretch = self._stretch = self._plan(now_s, planned)
        if has_freed:
            stretch.steps = 1  # waiting requests may fit into the freed blocks next step
        if self._loading and stretch.steps > 1:
            stretch.steps = stretch.steps_until(self._loading[0][0])
        if self._lacks_blocks is not None and self._retained and stretch.steps > 1:
            until_s, _ = next(iter(self._retained.values()))
            stretch.steps = stretch.steps_until(until_s)
        self.wake_s = stretch.after(stretch.steps)

    def _cut(self, now_s: float) -> None:
        if self._at_boundary:
            return
        stretch = self._stretch
        if stretch is None:
            self.wake_s = now_s
            return
        if stretch.steps > 1:
            stretch.steps = stretch.steps_until(now_s)
            self.wake_s = stretch.end_s

    def _first_token(self, sequence: Sequence, now_s: float) -> list[tuple[FactKind, Sequence]]:
        generated = sequence.generated = sequence.generated + 1
        self.tokens_out += 1
        facts = [] if sequence._has_begun else [(FactKind.FIRST_TOKEN, sequence)]
        sequence._has_begun = True
        sequence._begun_at_s, sequence._begun_step = now_s, self._step
        sequence._zero_step = self._step - generated
        if not self._decoding:  # reports count from the start of a stream, as in live engines
            self._reported_step = self._step
        self._decoding[sequence.id] = sequence
        self._context_tokens += 1
        left = sequence.output_tokens - generated
        if left <= 0:
            self._end(sequence, now_s)
            facts.append((FactKind.DONE, sequence))
        else:
            self._count += 1
            heapq.heappush(self._ends, (self._step + left, self._count, sequence))
        return facts

    def _end(self, sequence: Sequence, now_s: float) -> None:
        """The request has its last token; its blocks may be retained."""
        self._take_blocks()
        holding = sequence._holding
        if sequence.retain_s > 0 and self.cache is not None and holding is not None:
            self.cache.retain(holding)
            self._release_of(sequence.session)
            self._retained[sequence.session] = now_s + sequence.retain_s, holding
            sequence._holding, self._lacks_blocks = None, None
        self._leave(sequence)

    def _take_blocks(self) -> None:
        """Give answers the blocks of their tokens so far; cached ones are evicted for them. Done
        before somebody looks into the cache or leaves: it makes no difference earlier."""
        cache = self.cache
        if cache is None:
            return
        for sequence in self._decoding.values():
            holding, generated = sequence._holding, self._step - sequence._zero_step
            tokens = sequence.prompt_tokens + generated - 1  # the newest one has no keys yet
            if holding is not None and tokens > holding.allocated * cache.block_tokens:
                cache.compute(holding, tokens)

    def _release_of(self, session: str) -> None:
        """Make the session's retained blocks evictable; no-op when it has none."""
        retained = self._retained.pop(session, None)
        if retained is not None and self.cache is not None:
            self.cache.release(retained[1])
            self._lacks_blocks = None

    def _release_retained(self, now_s: float) -> None:
        """Release blocks whose retention has expired."""
        while self._retained:
            session, (until_s, _) = next(iter(self._retained.items()))
            if until_s > now_s:
                return
            self._release_of(session)

    def _leave(self, sequence: Sequence) -> None:
        del self._decoding[sequence.id]
        sequence.generated = self._step - sequence._zero_step
        sequence._is_gone = True
        self._context_tokens -= sequence.prompt_tokens + sequence.generated
        self._give_back_blocks(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if self._decoding.get(sequence.id) is sequence:
            self._take_blocks()
            self._leave(sequence)
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self._forget_prompt(sequence)
            self._give_back_blocks(sequence)
        elif sequence._holding is not None:
            self._loading = deque(x for x in self._loading if x[1] is not sequence)
            self._give_back_blocks(sequence)
        else:
            self._waiting = [w for w in self._waiting if w[2] is not sequence]
            heapq.heapify(self._waiting)

    def _forget_prompt(self, sequence: Sequence) -> None:
        """Drop the processed part of its prompt from the KV cache."""
        whole = sequence.prompt_tokens + sequence.generated
        self._context_tokens -= whole - sequence.prefill_left
        sequence.prefill_left = whole

    def _give_back_blocks(self, sequence: Sequence) -> None:
        """Free the blocks; they stay cached until their space is needed."""
        if self.cache is not None and sequence._holding is not None:
            self.cache.release(sequence._holding)
            sequence._holding = None
            self._lacks_blocks = None

    def _join(self, sequence: Sequence) -> None:
        """All cached blocks of its prompt are loaded."""
        self._context_tokens += sequence.cached_tokens
        self._prefilling.append(sequence)

    def _admit_to(self, cache: PrefixCache, now_s: float) -> None:
        """Admit in order while there are free blocks for prompt and answer."""
        while self._waiting and self._running < self.max_running:
            sequence = self._waiting[0][2]
            if sequence is self._lacks_blocks:
                return
            if not self._let_in(cache, sequence, now_s):
                self._lacks_blocks = sequence
                return
            heapq.heappop(self._waiting)

    def _let_in(self, cache: PrefixCache, sequence: Sequence, now_s: float) -> bool:
        """Start the request if there are free blocks for it; it stays in the queue."""
        prompt_tokens = sequence.prompt_tokens + sequence.generated
        whole = max(prompt_tokens, sequence.prompt_tokens + sequence.output_tokens)
        while (holding := cache.admit(sequence.blocks, prompt_tokens, whole)) is None:
            if not self._retained or self._running:
                return False
            self._release_of(next(iter(self._retained)))
        self._release_of(sequence.session)
        sequence._holding = holding
        sequence.cached_tokens = holding.cached_tokens
        load_s = holding.loaded_tokens * self.profile.host_load_token_s
        load_s += self._fetch_s(cache, sequence, holding, prompt_tokens)
        sequence.prefill_left = prompt_tokens - sequence.cached_tokens
        if load_s:
            self._loads_end_s = max(now_s, self._loads_end_s) + load_s
            self._loading.append((self._loads_end_s, sequence))
        else:
            self._join(sequence)
        return True

    def _planned(self, rule: DueDateRule, cache: PrefixCache, now_s: float) -> Pieces:
        """The prompt tokens of the next step by due date; newly admitted prompts start running."""
        assert self.chunk_tokens is not None
        decoding = [
            DecodingCall(self._step - s._begun_step + 1, now_s - s._begun_at_s, s.target.tpot_s)
            for s in self._decoding.values()
        ]
        while True:
            waiting = {str(s.id): (priority, s) for priority, _, s in self._waiting}
            prompts = [self._asked(cache, s, 0) for s in self._prefilling]
            prompts += [self._asked(cache, s, priority) for priority, s in waiting.values()]
            pieces = rule.plan(
                now_s,
                decoding,
                prompts,
                room_tokens=self.chunk_tokens,
                places=self.max_running - len(self._loading),
                free_blocks=cache.free_blocks,
            )
            loading = len(self._loading)
            self._enter(cache, [waiting[id][1] for id in pieces if id in waiting], now_s)
            # While blocks are loaded, other prompts get the budget of their prompt.
            if len(self._loading) == loading:
                left = {str(s.id): s for s in self._prefilling}
                return tuple((left[id], n) for id, n in pieces.items() if id in left)

    def _enter(self, cache: PrefixCache, sequences: Iterable[Sequence], now_s: float) -> None:
        """Start these waiting requests in order, until one finds no room."""
        entered = set()
        for sequence in sequences:
            if not self._let_in(cache, sequence, now_s):
                break
            entered.add(sequence.id)
        if entered:
            self._waiting = [w for w in self._waiting if w[2].id not in entered]
            heapq.heapify(self._waiting)

    def _asked(self, cache: PrefixCache, sequence: Sequence, priority: int) -> PromptCall:
        tokens, blocks = sequence.prompt_tokens + sequence.generated, 0
        computed = tokens - sequence.prefill_left
        if sequence._holding is None:
            whole = max(tokens, sequence.prompt_tokens + sequence.output_tokens)
            computed = cache.cached_tokens(sequence.blocks, tokens)
            blocks = cache.needed_blocks(sequence.blocks, tokens, whole)
        return PromptCall(
            sequence.id,
            sequence.asked_at_s,
            tokens - computed,
            computed,
            sequence.target,
            priority,
            blocks,
            is_running=sequence._holding is not None,
        )

    def _fetch_s(
        self, cache: PrefixCache, sequence: Sequence, holding: Holding, prompt_tokens: int
    ) -> float:
        """Fetch blocks that another replica holds beyond ours; returns the transfer time."""
        if self.fetchable is None:
            return 0.0
        tokens = min(self.fetchable(sequence), prompt_tokens - 1)
        tokens = tokens // cache.block_tokens * cache.block_tokens
        fetched = tokens - holding.cached_tokens
        if fetched <= 0:
            return 0.0
        cache.compute(holding, tokens)
        sequence.cached_tokens = tokens
        return fetched * self.profile.fetch_token_s

    def _admit(self, now_s: float) -> None:
        if self.cache is not None:
            self._admit_to(self.cache, now_s)
            return
        capacity = self.profile.kv_capacity_tokens
        running = len(self._decoding) + len(self._prefilling)
        if running >= self.max_running:
            return
        claimed = self._context_tokens + sum([s.prefill_left for s in self._prefilling])
        while self._waiting and running < self.max_running:
            sequence = self._waiting[0][2]
            claimed += sequence.prefill_left
            if claimed > capacity and running > 0:
                return
            heapq.heappop(self._waiting)
            self._prefilling.append(sequence)
            running += 1

    def _plan(self, now_s: float, planned: Pieces) -> Stretch:
        batch = len(self._decoding)
        if planned:
            return self._plan_due(now_s, batch, planned)
        if self._prefilling and self.rule is None:
            if self.chunk_tokens is None:
                return self._plan_prompts(now_s)
            return self._plan_chunk(now_s, batch)
        return self._stretch_of(now_s, batch, self._steps_left(batch))

    def _plan_due(self, now_s: float, batch: int, pieces: Pieces) -> Stretch:
        """One step, from which the rule learns."""
        ended = sum([tokens == sequence.prefill_left for sequence, tokens in pieces])
        stretch = self._stretch_of(now_s, batch, 1, pieces, ended)
        assert self.rule is not None
        contexts = [(n, s.prompt_tokens + s.generated - s.prefill_left) for s, n in pieces]
        self.rule.law.saw(stretch.first_s, batch, contexts)
        return stretch

    def _plan_prompts(self, now_s: float) -> Stretch:
        """One step with as many waiting prompts as the budget holds."""
        together: list[tuple[Sequence, int]] = []
        tokens = 0
        for sequence in self._prefilling:
            if together and (
                tokens + sequence.prefill_left > MAX_BATCHED_TOKENS or not self.prefill_together
            ):
                break
            together.append((sequence, sequence.prefill_left))
            tokens += sequence.prefill_left
        held, positions = self._context_tokens, attended(together)
        step_s = self.profile.step_s(0, held, tokens, len(together), positions)
        return Stretch(now_s, step_s, 0.0, 1, 0, tuple(together))

    def _pieces(self) -> list[tuple[Sequence, int]]:
        """Prompt tokens of the next step: decoding comes first, but prompts always progress."""
        assert self.chunk_tokens is not None
        most = left = max(1, self.chunk_tokens - len(self._decoding))
        if self.prompt_cap_tokens and self.held > 1:
            most = min(left, self.prompt_cap_tokens)
        pieces: list[tuple[Sequence, int]] = []
        for sequence in self._prefilling:
            tokens = min(left, most, sequence.prefill_left)
            if tokens == 0:
                break
            pieces.append((sequence, tokens))
            left -= tokens
        return pieces

    def _plan_chunk(self, now_s: float, batch: int) -> Stretch:
        pieces = tuple(self._pieces())
        steps = min([(sequence.prefill_left - 1) // tokens for sequence, tokens in pieces])
        if steps:  # all of these prompts last at least this many steps
            steps = min(steps, self._steps_left(batch + sum([n for _, n in pieces])))
            return self._stretch_of(now_s, batch, steps, pieces)
        ended = sum([tokens == sequence.prefill_left for sequence, tokens in pieces])
        return self._stretch_of(now_s, batch, 1, pieces, ended)

    def _stretch_of(
        self,
        now_s: float,
        batch: int,
        steps: int,
        prefilled: Pieces = (),
        ended: int = 0,
    ) -> Stretch:
        held = self._context_tokens
        return stretch_of(self.profile, now_s, batch, held, steps, prefilled, ended)

    def _steps_left(self, grown: int) -> int:
        """Steps until the next event, when each step adds `grown` tokens to the KV cache."""
        if not self._decoding:
            return 1 << 30
        ends = self._ends
        while ends[0][2]._is_gone:
            heapq.heappop(ends)
        until = ends[0][0]
        if self.report_steps:
            until = min(until, self._reported_step + self.report_steps)
        if self.cache is not None:
            return max(1, until - self._step)
        room = self.profile.kv_capacity_tokens - self._context_tokens
        return max(1, min(until - self._step, room // grown))

    def _make_room(self) -> bool:
        """KV cache full: preempt the latest arrivals; they return to the queue and are recomputed.

        True when any was preempted.
        """
        capacity = self.profile.kv_capacity_tokens
        before = self.preemptions
        while len(self._decoding) + len(self._prefilling) > 1:
            if self._context_tokens + self._next_tokens() <= capacity:
                break
            if self._prefilling:
                victim = self._prefilling.pop()
                self._forget_prompt(victim)
            else:
                last = next(reversed(self._decoding.values()))
                self._leave(last)
                victim = Sequence(
                    last.id, last.prompt_tokens, last.output_tokens, last.priority, last.generated
                )
                victim.prefill_left = victim.prompt_tokens + victim.generated
                victim._has_begun = last._has_begun
            self.preemptions += 1
            self._count += 1
            heapq.heappush(self._waiting, (victim.priority, -self._count, victim))
        return self.preemptions > before

    def _next_tokens(self) -> int:
        """Tokens that the next step adds to the KV cache, except those of unchunked prompts.

        Unchunked prompts reserved their room at admission, and nothing else grows in their step.
        """
        tokens = len(self._decoding)
        if self.chunk_tokens is not None and self._prefilling:
            tokens += sum([n for _, n in self._pieces()])
        return tokens
