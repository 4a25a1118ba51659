"""JITServe: goodput per second of service, just in time, in groups of similar prompts."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf, log

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation, due_s
from cato.policies.ordering.tempo import RESERVED, GainDensity

DUE, CAN_WAIT, HOPELESS = 1, 2, 3

# Larger than any prompt: a group's key outweighs that of a prompt within it.
_GROUP = 1e8
# A goodput per second is computed again after this share of the execution time.
_REVIEW = 0.1
_A_LITTLE_S = 1e-6


@dataclass(frozen=True, slots=True)
class JitServeOrdering:
    """Grouped margin goodput: just in time, densest first, similar prompts together.

    JITServe (arXiv 2504.20068v3, NSDI 2026), the successor of Tempo. Its text was not available:
    this follows its abstract and Tempo's text, and may differ in detail. Goodput is hard: late work
    earns nothing (`density.a` is inf), so it goes after everything that can be in time. The
    *margin* is the time to the deadline less the execution time, by the bound of the length. Calls
    with a margin above `frame_s` are served later, just in time, and leave the batch slots to the
    others. Those go by goodput per second of execution, in groups whose members differ by a factor
    of at most `group`; within a group the shortest prompt goes first, so that prompts that run
    together are alike. `frame_s` inf: no call waits for its time; `group` 1: no groups.
    """

    density: GainDensity
    frame_s: float = 1.0
    group: float = 1.25

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        if invocation.deadline_s == inf:
            return Rank(RESERVED, "no SLO: into the reserve", key=invocation.arrived_at_s)
        density = self.density
        execution_s = density.waiting_execution_s(invocation)
        margin_s = self.margin_s(invocation, now_s)
        if margin_s < 0:
            return Rank(HOPELESS, f"late by {-margin_s:.1f} s", key=execution_s)
        if margin_s > self.frame_s:
            # A little later, so that rounding does not make it wait for the same instant again.
            until_s = now_s + margin_s - self.frame_s + _A_LITTLE_S
            return Rank(
                CAN_WAIT, f"can wait for {margin_s:.1f} s", key=now_s + margin_s, until_s=until_s
            )
        per_s = density.of_waiting(invocation, now_s)
        until_s = now_s + min(margin_s + _A_LITTLE_S, max(density.step_s, _REVIEW * execution_s))
        return Rank(
            DUE, f"{per_s:.1f} tokens/s in time", key=self._key(per_s, invocation), until_s=until_s
        )

    def margin_s(self, invocation: Invocation, now_s: float) -> float:
        """How much later it may start and still be in time, with the bound of its length."""
        density = self.density
        if invocation.until_first_token and invocation.generated == 0:
            prefill_s = density.profile.prefill_s(invocation.prompt_tokens)
            return invocation.deadline_s - now_s - prefill_s
        tokens = invocation.generated + density.left_tokens(invocation)
        return due_s(invocation, None, tokens) - now_s - density.waiting_execution_s(invocation)

    def _key(self, per_s: float, invocation: Invocation) -> float:
        if self.group <= 1:
            return -per_s
        if per_s <= 0:
            return float(invocation.prompt_tokens)
        return invocation.prompt_tokens - _GROUP * floor(log(per_s) / log(self.group))
