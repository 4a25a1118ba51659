"""Shared plot styles of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files, no window

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtrit

from cato.sim.looks import look_of
from cato.sim.report import Mean

# Of intervals: visible on every bar, a black one too.
BAR_ERROR = "#808080"
# Readable names of settings.
_WORDS = {"rate_per_s": "requests per second", "load": "load", "requests": "requests that wait"}


def figure(columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` x `columns` axes, listed row by row."""
    fig, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.8 * rows), squeeze=False)
    foot = 0.03 / rows  # fraction of the height, for the note of `save`
    fig.set_layout_engine("constrained", rect=(0, foot, 1, 1 - foot))
    return fig, [a for row in axes for a in row]


def margin(mean: Mean) -> float:
    """Half of the 95 % interval of a mean, by Student's t: with two seeds it is 6.5 times as wide
    as a normal law has it. nan for one seed, which has no interval."""
    return float(stdtrit(mean.n - 1, 0.975)) * mean.stderr if mean.n > 1 else nan


def lines(axes: Axes, means: Sequence[Mean], x: str, y_label: str, scale: float = 1.0) -> None:
    """One line per policy of `means` (of one metric) over `setting[x]`, with 95 % intervals."""
    for policy in dict.fromkeys(m.policy for m in means):
        points = sorted(
            (float(m.setting[x]), m.mean * scale, margin(m) * scale)
            for m in means
            if m.policy == policy
        )
        xs, ys, errors = zip(*points, strict=True)
        look = look_of(_figure_of(axes), policy)
        axes.errorbar(
            xs,
            ys,
            yerr=errors,
            label=policy,
            color=look.color,
            linestyle=look.line,
            marker=look.marker,
            markerfacecolor="none" if look.is_hollow else look.color,
            markersize=5 if look.is_hollow else 3,
            linewidth=0.8 if look.is_hollow else 1.4,
            elinewidth=0.7,
            capsize=2,
        )
    axes.set_xlabel(_WORDS.get(x, x.replace("_", " ")))
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)


def curve(axes: Axes, policy: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    """A thin line of one policy, without markers."""
    look = look_of(_figure_of(axes), policy)
    axes.plot(xs, ys, label=policy, color=look.color, linestyle=look.line, linewidth=1.2)


def _figure_of(axes: Axes) -> Figure:
    figure = axes.figure
    assert isinstance(figure, Figure), "subfigures are not supported"
    return figure


def bars(
    axes: Axes,
    means: Sequence[Mean],
    groups: Sequence[str],
    by: str,
    label: str,
    scale: float = 1.0,
) -> None:
    """One group of bars per value of `setting[by]`, one bar per policy that has it, 95 % intervals.

    `scale` multiplies the values.
    """
    policies = list(dict.fromkeys(m.policy for m in means))
    width = 0.8 / max(1, len(policies))
    for i, policy in enumerate(policies):
        mine = {str(m.setting[by]): m for m in means if m.policy == policy}
        present = [g for g in groups if g in mine]
        axes.bar(
            [groups.index(g) + (i - (len(policies) - 1) / 2) * width for g in present],
            [scale * mine[g].mean for g in present],
            width,
            yerr=[scale * margin(mine[g]) for g in present],
            label=policy,
            color=look_of(_figure_of(axes), policy).color,
            ecolor=BAR_ERROR,
            capsize=2,
        )
    slant = 25 if sum(map(len, groups)) > 30 else 0
    axes.set_xticks(range(len(groups)), groups, rotation=slant, ha="right" if slant else "center")
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)


def same_shares(panels: Sequence[Axes]) -> None:
    """One scale for panels that show shares, so that equal heights are equal shares; intervals
    beyond 1 are cut."""
    drawn = [a for a in panels if a.has_data()]
    low = min((a.get_ylim()[0] for a in drawn), default=0.0)
    for axes in drawn:
        axes.set_ylim(max(0.0, low), 1.02)


def legend(fig: Figure) -> None:
    """One legend for all axes, above them; each policy once."""
    found: dict[str, Any] = {}
    for axes in fig.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    longest = max(map(len, found), default=1)
    columns = max(1, int(fig.get_figwidth() * 11 / (longest + 6)))
    fig.legend(
        found.values(),
        found.keys(),
        loc="outside upper center",
        ncols=min(columns, len(found)),
        fontsize=8,
    )


def heat_map(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    limit: float,
    breaks: Sequence[int] = (),
) -> Figure:
    """A table of values coloured around 0, with the numbers; nan stays empty. Colours saturate
    at `limit`. `breaks`: rows with a line above them.
    """
    fig, axes = plt.subplots(figsize=(1.8 + 0.85 * len(columns), 1.4 + 0.24 * len(rows)))
    fig.set_layout_engine("constrained", rect=(0, 0.02, 1, 0.98))
    image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if not isnan(value):
                color = "white" if abs(value) > 0.6 * limit else "black"
                axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=7, color=color)
    for y in breaks:
        axes.axhline(y - 0.5, color="black", linewidth=0.8)
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    fig.colorbar(image, label=label)
    return fig


def save(fig: Figure, folder: Path, name: str) -> Path:
    """Write the figure, marked as simulated, and close it."""
    folder.mkdir(parents=True, exist_ok=True)
    fig.text(0.995, 0.005, "simulated", ha="right", va="bottom", fontsize=7, color="gray")
    path = folder / f"{name}.png"
    fig.savefig(path, dpi=110)
    plt.close(fig)
    return path
