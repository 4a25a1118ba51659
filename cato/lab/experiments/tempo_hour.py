"""Tempo's Fig. 9: an hour of mixed objectives in overload.

Engine, tasks and schedulers are those of `tempo-e2e`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cato.lab.experiments.tempo import OF_CLASSES, SOURCE, class_metrics, gain_share
from cato.lab.experiments.tempo_figures import (
    ARMS,
    FEW_ARMS,
    LOAD,
    Traffic,
    plot_lines,
    tasks_of,
    variant_of,
)
from cato.lab.experiments.tempo_variants import ran
from cato.lab.study import Study, Trial, no_targets
from cato.sim.experiment import Options
from cato.sim.metrics import NAMES, metrics_of
from cato.sim.report import Sample, summarize
from cato.sim.tasks import Outcome
from cato.sim.tempo_workload import tempo_rate_per_s

HOUR_S, WINDOW_S = 3600.0, 600.0
_WINDOW = "gain_share_window_"
WINDOWS = tuple(f"{_WINDOW}{i}" for i in range(int(HOUR_S // WINDOW_S)))


def _windows(load: float, arm: str, seed: int) -> dict[str, float]:
    """Gain of the tasks that arrived in each ten minutes, and its change over the hour."""
    count = round(HOUR_S * tempo_rate_per_s(load))
    fleet, outcomes = ran(variant_of(arm, 1.0), tasks_of(Traffic(load, count), seed))
    last = len(WINDOWS)
    windows: list[list[Outcome]] = [[] for _ in range(last)]
    for o in outcomes:
        windows[min(last - 1, int(o.task.arrived_at_s // WINDOW_S))].append(o)
    shares = [gain_share(w) for w in windows]
    metrics = metrics_of(fleet, outcomes) | class_metrics(outcomes)
    metrics |= zip(WINDOWS, shares, strict=True)
    return metrics | {"gain_lost": 1 - shares[-1] / shares[0]}


def _hour(options: Options) -> list[Trial]:
    return [Trial({"load": LOAD}, partial(_windows, LOAD))]


def _over_time(samples: Sequence[Sample]) -> list[Sample]:
    """The windows as separate settings."""
    return [
        Sample(
            {**s.setting, "minutes": (int(name.removeprefix(_WINDOW)) + 0.5) * WINDOW_S / 60},
            s.policy,
            s.seed,
            {"gain_share": value},
        )
        for s in samples
        for name, value in s.metrics.items()
        if name.startswith(_WINDOW)
    ]


STUDY = Study(
    "tempo-fig9",
    "an hour of mixed objectives in overload: service gain by ten minutes",
    f"{SOURCE}, Fig. 9",
    ARMS,
    _hour,
    no_targets,
    partial(plot_lines, "minutes"),
    ("slo_attainment", "gain_share", "gain_lost"),
    ("slo_attainment", "service_gain"),
    means=lambda samples: summarize((*_over_time(samples), *samples)),
    quick_arms=FEW_ARMS,
    quick_seeds=1,
    metrics=(*NAMES, *OF_CLASSES, *WINDOWS, "gain_lost"),
)
