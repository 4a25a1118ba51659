"""Match a growing run to past runs and divide its remaining time between stages.

From Tempo's section on collective requests: the calls of one stage form a super-node, weighted by
the sum of their output lengths; edges are weighted by the input lengths that flow along them. A
growing graph is compared with prefixes of past graphs of the same application by a Gaussian kernel.
The stage times of the closest past run give the next stage's share of the remaining time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from cato.core.errors import InputError
from cato.estimators.survival import Floats, Ints

FROM_USER = -1
"""The source of input that no stage produced."""


@dataclass(frozen=True, slots=True)
class SuperNode:
    """The calls of one stage, together.

    `input_tokens` holds (source, tokens) pairs: the input of the calls, by the stage that wrote
    it, or `FROM_USER`. `output_tokens` and `time_s` are None until the stage is finished.
    """

    input_tokens: tuple[tuple[int, int], ...]
    output_tokens: int | None = None
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class SuperGraph:
    """A run as a sequence of stages; only the last may be unfinished."""

    stages: tuple[SuperNode, ...]

    @property
    def finished(self) -> int:
        """Number of finished stages, and so the index of the next one to be budgeted."""
        return sum(1 for s in self.stages if s.output_tokens is not None)


@dataclass(frozen=True, slots=True)
class StageShare:
    """The closest past run, and the share of its remaining time that its next stage took."""

    index: int
    similarity: float
    share: float

    def budget_s(self, remaining_s: float) -> float:
        """Time for all calls of the next stage together: they share one deadline.

        `remaining_s` is the time to the run's deadline, so time saved earlier is spread over all
        later stages.
        """
        return max(0.0, remaining_s) * self.share


@dataclass(frozen=True, slots=True, eq=False)
class DagHistory:
    """Past runs of one application as arrays, one row per run, oldest first.

    Row layout, stage by stage: the logarithms of 1 + tokens of its inputs (from the user, from
    stage 0, 1, ..), then of its output; -1 for a missing edge. A prefix of stages is a prefix of
    the row. `lengths` counts the entries of each row, `times_s` is indexed [run, stage].
    """

    rows: Floats
    lengths: Ints
    times_s: Floats

    @classmethod
    def of(cls, runs: Sequence[SuperGraph]) -> DagHistory:
        """Raise `InputError` for a run with an unfinished stage or an edge from a later one."""
        rows = [_row(run) for run in runs]
        stages = max((len(run.stages) for run in runs), default=0)
        packed = np.full((len(runs), max((len(r) for r in rows), default=0)), -1.0)
        times_s = np.zeros((len(runs), stages))
        for i, (run, row) in enumerate(zip(runs, rows, strict=True)):
            packed[i, : len(row)] = row
            for k, stage in enumerate(run.stages):
                if stage.output_tokens is None or stage.time_s is None:
                    raise InputError(f"stage {k} of past run {i} is unfinished: leave the run out")
                times_s[i, k] = stage.time_s
        return cls(packed, np.array([len(r) for r in rows], dtype=np.int64), times_s)

    def similarities(self, growing: SuperGraph, bandwidth: float) -> Floats:
        """Similarity to each past run in [0, 1]; -1 for one with no stage left to learn from."""
        out: Floats = _similarities(
            self.rows, self.lengths, np.array(_row(growing)), growing.finished, bandwidth
        )
        return out

    def match(self, growing: SuperGraph, bandwidth: float = 0.5) -> StageShare | None:
        """The closest past run that went on from here, the latest of equals; None if none did.

        `bandwidth` is the kernel's width in logarithms of tokens: 0.5 is a factor of 1.6.
        """
        scores = self.similarities(growing, bandwidth)
        if len(scores) == 0:
            return None
        best = len(scores) - 1 - int(np.argmax(scores[::-1]))
        if scores[best] < 0.0:
            return None
        left_s = self.times_s[best, growing.finished :]
        total_s = float(left_s.sum())
        share = float(left_s[0]) / total_s if total_s > 0.0 else 1.0
        return StageShare(best, float(scores[best]), share)


def _row(graph: SuperGraph) -> list[float]:
    """The row of `DagHistory`; excludes the output of an unfinished last stage."""
    row: list[float] = []
    for k, stage in enumerate(graph.stages):
        inputs = [-1.0] * (k + 1)
        for source, tokens in stage.input_tokens:
            if not FROM_USER <= source < k or tokens < 0:
                raise InputError(
                    f"stage {k} of a run reads {tokens} tokens from stage {source}: inputs come "
                    "from the user or an earlier stage"
                )
            inputs[source + 1] = math.log1p(tokens)
        row.extend(inputs)
        if stage.output_tokens is not None:
            row.append(math.log1p(stage.output_tokens))
        elif k + 1 < len(graph.stages):
            raise InputError(f"stage {k} of a run is unfinished but stage {k + 1} has begun")
    return row


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _similarities(
    rows: Floats, lengths: Ints, growing: Floats, finished: int, bandwidth: float
) -> Floats:
    """Mean over nodes and edges of either graph of exp(-d² / 2h²); 0 for an edge in only one.

    A mean, since a product would let one unusual node hide an otherwise equal run. There are
    (k + 1)(k + 4) / 2 entries up to the end of stage k; a run that has them up to
    k = `finished` has the next stage.
    """
    needed = (finished + 1) * (finished + 4) // 2
    scale = -0.5 / (bandwidth * bandwidth)
    out = np.empty(len(rows))
    for i in range(len(rows)):
        if lengths[i] < needed:
            out[i] = -1.0
            continue
        total = 0.0
        entries = 0
        for k in range(len(growing)):
            a, b = growing[k], rows[i, k]
            if a < 0.0 and b < 0.0:
                continue
            entries += 1
            if a >= 0.0 and b >= 0.0:
                total += math.exp(scale * (a - b) * (a - b))
        out[i] = total / entries if entries > 0 else 1.0
    return out
