"""SABER, "Adaptive Request Scheduling for CodeLLM Serving with SLA Guarantees" (2025)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from cato.core.decision import Admit, Defer, Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation, ReplicaView
from cato.policies.due import due_s, running_due_s

HIGH, LOW = 0, 1


class SpeedModel(Protocol):
    """Tokens per second of each of `batch` requests that run together (SABER: v(L))."""

    def speed(self, batch: float) -> float: ...


def _left_tokens(invocation: Invocation, tokens: int, quantile: float | None) -> float:
    """Still to come after `tokens` of this attempt: expected, or that quantile of its length."""
    if quantile is None or invocation.length is None:
        return invocation.left_tokens(tokens)
    return invocation.length.left_quantile(quantile, invocation.generated + tokens)


def _required_per_s(tokens: float, due: float, now_s: float) -> float:
    """Tokens left / time left; inf when no time is left."""
    if due == inf:
        return 0.0
    return tokens / (due - now_s) if due > now_s else inf


@dataclass(frozen=True, slots=True)
class SaberOrdering:
    """High-priority queue, then low: what needs more than v(1) is hopeless and goes to the low one.

    SABER, online phase. Within a queue the order is arrival; which of the first `window` is looked
    at is random there (`Policies.shuffled`). `quantile`: see `SaberAdmission`.
    """

    model: SpeedModel
    quantile: float | None = None

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        tokens = _left_tokens(invocation, 0, self.quantile)
        due = due_s(invocation, None, invocation.generated + tokens)
        alone_per_s = self.model.speed(1)
        needed_per_s = _required_per_s(tokens, due, now_s)
        if needed_per_s > alone_per_s:
            return Rank(LOW, f"needs {needed_per_s:.1f} tok/s, alone {alone_per_s:.1f}: low queue")
        until_s = due - tokens / alone_per_s
        return Rank(HIGH, f"needs {needed_per_s:.1f} tok/s: high queue", until_s=until_s)


@dataclass(frozen=True, slots=True)
class SaberAdmission:
    """Admit when v(L+1) is at least what the candidate and every running request need.

    Readings that work, from algorithms.md (section 4, pitfalls): required speeds come from expected
    tokens, refreshed live, and skip what runs but is doomed already; the low queue gets
    `low_slots` places (printed: all that are idle, which floods the batch in every idle instant).
    The window of 10, looked at in random order, is as published (`saber` in the registry).
    Other readings, for comparison: `quantile` takes that quantile of the length (1: the largest) in
    place of the expected tokens; with `counts_doomed` nobody joins beside what is late already.
    """

    model: SpeedModel
    low_slots: int = 2
    quantile: float | None = None
    counts_doomed: bool = False

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        speed = self.model.speed
        alone_per_s, joined_per_s = speed(1), speed(replica.held + 1)
        needed_per_s, doomed = 0.0, 0
        for running in replica.running:
            left = _left_tokens(running.invocation, running.tokens, self.quantile)
            required = _required_per_s(left, running_due_s(running), now_s)
            if required > alone_per_s:
                doomed += 1
            if required <= alone_per_s or self.counts_doomed:
                needed_per_s = max(needed_per_s, required)
        tokens = _left_tokens(invocation, 0, self.quantile)
        own = _required_per_s(tokens, due_s(invocation, None, invocation.generated + tokens), now_s)
        if own > alone_per_s:
            if doomed >= self.low_slots:
                return Defer(f"{doomed} hopeless ones run already")
        else:
            needed_per_s = max(needed_per_s, own)
        if joined_per_s >= needed_per_s:
            return Admit(f"v({replica.held + 1}) = {joined_per_s:.1f} >= {needed_per_s:.1f} tok/s")
        return Defer(f"v({replica.held + 1}) = {joined_per_s:.1f} < {needed_per_s:.1f} tok/s")
