"""The experiment on batch mapping, at sizes that take a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from cato.core.errors import UnknownNameError
from cato.lab.experiments import slo_sa, slo_sa_queues
from cato.lab.registry import experiment
from cato.policies.mapping.registry import MAPPERS
from cato.sim.experiment import Options, silent
from cato.sim.report import Report


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slo_sa, "SIZES", (4, 20))
        yield experiment("slo-sa").run(Options(seeds=(0, 1)), silent)


@pytest.mark.slow
def test_the_same_seeds_give_the_same_bytes(report: Report) -> None:
    again = experiment("slo-sa").run(Options(seeds=(0, 1)), silent)
    assert again.to_json() == report.to_json()


def test_every_target_of_the_group_is_measured_and_met(report: Report) -> None:
    assert {(t.group, t.goal) for t in report.targets} == {(4, 0.999), (4, 0.99)}
    assert len(report.targets) == 2 * len(slo_sa.CAPS)
    # Fewer than in a full run, but these sizes are easy.
    assert [t.text for t in report.targets if not t.is_met] == []


def test_exact_lengths_gain_more_than_class_means_and_those_more_than_draws(
    report: Report,
) -> None:
    exact, mean, drawn = (
        report.mean(
            "of_fcfs", "moore-smith", workload="chat-code", max_batch=1, requests=20, lengths=k
        ).mean
        for k in slo_sa_queues.LENGTHS
    )
    assert exact > mean > drawn


def test_readings_of_the_printed_algorithm_run_at_one_size(report: Report) -> None:
    sizes = {m.setting["requests"] for m in report.means if m.policy in slo_sa.READINGS}
    assert sizes == {20}


def test_a_queue_tells_the_mappers_what_they_may_know() -> None:
    queue = slo_sa_queues.a_queue("coding", 12, Random(5))
    by_class = {kind.name: kind for kind in slo_sa_queues.WORKLOADS["coding"]}
    assert queue.told[slo_sa_queues.EXACT] == queue.true
    for true, told in zip(queue.true, queue.told[slo_sa_queues.CLASS_MEAN], strict=True):
        assert told.expected_tokens == by_class[true.id.split("-")[1]].output_tokens
        assert (told.id, told.prompt_tokens, told.slos) == (true.id, true.prompt_tokens, true.slos)
    drawn = [r.expected_tokens for r in queue.told[slo_sa_queues.GAUSSIAN]]
    assert len(set(drawn)) > 1
    assert drawn != [r.expected_tokens for r in queue.true]


def test_lengths_have_the_mean_of_their_class() -> None:
    kind = slo_sa_queues.WORKLOADS["coding"][3]
    lengths = [
        r.expected_tokens
        for seed in range(40)
        for r in slo_sa_queues.a_queue("coding", 100, Random(seed)).true
        if r.id.endswith(kind.name)
    ]
    assert sum(lengths) / len(lengths) == pytest.approx(kind.output_tokens, rel=0.1)


def test_calls_to_time_are_whole_calls_of_the_mapper() -> None:
    calls = slo_sa.calls_to_time(MAPPERS["moore-smith"], "chat-code", 6, 2, (1, 2))
    mappings = [call() for call in calls]
    assert [sum(map(len, m.batches)) for m in mappings] == [6, 6]
    assert mappings[0] != mappings[1]


def test_an_unknown_mapper_is_named() -> None:
    with pytest.raises(UnknownNameError, match="moore-smith"):
        experiment("slo-sa").run(Options(seeds=(0,), policies=("more-smith",)), silent)


@pytest.mark.slow
def test_the_pictures_are_drawn(report: Report, tmp_path: Path) -> None:
    paths = experiment("slo-sa").plot(report, tmp_path)
    assert [p.name for p in paths] == [
        f"slo-sa-{n}.png" for n in ("objective", "ratio", "lengths", "readings")
    ]
    assert all(p.stat().st_size > 10_000 for p in paths)
