"""The figures of the papers as studies: what is varied, and that it has its effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from cato.core.errors import InputError
from cato.lab.experiments import (
    cace_figures,
    saber_figures,
    slo_sa_figures,
    slo_sa_instances,
    slo_sa_queues,
    tempo_figures,
    tempo_hour,
    tempo_variants,
)
from cato.lab.experiments.cace_figures import ByWindow, Scene, adapted, windows_of
from cato.lab.experiments.tempo_figures import Traffic, recorded, tasks_of
from cato.lab.registry import study
from cato.lab.study import as_experiment
from cato.policies.eviction.cace import Cace
from cato.sim.experiment import Options, silent
from cato.sim.traces import load_trace

BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
45.5,ChatGPT,20,0,20,API log
118,ChatGPT,417,276,693,Conversation log
"""


# Tempo


def test_arrivals_of_a_burst_gpt_file_keep_their_clumps_at_the_wanted_rate(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT.csv"
    path.write_text(BURST_GPT)
    rows = load_trace(path)
    # The third request failed.
    assert [(r.arrived_at_s, r.prompt_tokens, r.output_tokens) for r in rows] == [
        (0.0, 472, 18),
        (40.0, 1087, 230),
        (113.0, 417, 276),
    ]
    times = recorded(path, np.random.default_rng(1), 2.0, 9)
    assert times[-1] == pytest.approx(9 / 2.0)
    gaps = np.diff(times)
    assert max(gaps) / min(gaps) == pytest.approx(73 / (113 / 3))
    path.write_text(BURST_GPT.replace("45.5,ChatGPT,20,0", "45.5,ChatGPT,20,many"))
    with pytest.raises(InputError, match=r"BurstGPT\.csv:4"):
        load_trace(path)


def test_tasks_of_a_figure_have_its_scale_and_its_mix() -> None:
    plain, scaled = (tasks_of(Traffic(1.0, 60, slo_scale=x), 1) for x in (1.0, 2.0))
    assert [2 * t.target_s for t in plain] == [t.target_s for t in scaled]
    assert {t.name for t in tasks_of(Traffic(1.0, 20, "streams"), 1)} == {"latency"}


def test_a_steeper_decay_leaves_less_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempo_figures, "QUICK_COUNT", 60)
    monkeypatch.setattr(tempo_figures, "DECAYS", (0.5, 8.0))
    monkeypatch.setattr(tempo_figures, "LOAD", 3.0)
    options = Options((1,), ("foresight", "fcfs"), quick=True)
    report = as_experiment(study("tempo-fig16")).run(options, silent)
    mild, steep = (report.mean("gain_share", "fcfs", decay=a).mean for a in (0.5, 8.0))
    assert steep < mild


def test_the_hour_is_shown_by_ten_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempo_hour, "HOUR_S", 60.0)
    monkeypatch.setattr(tempo_hour, "WINDOW_S", 10.0)
    chosen = as_experiment(study("tempo-fig9"))
    report = chosen.run(Options((1,), ("fcfs",)), silent)
    points = [m for m in report.means if m.metric == "gain_share" and "minutes" in m.setting]
    assert len(points) == 6
    (picture,) = chosen.plot(report, tmp_path)
    assert picture.exists()


def test_without_graph_matching_a_call_knows_nothing_of_later_stages() -> None:
    tasks = tasks_of(Traffic(1.0, 30), 2)
    assert any(n.downstream_s > 0 for t in tasks for n in t.nodes)
    assert all(n.downstream_s == 0 for t in tempo_variants.without_stages(tasks) for n in t.nodes)
    assert all(n.length is None for t in tempo_variants.without_lengths(tasks) for n in t.nodes)


# SLO-SA


def test_lengths_that_are_better_known_gain_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slo_sa_figures, "PANELS", ((20, 2),))
    monkeypatch.setattr(slo_sa_figures, "LENGTH_ERRORS", (0.0, 0.3))
    report = as_experiment(study("slo-sa-fig9")).run(Options((1, 2), ("annealing",)), silent)
    exact, near, drawn = (
        report.mean("of_fcfs", "annealing", lengths=k).mean for k in ("exact", "+-30 %", "gaussian")
    )
    assert exact > near > drawn


def test_a_wrong_coefficient_is_one_of_both_phases() -> None:
    wrong, right = slo_sa_figures._wrong(1, 0.5), slo_sa_figures.SLO_SA_TABLE_2
    assert wrong.prefill.per_request_s == pytest.approx(1.5 * right.prefill.per_request_s)
    assert wrong.decode == replace(right.decode, per_request_s=1.5 * right.decode.per_request_s)


def test_instances_get_about_as_many_tokens_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = slo_sa_queues.a_queue("chat-code", 40, Random(1)).true
    tokens = [0, 0, 0]
    for r, place in zip(requests, slo_sa_instances._by_memory(requests, 3), strict=True):
        tokens[place] += r.prompt_tokens + round(r.expected_tokens)
    largest = max(r.prompt_tokens + r.expected_tokens for r in requests)
    assert max(tokens) - min(tokens) <= largest


def test_each_instance_of_figure_11_has_a_copy_of_the_same_ten() -> None:
    alone = slo_sa_instances._queues(1, slo_sa_instances.COPIES, "1 0")
    four = slo_sa_instances._queues(4, slo_sa_instances.COPIES, "1 0")
    assert len(alone[0]) == slo_sa_instances.EACH
    assert four == alone * 4
    for name in slo_sa_instances.ASSIGNMENTS:
        queues = slo_sa_instances._queues(4, name, "1 0")
        assert sum(len(q) for q in queues) == 4 * slo_sa_instances.EACH
        assert all(queues[0] != q for q in queues[1:])


# SABER


def test_distribution_functions_rise_to_the_share_that_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(saber_figures, "PANELS", (("W3", 10.0, 80),))
    chosen = as_experiment(study("saber-fig4"))
    report = chosen.run(Options((1,), ("saber", "static-cap-80", "static-cap-30")), silent)
    # Caps that are the best of other workloads do not run.
    assert {m.policy for m in report.means} == {"saber", "static-cap-80"}
    for policy in ("saber", "static-cap-80"):
        at = [
            report.mean("done", policy, task="qna", time_over_sla=x).mean for x in (0.5, 1.0, 3.0)
        ]
        assert at == sorted(at)
        assert at[1] == report.mean("attainment_qna", policy, workload="W3").mean
    assert chosen.plot(report, tmp_path)


# CACE


def test_windows_begin_where_they_should_and_arms_meet_the_same() -> None:
    scene = Scene("skewed", 0.5, 3)
    windows = windows_of(scene, 1)
    assert windows == windows_of(scene, 1)
    assert all(0 <= a.wanted.arrived_at_s < 30 for w in windows for a in w)
    ids = [a.wanted.id for a in cace_figures._row(windows)]
    assert len(set(ids)) == len(ids)


def test_weights_are_learnt_from_earlier_windows_alone() -> None:
    scene = Scene("skewed", 0.4, 4)
    first, *rest = adapted(scene, 1)
    assert first == Cace()
    assert adapted(replace(scene, windows=3), 1) == (first, *rest[:2])
    policy = ByWindow((Cace(), Cace(demand=0.0)))
    assert len(policy.weights) == 2
