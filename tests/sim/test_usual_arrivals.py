"""Teams that ask for other models at other hours: what other days showed is loaded ahead."""

from __future__ import annotations

import numpy as np
import pytest
from fleet_kit import a_card_arrival

from cato.core.topology import SharedPoolPolicies
from cato.policies.eviction.registry import card_policies
from cato.sim.card_workload import COMPLETION, LANGUAGES, REASONING, CardArrival
from cato.sim.cards import Served, run

DAY_S = 86_400.0
DAYS = 3
HOURS = range(9, 17)
RATE_PER_S = 0.04


def some_working_days(seed: int) -> tuple[CardArrival, ...]:
    """In each hour 70 % of the calls are of the language of the hour, the others of all."""
    draw = np.random.default_rng(seed)
    found = []
    for day in range(DAYS):
        for hour, favourite in zip(HOURS, LANGUAGES, strict=True):
            moments = np.sort(draw.uniform(0, 3600, draw.poisson(RATE_PER_S * 3600)))
            for at_s in (day * DAY_S + hour * 3600 + moments).tolist():
                language = favourite if draw.random() < 0.7 else str(draw.choice(LANGUAGES))
                kind = COMPLETION if draw.random() < 0.7 else REASONING
                found.append(a_card_arrival(f"{len(found):06d}", language, kind, at_s))
    return tuple(found)


def the_last_day(arrivals: tuple[CardArrival, ...], first_day_s: float) -> list[Served]:
    policies = card_policies(SharedPoolPolicies("foresight", "queue-aware"))
    served = run(arrivals, policies, midnight_s=first_day_s).served
    return [s for s in served if s.arrival.wanted.arrived_at_s > (DAYS - 1) * DAY_S]


@pytest.mark.parametrize("seed", [0])
def test_what_is_usual_at_this_hour_is_there_before_it_is_asked_for(seed: int) -> None:
    arrivals = some_working_days(seed)
    knowing = the_last_day(arrivals, 0.0)
    # The same looks, by a clock that shows every day as the first one that is watched.
    new = the_last_day(arrivals, (DAYS - 1) * DAY_S)
    hits, hits_of_new = (sum(s.is_hit for s in served) / len(served) for served in (knowing, new))
    ttft_s, ttft_s_of_new = (np.mean([s.ttft_s for s in served]) for served in (knowing, new))
    print(f"hit rate {hits_of_new:.3f} -> {hits:.3f}, TTFT {ttft_s_of_new:.2f} -> {ttft_s:.2f} s")
    assert hits > hits_of_new + 0.02
    assert ttft_s < 0.9 * ttft_s_of_new
