"""The report of CACE live: measured and simulated values, and the goals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from cato.lab.live.cace_cases import (
    GOALS,
    MOST_HITS_OFF,
    MOST_OFF,
    NAME,
    PREDICTED,
    SHOWN,
    WORKLOADS,
    Goal,
    Run,
    Settings,
)
from cato.sim.report import finite, mean_and_stderr


def as_json(
    runs: Sequence[Run], settings: Settings, facts: Mapping[str, object], command: str
) -> dict[str, Any]:
    return {
        "experiment": NAME,
        "command": command,
        "machine": dict(facts),
        "simulated_engines": True,
        "settings": asdict(settings),
        "runs": [asdict(r) for r in runs],
        "goals": [g for workload in settings.workloads for g in _goals(runs, workload)],
        "simulated": [f for workload in settings.workloads for f in _predicted(runs, workload)],
        "problems": list(dict.fromkeys(p for r in runs for p in r.problems)),
    }


def _predicted(runs: Sequence[Run], workload: str) -> list[dict[str, Any]]:
    """Measured over simulated value of each arm: means over the seeds."""
    mine = [r for r in runs if r.workload == workload]
    found = []
    for arm in dict.fromkeys(r.arm for r in mine):
        of_arm = [r for r in mine if r.arm == arm]
        measured = {m: float(np.mean([r.measured[m] for r in of_arm])) for m in PREDICTED}
        simulated = {m: float(np.mean([r.simulated[m] for r in of_arm])) for m in PREDICTED}
        ratios = {m: measured[m] / simulated[m] if simulated[m] else inf for m in PREDICTED}
        off = {m for m, ratio in ratios.items() if abs(ratio - 1) > MOST_OFF}
        if abs(measured["hit_rate"] - simulated["hit_rate"]) <= MOST_HITS_OFF:
            off.discard("hit_rate")
        found.append({"workload": workload, "arm": arm, "ratios": ratios, "met": not off})
    return found


def _goals(runs: Sequence[Run], workload: str) -> list[dict[str, Any]]:
    mine = [r for r in runs if r.workload == workload]
    arms = {r.arm for r in mine}
    return [
        {
            "workload": workload,
            "goal": goal.text,
            "least": goal.least,
            "measured": _reached(goal, mine, lambda r: r.measured),
            "simulated": _reached(goal, mine, lambda r: r.simulated),
        }
        for goal in GOALS
        if goal.case == WORKLOADS[workload][1].name and {goal.ours, goal.theirs} <= arms
    ]


def _reached(
    goal: Goal, runs: Sequence[Run], of: Callable[[Run], Mapping[str, float]]
) -> tuple[float, float]:
    """Mean over the seeds of the difference or the ratio, with its standard error."""
    by_arm = {(r.arm, r.seed): of(r)[goal.metric] for r in runs}
    pairs = [
        (by_arm[goal.ours, seed], by_arm[goal.theirs, seed])
        for seed in dict.fromkeys(r.seed for r in runs)
    ]
    if goal.is_points:
        return mean_and_stderr([100 * (a - b) for a, b in pairs])
    return mean_and_stderr([b / max(a, 1e-9) for a, b in pairs])


def tables(report: Mapping[str, Any]) -> Group:
    """Measured and simulated values side by side, and the goals."""
    runs = [_runs_table(report, workload) for workload in report["settings"]["workloads"]]
    shown = "{:.2f} ± {:.2f}" if len(report["settings"]["seeds"]) > 1 else "{:.2f}, one seed"
    goals = Table(
        "workload", "goal", "least", "measured", "simulated", title="Goals", title_style=""
    )
    for g in report["goals"]:
        reached = (shown.format(*g[k]) for k in ("measured", "simulated"))
        goals.add_row(g["workload"], g["goal"], f"{g['least']:.2f}", *reached)
    title = f"Measured over simulated; goal: within {MOST_OFF:.0%}"
    simulated = Table("workload", "arm", *PREDICTED, "met", title=title, title_style="")
    for f in report["simulated"]:
        ratios = (f"{f['ratios'][m]:.2f}" for m in PREDICTED)
        simulated.add_row(f["workload"], f["arm"], *ratios, "yes" if f["met"] else "no")
    problems = [f"problem: {p}" for p in report["problems"]]
    parts = [*runs, *([goals] if report["goals"] else []), simulated]
    return Group("All engines are simulated.", *parts, *problems)


def _runs_table(report: Mapping[str, Any], workload: str) -> Table:
    """Two lines per run; fits in 80 columns."""
    table = Table(title=f"{workload}; times in the experiment's seconds", title_style="")
    for column in ("arm", "seed", ""):
        table.add_column(column, overflow="fold")
    for column in SHOWN:
        table.add_column(column, justify="right", no_wrap=True)
    for r in report["runs"]:
        if r["workload"] == workload:
            live = (f"{r['measured'][m]:.4g}" for m in SHOWN)
            predicted = (f"{r['simulated'][m]:.4g}" for m in SHOWN)
            table.add_row(r["arm"], str(r["seed"]), "live", *live)
            table.add_row("", "", "simulated", *predicted, end_section=True)
    return table


def save(report: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(finite(report), indent=2, allow_nan=False) + "\n")
