"""Policies look alike in all pictures, and different within one."""

from __future__ import annotations

from math import isnan, nan

import pytest
from matplotlib.patches import Rectangle

from cato.lab.experiments import cato_rq, cato_rq4, saber, tempo_variants
from cato.lab.experiments.bounds import UPPER_BOUND
from cato.lab.experiments.routers import ROUTERS
from cato.sim import plots
from cato.sim.looks import look_of
from cato.sim.report import Mean

SETS = {
    "routers": (*ROUTERS, *cato_rq.IDEALS, "cato, paper", "ray-serve, paper"),
    "scaled": tuple(cato_rq4.METHODS),
    "saber": (*saber.RQ1_POLICIES, *saber.RQ2_POLICIES, UPPER_BOUND),
    "tempo": tuple(tempo_variants.SCHEDULERS),
    "parts": tuple(tempo_variants.PARTS),
}


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_no_two_policies_of_a_picture_look_alike(names: tuple[str, ...]) -> None:
    fig, _ = plots.figure()
    distinct = dict.fromkeys(names)
    assert len({look_of(fig, name) for name in distinct}) == len(distinct)


def test_a_policy_keeps_its_look_whatever_stands_beside_it() -> None:
    first, _ = plots.figure()
    second, _ = plots.figure()
    look_of(first, "another")
    assert look_of(first, "ray-serve") == look_of(second, "ray-serve")


def test_the_legend_names_each_policy_once_and_covers_no_axes() -> None:
    fig, axes = plots.figure(2)
    means = [Mean({"rate_per_s": 1.0}, p, "x", 0.5, 0.1, 3) for p in ("cato", "cato, paper")]
    plots.lines(axes[0], means[:1], "rate_per_s", "x")
    plots.lines(axes[1], means, "rate_per_s", "x")
    plots.legend(fig)
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["cato", "cato, paper"]
    assert axes[1].get_xlabel() == "requests per second"
    fig.canvas.draw()
    box = fig.legends[0].get_window_extent()
    assert not any(box.overlaps(a.get_window_extent()) for a in axes)


def test_an_interval_of_few_seeds_is_as_wide_as_students_law_says() -> None:
    """Tables of t for a two-sided 95 %: 12.706 with one degree of freedom, 2.262 with nine."""
    for seeds, t in ((2, 12.706), (10, 2.262), (10_000, 1.96)):
        mean = Mean({"load": 1.0}, "cato", "x", 0.5, 0.01, seeds)
        assert plots.margin(mean) == pytest.approx(0.01 * t, rel=1e-3)
    assert isnan(plots.margin(Mean({"load": 1.0}, "cato", "x", 0.5, nan, 1)))


def test_panels_of_shares_have_one_scale_up_to_one() -> None:
    _, (left, right, empty) = plots.figure(3)
    for axes, mean in ((left, 0.99), (right, 0.5)):
        plots.lines(axes, [Mean({"load": 1.0}, "cato", "x", mean, 0.1, 3)], "load", "x")
    plots.same_shares([left, right, empty])
    assert left.get_ylim() == right.get_ylim()
    assert left.get_ylim()[0] < 0.5
    assert left.get_ylim()[1] == pytest.approx(1.02)
    assert empty.get_ylim() == (0.0, 1.0)


def test_a_policy_without_a_value_has_no_bar() -> None:
    _, (axes,) = plots.figure()
    means = [Mean({"task": t}, "cato", "x", 0.5, 0.1, 3) for t in ("all", "completion")]
    means.append(Mean({"task": "all"}, "ray-serve", "x", 0.25, 0.1, 3))
    plots.bars(axes, means, ["all", "completion"], "task", "x", scale=100.0)
    heights = [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert heights == [50.0, 50.0, 25.0]
