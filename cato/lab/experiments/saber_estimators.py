"""Which curve predicts the speed of one request among L others?

With the engine's cap lifted, every finished request gives a pair: its mean concurrency, itself
included, and its tokens per second from start to last token. Each curve is fitted to the pairs of
even requests, all rates together; `held_out_r2` is computed on the odd ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import InvocationId
from cato.core.profile import Profile
from cato.estimators.usl import (
    LinearFit,
    LogisticFit,
    SpeedSample,
    UslFit,
    fit_linear,
    fit_logistic,
    fit_usl,
)
from cato.lab.study import Study, Trial, no_targets
from cato.sim import replica
from cato.sim.experiment import Options
from cato.sim.plots import figure, save
from cato.sim.replica import FactKind, SimReplica
from cato.sim.report import Report, Sample
from cato.sim.workloads import (
    SABER_CLASSES,
    SABER_ENGINE,
    SABER_RATES_PER_S,
    SABER_SHARES,
    SPREAD,
)

REQUESTS = 100
# The offline phase uses other requests than the experiments: its own seed.
OFFLINE_SEED = 77_002

USL, LINEAR, LOGISTIC = "usl", "linear", "logistic"
CURVES = (USL, LINEAR, LOGISTIC)
# Metrics of every curve, and of the USL alone.
OF_FITS = ("r2", "held_out_r2")
OF_USL = ("lambda_tokens_per_s", "sigma", "kappa")

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
    return load_and_speed(sequences, arrived_at_s, SimReplica(SABER_ENGINE, max_running=REQUESTS))


def load_and_speed(
    sequences: Sequence[replica.Sequence], arrived_at_s: Sequence[float], engine: SimReplica
) -> tuple[SpeedSample, ...]:
    """Mean load and tokens per second of each sequence from arrival to last token, in their order.

    `engine` is idle and has room for all of them: time in its queue would count, too.
    """
    assert engine.max_running >= len(sequences), "the cap is not lifted"
    started: dict[str, tuple[float, float]] = {}
    found: dict[str, SpeedSample] = {}
    # The integral of the engine's concurrency over time gives each request's mean concurrency.
    held_s, since_s, following = 0.0, 0.0, 0
    while len(found) < len(sequences):
        next_s = arrived_at_s[following] if following < len(sequences) else np.inf
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


def offline_law(
    rates_per_s: Sequence[float],
    drawn: Callable[[np.random.Generator, int], Sequence[tuple[int, int]]],
    profile: Profile,
    chunk_tokens: int | None,
) -> UslFit:
    """SABER's offline phase on one replica of `profile` with the cap lifted, at each of the rates.

    `drawn` gives the prompt and output tokens of so many requests of the workload. As in the paper
    (Section IV-B, step 1) a request's speed is its tokens by its execution time, prompts included.
    """
    samples: list[SpeedSample] = []
    for rate_per_s in rates_per_s:
        rng = np.random.default_rng([OFFLINE_SEED, round(1000 * rate_per_s)])
        tokens = drawn(rng, REQUESTS)
        arrived_at_s = np.cumsum(rng.exponential(1 / rate_per_s, REQUESTS)).tolist()
        sequences = [
            replica.Sequence(InvocationId(str(i)), prompt, output)
            for i, (prompt, output) in enumerate(tokens)
        ]
        engine = SimReplica(profile, REQUESTS, chunk_tokens)
        samples += load_and_speed(sequences, arrived_at_s, engine)
    return fit_usl(samples)


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


@lru_cache(maxsize=len(SABER_SHARES))
def _pairs(workload: str, seed: int) -> tuple[SpeedSample, ...]:
    """The pairs at all rates; the same for every curve."""
    return tuple(s for rate in SABER_RATES_PER_S for s in speed_samples(workload, rate, seed))


@lru_cache(maxsize=len(CURVES))
def offline_fit(curve: str) -> Fit:
    """SABER's offline phase: the speed law of this engine, with the cap lifted."""
    return fitted(curve, [s for w in SABER_SHARES for s in _pairs(w, OFFLINE_SEED)])


def _measured(workload: str, curve: str, seed: int) -> dict[str, float]:
    samples = _pairs(workload, seed)
    fit = fitted(curve, samples[::2])
    metrics = dict(zip(OF_FITS, (fit.r2, _r2(fit, samples[1::2])), strict=True))
    if isinstance(fit, UslFit):
        law = (fit.lambda_tokens_per_s, fit.sigma, fit.kappa)
        metrics |= zip(OF_USL, law, strict=True)
    return metrics


def _r2(fit: Fit, samples: Sequence[SpeedSample]) -> float:
    speeds = np.array([s.tokens_per_s for s in samples])
    errors = speeds - np.array([fit.speed(s.concurrency) for s in samples])
    return float(1.0 - np.sum(errors**2) / np.sum((speeds - speeds.mean()) ** 2))


def _cells(options: Options) -> list[Trial]:
    return [Trial({"workload": w}, partial(_measured, w)) for w in SABER_SHARES]


def _extra(options: Options, samples: Sequence[Sample]) -> dict[str, object]:
    curves = list(dict.fromkeys(s.policy for s in samples))
    return {"curves": {w: _curves(w, options.seeds[0], curves) for w in SABER_SHARES}}


def _curves(workload: str, seed: int, curves: Sequence[str]) -> dict[str, list[list[float]]]:
    """Pairs of one seed and its fitted curves, as points to plot."""
    samples = _pairs(workload, seed)
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


STUDY = Study(
    "saber-estimators",
    "Speed of one request over concurrency: USL against a line and a logistic curve",
    "SABER, Universal Scalability Law fit and its comparison by R²",
    CURVES,
    _cells,
    no_targets,
    plot,
    compared=OF_FITS,
    extra=_extra,
    reference=USL,
    called="curve",
    metrics=(*OF_FITS, *OF_USL),
)
