"""Due-date scheduling inside an engine: which prompts the next step works on, and how far.

A step gives every running stream a token and processes pieces of prompts beside them. The pieces
determine how long the streams wait for their next token, so the rule bounds their time, not their
tokens: the time that the streams' targets leave, between `LEAST_S` and `most_s`. Prompts are served
in the order in which their first tokens are due; one that is due sooner pauses another.

The order is by due date, not by least slack: with least slack equal prompts would alternate, and
all would end late. A target that can no longer be met is doubled until it can. Behind all others a
late prompt would starve; before all others it would make these late, too. Doubling stops after
`MOST_DOUBLINGS`, so that every prompt precedes all that arrive after its last due date.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from cato.core.record import record

# Prompt work per step beside streams: less makes no progress on a prompt, more disturbs the
# streams.
LEAST_S, MOST_S = 0.010, 0.060
# With one prompt and no stream, splitting the prompt would only delay the next arrival.
ALONE_STEPS = 4
# A smaller piece is not worth a step.
LEAST_TOKENS = 16
# For a call that has no target for its first token.
NO_TARGET_S = 10.0
LEAST_TARGET_S = 0.001
MOST_DOUBLINGS = 4
# Units that give the terms of `StepLaw` a similar size, and the initial estimate, with the weight
# of one step of each kind. It fits a 7B model on a GPU, and also a model of 16M parameters on two
# cores.
_TOKENS, _ATTENDED = 100.0, 1e6
_PRIOR = (0.010, 0.0005, 0.012, 0.0)
_PRIOR_WEIGHTS = (0.1, 1.0, 0.1, 0.001)
_KEPT = 0.99
_MOST_TIMES, _LEAST_SEEN_S = 4.0, 0.005


@record
class CallTarget:
    """An engine's information on a call's target.

    The call arrived `waited_s` ago, and its `tokens`-th token is due `target_s` after that (inf:
    none is). After that, a token is due every `tpot_s`. `has_begun`: the client already reads its
    answer, and its prompt is being computed again.
    """

    target_s: float = inf
    waited_s: float = 0.0
    tokens: int = 1
    tpot_s: float = inf
    has_begun: bool = False


NOTHING_DUE = CallTarget()


@record
class DecodingCall:
    """A running stream with `tokens` tokens so far, the first of them `elapsed_s` ago."""

    tokens: int
    elapsed_s: float
    tpot_s: float = inf


@record
class PromptCall:
    """A call whose prompt is unfinished: `left_tokens` to compute after `context_tokens`.

    `target` counts from `asked_at_s`, when the engine got the call. It still needs `blocks` blocks
    of KV cache. `is_running`: it holds a batch slot and the blocks of what is computed.
    `enters_first`: the engine admits it before any other waiting prompt, because it already holds
    blocks, for example with what was loaded from host memory.
    """

    id: str
    asked_at_s: float
    left_tokens: int
    context_tokens: int = 0
    target: CallTarget = NOTHING_DUE
    priority: int = 0
    blocks: int = 0
    is_running: bool = False
    enters_first: bool = False


@dataclass(slots=True)
class StepLaw:
    """Step times of this engine, learned from its steps.

    step = base + request · streams + token · tokens + attended · (positions before each of them).
    No term is negative. Least squares, in which each step has `_KEPT` times the weight of the next
    one.
    """

    _sums: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    _times: list[float] = field(default_factory=lambda: [0.0] * 4)
    _law: tuple[float, ...] = _PRIOR

    def decode_s(self, streams: int) -> float:
        """Time of a step with nothing but `streams`."""
        return self._law[0] + self._law[1] * streams

    def piece_s(self, tokens: int, context_tokens: int) -> float:
        """Time that `tokens` tokens after `context_tokens` add to a step."""
        attended = tokens * (context_tokens + tokens / 2)
        return self._law[2] / _TOKENS * tokens + self._law[3] / _ATTENDED * attended

    def tokens_in(self, time_s: float, context_tokens: int) -> int:
        """How many tokens after `context_tokens` add at most `time_s` to a step."""
        if time_s <= 0.0:
            return 0
        token_s, attended_s = self._law[2] / _TOKENS, self._law[3] / _ATTENDED
        linear_s = token_s + attended_s * context_tokens
        # Positive root of attended · n² / 2 + linear · n = time, in the form that does not divide
        # by a small `attended`.
        divisor_s = linear_s + sqrt(linear_s * linear_s + 2.0 * attended_s * time_s)
        return int(2.0 * time_s / max(divisor_s, 1e-12))

    def saw(self, step_s: float, streams: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Learn from a step; `pieces` are its prompts' tokens and the tokens before each piece."""
        tokens, attended = 0, 0.0
        for n, context in pieces:
            tokens += n
            attended += n * (context + n / 2)
        x = (1.0, float(streams), tokens / _TOKENS, attended / _ATTENDED)
        predicted_s = sum(a * b for a, b in zip(self._law, x, strict=True))
        # If the machine was busy with other work, the step says nothing about its engine.
        step_s = min(step_s, _MOST_TIMES * predicted_s + _LEAST_SEEN_S)
        for i in range(4):
            row = self._sums[i]
            for j in range(4):
                row[j] = _KEPT * row[j] + x[i] * x[j]
            self._times[i] = _KEPT * self._times[i] + x[i] * step_s
        self._law = _solved(self._sums, self._times)


@dataclass(slots=True)
class DueDateRule:
    """Plans each step; `most_s` bounds its prompt work beside streams."""

    most_s: float = MOST_S
    law: StepLaw = field(default_factory=StepLaw)

    def plan(
        self,
        now_s: float,
        decoding: Sequence[DecodingCall],
        prompts: Sequence[PromptCall],
        *,
        room_tokens: int,
        places: int,
        free_blocks: float = inf,
    ) -> dict[str, int]:
        """Tokens of each prompt in the next step, by id, in the order in which they are due.

        Other prompts get none: running ones pause, waiting ones are not admitted. `room_tokens` and
        `places` are the engine's own limits on tokens and batch slots. `free_blocks` of its KV
        cache are unused; of these, running prompts keep what they still need.
        """
        pieces: dict[str, int] = {}
        left_s = self.budget_s(decoding, len(prompts))
        room = room_tokens - len(decoding)
        running = [p for p in prompts if p.is_running]
        free_blocks -= sum(p.blocks for p in running)
        free_places = min(places, self._streams_in_time(decoding)) - len(decoding) - len(running)
        may_enter, runs_nothing = True, not decoding and not running
        for prompt in self.in_order(now_s, len(decoding), prompts):
            if not prompt.is_running:
                # Strict order: smaller prompts that come later must not starve this one.
                fits = prompt.blocks <= free_blocks and free_places > 0
                may_enter = may_enter and (fits or (runs_nothing and not pieces))
                if not may_enter:
                    continue
            tokens = self.law.tokens_in(left_s, prompt.context_tokens)
            if not pieces:
                tokens = max(tokens, LEAST_TOKENS)
            tokens = min(tokens, prompt.left_tokens, room)
            if tokens < min(LEAST_TOKENS, prompt.left_tokens) and (pieces or tokens <= 0):
                break
            pieces[prompt.id] = tokens
            room -= tokens
            left_s -= self.law.piece_s(tokens, prompt.context_tokens)
            if not prompt.is_running:
                free_places -= 1
                free_blocks -= prompt.blocks
        return pieces

    def in_order(
        self, now_s: float, streams: int, prompts: Iterable[PromptCall]
    ) -> list[PromptCall]:
        """By due date; prompts of answers that are already being read come first.

        Before all of them come those that the engine admits first: if one of these got no tokens,
        the engine would admit no other prompt, and the tokens of the others would be unused.
        """
        return sorted(
            prompts,
            key=lambda p: (
                not p.enters_first,
                not p.target.has_begun,
                self.due_at_s(now_s, streams, p),
                p.priority,
                p.asked_at_s,
                p.id,
            ),
        )

    def due_at_s(self, now_s: float, streams: int, prompt: PromptCall) -> float:
        """When its first token is due, after doubling a target that cannot be met."""
        asked = prompt.target
        target_s = max(LEAST_TARGET_S, asked.target_s) if asked.target_s < inf else NO_TARGET_S
        from_s = (
            prompt.asked_at_s - asked.waited_s - (asked.tokens - 1) * self.law.decode_s(streams + 1)
        )
        done_s = now_s + self.law.piece_s(prompt.left_tokens, prompt.context_tokens)
        for _ in range(MOST_DOUBLINGS):
            if from_s + target_s >= done_s:
                break
            target_s *= 2.0
        return from_s + target_s

    def budget_s(self, decoding: Sequence[DecodingCall], prompts: int) -> float:
        """Time for prompt work in the next step that lets the streams keep their pace."""
        if not decoding:
            return self.most_s if prompts > 1 else ALONE_STEPS * self.most_s
        step_s = self.law.decode_s(len(decoding))
        least_s = min(LEAST_S, self.most_s)
        left_s = self.most_s
        for stream in decoding:
            if stream.tpot_s < inf:
                pace_s = _doubled(stream.tpot_s, step_s + least_s)
                left_s = min(left_s, pace_s * stream.tokens - stream.elapsed_s - step_s)
        return max(least_s, left_s)

    def _streams_in_time(self, decoding: Sequence[DecodingCall]) -> float:
        """How many streams can run at once and keep their pace."""
        tpot_s = min((stream.tpot_s for stream in decoding), default=inf)
        request_s = self.law.decode_s(1) - self.law.decode_s(0)
        if tpot_s == inf or request_s <= 0.0:
            return inf
        pace_s = _doubled(tpot_s, self.law.decode_s(1))
        return max(1, int((pace_s - self.law.decode_s(0)) / request_s + 1e-9))


def _doubled(target_s: float, least_s: float) -> float:
    """The target, doubled until it can be met."""
    target_s = max(LEAST_TARGET_S, target_s)
    while target_s < least_s:
        target_s *= 2.0
    return target_s


def _solved(sums: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[float, ...]:
    """Least squares of the observations and `_PRIOR`, without negative terms."""
    kept = [0, 1, 2, 3]
    while True:
        rows = [
            [sums[i][j] + (_PRIOR_WEIGHTS[i] if i == j else 0.0) for j in kept]
            + [times[i] + _PRIOR_WEIGHTS[i] * _PRIOR[i]]
            for i in kept
        ]
        found = _eliminated(rows)
        worst = min(range(len(kept)), key=lambda i: found[i])
        if found[worst] >= 0.0:
            break
        del kept[worst]
    law = [0.0] * 4
    for i, value in zip(kept, found, strict=True):
        law[i] = value
    return tuple(law)


def _eliminated(rows: list[list[float]]) -> list[float]:
    """Solve a positive definite system whose right side is the last column."""
    n = len(rows)
    for i in range(n):
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, n + 1):
                rows[k][j] -= factor * rows[i][j]
    found = [0.0] * n
    for i in reversed(range(n)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, n))
        found[i] = (rows[i][n] - known) / rows[i][i]
    return found
