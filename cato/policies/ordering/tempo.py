"""Tempo: the service gain of a call per second of service, and the queue order by it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, StageCall

RESERVED, DENSE = 0, 1

# A density is computed again after this share of the invocation's wait so far: it changes by about
# as much.
_REVIEW = 0.1
# Sample points of a stream's gain, as shares of its remaining tokens (midpoint rule).
_MIDPOINTS = (1 / 6, 1 / 2, 5 / 6)


@dataclass(frozen=True, slots=True)
class GainDensity:
    """Expected service gain per second of remaining execution (Tempo, "service gain density").

    Gain: `w_in` per prompt token and `w_out` per output token, times min(1, (target/actual)^a). A
    stream earns it token by token against its expected timeline, which starts at its TTFT target
    and continues by its TPOT target (ALGORITHMS.md, section 6). Times are those of a full batch of
    `profile`. The target of a call within a task is the time from its arrival to the deadline, less
    the downstream time: its node's share of the task's target.

    The length is the bound at `level` of the belief, given the tokens so far; with `is_refined`
    False it stays the bound from before the first token. `over_budget` is the rule as printed: gain
    over the remaining time *budget* instead of the execution time. That is close to earliest
    deadline first: in overload (`tempo-ablation`, load 1.3, 1,500 tasks, 3 seeds) it meets 12
    points less, though it gains 3 % more, since slightly late calls still gain.

    A stage is done when its longest call is, so a call whose last token counts takes as long as
    that one (paper, 4.2): it gains by its own tokens, over the stage's time, and shorter calls of a
    stage leave their place to others. Pools tell the stage where `Policies.knows_stages` is set.
    """

    profile: Profile
    w_in: float = 1.0
    w_out: float = 2.0
    a: float = 1.0
    level: float = 0.9
    is_refined: bool = True
    over_budget: bool = False

    @property
    def step_s(self) -> float:
        """Time of a decode step of the full batch."""
        return self.profile.decode_step_s(self.profile.max_running)

    def left_tokens(self, invocation: Invocation, tokens: int = 0) -> float:
        """The bound on the tokens to come after `tokens` of this attempt; at least 1."""
        return self._left_tokens(invocation.as_stage_call(tokens))

    def _left_tokens(self, call: StageCall) -> float:
        belief, generated = call.length, call.generated
        if belief is None:
            return max(1.0, call.expected_tokens - generated)
        if self.is_refined:
            return belief.left_quantile(self.level, generated)
        return max(1.0, belief.left_quantile(self.level, 0) - generated)

    def stage_tokens(self, invocation: Invocation, left: float) -> float:
        """The most tokens to come of its stage's longest call, if it has `left` itself."""
        return max(left, *map(self._left_tokens, invocation.stage)) if invocation.stage else left

    def waiting_execution_s(self, invocation: Invocation) -> float:
        """From its start to its last token."""
        prefill_s = self.profile.prefill_s(invocation.prompt_tokens)
        return prefill_s + self.left_tokens(invocation) * self.step_s

    def of_waiting(self, invocation: Invocation, now_s: float) -> float:
        """Gain per second of a queued call that starts now."""
        prefill_s = self.profile.prefill_s(invocation.prompt_tokens)
        left = self.left_tokens(invocation)
        gain = self._gain(invocation, now_s + prefill_s, invocation.generated, left)
        stage_s = self.stage_tokens(invocation, left) * self.step_s
        return gain / self._over_s(invocation, now_s, prefill_s + stage_s)

    def of_running(self, invocation: Invocation, tokens: int, now_s: float) -> float:
        """Gain per second of a running call with `tokens` generated in this attempt."""
        left = self.left_tokens(invocation, tokens)
        gain = self._gain(invocation, now_s, invocation.generated + tokens, left)
        stage_s = self.stage_tokens(invocation, left) * self.step_s
        return gain / self._over_s(invocation, now_s, stage_s)

    def _over_s(self, invocation: Invocation, now_s: float, execution_s: float) -> float:
        if not self.over_budget:
            return execution_s
        return max(self.step_s, invocation.deadline_s - invocation.downstream_s - now_s)

    def _gain(
        self, invocation: Invocation, decodes_at_s: float, generated: int, left: float
    ) -> float:
        """Expected gain of its prompt and its remaining tokens, decoding from `decodes_at_s` on.

        Parts processed before count too: without the rest they earn nothing.
        """
        arrived_s, step_s = invocation.arrived_at_s, self.step_s
        output = self.w_out * (generated + left)
        prompt = self.w_in * invocation.prompt_tokens
        if invocation.deadline_s == inf:
            return prompt + output
        target_s = invocation.deadline_s - invocation.downstream_s - arrived_s
        if not invocation.until_first_token:
            done_s = decodes_at_s + self.stage_tokens(invocation, left) * step_s - arrived_s
            return (prompt + output) * self._kept(target_s, done_s)
        if generated == 0:
            prompt *= self._kept(target_s, decodes_at_s - arrived_s)
        if invocation.tpot_target_s == inf:
            return prompt + output
        kept = 0.0
        for share in _MIDPOINTS:
            expected_s = target_s + invocation.tpot_target_s * (generated + share * left)
            kept += self._kept(expected_s, decodes_at_s + share * left * step_s - arrived_s)
        return prompt + output * kept / len(_MIDPOINTS)

    def _kept(self, target_s: float, actual_s: float) -> float:
        if actual_s <= target_s:
            return 1.0
        return float(max(0.0, target_s / actual_s) ** self.a)


@dataclass(frozen=True, slots=True)
class TempoOrdering:
    """Densest first: (1 - fairness) · density + fairness · waiting share of its time so far.

    Both are in about [0, 1]: the density in multiples of `w_out` tokens per step, the least that
    timely work earns. Calls without an SLO go first, in order of arrival, but only into the slots
    that `TempoAdmission` reserves.
    """

    density: GainDensity
    fairness: float = 0.1

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        if invocation.deadline_s == inf:
            return Rank(RESERVED, "no SLO: into the reserve", key=invocation.arrived_at_s)
        density = self.density
        per_s = density.of_waiting(invocation, now_s)
        unit_per_s = density.w_out / density.step_s
        waited_s = now_s - invocation.arrived_at_s
        execution_s = density.waiting_execution_s(invocation)
        score = (1 - self.fairness) * per_s / unit_per_s
        score += self.fairness * waited_s / (waited_s + execution_s)
        until_s = now_s + _REVIEW * (waited_s + execution_s)
        return Rank(DENSE, f"gains {per_s:.1f}/s", key=-score, until_s=until_s)
