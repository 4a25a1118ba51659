"""The papers' experiments are the papers': mixes, rates, judged metrics, baselines, replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from math import expm1, inf, sqrt
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from cato.cli import app
from cato.core.ids import PoolName
from cato.core.slo import SloMetric
from cato.lab.experiments import (
    azure_replay,
    cace,
    cace_figures,
    cato_rq,
    cato_rq4,
    coding_scaling,
    papers,
    printed,
    saber,
    slo_sa,
    slo_sa_figures,
    slo_sa_instances,
    slo_sa_queues,
    tempo_figures,
    tempo_variants,
)
from cato.lab.live.experiments import live_experiment
from cato.lab.registry import experiment
from cato.lab.studies import matrix
from cato.policies import schedulers
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import InOrder
from cato.policies.mapping.annealing import SimulatedAnnealing
from cato.policies.mapping.registry import MAPPERS
from cato.sim import card_workload, cards
from cato.sim.cato_workload import CATO_PRINTED_CLASSES, MODEL_A, MODEL_B
from cato.sim.experiment import Options, silent
from cato.sim.report import Report
from cato.sim.tasks import SimTask
from cato.sim.tempo_workload import CHATBOT, TEMPO_LENGTHS, tempo_tasks
from cato.sim.workloads import saber_tasks

CODING_CELLS = [
    (name, mix, rate)
    for name, paper in printed.CODING.items()
    for mix in paper.mixes
    for rate in (paper.rates_per_s[0], paper.rates_per_s[-1])
]


def a_report(name: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    """All cells and policies of the experiment, thirty tasks each."""
    made = cato_rq.cato_tasks
    monkeypatch.setattr(
        cato_rq,
        "cato_tasks",
        lambda shares, rate, count, seed, **kwargs: made(shares, rate, 30, seed, **kwargs),
    )
    return experiment(name).run(Options((1,)), silent)


def many(mix: printed.Shares, rate_per_s: float) -> list[SimTask]:
    return [t for seed in range(30) for t in cato_rq.tasks_at(mix, "rate_per_s", rate_per_s, seed)]


@pytest.mark.parametrize(("name", "mix", "rate_per_s"), CODING_CELLS)
def test_coding_tasks_come_as_the_paper_mixes_them(name: str, mix: str, rate_per_s: float) -> None:
    shares = printed.CODING[name].mixes[mix]
    tasks = many(shares, rate_per_s)
    counts = Counter(str(t.name) for t in tasks)
    assert {k: n / len(tasks) for k, n in counts.items()} == pytest.approx(dict(shares), abs=0.02)
    lasted_s = fmean(tasks[i].arrived_at_s for i in range(199, len(tasks), 200))
    assert 200 / lasted_s == pytest.approx(rate_per_s, rel=0.05)
    gaps = [b.arrived_at_s - a.arrived_at_s for a, b in pairwise(tasks) if b.id != "t00000"]
    mean = fmean(gaps)
    assert fmean((g - mean) ** 2 for g in gaps) == pytest.approx(mean**2, rel=0.1)  # Poisson


@pytest.mark.parametrize("task", printed.JUDGED)
def test_coding_tasks_ask_the_models_in_the_papers_order_and_are_judged_by_its_metric(
    task: str,
) -> None:
    found = cato_rq.tasks_at({task: 1.0}, "rate_per_s", 1.0, 1)
    assert {t.metric for t in found} == {printed.JUDGED[task]}
    calls = [MODEL_A, MODEL_B] if task in ("generation", "translation") else [MODEL_A]
    assert all([n.pool for n in t.nodes] == [PoolName(m) for m in calls] for t in found)


@pytest.mark.parametrize("task", printed.JUDGED)
def test_the_sla_is_one_and_a_half_times_the_judged_mean_of_the_task_alone(task: str) -> None:
    alone = [
        replace(t, arrived_at_s=1000.0 * i)
        for i, t in enumerate(
            t for seed in range(3) for t in cato_rq.tasks_at({task: 1.0}, "rate_per_s", 1.0, seed)
        )
    ]
    fleet = cato_rq.a_fleet("foresight")
    (times,) = cato_rq.judged_s(fleet.run(alone)).values()
    assert alone[0].target_s == pytest.approx(1.5 * fmean(times), rel=0.03)


@pytest.mark.parametrize("name", printed.CODING)
def test_every_rate_and_baseline_of_the_paper_is_in_the_report_and_its_pictures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = printed.CODING[name]
    report = a_report(name, monkeypatch)
    ours, cato = (
        (cato_rq4.OURS, printed.SCALED_CATO)
        if name == cato_rq4.NAME
        else ("foresight", printed.CATO)
    )
    for mix, shares in paper.mixes.items():
        for rate in paper.rates_per_s:
            for policy in (*paper.baselines, ours, cato):
                for metric in ("slo_attainment", "utilization", "longest_wait_s"):
                    report.mean(metric, policy, workload=mix, rate_per_s=rate)
        for task in shares:
            of_task = (f"{m}.{task}" for m in ("slo_attainment", "judged_s_p95", "judged_s_p99"))
            for metric in of_task:
                assert any(m.metric == metric for m in report.means)
    for result in paper.results:
        own = report.mean(result.metric, result.policy, **result.setting)
        theirs = report.mean(result.metric, f"{result.policy}, paper", **result.setting)
        assert (own.n, theirs.n, theirs.mean) == (1, 0, result.value)
    drawn = {path.name for path in experiment(name).plot(report, tmp_path)}
    ends = [f"-{mix}" if len(paper.mixes) > 1 else "" for mix in paper.mixes]
    assert drawn >= {
        f"{name}-{of}{end}.png" for of in ("goodput", "latency", "utilization") for end in ends
    }


def test_coding_models_have_as_many_replicas_as_in_the_paper() -> None:
    fleet = cato_rq.a_fleet("ray-serve")
    assert {n: len(p.replicas) for n, p in fleet.pools.items()} == {MODEL_A: 6, MODEL_B: 6}
    assert set(CATO_PRINTED_CLASSES) == set(printed.JUDGED)
    scaled = cato_rq4.METHODS[printed.SCALED_CATO].scaling
    assert scaled is not None
    assert scaled.max_exceeded_times == printed.VIOLATIONS  # type: ignore[attr-defined]
    assert printed.SCALED_REPLICAS == (coding_scaling.MIN_REPLICAS, coding_scaling.MAX_REPLICAS)
    start = cato_rq4.a_fleet(printed.SCALED_CATO, "pattern-1").fleet
    assert {len(p.replicas) for p in start.pools.values()} == {coding_scaling.MIN_REPLICAS}


def test_saber_serves_the_papers_requests_under_its_caps() -> None:
    paper = printed.SABER
    assert paper.caps == saber.CAPS
    assert {saber.cap_name(c) for c in paper.caps} | {"saber"} <= set(saber.RQ1_POLICIES)
    for mix, shares in paper.mixes.items():
        tasks = [
            t for seed in range(40) for t in saber_tasks(mix, 5.0, saber.REQUESTS, seed, saber.POOL)
        ]
        assert len(tasks) == 40 * paper.requests
        counts = Counter(str(t.name) for t in tasks)
        assert {k: n / len(tasks) for k, n in counts.items()} == pytest.approx(
            dict(shares), abs=0.02
        )
        for name, (prompt, output, sla_s) in paper.classes.items():
            of_class = [t for t in tasks if t.name == name]
            assert {(t.metric, t.target_s) for t in of_class} == {(paper.metric, sla_s)}
            assert fmean(t.nodes[0].prompt_tokens for t in of_class) == pytest.approx(
                prompt, rel=0.08
            )
            assert fmean(t.nodes[0].output_tokens for t in of_class) == pytest.approx(
                output, rel=0.08
            )


def test_saber_is_run_at_every_rate_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saber, "REQUESTS", 3)
    report = experiment("saber-rq1").run(Options((1,), ("saber",)), silent)
    cells = {(m.setting["workload"], m.setting["rate_per_s"]) for m in report.means}
    assert cells == {(w, r) for w in printed.SABER.mixes for r in printed.SABER.rates_per_s}


def test_annealing_has_the_papers_temperatures() -> None:
    mapper = SimulatedAnnealing()
    assert {k: getattr(mapper, k) for k in printed.ANNEALING} == printed.ANNEALING


def test_tempo_mixes_requests_and_objectives_as_the_paper_does() -> None:
    tasks = tempo_tasks(1.0, 4000, 1, tempo_variants.POOL)
    counts = Counter(str(t.name) for t in tasks)
    assert {k: n / len(tasks) for k, n in counts.items()} == pytest.approx(
        dict(printed.TEMPO_SHARES), abs=0.02
    )
    found = {(str(t.name), t.metric, t.target_s, t.tpot_target_s) for t in tasks}
    assert found == {
        ("latency", SloMetric.TTFT, printed.TEMPO_TTFT_S, printed.TEMPO_TBT_S),
        ("throughput", SloMetric.E2E, printed.TEMPO_TTLT_S, inf),
        ("collective", SloMetric.E2E, 2 * printed.TEMPO_TTLT_S, inf),  # two stages
    }


def test_tempo_can_have_the_papers_lengths() -> None:
    tasks = tempo_tasks(1.0, 5000, 1, tempo_variants.POOL, length=CHATBOT)
    for kind, (prompt, output) in printed.TEMPO_CHATBOT.items():
        mine = [t.nodes for t in tasks if (t.name == "collective") == (kind == "collective")]
        prompts = fmean(sum(n.prompt_tokens for n in nodes) for nodes in mine)
        outputs = fmean(sum(n.output_tokens for n in nodes) for nodes in mine)
        assert prompts == pytest.approx(prompt[0], rel=0.05)
        assert outputs == pytest.approx(output[0], rel=0.05)
        calls, call = len(mine[0]), TEMPO_LENGTHS[CHATBOT][kind == "collective"]
        assert _deviation(calls, call.prompt, call.prompt_spread) == pytest.approx(prompt[1])
        assert _deviation(calls, call.output, call.output_spread) == pytest.approx(output[1])


def _deviation(calls: int, mean: float, spread: float) -> float:
    """Of the sum of so many lognormal lengths."""
    return mean * sqrt(calls * expm1(spread**2))


def test_cace_has_the_papers_models_cards_and_patterns() -> None:
    assert cards.CARDS == printed.CACE_CARDS
    assert {
        p.name: (p.completions, p.favourites) for p in card_workload.PATTERNS
    } == printed.CACE_PATTERNS
    for pattern in cace.PATTERNS.values():
        shares = [
            pattern.share(lang, kind)
            for lang in card_workload.LANGUAGES
            for kind in card_workload.SLO_S
        ]
        assert len(shares) == printed.CACE_MODELS
        assert sum(shares) == pytest.approx(1.0)
    assert {"lru", "lfu", "cace"} <= set(cace.POLICIES)


def test_slo_sa_has_the_papers_objectives_batches_instances_and_baselines() -> None:
    found = {
        c.name: {s.metric: s.target_s for s in c.slos} for c in slo_sa_queues.WORKLOADS["chat-code"]
    }
    assert found == printed.SLO_SA_OBJECTIVES
    names = Counter(
        str(t.name) for t in slo_sa_queues.arriving("chat-code", [0.0] * 4000, 1, PoolName("p"))
    )
    assert names["chat"] / 4000 == pytest.approx(0.5, abs=0.03)
    assert slo_sa.CAPS == printed.SLO_SA_LARGEST_BATCHES
    assert slo_sa_figures.LENGTH_ERRORS[1:4] == printed.SLO_SA_LENGTH_ERRORS
    assert slo_sa_instances.INSTANCES == printed.SLO_SA_INSTANCES
    assert set(printed.SLO_SA_BASELINES) <= set(MAPPERS)


def test_every_baseline_of_tempo_and_cace_is_run() -> None:
    assert set(printed.TEMPO_BASELINES.values()) <= set(tempo_variants.SCHEDULERS)
    assert set(printed.TEMPO_BASELINES.values()) <= set(tempo_figures.ARMS)
    for table in (cace.POLICIES, cace.ABLATED, cace_figures.ARMS):
        assert set(printed.CACE_BASELINES) <= set(table)
    evictions = {eviction for eviction, _ in cace.STRATEGIES.values()}
    assert {"lru", "lfu", "cace"} <= evictions


def test_every_question_of_cace_compares_the_papers_arms_in_order() -> None:
    meant = {
        "lru": LeastRecentlyUsed(),
        "cace": Cace(),
        "cace without recency": Cace(recency=0.0),
        "cace without reload cost": Cace(reload_cost=0.0),
        "cace without demand": Cace(demand=0.0),
        "cace without output": Cace(output=0.0),
    }
    tables = {
        "cace-rq1": cace.RQ1_ARMS,
        "cace-rq2": {n.removesuffix(", in-order"): arm for n, arm in cace.RQ2_ARMS.items()},
        "cace-ablation": cace.ABLATION_ARMS,
    }
    for name, arms in printed.CACE_ARMS.items():
        assert {n: tables[name][n] for n in arms} == {n: (meant[n], InOrder()) for n in arms}


@pytest.mark.parametrize(
    "table",
    [cato_rq.POLICIES, saber.RQ1_POLICIES, saber.RQ2_POLICIES, tempo_variants.SCHEDULERS,
     tempo_figures.ARMS, azure_replay.POLICIES],
)  # fmt: skip
def test_strong_opponents_stand_in_every_table(table: Collection[str]) -> None:
    assert set(printed.OPPONENTS) <= set(table)


def test_batches_are_known_where_speeds_are_mixed() -> None:
    assert schedulers.KNOWS_BATCHES in {a.name for a in live_experiment("mixed").arms}
    assert {schedulers.KNOWS_BATCHES} <= set(matrix.OPEN_ARMS) & set(azure_replay.POLICIES)


def test_the_command_lists_every_experiment_of_the_five_papers() -> None:
    listed = CliRunner().invoke(app, ["simulate", "--list"], env={"COLUMNS": "200"}).output
    words = set(listed.split())
    for paper in papers.PAPERS:
        assert {e.experiment for e in paper.entries} <= words, paper.name
