"""Waits of a simulated fleet against queueing theory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fleet_kit import a_fleet, a_task
from kits.builders import a_profile

from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.routing.least_wait import LeastWait
from cato.sim.report import mean_and_stderr

FCFS = Policies(LeastWait(), FirstComeFirstServed(), max_queued=1_000_000)
# A step of 1 ms: lengths in tokens are lengths of service in ms.
STEPPING: Profile = a_profile(prefill_s=0.001, token_s=0.001)
SERVICE_TOKENS = 1000
LOAD = 0.7
SEEDS, CALLS, WARM_UP = range(12), 1500, 300

Lengths = Callable[[np.random.Generator, int], np.ndarray[tuple[int], np.dtype[np.int64]]]


def same(rng: np.random.Generator, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.full(n, SERVICE_TOKENS)


def exponential(rng: np.random.Generator, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Geometric: the exponential's closest kin in whole tokens."""
    return rng.geometric(1 / SERVICE_TOKENS, n)


def paths(seed: int, servers: int, lengths: Lengths) -> tuple[list[float], list[int]]:
    """Arrivals and tokens of one run."""
    rng = np.random.default_rng([seed, servers])
    rate_per_s = LOAD * servers / (SERVICE_TOKENS / 1000)
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, CALLS))
    return at_s.tolist(), lengths(rng, CALLS).tolist()


def simulated_waits(at_s: Sequence[float], tokens: Sequence[int], servers: int) -> list[float]:
    fleet = a_fleet(FCFS, replicas=servers, max_running=1, profile=STEPPING, report_steps=0)
    tasks = [
        a_task(f"t{i:05d}", t, prompt=1, output=n)
        for i, (t, n) in enumerate(zip(at_s, tokens, strict=True))
    ]
    return [o.queue_s for o in fleet.run(tasks)]


def erlang_c_wait_s(servers: int, load: float, service_s: float) -> float:
    """Mean wait of M/M/c at `load` per server (Erlang, 1917)."""
    offered = load * servers
    all_busy = offered**servers / math.factorial(servers) / (1 - load)
    chance = all_busy / (sum(offered**k / math.factorial(k) for k in range(servers)) + all_busy)
    return chance * service_s / (servers * (1 - load))


def pollaczek_khinchine_wait_s(load: float, service_s: float, cv: float) -> float:
    """Mean wait of M/G/1 with a coefficient of variation `cv` of the service (1930, 1932)."""
    return load / (1 - load) * service_s * (1 + cv**2) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "lengths", "theory_s"),
    [
        (1, same, pollaczek_khinchine_wait_s(LOAD, 1.0, 0.0)),
        (3, exponential, erlang_c_wait_s(3, LOAD, 1.0)),
    ],
    ids=["M/D/1", "M/M/3"],
)
def test_mean_waits_are_those_of_theory(servers: int, lengths: Lengths, theory_s: float) -> None:
    means = []
    for seed in SEEDS:
        waits = simulated_waits(*paths(seed, servers, lengths), servers)
        means.append(sum(waits[WARM_UP:]) / (CALLS - WARM_UP))
    mean, stderr = mean_and_stderr(means)
    # Runs are independent, their means near normal: 3 standard errors are passed by a right
    # simulator with 98.8 % (t, 11 degrees), and by these seeds for ever. A wrong one must be off
    # by less than that to pass; the second line says how little that is.
    assert abs(mean - theory_s) <= 3 * stderr
    assert stderr < 0.07 * theory_s


@pytest.mark.parametrize("servers", [1, 3])
def test_each_wait_is_that_of_the_recursion_of_kiefer_and_wolfowitz(servers: int) -> None:
    at_s, tokens = paths(77, servers, exponential)
    free_at_s = [0.0] * servers
    expected = []
    for t, n in zip(at_s, tokens, strict=True):
        first = free_at_s.index(min(free_at_s))
        start_s = max(t, free_at_s[first])
        expected.append(start_s - t)
        free_at_s[first] = start_s + n / 1000
    assert simulated_waits(at_s, tokens, servers) == pytest.approx(expected, abs=1e-6)


def test_the_closed_forms_know_the_queue_that_both_describe() -> None:
    assert erlang_c_wait_s(1, LOAD, 2.0) == pytest.approx(pollaczek_khinchine_wait_s(LOAD, 2.0, 1))
