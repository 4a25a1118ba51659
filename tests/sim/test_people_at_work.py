"""Who writes in a language and now and then asks a question: the next model is loaded ahead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from fleet_kit import a_card_arrival

from cato.core.topology import SharedPoolPolicies
from cato.policies.eviction.registry import card_policies
from cato.sim.card_workload import COMPLETION, LANGUAGES, REASONING, CardArrival
from cato.sim.cards import run

PEOPLE, HOURS = 6, 8
GAP_S = 60.0


def people_at_work(seed: int) -> tuple[CardArrival, ...]:
    """Each asks every minute: for a completion, and after half of these a question follows. One
    call in twenty is the last for an hour or so, after which the language is another."""
    draw = np.random.default_rng(seed)
    found = []
    for person in range(PEOPLE):
        at_s, kind, language = float(draw.uniform(0, 600)), COMPLETION, str(draw.choice(LANGUAGES))
        while at_s < HOURS * 3600:
            id = f"{person}.{at_s:.3f}"
            found.append(a_card_arrival(id, language, kind, at_s, user=f"person {person}"))
            asks = kind == COMPLETION and draw.random() < 0.5
            kind = REASONING if asks else COMPLETION
            at_s += float(draw.gamma(4.0, GAP_S / 4))
            if draw.random() < 0.05:
                at_s += float(draw.exponential(3600.0))
                kind, language = COMPLETION, str(draw.choice(LANGUAGES))
    return tuple(sorted(found, key=lambda a: a.wanted.arrived_at_s))


def test_knowing_who_asks_loads_ahead_what_they_ask_for_next() -> None:
    found = []
    for seed in range(3):
        known = people_at_work(seed)
        nobody = tuple(replace(a, wanted=replace(a.wanted, user="")) for a in known)
        for arrivals in (nobody, known):
            policies = card_policies(SharedPoolPolicies("foresight", "queue-aware"))
            metrics = run(arrivals, policies).metrics()
            found.append([metrics["hit_rate"], metrics["ttft_s_mean"], metrics["loads"]])
    without, knowing = np.mean(found[::2], axis=0), np.mean(found[1::2], axis=0)
    hits, ttft_s = f"{without[0]:.3f} -> {knowing[0]:.3f}", f"{without[1]:.2f} -> {knowing[1]:.2f}"
    print(f"hit rate {hits}, TTFT {ttft_s} s")
    assert knowing[0] > without[0] + 0.05
    assert knowing[1] < 0.85 * without[1]
    assert knowing[2] < 1.1 * without[2]
