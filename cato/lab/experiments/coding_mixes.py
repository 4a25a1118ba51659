"""The coding tasks in mixes that no paper has, all judged by E2E: attainment by router.

Two models on 6 + 6 replicas. `coding-small-first`: the tasks that start on the small model
(completion, generation); `coding-large-first`: those that start on the large one (translation,
summarization); `coding-mixes`: all four together, in equal shares and in an IDE's mix with 70 %
completions, and dynamic workflows with refinement loops and fan-outs. The paper's own mixes are
`cato-rq1` to `cato-rq3`. The target of a task is 1.5 × the mean of its class on idle replicas.
Utilization is offered work / capacity of the fleet: the busier model's pool is above it.
Besides one request at a time per replica there is a setting with continuous batching (cap 16).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.lab.experiments.common import attainment_gap, measured
from cato.lab.experiments.routers import ROUTERS
from cato.lab.study import Study, Trial
from cato.policies import schedulers
from cato.sim.cato_workload import (
    CATO_CLASSES,
    CATO_DYNAMIC,
    LARGE,
    SMALL,
    cato_tasks,
    load_per_task_s,
)
from cato.sim.drawn_calls import CallSpec
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.plots import figure, legend, lines, save
from cato.sim.report import Report, Sample, Target
from cato.sim.workloads import SEVEN_B

TASKS = 600
REPLICAS = 6
CAP = 16
UTILIZATIONS = (0.3, 0.5, 0.7, 0.83, 0.9)
# With batching the capacity depends on the batch, so rates are given. At the first the fleet is
# half empty; at the middle ones power-of-two reaches about 75 %.
BATCHED_RATES_PER_S = (4.0, 12.0, 13.0, 14.0, 16.0)
SOURCE = "CATO project"

WORKLOADS: Mapping[str, tuple[Mapping[str, float], Mapping[str, tuple[CallSpec, ...]]]] = {
    "small-first": ({"completion": 0.5, "generation": 0.5}, CATO_CLASSES),
    "large-first": ({"translation": 0.5, "summarization": 0.5}, CATO_CLASSES),
    "equal-shares": (dict.fromkeys(CATO_CLASSES, 0.25), CATO_CLASSES),
    "mostly-completions": (
        {"completion": 0.7, "generation": 0.1, "translation": 0.1, "summarization": 0.1},
        CATO_CLASSES,
    ),
    "dynamic": ({"refinement": 0.5, "review": 0.5}, CATO_DYNAMIC),
}
BATCHED = "batched"
EQUAL_BATCHED = f"equal-shares, {BATCHED}"
COMPARED = ("slo_attainment", "goodput_per_s", "e2e_s_p95")

ONE_AT_A_TIME: Profile = replace(SEVEN_B, max_running=1)
IN_BATCHES: Profile = replace(SEVEN_B, max_running=CAP)


def _measured(
    workload: str, profile: Profile, load: float, policy: str, seed: int
) -> dict[str, float]:
    """`load`: utilization, or tasks per second where a replica serves a batch."""
    shares, classes = WORKLOADS[workload]
    rate_per_s = load
    if profile == ONE_AT_A_TIME:
        busy_s = sum(load_per_task_s(shares, classes, profile).values())
        rate_per_s = load * 2 * REPLICAS / busy_s
    tasks = cato_tasks(shares, rate_per_s, TASKS, seed, profile=profile, classes=classes)
    setups = [
        PoolSetup(PoolName(name), (profile,) * REPLICAS, ROUTERS[policy]())
        for name in (SMALL, LARGE)
    ]
    return measured(setups, tasks)


def _cells(workloads: Sequence[str], options: Options) -> list[Trial]:
    rows = []
    for workload in workloads:
        rows += [(workload, workload, ONE_AT_A_TIME, u) for u in UTILIZATIONS]
        if workload == "equal-shares":
            rows += [(EQUAL_BATCHED, workload, IN_BATCHES, r) for r in BATCHED_RATES_PER_S]
    return [
        Trial({"workload": name, "load": load}, partial(_measured, workload, profile, load))
        for name, workload, profile, load in rows
    ]


def _targets(name: str, workloads: Sequence[str], samples: Sequence[Sample]) -> list[Target]:
    """Target group 1: over the experiment's static workloads together, and for each one."""
    targets: list[Target] = []
    static = [w for w in workloads if w != "dynamic"]

    def hold(
        text: str, goal: float, baseline: str, loads: Sequence[float], among: Sequence[str]
    ) -> None:
        gap = attainment_gap(
            samples,
            schedulers.FORESIGHT,
            baseline,
            lambda s: s["load"] in loads and s["workload"] in among,
        )
        if gap is not None:
            targets.append(Target(1, text, goal, *gap))

    goals = (
        (0.5, "power-of-two", 14.0),
        (0.5, "cato", 2.0),
        (0.7, "cato", 12.0),
        (0.83, "cato", 30.0),
        (0.9, "cato", 30.0),
    )
    for load, baseline, goal in goals:
        text = f"{name}: points over {baseline} at utilization {load:g}"
        hold(text, goal, baseline, (load,), static)
        for workload in static if len(static) > 1 else ():
            hold(f"{text}, {workload}", goal, baseline, (load,), [workload])
    for workload in static:
        text = f"{workload}: points over power-of-two at utilization 0.3"
        hold(text, -0.5, "power-of-two", (0.3,), [workload])
    for baseline, goal in (("power-of-two", 3.0), ("cato", 5.0)):
        text = f"batched, where power-of-two reaches about 75 %: points over {baseline}"
        hold(text, goal, baseline, BATCHED_RATES_PER_S[1:4], [EQUAL_BATCHED])
    text = "batched, low load: points over power-of-two"
    hold(text, -0.5, "power-of-two", BATCHED_RATES_PER_S[:1], [EQUAL_BATCHED])
    return targets


def plot(report: Report, folder: Path) -> list[Path]:
    """Attainment, P95 of E2E and measured utilization over the load, one column per workload."""
    workloads = list(dict.fromkeys(str(m.setting["workload"]) for m in report.means))
    fig, axes = figure(len(workloads), 2)
    for i, workload in enumerate(workloads):
        for row, (metric, label) in enumerate(
            (("slo_attainment", "attainment"), ("e2e_s_p95", "E2E latency, P95 (s)"))
        ):
            axis = axes[row * len(workloads) + i]
            means = [
                m for m in report.means if m.metric == metric and m.setting["workload"] == workload
            ]
            lines(axis, means, "load", label)
            axis.set_xlabel("tasks per second" if BATCHED in workload else "utilization")
            axis.set_title(workload, fontsize=9)
    legend(fig)
    return [save(fig, folder, report.experiment)]


def _study(name: str, title: str, *workloads: str) -> Study:
    return Study(
        name,
        title,
        SOURCE,
        tuple(ROUTERS),
        partial(_cells, workloads),
        partial(_targets, name, workloads),
        plot,
        compared=COMPARED,
    )


STUDIES = (
    _study(
        "coding-small-first",
        "attainment of completion and generation by router, over the load",
        "small-first",
    ),
    _study(
        "coding-large-first",
        "attainment of translation and summarization by router, over the load",
        "large-first",
    ),
    _study(
        "coding-mixes",
        "all four coding tasks together: equal shares, mostly completions, dynamic; batching",
        "equal-shares",
        "mostly-completions",
        "dynamic",
    ),
)
