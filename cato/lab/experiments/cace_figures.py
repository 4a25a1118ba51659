"""CACE's windows of 30 s as printed, and its future work: weights that adapt to the workload.

A run is a sequence of windows. With accelerators empty at each window, as the paper measures,
policies have little choice; with models kept, and a pattern that changes every `CHANGE` windows,
weights can adapt. The weights of a window are those that would have had the most hits in the
`LEARNT` windows before it, changing one factor at a time: simulating the recorded arrivals tells.
All accelerators are alike here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from cato.core.eviction import EvictionPolicy, FleetSnapshot, Keep, Prefetch
from cato.core.ids import InvocationId, ModelName
from cato.lab.experiments.cace import (
    BELADY,
    CACE,
    FORESIGHT,
    LFU,
    LRU,
    PATTERNS,
    POLICIES,
    SOURCE,
    alike,
)
from cato.lab.study import Study, Trial, no_targets
from cato.policies.eviction.belady import Belady
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.orders import InOrder
from cato.sim import card_workload, cards, plots
from cato.sim.card_workload import CardArrival
from cato.sim.experiment import Options
from cato.sim.report import Report

WINDOW_S = 30.0
WINDOWS, QUICK_WINDOWS, QUICK_SEEDS = 60, 30, 3
CHANGE = 10  # windows per pattern, when patterns change
LEARNT = 10
RATES_PER_S = (0.2, 0.5, 1.0)
# In order, four accelerators that load can serve about 0.5 a second.
KEPT_RATES_PER_S = (0.1, 0.2, 0.4)
ADAPTIVE = "cace, adaptive weights"
# The arm that does not run everywhere is last, so that the others keep their colours.
ARMS = (CACE, LRU, LFU, FORESIGHT, BELADY, ADAPTIVE)
CHANGING = "changing"
EMPTY, KEPT = "empty at each window", "kept"
CANDIDATES: tuple[Cace, ...] = (
    Cace(),
    *(
        changed
        for weight in (0.0, 4.0)
        for changed in (
            Cace(recency=weight),
            Cace(reload_cost=weight),
            Cace(demand=weight),
            Cace(output=weight),
        )
    ),
)


@dataclass(frozen=True, slots=True)
class ByWindow:
    """`Cace` with the weights of the current window."""

    weights: tuple[Cace, ...]

    def keep(self, model: ModelName, fleet: FleetSnapshot) -> Keep:
        window = min(int(fleet.now_s // WINDOW_S), len(self.weights) - 1)
        return self.weights[window].keep(model, fleet)

    def prefetch(self, fleet: FleetSnapshot) -> Prefetch | None:
        return None


@dataclass(frozen=True, slots=True)
class Scene:
    """A sequence of windows of Poisson arrivals."""

    pattern: str
    rate_per_s: float
    windows: int


@lru_cache(maxsize=8)
def windows_of(scene: Scene, seed: int) -> tuple[tuple[CardArrival, ...], ...]:
    """Arrivals of each window, by time since its start; the same for every arm."""
    rng = np.random.default_rng([seed, 30, round(100 * scene.rate_per_s)])
    found = []
    for i in range(scene.windows):
        names = list(PATTERNS)
        name = names[i // CHANGE % len(names)] if scene.pattern == CHANGING else scene.pattern
        count = max(1, int(rng.poisson(scene.rate_per_s * WINDOW_S)))
        drawn = card_workload.arrivals(PATTERNS[name], scene.rate_per_s, count, rng)
        # A Poisson number of arrivals, uniform in the window.
        times = sorted(float(t) for t in rng.uniform(0, WINDOW_S, count))
        found.append(tuple(_moved(a, t, f"{i:03d}-") for a, t in zip(drawn, times, strict=True)))
    return tuple(found)


def _moved(arrival: CardArrival, at_s: float, prefix: str = "") -> CardArrival:
    """The same arrival at another time."""
    wanted = arrival.wanted
    patience_s = wanted.deadline_s - wanted.arrived_at_s
    id = InvocationId(prefix + wanted.id)
    moved = replace(wanted, id=id, arrived_at_s=at_s, deadline_s=at_s + patience_s)
    return replace(arrival, wanted=moved)


def _row(windows: Sequence[Sequence[CardArrival]]) -> list[CardArrival]:
    """Consecutive windows, by time since the first began."""
    return [
        _moved(a, i * WINDOW_S + a.wanted.arrived_at_s)
        for i, window in enumerate(windows)
        for a in window
    ]


@lru_cache(maxsize=8)
def adapted(scene: Scene, seed: int) -> tuple[Cace, ...]:
    """The weights of each window, learned from those before it; the paper's for the first."""
    windows = windows_of(scene, seed)
    chosen = [CANDIDATES[0]]
    for i in range(1, scene.windows):
        past = _row(windows[max(0, i - LEARNT) : i])
        hits = [cards.run(past, alike(c, InOrder())).metrics()["hit_rate"] for c in CANDIDATES]
        chosen.append(CANDIDATES[int(np.argmax(hits))])
    return tuple(chosen)


def _measured(scene: Scene, fleet: str, arm: str, seed: int) -> dict[str, float]:
    windows = windows_of(scene, seed)
    if fleet == KEPT:
        row = _row(windows)
        policy = ByWindow(adapted(scene, seed)) if arm == ADAPTIVE else _policy(arm, row)
        return cards.run(row, alike(policy, InOrder())).metrics()
    runs = [cards.run(w, alike(_policy(arm, w), InOrder())).metrics() for w in windows]
    return {name: float(np.nanmean([r[name] for r in runs])) for name in runs[0]}


def _policy(arm: str, arrivals: Sequence[CardArrival]) -> EvictionPolicy:
    return POLICIES[arm] or Belady(card_workload.arrivals_s(arrivals))


def _cells(options: Options) -> list[Trial]:
    windows = QUICK_WINDOWS if options.quick else WINDOWS
    rows = [(pattern, EMPTY, rate) for pattern in PATTERNS for rate in RATES_PER_S]
    rows += [(pattern, KEPT, rate) for pattern in ("skewed", CHANGING) for rate in KEPT_RATES_PER_S]
    fixed = tuple(a for a in ARMS if a != ADAPTIVE)
    return [
        Trial(
            {"pattern": pattern, "rate_per_s": rate, "cards": fleet},
            partial(_measured, Scene(pattern, rate, windows), fleet),
            ARMS if fleet == KEPT else fixed,
        )
        for pattern, fleet, rate in rows
    ]


def _plot(report: Report, folder: Path) -> list[Path]:
    """Hit rate and mean TTFT over the rate, one column per pattern."""
    rows = list(dict.fromkeys((m.setting["pattern"], m.setting["cards"]) for m in report.means))
    fig, axes = plots.figure(len(rows), 2)
    shown = [(m, row) for m in ("hit_rate", "ttft_s_mean") for row in rows]
    for ax, (metric, (pattern, fleet)) in zip(axes, shown, strict=True):
        means = [
            m
            for m in report.means
            if m.metric == metric and (m.setting["pattern"], m.setting["cards"]) == (pattern, fleet)
        ]
        plots.lines(ax, means, "rate_per_s", metric.replace("_", " "))
        ax.set_title(f"{pattern}, cards {fleet}", fontsize=9)
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


STUDY = Study(
    "cace-windows",
    "windows of 30 s, and factor weights that follow the workload",
    f"{SOURCE}, workload; adaptive weights: its future work",
    ARMS,
    _cells,
    no_targets,
    _plot,
    ("hit_rate", "ttft_s_mean", "load_s"),
    ("hit_rate", "ttft_s_mean", "load_s"),
    quick_seeds=QUICK_SEEDS,
    reference=CACE,
    metrics=cards.NAMES,
)
