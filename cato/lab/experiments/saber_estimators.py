"""Which curve predicts the speed of one request among L others?

With the engine's cap lifted, every finished request gives a pair: its mean concurrency, itself
included, and its tokens per second from start to last token. Each curve is fitted to the pairs of
even requests, all rates together; `held_out_r2` is computed on the odd ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import InvocationId
from cato.estimators.usl import (
    LinearFit,
    LogisticFit,
    SpeedSample,
    UslFit,
    fit_linear,
    fit_logistic,
    fit_usl,
)
from cato.sim import replica
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.plots import figure, save
from cato.sim.replica import FactKind, SimReplica
from cato.sim.report import Report, Sample, compare, summarize
from cato.sim.workloads import (
    SABER_CLASSES,
    SABER_ENGINE,
    SABER_RATES_PER_S,
    SABER_SHARES,
    SPREAD,
)

REQUESTS = 100

USL, LINEAR, LOGISTIC = "usl", "linear", "logistic"
CURVES = (USL, LINEAR, LOGISTIC)

Fit = UslFit | LinearFit | LogisticFit


def speed_samples(workload: str, rate_per_s: float, seed: int) -> tuple[SpeedSample, ...]:
    """Pairs of one run of `REQUESTS` Poisson arrivals, in order of arrival."""
    rng = np.random.default_rng([seed, round(rate_per_s * 1000), int(workload[1:])])
    arrived_at_s = np.cumsum(rng.exponential(1.0 / rate_per_s, REQUESTS)).tolist()
    classes = rng.choice(
        list(SABER_CLASSES), REQUESTS, p=[SABER_SHARES[workload][c] for c in SABER_CLASSES]
    )
    spread = rng.normal(-(SPREAD**2) / 2, SPREAD, (2, REQUESTS))  # keeps the mean
    sequences = [
        replica.Sequence(
            id=InvocationId(str(i)),
            prompt_tokens=max(1, round(SABER_CLASSES[name][0] * float(np.exp(spread[0, i])))),
            output_tokens=max(2, round(SABER_CLASSES[name][1] * float(np.exp(spread[1, i])))),
        )
        for i, name in enumerate(classes)
    ]
    engine = SimReplica(SABER_ENGINE, max_running=REQUESTS)
    started: dict[str, tuple[float, float]] = {}
    found: dict[str, SpeedSample] = {}
    # The integral of the engine's concurrency over time gives each request's mean concurrency.
    held_s, since_s, following = 0.0, 0.0, 0
    while len(found) < REQUESTS:
        next_s = arrived_at_s[following] if following < REQUESTS else np.inf
        now_s = min(next_s, engine.wake_s)
        held_s += engine.held * (now_s - since_s)
        since_s = now_s
        if engine.wake_s <= now_s:
            facts, _ = engine.wake(now_s)
            for kind, sequence in facts:
                if kind is FactKind.DONE:
                    at_s, held_before_s = started[sequence.id]
                    took_s = now_s - at_s
                    found[sequence.id] = SpeedSample(
                        # Rounding may put a request that ran alone slightly below 1.
                        max(1.0, (held_s - held_before_s) / took_s),
                        sequence.output_tokens / took_s,
                    )
            engine.go_on(now_s)
        if next_s <= now_s:
            started[sequences[following].id] = (now_s, held_s)
            engine.submit(now_s, sequences[following])
            following += 1
    return tuple(found[s.id] for s in sequences)


def fitted(curve: str, samples: Sequence[SpeedSample]) -> Fit:
    """The curve called `curve`; raise `InputError` for another name."""
    match curve:
        case "usl":
            return fit_usl(samples)
        case "linear":
            return fit_linear(samples)
        case "logistic":
            return fit_logistic(samples)
    raise InputError(f"no curve named {curve!r}; known: {', '.join(CURVES)}")


@dataclass(frozen=True, slots=True)
class _Job:
    workload: str
    seed: int
    curves: tuple[str, ...]


def _run_one(job: _Job) -> list[Sample]:
    samples = [s for rate in SABER_RATES_PER_S for s in speed_samples(job.workload, rate, job.seed)]
    results = []
    for curve in job.curves:
        fit = fitted(curve, samples[::2])
        metrics = {"r2": fit.r2, "held_out_r2": _r2(fit, samples[1::2])}
        if isinstance(fit, UslFit):
            metrics["lambda_tokens_per_s"] = fit.lambda_tokens_per_s
            metrics["sigma"], metrics["kappa"] = fit.sigma, fit.kappa
        results.append(Sample({"workload": job.workload}, curve, job.seed, metrics))
    return results


def _r2(fit: Fit, samples: Sequence[SpeedSample]) -> float:
    speeds = np.array([s.tokens_per_s for s in samples])
    errors = speeds - np.array([fit.speed(s.concurrency) for s in samples])
    return float(1.0 - np.sum(errors**2) / np.sum((speeds - speeds.mean()) ** 2))


def run(options: Options, progress: Progress) -> Report:
    """Raise `InputError` for an unknown curve."""
    curves = options.policies or CURVES
    for curve in curves:
        if curve not in CURVES:
            raise InputError(f"no curve named {curve!r}; known: {', '.join(CURVES)}")
    jobs = [_Job(workload, seed, curves) for workload in SABER_SHARES for seed in options.seeds]
    samples = [s for found in run_all(_run_one, jobs, progress, options.jobs) for s in found]
    differences = compare(samples, USL, ("r2", "held_out_r2")) if USL in curves else ()
    extra = {workload: _curves(workload, options.seeds[0], curves) for workload in SABER_SHARES}
    return Report(
        "saber-estimators", options.seeds, summarize(samples), differences, extra={"curves": extra}
    )


def _curves(workload: str, seed: int, curves: Sequence[str]) -> dict[str, list[list[float]]]:
    """Pairs of one seed and its fitted curves, as points to plot."""
    samples = [s for rate in SABER_RATES_PER_S for s in speed_samples(workload, rate, seed)]
    loads = np.linspace(1.0, max(s.concurrency for s in samples), 80).tolist()
    points = {"measured": [[s.concurrency, s.tokens_per_s] for s in samples]}
    for curve in curves:
        fit = fitted(curve, samples[::2])
        points[curve] = [[load, fit.speed(load)] for load in loads]
    return points


def plot(report: Report, folder: Path) -> Sequence[Path]:
    """The fits of each workload over its pairs, with R²."""
    by_workload = cast(
        Mapping[str, Mapping[str, Sequence[Sequence[float]]]], report.extra["curves"]
    )
    fig, all_axes = figure(columns=len(by_workload))
    for axes, (workload, curves) in zip(all_axes, by_workload.items(), strict=True):
        for name, points in curves.items():
            xs, ys = zip(*points, strict=True)
            if name == "measured":
                axes.scatter(xs, ys, s=4, alpha=0.35, color="gray", label="requests")
                continue
            r2 = report.mean("r2", name, workload=workload).mean
            axes.plot(xs, ys, label=f"{name}, R² {r2:.3f}")
        axes.set_title(workload)
        axes.set_xlabel("concurrency")
        axes.set_ylabel("tokens/s of one request")
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return (save(fig, folder, "saber-estimators"),)


EXPERIMENT = Experiment(
    name="saber-estimators",
    title="Speed of one request over concurrency: USL against a line and a logistic curve",
    source="SABER, Universal Scalability Law fit and its comparison by R²",
    run=run,
    plot=plot,
)
