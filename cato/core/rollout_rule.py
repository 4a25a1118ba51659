"""The rule of a rollout: it compares the results of both models and decides on the next step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt

from cato.core.receipt import Drawn, Excuse, SlaReceipt

# Standard errors for the two questions. "Is the canary surely worse?" is asked again after every
# call, so the bar is high. "Can it be worse than the limit?" is asked until the answer is no.
SURELY_Z = 3.5
LIKELY_Z = 2.0
# Fewer times than this have no meaningful spread.
LEAST_TIMES = 20

_GONE = frozenset({Excuse.SUPERSEDED, Excuse.CLIENT_LEFT})
_FAILED = frozenset({"failed", "refused", "deadline_exceeded"})
# The longest that a step may be held, so that every rollout ends.
MAX_HOLD_S = 30 * 86_400.0


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


DEFAULT_RULE = RolloutRule()


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


NO_COUNTS = ArmCounts()


def counted(receipt: SlaReceipt, drawn: Drawn) -> ArmCounts:
    """The counts that one run adds to its arm; zero if nobody waited for its end.

    A call that the canary could not answer is its error, even though the stable model answered. A
    body that one version refuses and the other accepts is an error, too, even if the client is
    content.
    """
    if receipt.excuse in _GONE:
        return NO_COUNTS
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
