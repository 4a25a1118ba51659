"""Rollouts: how a new version of a model goes live in steps, and the rule that decides. Pure.

Clients call a name. A rollout maps that name to two models: the stable one, and the canary, which
gets a growing share of the sessions. Both are compared, and the canary is promoted or rolled back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import exp, log, sqrt

from cato.core.receipt import Drawn, Excuse, SlaReceipt, TrafficArm

# Standard errors for the two questions. "Is the canary surely worse?" is asked again after every
# call, so the bar is high. "Can it be worse than the limit?" is asked until the answer is no.
SURELY_Z = 3.5
LIKELY_Z = 2.0
# Fewer times than this have no meaningful spread.
LEAST_TIMES = 20
KEPT_CHANGES = 20

_GONE = frozenset({Excuse.SUPERSEDED, Excuse.CLIENT_LEFT})
_FAILED = frozenset({"failed", "refused", "deadline_exceeded"})


class Phase(StrEnum):
    """The state of a rollout.

    `shadow`: the canary answers copies of calls, and nobody reads its answers. `canary`: it has a
    share of the sessions. `promoted`: it has all. `rolled-back`: it has none.
    """

    SHADOW = "shadow"
    CANARY = "canary"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled-back"

    @property
    def is_under_way(self) -> bool:
        return self in (Phase.SHADOW, Phase.CANARY)


@dataclass(frozen=True, slots=True)
class RolloutRule:
    """When a step ends, and how.

    The canary gets each of `shares` of the sessions in turn; before that, copies of `shadow_share`
    of the calls (0: no shadow step). A step lasts at least `hold_s` and until each arm has
    `min_calls`; if it is undecided after `max_calls` of the canary, the canary is rolled back.
    Limits say how much worse the canary may be: SLO misses, errors and rejected completions as
    fractions of calls, TTFT as a fraction of the stable model's. Acceptance counts once `min_shown`
    completions of each arm were shown.
    """

    shares: tuple[float, ...] = (0.05, 0.25)
    shadow_share: float = 0.05
    min_calls: int = 100
    max_calls: int = 20_000
    hold_s: float = 600.0
    min_shown: int = 50
    miss_limit: float = 0.02
    error_limit: float = 0.01
    ttft_limit: float = 0.1
    acceptance_limit: float = 0.05


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """Results of one arm in one step. TTFTs are kept as sums of their logarithms."""

    calls: int = 0
    errors: int = 0
    promised: int = 0
    met: int = 0
    first_tokens: int = 0
    log_ttft: float = 0.0
    log_ttft_squared: float = 0.0
    shown: int = 0
    taken: int = 0

    def plus(self, other: ArmCounts) -> ArmCounts:
        return ArmCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def mean_ttft_s(self) -> float | None:
        """The geometric mean: one slow call does not dominate."""
        return exp(self.log_ttft / self.first_tokens) if self.first_tokens else None


def counted(receipt: SlaReceipt, drawn: Drawn) -> ArmCounts:
    """The counts that one run adds to its arm; zero if nobody waited for its end.

    A call that the canary could not answer is its error, even though the stable model answered. A
    body that one version refuses and the other accepts is an error, too, even if the client is
    content.
    """
    if receipt.excuse in _GONE:
        return ArmCounts()
    is_error = receipt.status in _FAILED or drawn.fell_back
    is_promised = receipt.excuse is Excuse.NONE
    counts = ArmCounts(
        calls=1,
        errors=int(is_error),
        promised=int(is_promised),
        met=int(is_promised and receipt.met and not drawn.fell_back),
    )
    if drawn.fell_back or receipt.ttft_s is None or receipt.ttft_s <= 0:
        return counts
    x = log(receipt.ttft_s)
    return replace(counts, first_tokens=1, log_ttft=x, log_ttft_squared=x * x)


@dataclass(frozen=True, slots=True)
class Measure:
    """One comparison. The canary is worse by `low` to `high` (95 %), and `limit` is allowed.

    `surely` is the least by which it is worse, beyond reasonable doubt; negative if it may be
    better.
    """

    name: str
    stable: float
    canary: float
    low: float
    high: float
    surely: float
    limit: float

    @property
    def is_worse(self) -> bool:
        return self.surely > self.limit

    @property
    def is_fine(self) -> bool:
        return self.high <= self.limit

    def __str__(self) -> str:
        return (
            f"{self.name} {self.stable:.3g} and {self.canary:.3g}, worse by "
            f"{100 * self.low:.1f} to {100 * self.high:.1f} % (limit {100 * self.limit:g} %)"
        )


def compared(stable: ArmCounts, canary: ArmCounts, rule: RolloutRule) -> tuple[Measure, ...]:
    """All comparisons for which both arms have data."""
    s, c = stable, canary
    found = [
        _shares("SLO misses", s.promised - s.met, s.promised, c.promised - c.met, c.promised,
                rule.miss_limit),
        _shares("errors", s.errors, s.calls, c.errors, c.calls, rule.error_limit),
        _times(s, c, rule.ttft_limit),
    ]  # fmt: skip
    if min(s.shown, c.shown) >= rule.min_shown:
        not_taken = "completions not taken"
        found.append(
            _shares(not_taken, s.shown - s.taken, s.shown, c.shown - c.taken, c.shown,
                    rule.acceptance_limit)
        )  # fmt: skip
    return tuple(m for m in found if m is not None)


def _shares(name: str, s: int, of_s: int, c: int, of_c: int, limit: float) -> Measure | None:
    """Newcombe's interval of the difference of two shares (1998, method 10)."""
    if not of_s or not of_c:
        return None
    ps, pc = s / of_s, c / of_c

    def bounds(z: float) -> tuple[float, float]:
        (low_s, high_s), (low_c, high_c) = _wilson(ps, of_s, z), _wilson(pc, of_c, z)
        low = pc - ps - sqrt((pc - low_c) ** 2 + (high_s - ps) ** 2)
        return low, pc - ps + sqrt((high_c - pc) ** 2 + (ps - low_s) ** 2)

    return Measure(name, ps, pc, *bounds(LIKELY_Z), bounds(SURELY_Z)[0], limit)


def _wilson(p: float, n: int, z: float) -> tuple[float, float]:
    """Wilson's interval of a share; it is informative even for 0 out of 50."""
    middle, spread = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    whole = 1 + z * z / n
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)


def _times(s: ArmCounts, c: ArmCounts, limit: float) -> Measure | None:
    """The ratio of geometric means: TTFTs are about log-normal."""
    if min(s.first_tokens, c.first_tokens) < LEAST_TIMES:
        return None
    (mean_s, error_s), (mean_c, error_c) = _log_mean(s), _log_mean(c)
    apart, error = mean_c - mean_s, sqrt(error_s + error_c)
    return Measure(
        "TTFT",
        exp(mean_s),
        exp(mean_c),
        exp(apart - LIKELY_Z * error) - 1,
        exp(apart + LIKELY_Z * error) - 1,
        exp(apart - SURELY_Z * error) - 1,
        limit,
    )


def _log_mean(counts: ArmCounts) -> tuple[float, float]:
    """The mean of the logarithms, and its variance."""
    n, mean = counts.first_tokens, counts.log_ttft / counts.first_tokens
    return mean, max(0.0, counts.log_ttft_squared - n * mean * mean) / (n - 1) / n


@dataclass(frozen=True, slots=True)
class Advance:
    """Go to the next step."""

    reason: str


@dataclass(frozen=True, slots=True)
class RollBack:
    reason: str


@dataclass(frozen=True, slots=True)
class Stay:
    reason: str


def judged(
    rule: RolloutRule, stable: ArmCounts, canary: ArmCounts, age_s: float
) -> Advance | RollBack | Stay:
    """The rule's verdict on a step that is `age_s` old.

    A canary that is surely worse is rolled back at once. It advances only when it is known not to
    be worse than the limits; lack of evidence is no reason to advance.
    """
    measures = compared(stable, canary, rule)
    worse = [str(m) for m in measures if m.is_worse]
    if worse:
        return RollBack("; ".join(worse))
    least = min(stable.calls, canary.calls)
    if least < rule.min_calls:
        return Stay(f"{least} of {rule.min_calls} calls")
    unsure = [str(m) for m in measures if not m.is_fine]
    if unsure and canary.calls >= rule.max_calls:
        return RollBack(f"not known to be as good after {canary.calls} calls: {'; '.join(unsure)}")
    if unsure:
        return Stay(f"not known yet: {'; '.join(unsure)}")
    if age_s < rule.hold_s:
        return Stay(f"as good so far; held for {rule.hold_s:g} s")
    return Advance("; ".join(map(str, measures)))


@dataclass(frozen=True, slots=True)
class Change:
    """`phase` and `share` from `at_s` (since the epoch) on, and the reason."""

    at_s: float
    phase: Phase
    share: float
    why: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout.

    Times are seconds since the epoch; `id` distinguishes it from others of its `name`.

    `stage` counts its steps, including the shadow step; `stable_counts` and `canary_counts` cover
    the present step.
    """

    name: str
    stable: str
    canary: str
    id: int
    rule: RolloutRule = RolloutRule()
    phase: Phase = Phase.CANARY
    stage: int = 0
    since_s: float = 0.0
    stable_counts: ArmCounts = ArmCounts()
    canary_counts: ArmCounts = ArmCounts()
    history: tuple[Change, ...] = ()

    @classmethod
    def started(
        cls, name: str, stable: str, canary: str, rule: RolloutRule, now_s: float
    ) -> Rollout:
        rollout = cls(name, stable, canary, round(now_s * 1000), rule)
        first = Phase.SHADOW if rule.shadow_share > 0 else Phase.CANARY
        return rollout._changed(first, 0, now_s, "started")

    @property
    def share(self) -> float:
        """Share of sessions that the canary serves."""
        match self.phase:
            case Phase.CANARY:
                return self.rule.shares[self.stage - (self.rule.shadow_share > 0)]
            case Phase.PROMOTED:
                return 1.0
            case _:
                return 0.0

    def outlook(self, now_s: float) -> str:
        """The rule's verdict on the present step, or why the rollout ended."""
        if not self.phase.is_under_way:
            return self.history[-1].why
        age_s = now_s - self.since_s
        return judged(self.rule, self.stable_counts, self.canary_counts, age_s).reason

    def draw(self, session: str, ready: Callable[[str], bool | None]) -> tuple[str, Drawn | None]:
        """The model that serves `session`, and its arm; None if its calls are not compared.

        Sessions are assigned by hash: every ingress assigns alike, and a session of the canary
        stays there while the share grows. `ready` says whether a model can serve now (None: no pool
        has it). Without its canary a session gets the stable model; without that, the model that
        the deployment file gives the name.
        """
        wanted = TrafficArm.CANARY if self._place(session) < self.share else TrafficArm.STABLE
        usual = (self.stable, self.name)
        models = (self.canary, *usual) if wanted is TrafficArm.CANARY else usual
        states = [(model, ready(model)) for model in models]
        known = [model for model, state in states if state is not None]
        model = next((m for m, state in states if state), known[0] if known else self.name)
        is_drawn = self.phase.is_under_way and model == models[0]
        return model, Drawn(self.name, self.id, self.stage, wanted) if is_drawn else None

    def is_shadowed(self, call: str) -> bool:
        """Whether the canary gets a copy of a call to its own name."""
        return self.phase is Phase.SHADOW and self._place(f"shadow\0{call}") < (
            self.rule.shadow_share
        )

    @property
    def shadow(self) -> Drawn:
        return Drawn(self.name, self.id, self.stage, TrafficArm.SHADOW)

    def _place(self, session: str) -> float:
        text = f"{self.name}\0{self.id}\0{session}".encode("utf-8", "replace")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2.0**64

    def seen(self, drawn: Drawn, counts: ArmCounts) -> Rollout:
        """With the result of one of its runs; runs of an earlier step do not count for this one."""
        if (drawn.id, drawn.stage) != (self.id, self.stage) or not self.phase.is_under_way:
            return self
        if drawn.arm is TrafficArm.STABLE:
            return replace(self, stable_counts=self.stable_counts.plus(counts))
        return replace(self, canary_counts=self.canary_counts.plus(counts))

    def at(self, now_s: float) -> Rollout:
        """The rollout after applying the rule at `now_s`."""
        if not self.phase.is_under_way:
            return self
        age_s = now_s - self.since_s
        match judged(self.rule, self.stable_counts, self.canary_counts, age_s):
            case Advance(reason):
                return self.promoted(now_s, reason)
            case RollBack(reason):
                return self.rolled_back(now_s, reason)
            case Stay():
                return self

    def promoted(self, now_s: float, why: str) -> Rollout:
        """At its next step; after the last one the canary has every session."""
        stage = self.stage + 1
        is_last = stage - (self.rule.shadow_share > 0) >= len(self.rule.shares)
        phase = Phase.PROMOTED if is_last else Phase.CANARY
        return self._changed(phase, stage, now_s, why)

    def rolled_back(self, now_s: float, why: str) -> Rollout:
        return self._changed(Phase.ROLLED_BACK, self.stage + 1, now_s, why)

    def _changed(self, phase: Phase, stage: int, now_s: float, why: str) -> Rollout:
        changed = replace(self, phase=phase, stage=stage, since_s=now_s)
        change = Change(now_s, phase, changed.share, why)
        ended = not phase.is_under_way  # keep the last counts, for people
        return replace(
            changed,
            stable_counts=self.stable_counts if ended else ArmCounts(),
            canary_counts=self.canary_counts if ended else ArmCounts(),
            history=(*self.history, change)[-KEPT_CHANGES:],
        )
