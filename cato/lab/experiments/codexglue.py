"""Attainment by scheduler with the lengths of real pairs of code (CodeXGLUE).

The papers evaluate on these datasets but give mean lengths only. Here the lengths come from a file:
text to code (`nl` and `code`, one JSON object per line) or code to code (two parallel files). Every
second pair trains the policies' length beliefs; the others are drawn at random and sent to six
replicas, one request at a time each, as in CATO's RQ1. The target is 1.5 × the mean E2E time on an
idle replica. A pair's prompt says something about its answer (see the correlation in the report),
but policies believe the class's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.slo import SloMetric
from cato.lab.experiments.cato_rq import POLICIES as ROUTERS
from cato.lab.experiments.coding_mixes import (
    COMPARED,
    ONE_AT_A_TIME,
    REPLICAS,
    TASKS,
    UTILIZATIONS,
)
from cato.lab.experiments.common import measured
from cato.lab.study import Study, Trial, no_targets
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.plots import figure, legend, lines, save
from cato.sim.report import Report, Sample
from cato.sim.tasks import SimNode, SimTask
from cato.sim.traces import TokenPair, load_pairs
from cato.sim.workloads import poisson

NAME = "codexglue"
POOL = PoolName("engine")
STRICTNESS = 1.5
LEAST_PAIRS = 20
_STREAM = 9  # random stream; other workloads use others


_loaded = cache(load_pairs)


@cache
def _pairs(dataset: Path) -> tuple[tuple[TokenPair, ...], LengthBelief]:
    """The pairs to draw from, and the output length belief from the other pairs."""
    pairs = _loaded(dataset)
    if len(pairs) < LEAST_PAIRS:
        raise InputError(
            f"--dataset: {dataset} has {len(pairs)} pairs; {LEAST_PAIRS} are the least"
        )
    return pairs[1::2], LengthBelief.of(float(p.target_tokens) for p in pairs[::2])


def tasks_of(dataset: Path, utilization: float, seed: int, n: int) -> list[SimTask]:
    """`n` tasks of one call each; at utilization 1 their mean work is the replicas' capacity."""
    pairs, known = _pairs(dataset)
    rng = np.random.default_rng([seed, _STREAM])
    alone_s = float(
        np.mean([ONE_AT_A_TIME.service_s(p.source_tokens, p.target_tokens) for p in pairs])
    )
    times = poisson(rng, utilization * REPLICAS / alone_s, n)
    chosen, draws = rng.integers(len(pairs), size=n), rng.random(n)
    tasks = []
    for i, arrived_at_s in enumerate(times):
        pair = pairs[chosen[i]]
        node = SimNode(
            POOL, pair.source_tokens, pair.target_tokens, max(1, round(known.mean)), known
        )
        tasks.append(
            SimTask(
                f"t{i:05d}",
                TaskName(NAME),
                arrived_at_s,
                SloMetric.E2E,
                STRICTNESS * alone_s,
                (node,),
                (float(draws[i]),),
            )
        )
    return tasks


def _measured(options: Options, utilization: float, policy: str, seed: int) -> dict[str, float]:
    tasks = tasks_of(options.needed("dataset"), utilization, seed, TASKS)
    setup = PoolSetup(POOL, (ONE_AT_A_TIME,) * REPLICAS, ROUTERS[policy]())
    return measured([setup], tasks)


def _cells(options: Options) -> list[Trial]:
    return [Trial({"load": load}, partial(_measured, options, load)) for load in UTILIZATIONS]


def _extra(options: Options, samples: Sequence[Sample]) -> dict[str, Mapping[str, float]]:
    return {"lengths": _lengths(options.needed("dataset"))}


def _lengths(dataset: Path) -> dict[str, float]:
    """Prompt and output tokens: mean, coefficient of variation, and their correlation."""
    pairs = _loaded(dataset)
    source = np.array([p.source_tokens for p in pairs], float)
    target = np.array([p.target_tokens for p in pairs], float)
    spread = source.std() * target.std()
    return {
        "pairs": float(len(pairs)),
        "prompt_tokens_mean": float(source.mean()),
        "prompt_tokens_cv": float(source.std() / source.mean()),
        "output_tokens_mean": float(target.mean()),
        "output_tokens_cv": float(target.std() / target.mean()),
        "correlation": float(np.corrcoef(source, target)[0, 1]) if spread else 0.0,
    }


def plot(report: Report, folder: Path) -> Sequence[Path]:
    """Attainment and P95 of E2E over the utilization."""
    fig, axes = figure(2)
    for axis, (metric, label) in zip(
        axes,
        (("slo_attainment", "attainment"), ("e2e_s_p95", "E2E latency, P95 (s)")),
        strict=True,
    ):
        lines(axis, [m for m in report.means if m.metric == metric], "load", label)
        axis.set_xlabel("utilization")
    legend(fig)
    return [save(fig, folder, report.experiment)]


STUDY = Study(
    NAME,
    "attainment by scheduler with the lengths of real pairs of code (--dataset)",
    "CodeXGLUE: text-to-code, code-to-code translation",
    tuple(ROUTERS),
    _cells,
    no_targets,
    plot,
    compared=COMPARED,
    extra=_extra,
)
