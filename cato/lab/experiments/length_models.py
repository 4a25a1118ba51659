"""Models of output lengths by name, and the records of a trace that teach and test them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.core.length import LengthBelief
from cato.core.profile import UNMEASURED
from cato.estimators.gaussian_lengths import GaussianLengths
from cato.estimators.length_bound import (
    LengthFeatures,
    LengthModel,
    LengthRecord,
    MarginalLengths,
    beats,
)
from cato.estimators.length_features import Answer, Answers, SimilarAnswers
from cato.estimators.length_forest import CompiledForest, ForestLengths
from cato.estimators.output_lengths import NEWEST
from cato.sim.traces import TraceRow, load_azure

Q = 0.9
"""The level of the bounds."""
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
UNSEEDED = (MARGINAL, GAUSSIAN)
_TASK = TaskName("completion")


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


@lru_cache(maxsize=1)
def halves(trace: Path) -> tuple[tuple[LengthRecord, ...], tuple[LengthRecord, ...]]:
    """First half to learn from, second to report on; raise `InputError` for too few rows."""
    rows = load_azure(trace)
    if len(rows) < MIN_ROWS:
        raise InputError(f"the trace has {len(rows)} requests; bounds need at least {MIN_ROWS}")
    records = records_of(rows)
    return records[: len(records) // 2], records[len(records) // 2 :]
