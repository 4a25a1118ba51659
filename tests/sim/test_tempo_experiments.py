"""Service gain token by token, Tempo's workload, and the experiments that rest on them."""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path

import pytest

from cato.core.errors import UnknownNameError
from cato.core.ids import PoolName, TaskName
from cato.core.slo import SloMetric
from cato.lab.experiments import tempo
from cato.lab.registry import experiment
from cato.sim.experiment import Options, silent
from cato.sim.tasks import Outcome, SimNode, SimTask, service_gain
from cato.sim.tempo_workload import CHATBOT, TEMPO_ENGINE, tempo_rate_per_s, tempo_tasks
from cato.sim.workloads import with_known_lengths

POOL = PoolName("p")


def an_outcome(
    *,
    first_s: float,
    end_s: float,
    stream: bool = True,
    tokens: int = 11,
    sent: list[tuple[float, int]] | None = None,
) -> Outcome:
    task = SimTask(
        "t",
        TaskName("t"),
        100.0,
        SloMetric.TTFT if stream else SloMetric.E2E,
        2.0,
        (SimNode(POOL, 30, tokens, tokens),),
        (0.5,),
        0.1 if stream else inf,
    )
    return Outcome(task, 100 + first_s, 100 + end_s, sent=sent or [])


def test_a_call_in_time_gains_its_weighted_tokens_and_a_late_one_its_share() -> None:
    assert service_gain(an_outcome(first_s=0.5, end_s=2.0, stream=False)) == 30 + 22
    assert service_gain(an_outcome(first_s=0.5, end_s=4.0, stream=False)) == pytest.approx(26)
    assert service_gain(Outcome(an_outcome(first_s=1, end_s=2).task)) == 0


def test_a_stream_is_paced_from_its_first_token_when_that_comes_early() -> None:
    assert service_gain(an_outcome(first_s=0.5, end_s=1.5)) == 30 + 22
    slow = service_gain(an_outcome(first_s=0.5, end_s=2.5))
    # token i was expected at 0.5 + 0.1 i and came at 0.5 + 0.2 i
    kept = sum((0.5 + 0.1 * i) / (0.5 + 0.2 * i) for i in range(11)) / 11
    assert slow == pytest.approx(30 + 22 * kept)


def test_a_late_first_token_costs_the_prompt_and_the_tokens_until_it_has_caught_up() -> None:
    gained = service_gain(an_outcome(first_s=4.0, end_s=4.1))
    kept = sum((2 + 0.1 * i) / (4 + 0.01 * i) for i in range(11)) / 11
    assert gained == pytest.approx(30 / 2 + 22 * kept)


def test_a_pause_costs_what_a_steady_stream_of_the_same_end_does_not() -> None:
    steady = service_gain(an_outcome(first_s=0.5, end_s=1.5))
    paused = service_gain(an_outcome(first_s=0.5, end_s=1.5, sent=[(100.51, 2), (101.4, 3)]))
    assert paused < steady == 52


def test_load_one_is_what_the_engine_does_at_its_full_batch() -> None:
    calls_per_task = 0.8 + 0.2 * 9
    tokens_per_s = tempo_rate_per_s(1.0) * calls_per_task * 250
    alone_per_s = TEMPO_ENGINE.max_running / TEMPO_ENGINE.decode_step_s(TEMPO_ENGINE.max_running)
    prefill_share = tempo_rate_per_s(1.0) * calls_per_task * 500 * 30e-6
    assert tokens_per_s == pytest.approx(alone_per_s * (1 - prefill_share))


def test_load_one_is_the_same_work_with_the_papers_lengths() -> None:
    engine, n = TEMPO_ENGINE, 5000
    step_s = engine.decode_step_s(engine.max_running) / engine.max_running
    nodes = [x for t in tempo_tasks(1.0, n, 2, POOL, length=CHATBOT) for x in t.nodes]
    work_s = sum(x.prompt_tokens * 30e-6 + x.output_tokens * step_s for x in nodes)
    assert work_s / n * tempo_rate_per_s(1.0, length=CHATBOT) == pytest.approx(1.0, rel=0.03)


def test_the_mix_is_three_to_one_to_one_and_stages_depend_on_each_other() -> None:
    tasks = tempo_tasks(1.1, 1000, 3, POOL, without_slo=0.1)
    shares = Counter(t.name for t in tasks)
    assert shares["latency"] == pytest.approx(540, abs=50)
    assert shares["throughput"] == pytest.approx(180, abs=40)
    assert shares["unbound"] == pytest.approx(100, abs=30)
    assert all((t.target_s == inf) == (t.name == "unbound") for t in tasks)
    collective = next(t for t in tasks if t.name == "collective")
    assert [n.needs for n in collective.nodes] == [()] * 3 + [(0, 1, 2)] * 6
    assert collective.nodes[0].downstream_s > 0 == collective.nodes[-1].downstream_s


def test_beliefs_foretell_a_part_of_each_length() -> None:
    tasks = tempo_tasks(1.0, 400, 5, POOL)
    nodes = [n for t in tasks for n in t.nodes]
    short = [n.output_tokens for n in nodes if n.expected_tokens < 200]
    long = [n.output_tokens for n in nodes if n.expected_tokens > 300]
    assert sum(short) / len(short) < 200 < 300 < sum(long) / len(long)
    within = [n.output_tokens <= n.length.left_quantile(0.9, 0) for n in nodes if n.length]
    assert sum(within) / len(within) == pytest.approx(0.9, abs=0.03)
    told = with_known_lengths(tasks)[0].nodes[0]
    assert told.expected_tokens == told.output_tokens == nodes[0].output_tokens


@pytest.mark.slow
def test_every_scheduler_finishes_all_tasks_and_targets_are_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempo, "COUNT", 25)
    e2e = experiment("tempo-e2e")
    report = e2e.run(Options((0,)), silent)
    assert all(m.mean == 1.0 for m in report.means if m.metric == "finished")
    assert len(report.targets) == 6 * 3 * 2
    ours = report.mean("slo_attainment", "foresight", load=1.3, lengths="assumed").mean
    theirs = report.mean("slo_attainment", "plas", load=1.3, lengths="assumed").mean
    target = next(t for t in report.targets if "plas, points, load 1.3, lengths assumed" in t.text)
    assert target.measured == pytest.approx(100 * (ours - theirs))
    assert [p.exists() for p in e2e.plot(report, tmp_path)] == [True] * 4
    again = e2e.run(Options((0,), ("plas", "tempo")), silent)
    assert again.mean("service_gain", "tempo", load=1.3) == report.mean(
        "service_gain", "tempo", load=1.3
    )


@pytest.mark.slow
def test_without_reserve_work_without_slo_waits_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempo, "ABLATION_COUNT", 200)
    ablation = experiment("tempo-ablation")
    options = Options((0,), ("tempo", "no reserve", "loss not counted"))
    report = ablation.run(options, silent)

    def mean(metric: str, policy: str, share: float = tempo.WITHOUT_SLO) -> float:
        return report.mean(metric, policy, without_slo=share).mean

    assert mean("unbound_e2e_s_mean", "no reserve") > 1.5 * mean("unbound_e2e_s_mean", "tempo")
    assert mean("unbound_within_patience", "tempo") == 1.0
    assert mean("preempted", "loss not counted", 0.0) > mean("preempted", "tempo", 0.0)
    assert ablation.plot(report, tmp_path)[0].exists()


def test_an_unknown_scheduler_is_refused() -> None:
    with pytest.raises(UnknownNameError):
        experiment("tempo-e2e").run(Options((0,), ("tempoo",)), silent)
