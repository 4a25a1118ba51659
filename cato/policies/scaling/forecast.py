"""The scaling of CATO's default: expected load and backlog."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from cato.core.scaling import PoolLoad, Scale


@dataclass(frozen=True, slots=True)
class _Look:
    """Arrivals between the previous look and this one."""

    at_s: float
    count: float
    work_s: float


@dataclass(frozen=True, slots=True)
class ForecastState:
    """`looks` of the window, without those that had no arrivals; `since_s`: the first look ever.

    `wanted`: (instant, replicas) of the hold time, only where no later look wanted as many.
    """

    looks: tuple[_Look, ...] = ()
    since_s: float | None = None
    wanted: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Forecast:
    """Replicas for the offered load and its fluctuation, plus those that clear the backlog in time.

    Offered load = work that arrives per second, i.e. the number of replicas that it keeps busy.
    Work counts whole runs from their start: a call of another pool announces the calls that will
    follow it here. The rate is observed over `window_s` (at least over `floor_s`, so that a first
    arrival is no flood), raised by `margin` standard deviations of a Poisson count. The busy slots
    are then Poisson distributed around the load (M/G/∞), for a new call as at any instant (PASTA):
    there are replicas for one call more than the quantile `covered`, so that it rarely waits. The
    backlog expected when a replica ordered now becomes ready has to be cleared in `clear_s`.
    Starting replicas count as ready, so that a cold start is ordered once.

    Replicas wanted within `hold_s` are kept: a start costs more than an idle replica for a while.
    The replicas of the first look count as wanted: it has no evidence against them.

    The constants were chosen on seeds 0-9 of `coding-scaling`: most attainment at 0.25 with no more
    replicas than `CatoScaling` holds at 0.5. A further point at 0.25 costs about one replica more.
    """

    window_s: float = 120.0
    floor_s: float = 5.0
    margin: float = 1.0
    covered: float = 0.82
    clear_s: float = 20.0
    hold_s: float = 45.0
    looks_ahead: bool = True

    def initial(self) -> ForecastState:
        return ForecastState()

    def decide(self, load: PoolLoad, state: ForecastState) -> tuple[Scale, ForecastState]:
        now_s = load.now_s
        since_s, before = state.since_s, state.wanted
        if since_s is None:
            since_s, before = now_s, ((now_s, load.bounded(load.provisioned)),)
        looks = tuple(x for x in state.looks if x.at_s > now_s - self.window_s)
        new = load.begun if self.looks_ahead else load.arrived
        if new.count > 0:
            looks = (*looks, _Look(now_s, new.count, new.work_s))
        span_s = max(self.floor_s, min(self.window_s, now_s - since_s))
        offered = sum(x.work_s for x in looks) / span_s
        count = sum(x.count for x in looks)
        expected = offered * (1 + self.margin / math.sqrt(count)) if count > 0 else 0.0
        busy = poisson_quantile(expected * load.places, self.covered)
        steady = math.ceil((busy + 1) / load.places) if count > 0 else 0
        waiting_s = load.queued_s + (load.coming_s if self.looks_ahead else 0.0)
        backlog_s = max(0.0, waiting_s + (offered - load.provisioned) * load.start_s)
        clearing = math.ceil(offered + backlog_s / self.clear_s)
        now_wanted = load.bounded(max(steady, clearing))
        wanted = tuple(
            (at_s, n) for at_s, n in before if at_s > now_s - self.hold_s and n > now_wanted
        )
        wanted = (*wanted, (now_s, now_wanted))
        goal = wanted[0][1]
        reason = (
            f"offered {offered:.2f} replicas, {steady} with margins; backlog {backlog_s:.1f} s, "
            f"{clearing} to clear it; {goal} within {self.hold_s:g} s"
        )
        return Scale(goal, reason), ForecastState(looks, since_s, wanted)


def poisson_quantile(mean: float, p: float) -> int:
    """The smallest n that a Poisson count with `mean` does not exceed with probability `p` < 1."""
    if mean > 200.0:  # the sum below would start from almost nothing; the normal law is close
        return math.ceil(mean + math.sqrt(mean) * NormalDist().inv_cdf(p))
    n, term = 0, math.exp(-mean)
    total = term
    while total < p and term > 0:
        n += 1
        term *= mean / n
        total += term
    return n
