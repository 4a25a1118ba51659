"""Stretches of engine steps: their total time and their work.

Steps of the same batch and the same prompt pieces are computed at once: each takes a constant
time longer than the one before, so a stretch costs the same however long it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cato.core.ids import InvocationId
from cato.core.pool.prefill import NOTHING_DUE, CallTarget
from cato.core.prefix_cache import Holding
from cato.core.profile import Profile


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine: `output_tokens` is its true length.

    `blocks` name the whole blocks of its prompt, for an engine with a prefix cache; after its end
    they are retained for `retain_s`, or until the next request of its `session`. `target` is for
    engines that order prompts by due date; it counts from `asked_at_s`, when the engine got it.
    """

    id: InvocationId
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    generated: int = 0
    blocks: tuple[int, ...] = ()
    session: str = ""
    retain_s: float = 0.0
    target: CallTarget = NOTHING_DUE
    asked_at_s: float = 0.0
    # Prompt tokens found in the cache at admission.
    cached_tokens: int = 0
    # Prompt tokens to process; after a preemption the generated ones are processed again.
    prefill_left: int = 0
    # The replica's step count at the (virtual) time of its token number 0.
    _zero_step: int = 0
    # Its first token here: when it came, and the replica's step count then.
    _begun_at_s: float = 0.0
    _begun_step: int = 0
    _is_gone: bool = False
    # Its first token here was reported; tokens generated before it came here do not count.
    _has_begun: bool = False
    _is_cancelled: bool = False
    _holding: Holding | None = None


@dataclass(slots=True)
class Stretch:
    """Equal steps from `start_s`: the first takes `first_s`, each further one `growth_s` more.

    `prefilled`: how many tokens of which prompts each step processes.
    """

    start_s: float
    first_s: float
    growth_s: float
    steps: int
    batch: int
    prefilled: tuple[tuple[Sequence, int], ...] = ()

    def after(self, steps: int) -> float:
        """Time after `steps` of them."""
        return self.start_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    @property
    def end_s(self) -> float:
        return self.after(self.steps)

    def steps_over(self, now_s: float) -> int:
        """Number of steps over at `now_s`."""
        steps = self.steps_until(now_s)
        return steps if self.after(steps) <= now_s else steps - 1

    def steps_until(self, now_s: float) -> int:
        """Number of steps over when the one running at `now_s` ends; at least 1."""
        lead_s = now_s - self.start_s
        a, b = self.growth_s / 2, self.first_s - self.growth_s / 2
        if lead_s <= 0:
            return 1
        if a <= 0:
            n = lead_s / b if b > 0 else self.steps
        else:
            n = (-b + math.sqrt(b * b + 4 * a * lead_s)) / (2 * a)
        steps = max(1, min(self.steps, math.ceil(n)))
        while steps > 1 and self.after(steps - 1) >= now_s:  # rounding
            steps -= 1
        while steps < self.steps and self.after(steps) < now_s:
            steps += 1
        return steps


def stretch_of(
    profile: Profile,
    now_s: float,
    batch: int,
    held: int,
    steps: int,
    prefilled: tuple[tuple[Sequence, int], ...] = (),
    ended: int = 0,
) -> Stretch:
    """At most `steps` equal steps of `batch` decoding requests from `now_s` on, together with the
    prompt pieces `prefilled` (the last ones for `ended`); `held` tokens are in the KV cache."""
    p = profile
    if not prefilled and p.decodes_evenly(batch, held):
        return Stretch(now_s, p.step_s(batch, held), p.context_token_s * batch, steps, batch)
    tokens = sum([n for _, n in prefilled])
    if p.is_linear:
        first_s = p.step_s(batch, held, tokens, ended)
        growth_s = p.decode_per_context_token_s * (batch + tokens) if batch else 0.0
        return Stretch(now_s, first_s, growth_s, steps, batch, prefilled)
    attended_tokens = attended(prefilled)
    # Each of several steps attends to the prompt pieces of the steps before it.
    grown, more_attended = tokens + batch, sum([n * n for _, n in prefilled])

    def at(step: int) -> float:
        positions = attended_tokens + step * more_attended
        return p.step_s(batch, held + step * grown, tokens, ended, positions)

    first_s = at(0)
    while steps > 1:
        # Growth from step to step is constant only while the same term, memory reads or compute,
        # dominates throughout.
        growth_s = (at(steps - 1) - first_s) / (steps - 1)
        if abs(at(1) - first_s - growth_s) < 1e-9:
            return Stretch(now_s, first_s, growth_s, steps, batch, prefilled)
        steps //= 2
    return Stretch(now_s, first_s, 0.0, 1, batch, prefilled)


def attended(pieces: Iterable[tuple[Sequence, int]]) -> float:
    """Total of the positions that the tokens of these pieces attend to."""
    return sum(
        [
            tokens * (s.prompt_tokens + s.generated - s.prefill_left + tokens / 2)
            for s, tokens in pieces
        ]
    )
