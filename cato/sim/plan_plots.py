"""Plots of plans: attainment over replicas or accelerators, and the goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from cato.sim import looks, plots
from cato.sim.plan import CURVE_MARGIN, Plan
from cato.sim.report import Report


@dataclass(frozen=True, slots=True)
class CardPlan:
    """A plan for one kind of replica, each on `cards` accelerators of that kind."""

    kind: str
    cards: int
    plan: Plan


def plot_cards(plans: Sequence[CardPlan], goal: float, title: str, folder: Path) -> Path:
    """Attainment over accelerators, one curve per kind, with the smallest sufficient number."""
    fig, (axes,) = plots.figure()
    for i, found in enumerate(plans):
        color = looks.COLORS[(i + 1) % len(looks.COLORS)]
        curve = sorted((t.replicas * found.cards, 100 * t.attainment) for t in found.plan.trials)
        most = found.plan.found.replicas + CURVE_MARGIN if found.plan.found else curve[-1][0]
        shown = [(x, y) for x, y in curve if x <= most * found.cards]
        xs, ys = zip(*shown, strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, color=color, label=found.kind)
        if (best := found.plan.found) is not None:
            x, y = best.replicas * found.cards, 100 * best.attainment
            axes.plot([x], [y], "o", markersize=11, fillstyle="none", color=color)
            axes.annotate(f"{x} cards", (x, y), (0, -16), textcoords="offset points", ha="center")
    axes.axhline(100 * goal, color="gray", linestyle="--", linewidth=1, label=f"{100 * goal:g} %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("cards")
    axes.set_ylabel("SLO attainment [%]")
    axes.set_ylim(0, 105)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    axes.set_title(title, fontsize=10)
    return plots.save(fig, folder, f"cards-{title}")


def plot(report: Report, folder: Path) -> tuple[Path, ...]:
    """Attainment over the total of replicas, one point per trial, and the goal."""
    fig, (axes,) = plots.figure()
    means = [m for m in report.means if m.metric == "slo_attainment"]
    for scheduler in dict.fromkeys(m.policy for m in means):
        mine = sorted(
            (float(m.setting["all replicas"]), 100 * m.mean, 100 * plots.margin(m))
            for m in means
            if m.policy == scheduler
        )
        xs, ys, errors = zip(*mine, strict=True)
        axes.errorbar(xs, ys, yerr=errors, label=scheduler, fmt="o", markersize=4, capsize=2)
    for m in means:
        counts = "+".join(f"{n:g}" for pool, n in m.setting.items() if pool != "all replicas")
        at = (float(m.setting["all replicas"]), 100 * m.mean)
        axes.annotate(counts, at, (4, 3), textcoords="offset points", fontsize=6, color="gray")
    goal = report.extra["goal"]
    assert isinstance(goal, float)
    axes.axhline(100 * goal, color="gray", linestyle="--", linewidth=1)
    axes.set_xlabel("replicas of all pools")
    axes.set_ylabel("SLO attainment [%]")
    axes.grid(alpha=0.3)
    axes.legend()
    return (plots.save(fig, folder, report.experiment.replace(" ", "-")),)
