"""SABER, "Adaptive Request Scheduling for CodeLLM Serving with SLA Guarantees" (2025)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Protocol

from cato.core.decision import Admit, Defer, Rank
from cato.core.policies import Work
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, ReplicaView, Running, due_s
from cato.estimators.speed_meter import NO_SPEEDS, Speeds
from cato.policies.due import running_due_s

HIGH, LOW = 0, 1
# Tokens of a typical coding request, for the law of a profile alone: means of SABER's classes.
TYPICAL_PROMPT_TOKENS, TYPICAL_OUTPUT_TOKENS = 340, 270


class SpeedModel(Protocol):
    """Speed in tokens per second per request, by batch size (SABER: v(L))."""

    def speed(self, batch: float) -> float: ...


def speed_model(profile: Profile, measured: Speeds = NO_SPEEDS) -> SpeedModel:
    """SABER's USL, fitted to measured speeds by load.

    As in the paper (Section IV-B, step 1) a request's speed is its tokens by its execution time,
    which includes its own prompt and those that others bring meanwhile. At loads without a
    measurement, the profile's speed of a typical request counts, corrected by the median ratio of
    measured to predicted speeds: an engine that has only run a few calls at a time says little of
    many. Where the workload is known beforehand, fit its USL to a run with the cap lifted, as the
    experiments do (`cato.lab.experiments.saber_estimators.offline_law`).
    """
    # Imported here: scipy would make a router's restart half a second longer.
    from cato.estimators.usl import SpeedSample, fit_usl

    batches = range(1, max(4, profile.max_running) + 1)
    speeds = {batch: _typical_per_s(profile, batch) for batch in batches}
    ratios = [measured[load] / speeds[load] for load in measured if load in speeds]
    correction = median(ratios) if ratios else 1.0
    speeds = {load: correction * speed for load, speed in speeds.items()} | dict(measured)
    return fit_usl([SpeedSample(load, speed) for load, speed in speeds.items()])


def _typical_per_s(profile: Profile, batch: int) -> float:
    """Of a typical request among `batch` alike: during each of them every other brings a prompt."""
    prompt, output = TYPICAL_PROMPT_TOKENS, TYPICAL_OUTPUT_TOKENS
    step_s = profile.decode_step_s(batch, prompt + output / 2)
    return output / (batch * profile.prefill_s(prompt) + output * step_s)


def _left_tokens(invocation: Invocation, tokens: int, quantile: float | None) -> float:
    """Tokens to come after `tokens` of this attempt: expected, or that quantile of its length."""
    if quantile is None or invocation.length is None:
        return invocation.left_tokens(tokens)
    return invocation.length.left_quantile(quantile, invocation.generated + tokens)


def _required_per_s(tokens: float, due: float, now_s: float) -> float:
    """Tokens left / time left; inf when no time is left."""
    if due == inf:
        return 0.0
    return tokens / (due - now_s) if due > now_s else inf


@dataclass(frozen=True, slots=True)
class _Need:
    """Tokens due by an instant; for a stream that has not begun also its first token."""

    tokens: float
    due: float
    first_due: float = inf

    def per_s(self, now_s: float) -> float:
        """The speed that it needs from now on."""
        of_all = _required_per_s(self.tokens, self.due, now_s)
        return max(of_all, _required_per_s(1.0, self.first_due, now_s))

    def met_until_s(self, speed_per_s: float) -> float:
        """The last instant at which that speed is enough."""
        return min(self.due - self.tokens / speed_per_s, self.first_due - 1.0 / speed_per_s)


def _need(invocation: Invocation, quantile: float | None) -> _Need:
    """The need of a queued call."""
    tokens = _left_tokens(invocation, 0, quantile)
    due = due_s(invocation, None, invocation.generated + tokens)
    first_due = invocation.deadline_s if invocation.until_first_token else inf
    return _Need(tokens, due, first_due)


def _needed_now(running: Running, quantile: float | None) -> _Need:
    """The need of a running call, from what it has generated."""
    tokens = _left_tokens(running.invocation, running.tokens, quantile)
    due = running_due_s(running)
    if running.first_token_at_s is None and running.invocation.until_first_token:
        return _Need(tokens, due, running.invocation.deadline_s)
    return _Need(tokens, due)


@dataclass(frozen=True, slots=True)
class SaberOrdering:
    """High-priority queue, then low: calls that need more than v(1) are hopeless and go there.

    SABER, online phase. Within a queue the order is arrival; the calls in the first `window` are
    tried in random order (`Policies.shuffled`). `quantile`: see `SaberAdmission`.
    """

    model: SpeedModel
    quantile: float | None = None

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        need = _need(invocation, self.quantile)
        alone_per_s = self.model.speed(1)
        needed_per_s = need.per_s(now_s)
        if needed_per_s > alone_per_s:
            return Rank(LOW, f"needs {needed_per_s:.1f} tok/s, alone {alone_per_s:.1f}: low queue")
        until_s = need.met_until_s(alone_per_s)
        return Rank(HIGH, f"needs {needed_per_s:.1f} tok/s: high queue", until_s=until_s)


@dataclass(frozen=True, slots=True)
class SaberAdmission:
    """Admit when v(L+1) is at least what the candidate and every running request need.

    A request's need is fixed when it joins, as in the paper (line 9 of its Algorithm 1, and
    "records the required speed with the current timestamp"): a request that outgrows its expected
    length then needs no more. A TTFT objective is one token by its deadline. Deviations: required
    speeds come from expected tokens, not the most; and the low queue gets `low_slots` slots
    (printed: all idle ones, which floods the batch at every idle moment). The window of 10 in
    random order is as published (`saber` in the registry).

    Other readings, for comparison: `refreshes` recomputes the needs of running requests. This
    blocks admission when an answer outgrows its mean; requests that are late already are skipped
    unless `counts_hopeless`. `quantile` takes that quantile of the length (1: the largest) in place
    of the expected tokens.
    """

    model: SpeedModel
    low_slots: int = 2
    quantile: float | None = None
    counts_hopeless: bool = False
    refreshes: bool = False

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        speed = self.model.speed
        alone_per_s, joined_per_s = speed(1), speed(replica.held + 1)
        needed_per_s, hopeless = 0.0, 0
        for running in replica.running:
            required = self._required_per_s(running, now_s)
            if required > alone_per_s:
                hopeless += 1
            if required <= alone_per_s or self.counts_hopeless:
                needed_per_s = max(needed_per_s, required)
        own = _need(invocation, self.quantile).per_s(now_s)
        if own > alone_per_s:
            if hopeless >= self.low_slots:
                return Defer(f"{hopeless} hopeless ones run already")
        else:
            needed_per_s = max(needed_per_s, own)
        if joined_per_s >= needed_per_s:
            return Admit(f"v({replica.held + 1}) = {joined_per_s:.1f} >= {needed_per_s:.1f} tok/s")
        return Defer(f"v({replica.held + 1}) = {joined_per_s:.1f} < {needed_per_s:.1f} tok/s")

    def _required_per_s(self, running: Running, now_s: float) -> float:
        if self.refreshes:
            return _needed_now(running, self.quantile).per_s(now_s)
        return _need(running.invocation, self.quantile).per_s(running.at_s)
