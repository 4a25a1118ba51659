"""Plots of `cato bench live`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files, no window

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from cato.lab.experiments.coding_scaling_plots import plot_cell


def pictures(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Attainment by arm, and for a scaled fleet its replicas over time with the load."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_attainment(report, folder)]
    for name, workload in report["workloads"].items():
        if "offered" in workload:
            paths.append(_replicas(report, name, workload, folder))
    return paths


def _attainment(report: Mapping[str, Any], folder: Path) -> Path:
    """Live with its 95 % interval, and simulated; one panel per workload."""
    workloads = report["workloads"]
    fig, axes = _figure(1, len(workloads))
    for axis, (name, workload) in zip(axes[0], workloads.items(), strict=True):
        arms = workload["arms"]
        for i, values in enumerate(arms.values()):
            found = {k: 100 * v for k, v in values["attainment"].items()}
            errors = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
            axis.bar(i, found["value"], 0.6, yerr=errors, capsize=3, color="C0")
            if "simulated" in values:
                axis.plot(i, 100 * values["simulated"], "D", color="C1", markersize=6)
        axis.set_xticks(range(len(arms)), list(arms), rotation=30, ha="right", fontsize=8)
        axis.set_ylim(0, 100)
        axis.set_ylabel("SLO attainment [%]")
        axis.set_title(name, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    return _save(fig, report, folder / f"live-{report['experiment']}.png", "; diamonds: simulate")


def _replicas(
    report: Mapping[str, Any], name: str, workload: Mapping[str, Any], folder: Path
) -> Path:
    """One panel per arm and pool, for the first seed."""
    seed, offered = workload["runs"][0]["seed"], workload["offered"]
    runs = [r for r in workload["runs"] if r["seed"] == seed]
    fig, axes = _figure(len(runs), len(offered))
    for row, run in zip(axes, runs, strict=True):
        for axis, (pool, load) in zip(row, offered.items(), strict=True):
            plot_cell(axis, run["replicas"][pool], load)
            axis.set_title(f"{run['arm']}: {pool}", fontsize=9)
    axes[0][0].legend(fontsize=7)
    words = name.replace(" ", "-").replace(".", "")
    path = folder / f"live-{report['experiment']}-replicas-{words}.png"
    return _save(fig, report, path, f", {name}, seed {seed}")


def _figure(rows: int, columns: int) -> tuple[Figure, Any]:
    return plt.subplots(
        rows,
        columns,
        figsize=(4.6 * columns, 3.4 * rows + 0.4),
        squeeze=False,
        layout="constrained",
    )


def _save(fig: Figure, report: Mapping[str, Any], path: Path, words: str) -> Path:
    kind = "simulated engines" if report["simulated_engines"] else "real engines"
    fig.suptitle(f"{report['experiment']}: live, {kind}{words}", fontsize=10)
    fig.savefig(path, dpi=110)
    plt.close(fig)
    return path
