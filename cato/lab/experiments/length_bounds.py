"""Calibration of output-length bounds on a recorded trace.

Trains on the first half of a trace in time, reports on the second. Coverage and pinball loss of
the 0.9 quantile before the first token, and coverage of the refined bound among the answers that
reach g tokens, for several g. Only the forests depend on the seed; the targets' standard errors
are over the reported rows, which are the smaller sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.core.length import LengthBelief
from cato.core.profile import UNMEASURED
from cato.estimators.calibration import covered, pinball_losses, reliability
from cato.estimators.length_bound import (
    CompiledForest,
    ForestLengths,
    GaussianLengths,
    LengthFeatures,
    LengthModel,
    LengthRecord,
    MarginalLengths,
    beats,
)
from cato.estimators.length_features import Answer, Answers, SimilarAnswers
from cato.estimators.output_lengths import NEWEST
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.plots import figure, save
from cato.sim.report import Mean, Report, Target, mean_and_stderr
from cato.sim.traces import TraceRow, load_azure

GROUP = 7
Q = 0.9
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
REACHED_TOKENS = (10, 30, 100, 300)
MIN_REACHED = 50
"""Minimum answers for judging coverage: its standard error is then 4 points."""
MIN_ROWS = 400
"""Minimum requests of a trace: half of them must train more than a stump."""

MARGINAL, GAUSSIAN, PACKAGE, COMPILED, BELIEF, LEARNT = (
    "marginal",
    "gaussian",
    "quantile-forest",
    "compiled-forest",
    "belief",
    "learnt",
)
MODELS = (MARGINAL, GAUSSIAN, PACKAGE, COMPILED, BELIEF, LEARNT)
_SEEDED = (PACKAGE, COMPILED, BELIEF, LEARNT)
_TASK = TaskName("completion")

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BeliefLengths:
    """The core's belief, made once at arrival from a grid: a few equally likely lengths."""

    model: CompiledForest

    def quantile(self, features: LengthFeatures, q: float, generated_tokens: int = 0) -> float:
        belief = LengthBelief(self.model.grid(features))
        return generated_tokens + belief.left_quantile(q, generated_tokens)

    def grid(self, features: LengthFeatures, generated_tokens: int = 0) -> tuple[float, ...]:
        """The grid points that exceed the tokens generated so far."""
        return tuple(x for x in self.model.grid(features) if x > generated_tokens)


def records_of(rows: Sequence[TraceRow]) -> tuple[LengthRecord, ...]:
    """Prompt tokens and the lengths of similar recent answers, known at arrival.

    Two widths: `SimilarAnswers`' default finds repeated requests of the same buffer, ten times that
    finds similar buffers.

    The trace does not say when an answer was complete; the service time of an unmeasured 7B replica
    is used instead. The trace has one task: classes by output length would reveal the answer.
    """
    similar = (SimilarAnswers(), SimilarAnswers(width=0.03))
    answers = Answers.of(
        Answer(
            r.arrived_at_s,
            r.arrived_at_s + UNMEASURED.service_s(r.prompt_tokens, r.output_tokens),
            r.prompt_tokens,
            r.output_tokens,
        )
        for r in rows
    )
    records = []
    for i, row in enumerate(rows):
        past = answers.first(i)
        recent = [s.log_tokens(row.prompt_tokens, row.arrived_at_s, past) for s in similar]
        features = LengthFeatures(_TASK, (float(row.prompt_tokens), *recent))
        records.append(LengthRecord(features, row.output_tokens))
    return tuple(records)


def fitted(name: str, train: Sequence[LengthRecord], seed: int) -> LengthModel:
    """The model called `name`; a benchmark calls its `quantile` to time it."""
    match name:
        case "marginal":
            return MarginalLengths.fit(train)
        case "gaussian":
            return GaussianLengths.fit(train)
        case "quantile-forest":
            return ForestLengths.fit(train, seed)
        case "compiled-forest":
            return ForestLengths.fit(train, seed).compiled().warmed_up()
        case "belief":
            return BeliefLengths(ForestLengths.fit(train, seed).compiled())
        case "learnt":
            return _learnt(train, seed)
    raise InputError(f"no length model named {name!r}; known: {', '.join(MODELS)}")


def _learnt(train: Sequence[LengthRecord], seed: int) -> LengthModel:
    """The Profiler's choice: the forest if it beat the marginal on the newest of `train`."""
    split = len(train) - len(train) // NEWEST
    older, newest = train[:split], train[split:]
    grown = ForestLengths.fit(older, seed).compiled()
    if beats(grown, MarginalLengths.fit(older), newest, Q):
        return ForestLengths.fit(train, seed).compiled()
    return MarginalLengths.fit(train)


@dataclass(frozen=True, slots=True)
class _Job:
    model: str
    seed: int
    train: tuple[LengthRecord, ...]
    test: tuple[LengthRecord, ...]


@dataclass(frozen=True, slots=True)
class _Scores:
    """Scores of each reported row; `refined` and `unrefined` of those that reach g tokens."""

    covered: _Floats
    loss: _Floats
    refined: Mapping[int, _Floats]
    unrefined: Mapping[int, _Floats]
    by_level: _Floats


def _scored(job: _Job) -> _Scores:
    model = fitted(job.model, job.train, job.seed)
    lengths = np.array([r.output_tokens for r in job.test], dtype=np.float64)
    bounds = {q: _bounds(model, job.test, q) for q in LEVELS}
    refined: dict[int, _Floats] = {}
    unrefined: dict[int, _Floats] = {}
    for g in REACHED_TOKENS:
        grown = lengths > g
        if grown.any():
            reached = [r for r in job.test if r.output_tokens > g]
            refined[g] = covered(lengths[grown], _bounds(model, reached, Q, g))
            unrefined[g] = covered(lengths[grown], bounds[Q][grown])
    return _Scores(
        covered(lengths, bounds[Q]),
        pinball_losses(lengths, bounds[Q], Q),
        refined,
        unrefined,
        np.array([point.coverage for point in reliability(lengths, bounds)]),
    )


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


def halves(trace: Path) -> tuple[tuple[LengthRecord, ...], tuple[LengthRecord, ...]]:
    """First half to learn from, second to report on; raise `InputError` for too few rows."""
    rows = load_azure(trace)
    if len(rows) < MIN_ROWS:
        raise InputError(f"the trace has {len(rows)} requests; bounds need at least {MIN_ROWS}")
    records = records_of(rows)
    return records[: len(records) // 2], records[len(records) // 2 :]


def run(options: Options, progress: Progress) -> Report:
    """Needs `--trace`; raise `InputError` for an unknown model or a trace too short to split."""
    names = options.policies or MODELS
    for name in names:
        if name not in MODELS:
            raise InputError(f"no length model named {name!r}; known: {', '.join(MODELS)}")
    if MARGINAL not in names:
        names = (MARGINAL, *names)  # the baseline of the pinball losses
    train, test = halves(options.needed("trace"))
    jobs = [
        _Job(name, seed, train, test)
        for name in names
        for seed in (options.seeds if name in _SEEDED else options.seeds[:1])
    ]
    found = run_all(_scored, jobs, progress, options.jobs)
    scores = {
        name: _mean_scores([s for job, s in zip(jobs, found, strict=True) if job.model == name])
        for name in names
    }
    baseline = scores[MARGINAL].loss
    means: list[Mean] = []
    for name, score in scores.items():
        means.append(_mean({}, name, "coverage", score.covered))
        means.append(_mean({}, name, "pinball_loss_tokens", score.loss))
        means.append(_mean({}, name, "pinball_minus_marginal_tokens", score.loss - baseline))
        for g in score.refined:
            setting = {"generated_tokens": float(g)}
            means.append(_mean(setting, name, "refined_coverage", score.refined[g]))
            means.append(_mean(setting, name, "unrefined_coverage", score.unrefined[g]))
    curves = {
        name: [list(point) for point in zip(LEVELS, score.by_level.tolist(), strict=True)]
        for name, score in scores.items()
    }
    targets = _targets(scores[LEARNT], baseline) if LEARNT in scores else ()
    extra = {"reliability": curves, "train_rows": len(train), "report_rows": len(test)}
    return Report("length-bounds", options.seeds, tuple(means), (), targets, extra)


def _mean(setting: Mapping[str, float], name: str, metric: str, values: _Floats) -> Mean:
    return Mean(setting, name, metric, *mean_and_stderr(values.tolist()), len(values))


def _targets(score: _Scores, baseline: _Floats) -> tuple[Target, ...]:
    share, error = mean_and_stderr(score.covered.tolist())
    worse, worse_error = mean_and_stderr((score.loss - baseline).tolist())
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
    return tuple(targets)


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
        for metric, style in (("refined_coverage", "-"), ("unrefined_coverage", ":")):
            if style == ":" and name != COMPILED:
                continue
            means = [m for m in report.means if m.policy == name and m.metric == metric]
            axes.errorbar(
                [float(m.setting["generated_tokens"]) for m in means],
                [m.mean for m in means],
                yerr=[1.96 * m.stderr for m in means],
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


EXPERIMENT = Experiment(
    name="length-bounds",
    title="Coverage and pinball loss of output-length bounds on a recorded trace",
    source="Tempo, length bound by quantile regression forest; Azure LLM inference trace 2023",
    run=run,
    plot=plot,
)
