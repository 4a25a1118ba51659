"""Calibration of output-length bounds on a recorded trace.

Trains on the first half of a trace in time, reports on the second. Coverage and pinball loss of
the 0.9 quantile before the first token, and coverage of the refined bound among the answers that
reach g tokens, for several g. Only the forests depend on the seed; the targets' standard errors
are over the reported rows, which are the smaller sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from cato.estimators.calibration import covered, pinball_losses, reliability
from cato.estimators.length_bound import LengthModel, LengthRecord
from cato.estimators.length_forest import ForestLengths
from cato.lab.experiments.length_models import (
    COMPILED,
    LEARNT,
    MARGINAL,
    MODELS,
    UNSEEDED,
    Q,
    fitted,
    halves,
)
from cato.lab.study import Measured, Study, Trial, all_compared
from cato.sim.experiment import Options, Progress
from cato.sim.plots import figure, margin, save
from cato.sim.report import Mean, Report, Sample, Target, mean_and_stderr

GROUP = 7
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
REACHED_TOKENS = (10, 30, 100, 300)
# Metrics before the first token, and at a number of generated tokens.
BEFORE = ("coverage", "pinball_loss_tokens", "pinball_minus_marginal_tokens")
AT_G = ("refined_coverage", "unrefined_coverage")
MIN_REACHED = 50
"""Minimum answers for judging coverage: its standard error is then 4 points."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Scores:
    """Scores of each reported row; `refined` and `unrefined` of those that reach g tokens."""

    covered: _Floats
    loss: _Floats
    refined: Mapping[int, _Floats]
    unrefined: Mapping[int, _Floats]
    by_level: _Floats


def _scored(options: Options, name: str, seed: int) -> Measured:
    """No metrics of its own: errors are those over the rows."""
    train, test = halves(options.needed("trace"))
    model = fitted(name, train, seed)
    lengths = np.array([r.output_tokens for r in test], dtype=np.float64)
    bounds = {q: _bounds(model, test, q) for q in LEVELS}
    refined: dict[int, _Floats] = {}
    unrefined: dict[int, _Floats] = {}
    for g in REACHED_TOKENS:
        grown = lengths > g
        if grown.any():
            reached = [r for r in test if r.output_tokens > g]
            refined[g] = covered(lengths[grown], _bounds(model, reached, Q, g))
            unrefined[g] = covered(lengths[grown], bounds[Q][grown])
    by_level = np.array([point.coverage for point in reliability(lengths, bounds)])
    losses = pinball_losses(lengths, bounds[Q], Q)
    return Measured({}, _Scores(covered(lengths, bounds[Q]), losses, refined, unrefined, by_level))


def _mean_scores(scores: Sequence[_Scores]) -> _Scores:
    """Row-wise mean over the seeds, so that errors over the rows count each row once."""

    def mean(values: Sequence[_Floats]) -> _Floats:
        first = values[0]
        out: _Floats = first + np.mean([v - first for v in values], axis=0)  # exact if equal
        return out

    return _Scores(
        mean([s.covered for s in scores]),
        mean([s.loss for s in scores]),
        {g: mean([s.refined[g] for s in scores]) for g in scores[0].refined},
        {g: mean([s.unrefined[g] for s in scores]) for g in scores[0].unrefined},
        mean([s.by_level for s in scores]),
    )


def _bounds(
    model: LengthModel, records: Sequence[LengthRecord], q: float, generated_tokens: int = 0
) -> _Floats:
    if isinstance(model, ForestLengths):  # one call for all rows: single calls take milliseconds
        return model.quantiles_of([r.features for r in records], q, generated_tokens)
    return np.array([model.quantile(r.features, q, generated_tokens) for r in records])


def _cells(options: Options) -> list[Trial]:
    return [Trial({}, partial(_scored, options))]


def _with_marginal(study: Study, options: Options, progress: Progress) -> Report:
    """The marginal is the baseline of the pinball losses."""
    if options.policies:
        options = replace(options, policies=(MARGINAL, *options.policies))
    return all_compared(study, options, progress)


def _by_model(samples: Sequence[Sample]) -> dict[str, _Scores]:
    return {
        name: _mean_scores([s.further for s in samples if s.policy == name])
        for name in dict.fromkeys(s.policy for s in samples)
    }


def _means(samples: Sequence[Sample]) -> list[Mean]:
    scores = _by_model(samples)
    means: list[Mean] = []
    for name, score in scores.items():
        relative = score.loss - scores[MARGINAL].loss
        for metric, values in zip(BEFORE, (score.covered, score.loss, relative), strict=True):
            means.append(_mean({}, name, metric, values))
        for g in score.refined:
            setting = {"generated_tokens": float(g)}
            for metric, values in zip(AT_G, (score.refined[g], score.unrefined[g]), strict=True):
                means.append(_mean(setting, name, metric, values))
    return means


def _extra(options: Options, samples: Sequence[Sample]) -> dict[str, object]:
    train, test = halves(options.needed("trace"))
    curves = {
        name: [list(point) for point in zip(LEVELS, score.by_level.tolist(), strict=True)]
        for name, score in _by_model(samples).items()
    }
    return {"reliability": curves, "train_rows": len(train), "report_rows": len(test)}


def _mean(setting: Mapping[str, float], name: str, metric: str, values: _Floats) -> Mean:
    return Mean(setting, name, metric, *mean_and_stderr(values.tolist()), len(values))


def _targets(samples: Sequence[Sample]) -> list[Target]:
    scores = _by_model(samples)
    if LEARNT not in scores:
        return []
    score = scores[LEARNT]
    share, error = mean_and_stderr(score.covered.tolist())
    worse, worse_error = mean_and_stderr((score.loss - scores[MARGINAL].loss).tolist())
    targets = [
        Target(GROUP, "coverage of the 0.9 quantile, at least", 0.87, share, error),
        Target(GROUP, "coverage of the 0.9 quantile, at most", 0.92, share, error, at_least=False),
        Target(
            GROUP,
            "pinball loss minus that of the per-task marginal, tokens",
            0.0,
            worse,
            worse_error,
            at_least=False,
        ),
    ]
    for g, values in score.refined.items():
        if len(values) >= MIN_REACHED:
            text = f"refined coverage at {g} tokens ({len(values)} answers)"
            targets.append(Target(GROUP, text, 0.88, *mean_and_stderr(values.tolist())))
    return targets


def plot(report: Report, folder: Path) -> Sequence[Path]:
    """A reliability plot, and coverage over the tokens generated."""
    curves = cast(Mapping[str, Sequence[Sequence[float]]], report.extra["reliability"])
    fig, (axes,) = figure()
    axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8, linestyle="--", label="calibrated")
    for name, points in curves.items():
        qs, shares = zip(*points, strict=True)
        axes.plot(qs, shares, marker="o", markersize=3, label=name)
    axes.set_xlabel("level of the bound")
    axes.set_ylabel("fraction of lengths within it")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    first = save(fig, folder, "length-bounds-reliability")

    fig, (axes,) = figure()
    axes.axhline(Q, color="gray", linewidth=0.8, linestyle="--")
    for i, name in enumerate(curves):
        for metric, style in zip(AT_G, ("-", ":"), strict=True):
            if style == ":" and name != COMPILED:
                continue
            means = [m for m in report.means if m.policy == name and m.metric == metric]
            axes.errorbar(
                [float(m.setting["generated_tokens"]) for m in means],
                [m.mean for m in means],
                yerr=[margin(m) for m in means],
                linestyle=style,
                marker="o",
                markersize=3,
                capsize=2,
                color=f"C{i}",
                label=name if style == "-" else f"{name}, not refined",
            )
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("coverage of the 0.9 bound")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return (first, save(fig, folder, "length-bounds-refined"))


STUDY = Study(
    "length-bounds",
    "Coverage and pinball loss of output-length bounds on a recorded trace",
    "Tempo, length bound by quantile regression forest; Azure LLM inference trace 2023",
    MODELS,
    _cells,
    _targets,
    plot,
    compared=(),
    means=_means,
    extra=_extra,
    run=_with_marginal,
    unseeded=UNSEEDED,
    called="length model",
    metrics=(*BEFORE, *AT_G),
)
