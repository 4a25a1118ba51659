"""Batch mappers: each is a whole answer, none is worse than it says, and the search is true."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import a_profile

from cato.core.errors import InputError
from cato.core.ids import InvocationId
from cato.core.slo import Slo, SloMetric
from cato.policies.mapping.annealing import Acceptance, SimulatedAnnealing
from cato.policies.mapping.kernels import ascending, moore_hodgson, smith, uniform
from cato.policies.mapping.latency import SLO_SA_TABLE_2, Bilinear, LatencyModel
from cato.policies.mapping.moore_smith import MooreSmith
from cato.policies.mapping.objective import worth
from cato.policies.mapping.problem import Mapping, MappingRequest
from cato.policies.mapping.registry import MAPPERS

# One second a request, whatever the batch: batches of one are jobs of scheduling theory.
ONE_SECOND_A_TOKEN = LatencyModel(Bilinear(0.0, 0.0, 1.0, 0.0), Bilinear(0.0, 0.0, 0.0, 0.0))


def a_request(
    id: str,
    prompt: int = 100,
    output: float = 100.0,
    e2e_s: float | None = None,
    waited_s: float = 0.0,
) -> MappingRequest:
    slos = () if e2e_s is None else (Slo(SloMetric.E2E, e2e_s),)
    return MappingRequest(InvocationId(id), prompt, output, slos, waited_s)


targets = st.one_of(
    st.just(()),
    st.tuples(st.builds(Slo, st.just(SloMetric.E2E), st.floats(0.5, 40.0))),
    st.tuples(
        st.builds(Slo, st.just(SloMetric.TTFT), st.floats(0.1, 15.0)),
        st.builds(Slo, st.just(SloMetric.TPOT), st.floats(0.0155, 0.018)),
    ),
)


def queues(max_size: int) -> st.SearchStrategy[list[MappingRequest]]:
    return st.lists(
        st.builds(
            MappingRequest,
            st.uuids().map(lambda u: InvocationId(str(u))),
            st.integers(1, 2_000),
            st.floats(1.0, 800.0),
            targets,
            st.floats(0.0, 5.0),
        ),
        max_size=max_size,
        unique_by=lambda r: r.id,
    )


def mapped(name: str, queue: list[MappingRequest], cap: int, seed: int = 0) -> Mapping:
    return MAPPERS[name].map(queue, SLO_SA_TABLE_2, cap, seed)


@given(queues(7), st.integers(1, 5), st.integers(0, 2**40), st.sampled_from(sorted(MAPPERS)))
def test_a_mapping_holds_each_request_once_in_batches_within_the_cap(
    queue: list[MappingRequest], cap: int, seed: int, name: str
) -> None:
    mapping = mapped(name, queue, cap, seed)
    assert sorted(id for b in mapping.batches for id in b) == sorted(r.id for r in queue)
    assert all(1 <= len(b) <= cap for b in mapping.batches)
    assert mapping == mapped(name, queue, cap, seed)


@given(queues(7), st.integers(1, 5), st.integers(0, 9), st.sampled_from(sorted(MAPPERS)))
def test_the_compiled_objective_is_that_of_plain_python(
    queue: list[MappingRequest], cap: int, seed: int, name: str
) -> None:
    mapping = mapped(name, queue, cap, seed)
    plain = worth(mapping.batches, queue, SLO_SA_TABLE_2).objective_per_s
    assert mapping.objective_per_s == pytest.approx(plain, rel=1e-9)


@given(queues(25), st.integers(1, 5), st.integers(0, 9))
def test_moore_smith_is_never_below_arrival_order(
    queue: list[MappingRequest], cap: int, seed: int
) -> None:
    ours = mapped("moore-smith", queue, cap, seed).objective_per_s
    assert ours >= mapped("fcfs", queue, cap).objective_per_s * (1 - 1e-9)


@given(queues(5), st.integers(1, 5), st.integers(0, 9))
def test_no_mapper_is_above_exhaustive_search(
    queue: list[MappingRequest], cap: int, seed: int
) -> None:
    best = mapped("exhaustive", queue, cap).objective_per_s
    for name in ("fcfs", "annealing", "moore-smith"):
        assert mapped(name, queue, cap, seed).objective_per_s <= best * (1 + 1e-9)


def cuts(n: int, cap: int) -> list[tuple[int, ...]]:
    """All ways to write `n` as a sum of batch sizes."""
    if n == 0:
        return [()]
    return [(b, *rest) for b in range(1, min(n, cap) + 1) for rest in cuts(n - b, cap)]


@settings(max_examples=15)
@given(queues(4), st.integers(1, 4))
def test_exhaustive_search_finds_the_maximum_over_all_orders_and_cuts(
    queue: list[MappingRequest], cap: int
) -> None:
    best = 0.0
    for order in permutations(r.id for r in queue):
        for sizes in cuts(len(queue), cap):
            ends = np.cumsum((0, *sizes)).tolist()
            batches = [order[a:b] for a, b in pairwise(ends)]
            best = max(best, worth(batches, queue, SLO_SA_TABLE_2).objective_per_s)
    assert mapped("exhaustive", queue, cap).objective_per_s == pytest.approx(best, rel=1e-9)


# Scheduling theory


def test_moore_hodgson_drops_the_longest_when_one_would_be_late() -> None:
    work, due = np.array([4.0, 3.0, 2.0, 2.0]), np.array([4.0, 6.0, 6.0, 9.0])
    # 4 and 3 make 7 > 6: the 4 goes; 3, 2 and 2 are then all on time.
    assert moore_hodgson(work, due).tolist() == [False, True, True, True]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=6).map(
        lambda jobs: np.array(jobs, dtype=np.float64)
    )
)
def test_moore_hodgson_keeps_as_many_as_can_be_and_smith_costs_least(
    jobs: np.ndarray[tuple[int, int], np.dtype[np.float64]],
) -> None:
    work, due = jobs[:, 0].copy(), jobs[:, 1].copy()
    kept = moore_hodgson(work, due)
    orders = [list(p) for p in permutations(range(len(work)))]
    ends = [dict(zip(p, np.cumsum(work[p]).tolist(), strict=True)) for p in orders]
    assert kept.sum() == max(sum(end[i] <= due[i] for i in end) for end in ends)
    allowed = [e for e in ends if all(e[i] <= due[i] for i in e if kept[i])]
    chosen = smith(work, due, kept)
    assert sum(np.cumsum(work[chosen])) == min(sum(e.values()) for e in allowed)
    end = dict(zip(chosen.tolist(), np.cumsum(work[chosen]).tolist(), strict=True))
    assert all(end[i] <= due[i] for i in end if kept[i])


def test_smith_puts_the_longest_last_that_may_end_last() -> None:
    work, due = np.array([1.0, 5.0, 2.0]), np.array([8.0, 5.0, 8.0])
    assert smith(work, due, np.array([True, True, True])).tolist() == [1, 0, 2]
    # Without a due time to keep the 5 is the longest, and goes last.
    assert smith(work, due, np.array([True, False, True])).tolist() == [0, 2, 1]


def test_moore_smith_gives_up_the_long_request_that_would_make_two_late() -> None:
    queue = [
        a_request("long", prompt=9, output=1, e2e_s=9.0),
        a_request("a", prompt=3, output=1, e2e_s=4.0),
        a_request("b", prompt=2, output=1, e2e_s=5.0),
    ]
    mapping = MAPPERS["moore-smith"].map(queue, ONE_SECOND_A_TOKEN, 1, 0)
    assert mapping.batches == (("a",), ("b",), ("long",))
    assert mapping.objective_per_s == pytest.approx(2 / (3 + 5 + 14))
    arrival = MAPPERS["fcfs"].map(queue, ONE_SECOND_A_TOKEN, 1, 0)
    assert arrival.objective_per_s == pytest.approx(1 / (9 + 12 + 14))


def test_equal_values_keep_their_order() -> None:
    assert ascending(np.array([2.0, 1.0, 2.0, 1.0])).tolist() == [1, 3, 0, 2]


def test_draws_are_even_and_differ_by_seed() -> None:
    state = np.array([7], np.uint64)
    draws = [uniform(state) for _ in range(20_000)]
    assert min(draws) >= 0.0
    assert max(draws) < 1.0
    shares = np.histogram(draws, bins=10, range=(0, 1))[0] / len(draws)
    assert shares == pytest.approx([0.1] * 10, abs=0.01)
    assert uniform(np.array([8], np.uint64)) != draws[0]


# What a request costs and when it is met


def test_a_batch_waits_for_its_longest_and_the_wait_before_counts() -> None:
    model = LatencyModel(Bilinear(0.0, 1.0, 0.0, 0.0), Bilinear(0.0, 0.0, 0.0, 1.0))
    queue = [
        a_request("short", output=1.0, e2e_s=2.0),
        a_request("long", output=4.0),
        a_request("next", output=1.0, e2e_s=8.5, waited_s=2.0),
    ]
    result = worth([["short", "long"], ["next"]], queue, model)
    # Batch of two: prefill 2 s, steps of 1 s; then 1 s alone, after 5 s and the 2 s from before.
    assert result.latency_s == 2.0 + 5.0 + (2.0 + 5.0 + 1.0)
    assert result.met == 3
    late = [queue[0], queue[1], a_request("next", output=1.0, e2e_s=7.5, waited_s=2.0)]
    assert worth([["short", "long"], ["next"]], late, model).met == 2


def test_ttft_and_tpot_targets_must_both_be_met() -> None:
    model = LatencyModel(Bilinear(0.0, 0.0, 0.0, 1.0), Bilinear(0.0, 0.0, 0.0, 0.2))

    def met(ttft_s: float, tpot_s: float) -> int:
        slos = (Slo(SloMetric.TTFT, ttft_s), Slo(SloMetric.TPOT, tpot_s))
        request = MappingRequest(InvocationId("r"), 10, 10.0, slos)
        found = MAPPERS["exhaustive"].map([request], model, 1, 0)
        assert (found.objective_per_s > 0) == (worth([["r"]], [request], model).met == 1)
        return worth([["r"]], [request], model).met

    assert (met(1.1, 0.3), met(0.9, 0.3), met(1.1, 0.1)) == (1, 0, 0)


def test_latencies_are_those_of_the_paper_and_of_a_profile() -> None:
    # 0.1·2·100 + 5.7·2 + 0.01·100 + 43.67 ms; 0.0002·2·150 + 0.275·2 + 0.00088·150 + 15.85 ms.
    assert SLO_SA_TABLE_2.prefill_s(2, 100) == pytest.approx(0.07607)
    assert SLO_SA_TABLE_2.step_s(2, 100, 100) == pytest.approx(0.016592)
    assert SLO_SA_TABLE_2.execution_s(2, 100, 100) == pytest.approx(0.07607 + 99 * 0.016592)
    profile = a_profile(prefill_s=0.5, token_s=0.02)
    assert LatencyModel.of(profile).execution_s(1, 300, 40) == pytest.approx(
        profile.service_s(300, 40)
    )


# The readings of the printed annealing


def hard_queue(n: int) -> list[MappingRequest]:
    draws = np.random.default_rng(3)
    return [
        a_request(
            f"{i:02d}",
            int(draws.integers(20, 400)),
            float(draws.integers(20, 900)),
            float(draws.uniform(1.0, 40.0)),
        )
        for i in range(n)
    ]


def test_only_the_mended_annealing_comes_near_the_best_mapping() -> None:
    queue = hard_queue(20)

    def found(**switched: object) -> float:
        mapper = SimulatedAnnealing(**switched)  # type: ignore[arg-type]
        values = [mapper.map(queue, SLO_SA_TABLE_2, 2, s).objective_per_s for s in range(5)]
        return sum(values) / len(values)

    mended = found()
    best = MooreSmith().map(queue, SLO_SA_TABLE_2, 2, 0).objective_per_s
    assert mended > 0.9 * best
    assert found(acceptance=Acceptance.UNSCALED, keep_best=False) < 0.5 * mended
    assert found(count_waits=False) < 0.7 * mended
    assert found(reset_counter=False) < mended


def test_the_answer_of_annealing_depends_on_its_seed_alone() -> None:
    queue = hard_queue(30)
    maps = [mapped("annealing", queue, 4, seed).batches for seed in (1, 1, 2)]
    assert maps[0] == maps[1] != maps[2]


# What cannot be answered


@pytest.mark.parametrize("name", sorted(MAPPERS))
def test_impossible_questions_are_input_errors(name: str) -> None:
    mapper = MAPPERS[name]
    with pytest.raises(InputError, match="at least one request"):
        mapper.map([a_request("a")], SLO_SA_TABLE_2, 0, 0)
    with pytest.raises(InputError, match="same id"):
        mapper.map([a_request("a"), a_request("a")], SLO_SA_TABLE_2, 1, 0)


def test_exhaustive_search_refuses_what_would_take_seconds() -> None:
    with pytest.raises(InputError, match="use moore-smith"):
        mapped("exhaustive", hard_queue(9), 1)


@pytest.mark.parametrize(
    ("prompt", "output", "waited_s"),
    [(0, 5.0, 0.0), (5, 0.5, 0.0), (5, float("nan"), 0.0), (5, 5.0, -1.0)],
)
def test_a_request_of_nothing_is_an_input_error(
    prompt: int, output: float, waited_s: float
) -> None:
    with pytest.raises(InputError):
        MappingRequest(InvocationId("a"), prompt, output, (), waited_s)


def test_a_latency_model_must_take_time_and_never_give_it_back() -> None:
    with pytest.raises(InputError, match="not negative"):
        Bilinear(0.0, -1e-6, 0.0, 0.0)
    with pytest.raises(InputError, match="no best order"):
        LatencyModel(Bilinear(0.0, 0.0, 0.0, 0.0), Bilinear(0.0, 0.0, 0.0, 1.0))


def test_a_mapping_that_forgets_a_request_has_no_worth() -> None:
    with pytest.raises(InputError, match="exactly one batch"):
        worth([["a"]], [a_request("a"), a_request("b")], SLO_SA_TABLE_2)
