"""Pictures of the experiments on eviction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cato.sim import plots
from cato.sim.report import Report


def by_pattern(
    title: str, metrics: Mapping[str, str], report: Report, folder: Path, *, dwarfs: bool = False
) -> list[Path]:
    """Bars of each metric by pattern, one panel per other setting, whose values fill `title`.

    `dwarfs`: in some panels one policy is far above the others; two rows, and a logarithmic scale.
    """
    rows = 2 if dwarfs else 1
    others = [{k: v for k, v in m.setting.items() if k != "pattern"} for m in report.means]
    panels = dict.fromkeys(title.format(**setting) for setting in others)
    paths = []
    for metric, label in metrics.items():
        fig, axes = plots.figure(len(panels) // rows, rows)
        for ax, panel in zip(axes, panels, strict=True):
            ax.set_title(panel, fontsize=10)
            means = [
                m for m in report.means if m.metric == metric and title.format(**m.setting) == panel
            ]
            patterns = list(dict.fromkeys(str(m.setting["pattern"]) for m in means))
            plots.bars(ax, means, patterns, "pattern", label)
            if dwarfs and max(m.mean for m in means) > 10 * min(m.mean for m in means):
                ax.set_yscale("log")
        plots.legend(fig)
        end = f"-{metric.replace('_', '-')}" if len(metrics) > 1 else ""
        paths.append(plots.save(fig, folder, f"{report.experiment}{end}"))
    return paths


def by_variant(report: Report, folder: Path) -> list[Path]:
    """Hit rate of every variant, one panel per setting."""
    settings = list(dict.fromkeys(tuple(m.setting.items()) for m in report.means))
    fig, axes = plots.figure(2, 2)
    for ax, items in zip(axes, settings, strict=True):
        setting = dict(items)
        means = [m for m in report.means if m.metric == "hit_rate" and m.setting == setting]
        names = [m.policy for m in means]
        ax.barh(names, [m.mean for m in means], xerr=[plots.margin(m) for m in means], capsize=2)
        ax.invert_yaxis()
        ax.set_xlabel("hit rate")
        ax.set_title(f"{setting['pattern']}, {setting['rate_per_s']}/s, in order", fontsize=10)
        ax.tick_params(axis="y", labelsize=8)
        ax.grid(axis="x", alpha=0.3)
    return [plots.save(fig, folder, report.experiment)]
