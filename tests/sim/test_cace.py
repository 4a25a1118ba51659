"""The simulated fleet of cards, and the experiments that rest on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cato.core.errors import UnknownNameError
from cato.core.events import InvocationOffered
from cato.core.eviction import CardPolicies, EvictionPolicy, Wanted
from cato.core.ids import DeploymentName, InvocationId, ModelName
from cato.core.pool.placement_events import Load, LoadFinished
from cato.core.shared import OfLine, SharedEvent
from cato.lab.experiments import cace, cace_mixed
from cato.lab.experiments.cace import alike
from cato.lab.registry import experiment
from cato.policies.eviction.belady import Belady
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.foresight import ForesightEviction
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import BatchedPerModel, InOrder, QueueAware
from cato.policies.eviction.sites import ShapeBlind, UrgentOnFast
from cato.sim import card_workload, cards
from cato.sim.card_workload import COMPLETION, PATTERNS, PROFILES, REASONING, CardArrival
from cato.sim.experiment import Options, silent

UNIFORM, IDE_HEAVY, SKEWED = PATTERNS


def an_arrival(
    id: str, at_s: float, *, kind: str = COMPLETION, prompt: int = 500, output: int = 20
) -> CardArrival:
    model = card_workload.model_name("Java", kind)
    wanted = Wanted(InvocationId(id), model, at_s, at_s + card_workload.SLO_S[kind], output)
    return CardArrival(wanted, kind, prompt, output)


def some_arrivals(seed: int, rate_per_s: float = 0.2, count: int = 80) -> tuple[CardArrival, ...]:
    return card_workload.arrivals(SKEWED, rate_per_s, count, np.random.default_rng(seed))


def test_a_lone_invocation_takes_the_load_its_prefill_and_a_step_a_token() -> None:
    run = cards.run([an_arrival("1", 0.0)], alike(LeastRecentlyUsed(), InOrder()))
    profile, load_s = PROFILES[COMPLETION], card_workload.models()[0].load_s
    (served,) = run.served
    assert load_s == pytest.approx(2.8)
    assert run.load_s == pytest.approx(load_s)
    assert served.ttft_s == pytest.approx(load_s + profile.prefill_s(500))
    rest_s = 19 * profile.decode_step_s(1)
    assert served.e2e_s == pytest.approx(load_s + profile.prefill_s(500) + rest_s)


def test_those_that_decode_together_slow_one_another_down() -> None:
    alone = an_arrival("1", 0.0, kind=REASONING, output=100)
    both = [alone, an_arrival("2", 0.0, kind=REASONING, output=100)]
    run = cards.run(both, alike(LeastRecentlyUsed(), BatchedPerModel()))
    profile = PROFILES[REASONING]
    load_s = (
        card_workload.ENGINE_START_S
        + card_workload.WEIGHTS_BYTES[REASONING] / card_workload.STORAGE_BYTES_PER_S
    )
    # The second prompt is processed beside the second token of the first answer.
    first_s = load_s + profile.prefill_s(500) + profile.step_s(1, 500, 500, 1)
    first_s += 98 * profile.decode_step_s(2)
    last_s = first_s + profile.decode_step_s(1)
    assert [s.e2e_s for s in run.served] == pytest.approx([first_s, last_s])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_ask_in_their_shares(pattern: card_workload.Pattern) -> None:
    drawn = card_workload.arrivals(pattern, 1.0, 4000, np.random.default_rng(1))
    completions = sum(a.kind == COMPLETION for a in drawn) / len(drawn)
    java = sum(a.wanted.model.startswith("Java-") for a in drawn) / len(drawn)
    assert completions == pytest.approx(pattern.completions, abs=0.03)
    assert java == pytest.approx(pattern.favourites / 4, abs=0.03)
    assert drawn[-1].wanted.arrived_at_s == pytest.approx(4000, rel=0.06)


def test_the_same_seed_gives_the_same_run_and_its_events_replay() -> None:
    runs = [
        cards.run(some_arrivals(3), alike(ForesightEviction(), QueueAware()), 10**11)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    books, opened = cards.opened_pool(alike(ForesightEviction(), QueueAware()), 10**11)
    assert runs[0].events[: len(opened)] == opened
    commands = [c for event in runs[0].events[len(opened) :] for c in books.handle(event)]
    assert tuple(c for c in commands if c in runs[0].loads) == runs[0].loads
    queued = [
        e
        for e in runs[0].events
        if isinstance(e, OfLine) and isinstance(e.event, InvocationOffered)
    ]
    loaded = [e for e in runs[0].events if isinstance(e, LoadFinished)]
    assert len(queued) == 80
    assert len(loaded) <= len(runs[0].loads)


@pytest.mark.parametrize("eviction", [Cace(), ForesightEviction()], ids=lambda e: type(e).__name__)
def test_books_decide_alike_when_all_times_and_their_unit_shrink(eviction: EvictionPolicy) -> None:
    """A power of two, so that the shorter times are exact."""
    unit_s = 1 / 16
    run = cards.run(some_arrivals(3), alike(eviction, QueueAware()), 10**11)
    decided = []
    for unit in (unit_s, 1.0):
        books, opened = cards.opened_pool(
            alike(eviction, QueueAware()), 10**11, scale_s=unit_s, unit_s=unit
        )
        told = run.events[len(opened) :]
        commands = [c for e in told for c in books.handle(_sooner(e, unit_s))]
        decided.append([(c.copy_id, c.model, c.evicted) for c in commands if isinstance(c, Load)])
    expected = [(c.copy_id, c.model, c.evicted) for c in run.loads]
    assert decided[0] == expected
    assert decided[1] != expected  # the constants of policies are seconds


def _sooner(event: SharedEvent, unit_s: float) -> SharedEvent:
    now_s = event.now_s * unit_s
    if not isinstance(event, OfLine):
        return replace(event, now_s=now_s)
    told = replace(event.event, now_s=now_s)
    if isinstance(told, InvocationOffered):
        call = told.invocation
        at_s, deadline_s = call.arrived_at_s * unit_s, call.deadline_s * unit_s
        told = replace(told, invocation=replace(call, arrived_at_s=at_s, deadline_s=deadline_s))
    return replace(event, event=told)


def test_host_memory_saves_load_time_and_belady_saves_loads() -> None:
    arrivals = some_arrivals(5)
    cold = cards.run(arrivals, alike(LeastRecentlyUsed(), InOrder()))
    warm = cards.run(arrivals, alike(LeastRecentlyUsed(), InOrder()), cards.HOST_WEIGHTS_BYTES)
    clairvoyant = cards.run(arrivals, alike(Belady(card_workload.arrivals_s(arrivals)), InOrder()))
    assert warm.load_s < 0.7 * cold.load_s
    assert warm.metrics()["ttft_s_mean"] < cold.metrics()["ttft_s_mean"]
    assert clairvoyant.metrics()["hit_rate"] > cold.metrics()["hit_rate"]
    assert len(clairvoyant.loads) < len(cold.loads)


@pytest.mark.slow
def test_every_experiment_reports_means_differences_targets_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cace, "COUNT", 10)
    pair, one = Options(seeds=(1, 2)), Options(seeds=(1,))
    rq1 = experiment("cace-rq1").run(pair, silent)
    assert rq1.to_json() == experiment("cace-rq1").run(pair, silent).to_json()
    assert rq1.difference("hit_rate", "foresight", "lru", pattern="skewed", rate_per_s=0.1).n == 2
    underload = {"pattern": "uniform", "rate_per_s": 0.1}
    ttft_s, of_completions_s = (
        rq1.mean(metric, "cace without output", **underload).mean
        for metric in ("ttft_s_mean", "ttft_s_mean.completion")
    )
    e2e_s, of_reasoning_s = (
        rq1.mean(metric, "cace without output", **underload).mean
        for metric in ("e2e_s_mean", "e2e_s_mean.reasoning")
    )
    assert of_completions_s < ttft_s
    assert of_reasoning_s > e2e_s
    rq2 = experiment("cace-rq2").run(one, silent)
    ablation = experiment("cace-ablation").run(one, silent)
    counts = {r.experiment: len(r.targets) for r in (rq1, rq2, ablation)}
    assert counts == {"cace-rq1": 4, "cace-rq2": 12, "cace-ablation": 0}
    for report in (rq1, rq2, ablation):
        paths = experiment(report.experiment).plot(report, tmp_path)
        assert paths
        assert all(p.stat().st_size > 10_000 for p in paths)


def test_targets_compare_paired_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cace, "COUNT", 15)
    options = Options(seeds=(1, 2, 3), policies=("foresight", "lru"))
    report = experiment("cace-rq1").run(options, silent)
    gap = report.difference("hit_rate", "foresight", "lru", pattern="skewed", rate_per_s=0.1)
    target = report.targets[0]
    assert (target.measured, target.stderr) == pytest.approx((100 * gap.mean, 100 * gap.stderr))
    assert len(report.targets) == 2  # nothing to say about Belady, which did not run


def test_refuses_a_policy_that_it_does_not_know() -> None:
    with pytest.raises(UnknownNameError, match="no eviction policy named 'fifo'; known: lru"):
        experiment("cace-rq1").run(Options(seeds=(1,), policies=("fifo",)), silent)


def test_models_are_the_sixteen_of_the_workload() -> None:
    facts = {m.name: m for m in card_workload.models()}
    assert len(facts) == 16
    reasoning = facts[ModelName("Rust-reasoning")]
    assert reasoning.load_s == pytest.approx(14.16)
    assert reasoning.reload_s == pytest.approx(reasoning.load_s / 4)


def test_on_two_speeds_urgent_models_run_on_the_fast_accelerators() -> None:
    arrivals = card_workload.arrivals(UNIFORM, 0.2, 120, np.random.default_rng(7))
    shares = {}
    for sites in (ShapeBlind(), UrgentOnFast()):
        policies = CardPolicies(ForesightEviction(), QueueAware(), sites)
        run = cards.run(arrivals, policies, cards.HOST_WEIGHTS_BYTES, cace_mixed.SHAPES)
        assert len(run.served) == len(arrivals)
        on_fast = [x.deployment == "fast" for x in run.loads if x.model.endswith(COMPLETION)]
        shares[type(sites)] = sum(on_fast) / len(on_fast)
    assert shares[UrgentOnFast] > 0.7 > shares[ShapeBlind]


def test_models_that_do_not_fit_are_never_loaded_there_and_loads_take_the_time_of_the_shape() -> (
    None
):
    large, small = card_workload.WEIGHTS_BYTES[REASONING], card_workload.WEIGHTS_BYTES[COMPLETION]
    shapes = (
        cards.CardShape(DeploymentName("large"), 1, memory_bytes=large),
        cards.CardShape(DeploymentName("small"), 2, 2.0, 3.0, memory_bytes=small),
    )
    policies = CardPolicies(LeastRecentlyUsed(), QueueAware(), UrgentOnFast())
    run = cards.run(some_arrivals(3, count=40), policies, shapes=shapes)
    assert {x.deployment for x in run.loads if x.model.endswith(REASONING)} == {"large"}
    facts = {m.name: m for m in card_workload.models()}
    for load in run.loads:
        scale = 3.0 if load.deployment == "small" else 1.0
        assert load.expected_s == pytest.approx(scale * facts[load.model].load_s)


def test_the_mixed_experiment_compares_its_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cace_mixed, "COUNT", 40)
    mixed = experiment("cace-mixed")
    report = mixed.run(Options((0,), (), quick=True), silent)
    assert {m.policy for m in report.means} == set(cace_mixed.ARMS)
    assert {m.setting["rate_per_s"] for m in report.means} == {0.2}
    assert len(report.targets) == 4
    with pytest.raises(UnknownNameError, match="arm"):
        mixed.run(Options((0,), ("belady",)), silent)
