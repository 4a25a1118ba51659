"""Pictures of `coding-scaling`: attainment, its price in replicas, and replicas over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cato.sim import plots
from cato.sim.report import Mean, Report, Setting

# Calls of a longer queue are cut off, so that replicas can be told apart.
MOST_SHOWN = 12.0


def label(setting: Setting) -> str:
    return f"{setting['utilization']:g} {setting['arrivals']} {setting['duration_s']:g} s"


def plot(report: Report, folder: Path) -> tuple[Path, ...]:
    """Attainment bars, attainment over replicas, and replicas over time with the load."""
    series = report.extra["series"]
    assert isinstance(series, Mapping)
    bars = _plot_bars(report, folder)
    return (bars, _plot_price(report, folder), *_plot_series(series, folder))


def _by_setting(report: Report, metric: str) -> dict[str, dict[str, Mean]]:
    """Means by label of the setting and policy."""
    found: dict[str, dict[str, Mean]] = {}
    for m in report.means:
        if m.metric == metric:
            found.setdefault(label(m.setting), {})[m.policy] = m
    return found


def _plot_bars(report: Report, folder: Path) -> Path:
    groups = _by_setting(report, "slo_attainment")
    fig, axes = plots.figure(2, (len(groups) + 1) // 2)
    for ax, (label, means) in zip(axes, groups.items(), strict=False):
        names = list(means)
        ax.barh(
            names,
            [100 * means[n].mean for n in names],
            xerr=[100 * plots.margin(means[n]) for n in names],
            capsize=2,
        )
        ax.invert_yaxis()
        ax.set_xlim(0, 100)
        ax.set_xlabel("SLO attainment [%]")
        ax.set_title(f"utilization {label}", fontsize=10)
        ax.tick_params(axis="y", labelsize=7)
        ax.grid(axis="x", alpha=0.3)
    return plots.save(fig, folder, "coding-scaling-attainment")


def _plot_price(report: Report, folder: Path) -> Path:
    attainment = _by_setting(report, "slo_attainment")
    replicas = _by_setting(report, "mean_replicas")
    fig, axes = plots.figure(2, (len(attainment) + 1) // 2)
    for ax, (label, means) in zip(axes, attainment.items(), strict=False):
        for i, (policy, m) in enumerate(means.items()):
            marker = "o" if i < 10 else "^"  # colours repeat after ten
            ax.scatter(
                replicas[label][policy].mean, 100 * m.mean, s=18, marker=marker, label=policy
            )
        ax.set_xlabel("mean replicas of both pools")
        ax.set_ylabel("SLO attainment [%]")
        ax.set_title(f"utilization {label}", fontsize=10)
        ax.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return plots.save(fig, folder, "coding-scaling-price")


def _plot_series(series: Mapping[str, Any], folder: Path) -> list[Path]:
    paths = []
    for label, runs in series.items():
        offered = runs["offered"]
        shown = [m for m in runs if m != "offered"]
        if not shown:
            continue
        fig, axes = plots.figure(len(offered), len(shown))
        cells = [(m, pool) for m in shown for pool in offered]
        for ax, (method, pool) in zip(axes, cells, strict=True):
            plot_cell(ax, runs[method][pool], offered[pool])
            ax.set_title(f"{method}: {pool}", fontsize=9)
        axes[0].legend(fontsize=7)
        name = label.replace(" s", "s").replace(" ", "-").replace(".", "")
        paths.append(plots.save(fig, folder, f"coding-scaling-replicas-{name}"))
    return paths


def plot_cell(
    ax: Axes, rows: Sequence[Sequence[float]], offered: Sequence[Sequence[float]]
) -> None:
    """Replicas and calls over time of one pool. `rows`: time in s, ready and provisioned replicas,
    calls that wait or run; `offered`: time in s and work in replicas."""
    at_s, ready, provisioned, calls = zip(*rows, strict=True)
    ax.step(at_s, provisioned, where="post", label="replicas with those starting", color="0.6")
    ax.step(at_s, ready, where="post", label="replicas ready", color="C0")
    ax.plot(*zip(*offered, strict=True), label="offered load (10 s)", color="C1", lw=0.9)
    most = max(MOST_SHOWN, *provisioned, *(work for _, work in offered))
    words = f"calls waiting or running, up to {most:g}"
    ax.plot(at_s, np.minimum(calls, most), label=words, color="C2", lw=0.6)
    ax.set_ylim(0, 1.04 * most)
    ax.set_xlabel("s")
    ax.grid(alpha=0.3)
