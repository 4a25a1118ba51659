"""The experiments on estimators measure what they say, on small inputs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from cato.core.commands import Command
from cato.core.errors import InputError, UnknownNameError
from cato.core.events import Event
from cato.core.ids import InvocationId
from cato.core.orchestrator import PoolOrchestrator
from cato.estimators.speed_meter import SpeedMeter
from cato.lab.experiments import azure_replay, length_models, saber, saber_estimators
from cato.lab.registry import experiment
from cato.lab.studies import completions, matrix, matrix_cells
from cato.policies import schedulers
from cato.policies.admission.saber import SaberAdmission, speed_model
from cato.sim.experiment import Options, silent
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.replica import Sequence, SimReplica
from cato.sim.traces import TraceRow, load_azure
from cato.sim.workloads import SABER_ENGINE, SEVEN_B, saber_tasks


def a_trace(folder: Path, rows: int, seed: int = 0, *, tells: bool = True) -> Path:
    """Two kinds of prompts: short ones have short answers, unless nothing `tells` the length."""
    rng = np.random.default_rng(seed)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    at = datetime(2023, 11, 16)
    for _ in range(rows):
        at += timedelta(seconds=float(rng.exponential(0.5)))
        is_long = rng.random() < 0.5
        prompt = int(rng.integers(2000, 4000) if is_long else rng.integers(100, 1000))
        is_long = is_long if tells else rng.random() < 0.5
        output = int(np.ceil((60 if is_long else 8) * rng.lognormal(0.0, 0.6)))
        lines.append(f"{at.isoformat(' ', 'microseconds')},{prompt},{output}")
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# Length bounds


@pytest.mark.slow
def test_length_bounds_judge_the_later_half_of_a_trace(tmp_path: Path) -> None:
    models = ("compiled-forest", "learnt")
    options = Options((0, 1), policies=models, trace=a_trace(tmp_path, 1200))
    report = experiment("length-bounds").run(options, silent)

    assert report.extra["train_rows"] == report.extra["report_rows"] == 600
    assert report.to_json() == experiment("length-bounds").run(options, silent).to_json()
    assert {m.policy for m in report.means} == {"marginal", *models}
    compiled = report.mean("coverage", "compiled-forest")
    assert compiled.n == 600
    assert 0.86 < compiled.mean < 0.95
    # The prompt tells the length here, so that the forest must beat the marginal ...
    gain = report.mean("pinball_minus_marginal_tokens", "compiled-forest")
    assert gain.mean < -2 * gain.stderr < 0
    assert report.mean("pinball_minus_marginal_tokens", "learnt") == replace(gain, policy="learnt")
    # ... and a bound that is not refined must miss the answers that outgrow it.
    refined = report.mean("refined_coverage", "compiled-forest", generated_tokens=100.0)
    unrefined = report.mean("unrefined_coverage", "compiled-forest", generated_tokens=100.0)
    assert refined.mean > 0.8 > unrefined.mean
    texts = [t.text for t in report.targets]
    assert len(texts) == 6  # coverage from both sides, pinball, and g of 10, 30 and 100
    assert "refined coverage at 300" not in " ".join(texts)  # too few answers reach it

    assert all(p.stat().st_size > 0 for p in experiment("length-bounds").plot(report, tmp_path))


def test_where_the_prompt_says_nothing_the_marginal_is_learnt(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, 1200, tells=False)
    options = Options((0,), policies=("learnt",), trace=trace)
    report = experiment("length-bounds").run(options, silent)
    assert report.mean("pinball_minus_marginal_tokens", "learnt").mean == 0.0


def test_length_features_know_only_answers_that_are_complete() -> None:
    rows = [
        TraceRow(0.0, 1000, 400),  # takes about nine seconds
        TraceRow(1.0, 1000, 10),
        TraceRow(60.0, 1000, 10),
    ]
    first, second, third = length_models.records_of(rows)
    assert first.features.values == second.features.values == (1000.0, 0.0, 0.0)
    assert third.features.values[1] > 0.0
    # No row's own output tells on its features.
    changed = length_models.records_of([*rows[:2], TraceRow(60.0, 1000, 999)])
    assert changed[2].features == third.features


def test_length_bounds_refuse_what_they_cannot_use(tmp_path: Path) -> None:
    run = experiment("length-bounds").run
    with pytest.raises(InputError, match="--trace"):
        run(Options(seeds=(0,)), silent)
    with pytest.raises(UnknownNameError, match="known: marginal"):
        run(Options(seeds=(0,), policies=("oracle",)), silent)
    with pytest.raises(InputError, match="at least 400"):
        run(Options(seeds=(0,), trace=a_trace(tmp_path, 300)), silent)


def test_every_named_model_can_be_fitted_and_asked(tmp_path: Path) -> None:
    records = length_models.records_of(load_azure(a_trace(tmp_path, 400)))
    for name in length_models.MODELS:
        model = length_models.fitted(name, records, seed=0)
        bound = model.quantile(records[0].features, 0.9)
        assert bound > model.quantile(records[0].features, 0.5) > 0
        assert model.quantile(records[0].features, 0.9, generated_tokens=1000) > 1000


# Speed over concurrency


def test_a_request_that_runs_alone_has_the_speed_of_the_profile() -> None:
    samples = saber_estimators.speed_samples("W2", rate_per_s=0.0001, seed=0)
    profile = SABER_ENGINE
    assert len(samples) == saber_estimators.REQUESTS
    assert max(s.concurrency for s in samples) == pytest.approx(1.0)
    fastest = max(s.tokens_per_s for s in samples)
    assert 0.85 / profile.decode_step_s(1) < fastest < 1.0 / profile.decode_step_s(1)


def test_a_requests_speed_counts_its_own_prompt_and_those_that_join() -> None:
    def speed_of_first(*prompts_tokens: int) -> float:
        sequences = [Sequence(InvocationId(str(i)), n, 28) for i, n in enumerate(prompts_tokens)]
        arrived_at_s = [0.3 * i for i in range(len(sequences))]
        engine = SimReplica(SEVEN_B, max_running=2)
        return saber_estimators.load_and_speed(sequences, arrived_at_s, engine)[0].tokens_per_s

    decoding = 1 / SEVEN_B.decode_step_s(1, 2048)
    alone = speed_of_first(2048)
    assert alone == pytest.approx(28 / (28 / decoding + SEVEN_B.prefill_s(2048)), rel=0.05)
    assert speed_of_first(2048, 2048) < 0.9 * speed_of_first(2048, 1) < 0.9 * alone


def test_saber_learns_the_speed_of_a_trace_from_its_earlier_rows(tmp_path: Path) -> None:
    trace, learnt = a_trace(tmp_path, 300), (0, 200)
    law = azure_replay.speed_law(trace, learnt, False)
    assert law.speed(1) < 1 / SEVEN_B.decode_step_s(1, 2048)
    assert law.speed(8) < 0.7 / SEVEN_B.decode_step_s(8, 2048)
    assert law != azure_replay.speed_law(trace, learnt, True)
    azure_replay.speed_law.cache_clear()
    assert law == azure_replay.speed_law(trace, learnt, False)


def test_busier_runs_are_more_concurrent_and_slower() -> None:
    means = [
        np.mean([(s.concurrency, s.tokens_per_s) for s in samples], axis=0)
        for samples in (saber_estimators.speed_samples("W1", rate, 0) for rate in (1.0, 5.0, 20.0))
    ]
    assert means[0][0] < means[1][0] < means[2][0]
    assert means[0][1] > means[1][1] > means[2][1]


@pytest.mark.slow
def test_usl_fits_best_also_where_it_was_not_fitted(tmp_path: Path) -> None:
    report = experiment("saber-estimators").run(Options(seeds=(0,)), silent)
    for workload in ("W1", "W2", "W3"):
        for other in ("linear", "logistic"):
            gap = report.difference("held_out_r2", "usl", other, workload=workload)
            assert gap.mean > 0
        step_s = SABER_ENGINE.decode_step_s(1)
        found = report.mean("lambda_tokens_per_s", "usl", workload=workload).mean
        assert found == pytest.approx(1.0 / step_s, rel=0.1)
    assert json.loads(report.to_json())["experiment"] == "saber-estimators"
    assert all(p.stat().st_size > 0 for p in experiment("saber-estimators").plot(report, tmp_path))


def test_saber_estimators_refuse_an_unknown_curve() -> None:
    with pytest.raises(UnknownNameError, match="known: usl, linear, logistic"):
        experiment("saber-estimators").run(Options(seeds=(0,), policies=("cubic",)), silent)


@dataclass(slots=True)
class Metered:
    """A pool's orchestrator with a meter of its speeds, as in a router."""

    orchestrator: PoolOrchestrator
    meter: SpeedMeter = field(default_factory=SpeedMeter)

    def handle(self, event: Event) -> tuple[Command, ...]:
        commands = self.orchestrator.handle(event)
        self.meter.handle(event, commands)
        return commands


def test_speeds_that_a_router_measures_correct_a_profile_that_is_wrong() -> None:
    believed = SABER_ENGINE.slowed(2.0)
    pool = PoolSetup(saber.POOL, (SABER_ENGINE,), schedulers.saber(speed_model(believed)))
    fleet = Fleet([pool])
    metered = Metered(fleet.pools[saber.POOL].orchestrator)
    fleet.pools[saber.POOL].orchestrator = metered
    fleet.run(saber_tasks("W1", 5.0, 300, 0, saber.POOL))
    speeds = metered.meter.news()
    assert speeds is not None
    right, found = saber_estimators.offline_fit(saber_estimators.USL), speed_model(believed, speeds)
    for load in (1, 5, 20, 40):
        assert found.speed(load) == pytest.approx(right.speed(load), rel=0.25)
        assert speed_model(believed).speed(load) < 0.75 * right.speed(load)


def test_the_law_of_a_profile_is_near_that_of_requests_with_their_prompts() -> None:
    measured, known = saber_estimators.offline_fit(saber_estimators.USL), speed_model(SABER_ENGINE)
    for load in (1, 5, 20, 64, 100):
        assert known.speed(load) == pytest.approx(measured.speed(load), rel=0.06)


def test_a_law_of_requests_with_long_prompts_is_far_below_the_speed_of_decoding() -> None:
    decoding_per_s = 1 / completions.ENGINE.decode_step_s(16, 512)
    assert matrix_cells.speed_law("64/20").speed(16) > 0.9 * decoding_per_s
    assert matrix_cells.speed_law("8000/500").speed(16) < 0.4 * decoding_per_s


def test_saber_knows_the_engine_of_a_cell_whatever_the_others_believe() -> None:
    scene = replace(matrix.BASES[0], slowness=2.0)
    pool = matrix_cells.cell_of(scene, None).with_policies("saber")
    assert isinstance(pool.policies.admission, SaberAdmission)
    assert pool.policies.admission.model == matrix_cells.speed_law(scene.traffic)
