"""Scaling policies on the coding tasks, from one replica per pool to six.

All four classes in equal shares and judged by E2E (the paper's own mixes: `cato-rq4`), two pools,
one request at a time per replica, cold starts of 20 s.
Utilization is the offered load over the largest fleet, 6 + 6.
A method is a scheduler and a scaling policy. The targets compare whole methods as they would be
deployed: CATO's default (`foresight` + `forecast`) with the published combinations. Rows with
`foresight` and another scaling policy show the effect of the scaling alone.

All tasks that arrive within the duration count, whenever they end. Starting and draining replicas
count too, until the end of the duration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cato.core.demand import CallKind, FollowUps
from cato.core.errors import UnknownNameError
from cato.core.ids import PoolName
from cato.core.policies import Policies
from cato.core.scaling import ScalingPolicy
from cato.policies import schedulers
from cato.policies.scaling.cato import CatoScaling
from cato.policies.scaling.forecast import Forecast
from cato.policies.scaling.queue_length import QueueLength
from cato.sim import plots
from cato.sim.autoscale import AutoscaledFleet, ScaledPool, follow_ups_of
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.fleet import PoolSetup
from cato.sim.metrics import metrics_of
from cato.sim.report import (
    Mean,
    Report,
    Sample,
    Setting,
    Target,
    compare,
    mean_and_stderr,
    summarize,
)
from cato.sim.tasks import SimTask
from cato.sim.workloads import (
    ARRIVALS,
    CATO_CLASSES,
    LARGE,
    SEVEN_B,
    SMALL,
    cato_tasks,
    load_per_task_s,
)

GROUP = 2
POOLS = (PoolName(SMALL), PoolName(LARGE))
MIN_REPLICAS, MAX_REPLICAS = 1, 6
COLD_START_S = 20.0
LONG_S, SHORT_S = 600.0, 60.0
UTILIZATIONS = (0.25, 0.5)
SHARES = dict.fromkeys(CATO_CLASSES, 1 / len(CATO_CLASSES))
COMPARED = ("slo_attainment", "mean_replicas", "e2e_s_mean")
# Earlier tasks that policies learn the workload from, with a seed that no run uses.
PAST_TASKS, PAST_SEED = 2000, 77_002
# Time grid of the replica counts kept for plots.
_SERIES_S = 2.5


@dataclass(frozen=True, slots=True)
class Method:
    """A scheduler and a scaling policy; None: all replicas from the start."""

    scheduler: Callable[[], Policies]
    scaling: ScalingPolicy[Any] | None


_power_of_two = partial(schedulers.early, "power-of-two")
# With one request at a time, one replica is wanted per ongoing request. (Ray Serve's default of
# two per replica attains less here.)
RAY = QueueLength(target_ongoing_requests=1.0)
_AT_ONCE = QueueLength(target_ongoing_requests=1.0, upscale_delay_s=0.0, downscale_delay_s=0.0)
RAY_UP_AT_ONCE = QueueLength(target_ongoing_requests=1.0, upscale_delay_s=0.0)

OURS = "foresight + forecast"
PUBLISHED = "cato + cato"
ZERO_DELAY = "power-of-two + queue-length, no delays"
UP_AT_ONCE = "power-of-two + queue-length, up at once"
CEILING = "foresight, 6 + 6 from the start"
METHODS: Mapping[str, Method] = {
    OURS: Method(schedulers.foresight, Forecast()),
    "foresight + forecast, own calls only": Method(
        schedulers.foresight, Forecast(looks_ahead=False)
    ),
    "foresight + cato": Method(schedulers.foresight, CatoScaling()),
    "foresight + cato as printed": Method(schedulers.foresight, CatoScaling(is_literal=True)),
    "foresight + queue-length": Method(schedulers.foresight, RAY),
    "foresight + queue-length, no delays": Method(schedulers.foresight, _AT_ONCE),
    "foresight + queue-length, up at once": Method(schedulers.foresight, RAY_UP_AT_ONCE),
    PUBLISHED: Method(schedulers.cato, CatoScaling()),
    "power-of-two + queue-length": Method(_power_of_two, RAY),
    ZERO_DELAY: Method(_power_of_two, _AT_ONCE),
    UP_AT_ONCE: Method(_power_of_two, RAY_UP_AT_ONCE),
    "ray-serve + queue-length": Method(schedulers.ray_serve, RAY),
    "ray-serve + queue-length, up at once": Method(schedulers.ray_serve, RAY_UP_AT_ONCE),
    CEILING: Method(schedulers.foresight, None),
}
# Methods in the plots over time, for the first seed.
SHOWN = (OURS, PUBLISHED, ZERO_DELAY)


@dataclass(frozen=True, slots=True)
class _Job:
    """One seed of one setting: every method gets the same arrivals."""

    methods: tuple[str, ...]
    setting: Setting
    seed: int
    keeps_series: bool


@dataclass(frozen=True, slots=True)
class _Result:
    samples: tuple[Sample, ...]
    series: Mapping[str, object]


def rate_per_s(utilization: float) -> float:
    """Tasks per second whose work keeps `utilization` of the largest fleet busy."""
    work_s = sum(load_per_task_s(SHARES, CATO_CLASSES, SEVEN_B).values())
    return utilization * MAX_REPLICAS * len(POOLS) / work_s


def tasks_of(setting: Setting, seed: int) -> list[SimTask]:
    """Tasks that arrive within the setting's duration."""
    duration_s = float(setting["duration_s"])
    rate = rate_per_s(float(setting["utilization"]))
    enough = round(rate * duration_s * 1.5) + 40
    arrivals = ARRIVALS[str(setting["arrivals"])]
    tasks = cato_tasks(SHARES, rate, enough, seed, arrivals=arrivals)
    return [t for t in tasks if t.arrived_at_s < duration_s]


@lru_cache(maxsize=1)
def _follow_ups() -> dict[CallKind, FollowUps]:
    past = cato_tasks(SHARES, 1.0, PAST_TASKS, PAST_SEED)
    return follow_ups_of(past, dict.fromkeys(POOLS, SEVEN_B), 1)


def scaled_fleet(
    method: Method, pools: Sequence[PoolName], follow_ups: Mapping[CallKind, FollowUps]
) -> AutoscaledFleet:
    """Pools of 7B replicas that scale from one to six; `follow_ups`: policies' knowledge."""
    first = MIN_REPLICAS if method.scaling is not None else MAX_REPLICAS
    return AutoscaledFleet(
        [
            ScaledPool(
                PoolSetup(
                    name,
                    (SEVEN_B,) * first,
                    method.scheduler(),
                    max_running=1,
                    cold_start_s=COLD_START_S,
                ),
                method.scaling,
                MIN_REPLICAS,
                MAX_REPLICAS,
            )
            for name in pools
        ],
        follow_ups,
    )


def _run(job: _Job) -> _Result:
    duration_s = float(job.setting["duration_s"])
    tasks = tasks_of(job.setting, job.seed)
    samples = []
    series: dict[str, object] = {}
    for name in job.methods:
        scaled = scaled_fleet(METHODS[name], POOLS, _follow_ups())
        metrics = metrics_of(scaled.fleet, scaled.run(tasks, duration_s))
        metrics["mean_replicas"] = scaled.mean_provisioned(duration_s)
        samples.append(Sample(job.setting, name, job.seed, metrics))
        if job.keeps_series and name in SHOWN:
            series[name] = _series(scaled, duration_s)
    if job.keeps_series:
        series["offered"] = _offered(tasks, duration_s)
    return _Result(tuple(samples), series)


def _series(scaled: AutoscaledFleet, duration_s: float) -> dict[str, list[list[float]]]:
    """Per pool rows of (time, ready, provisioned, calls waiting or running)."""
    rows: dict[str, list[list[float]]] = {}
    for pool, points in scaled.series.items():
        kept = [p for p in points if p.at_s < duration_s and p.at_s % _SERIES_S == 0]
        rows[pool] = [[p.at_s, p.ready, p.provisioned, p.offered] for p in kept]
    return rows


def _offered(tasks: Sequence[SimTask], duration_s: float) -> dict[str, list[list[float]]]:
    """Per pool rows of (time, work arriving per second, over the surrounding 10 s)."""
    edges = np.arange(0.0, duration_s + 10.0, 10.0)
    rows: dict[str, list[list[float]]] = {}
    for pool in POOLS:
        work_s = [
            sum(
                SEVEN_B.service_s(n.prompt_tokens, n.output_tokens)
                for n in t.nodes
                if n.pool == pool
            )
            for t in tasks
        ]
        sums, _ = np.histogram([t.arrived_at_s for t in tasks], edges, weights=work_s)
        rows[pool] = [[float(e) + 5.0, float(s) / 10.0] for e, s in zip(edges, sums, strict=False)]
    return rows


def _settings(long_s: float, short_s: float) -> list[Setting]:
    return [
        {"utilization": u, "arrivals": arrivals, "duration_s": duration_s}
        for arrivals, duration_s in (("poisson", long_s), ("poisson", short_s), ("burst", long_s))
        for u in UTILIZATIONS
    ]


def run(
    options: Options, progress: Progress, long_s: float = LONG_S, short_s: float = SHORT_S
) -> Report:
    """All methods in all settings; raise `UnknownNameError` for a method that is not compared."""
    for name in options.policies:
        if name not in METHODS:
            raise UnknownNameError("scaling method", name, tuple(METHODS))
    methods = tuple(m for m in METHODS if not options.policies or m in options.policies)
    jobs = [
        _Job(methods, setting, seed, seed == options.seeds[0])
        for setting in _settings(long_s, short_s)
        for seed in options.seeds
    ]
    results = run_all(_run, jobs, progress, options.jobs)
    samples = [s for r in results for s in r.samples]
    series = {
        _label(job.setting): dict(result.series)
        for job, result in zip(jobs, results, strict=True)
        if job.keeps_series
    }
    return Report(
        "coding-scaling",
        options.seeds,
        summarize(samples),
        compare(samples, OURS, COMPARED),
        _targets(samples, long_s, short_s),
        {"series": series},
    )


def _label(setting: Setting) -> str:
    return f"{setting['utilization']:g} {setting['arrivals']} {setting['duration_s']:g} s"


# Targets


def _targets(samples: Sequence[Sample], long_s: float, short_s: float) -> tuple[Target, ...]:
    targets: list[Target] = []

    def add(
        baseline: str,
        utilization: float,
        duration_s: float,
        goal: float,
        metric: str = "slo_attainment",
        scale: float = 100.0,
        at_least: bool = True,
    ) -> None:
        gaps = _gaps(samples, baseline, utilization, duration_s, metric)
        if gaps:
            what = "attainment [points]" if metric == "slo_attainment" else "mean replicas"
            text = f"{what} of {OURS} minus {baseline}, {utilization:g}, {duration_s:g} s"
            mean, stderr = mean_and_stderr([scale * g for g in gaps])
            targets.append(Target(GROUP, text, goal, mean, stderr, at_least))

    # Two readings of "zero-delay": no delay in either direction, or Ray Serve's 600 s downscale
    # delay kept, which is the stronger baseline.
    for baseline in (ZERO_DELAY, UP_AT_ONCE):
        for utilization, goal in zip(UTILIZATIONS, (7.0, 15.0), strict=True):
            add(baseline, utilization, long_s, goal)
    for utilization in UTILIZATIONS:
        add(PUBLISHED, utilization, long_s, 3.0)
        add(PUBLISHED, utilization, long_s, 0.0, "mean_replicas", 1.0, at_least=False)
        add(PUBLISHED, utilization, short_s, 12.0)
    return tuple(targets)


def _gaps(
    samples: Sequence[Sample], baseline: str, utilization: float, duration_s: float, metric: str
) -> list[float]:
    """Ours minus `baseline` by seed, Poisson arrivals."""
    wanted = {"utilization": utilization, "arrivals": "poisson", "duration_s": duration_s}

    def of(policy: str) -> dict[int, float]:
        return {
            s.seed: s.metrics[metric]
            for s in samples
            if s.policy == policy and dict(s.setting) == wanted
        }

    ours, theirs = of(OURS), of(baseline)
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


# Plots


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
            found.setdefault(_label(m.setting), {})[m.policy] = m
    return found


def _plot_bars(report: Report, folder: Path) -> Path:
    groups = _by_setting(report, "slo_attainment")
    fig, axes = plots.figure(2, (len(groups) + 1) // 2)
    for ax, (label, means) in zip(axes, groups.items(), strict=False):
        names = list(means)
        ax.barh(
            names,
            [100 * means[n].mean for n in names],
            xerr=[196 * means[n].stderr for n in names],
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
        shown = [m for m in SHOWN if m in runs]
        if not shown:
            continue
        fig, axes = plots.figure(len(POOLS), len(shown))
        cells = [(m, pool) for m in shown for pool in POOLS]
        for ax, (method, pool) in zip(axes, cells, strict=True):
            _plot_cell(ax, runs[method][pool], runs["offered"][pool])
            ax.set_title(f"{method}: {pool}", fontsize=9)
        axes[0].legend(fontsize=7)
        name = label.replace(" s", "s").replace(" ", "-").replace(".", "")
        paths.append(plots.save(fig, folder, f"coding-scaling-replicas-{name}"))
    return paths


def _plot_cell(
    ax: Axes, rows: Sequence[Sequence[float]], offered: Sequence[Sequence[float]]
) -> None:
    at_s, ready, provisioned, calls = zip(*rows, strict=True)
    ax.step(at_s, provisioned, where="post", label="replicas with those starting", color="0.6")
    ax.step(at_s, ready, where="post", label="replicas ready", color="C0")
    ax.plot(*zip(*offered, strict=True), label="offered load (10 s)", color="C1", lw=0.9)
    ax.plot(
        at_s, np.minimum(calls, 12), label="calls waiting or running, up to 12", color="C2", lw=0.6
    )
    ax.set_ylim(0, 12.5)
    ax.set_xlabel("s")
    ax.grid(alpha=0.3)


EXPERIMENT = Experiment(
    name="coding-scaling",
    title="Attainment and replicas by scaling policy, from 1 to 6 replicas a pool",
    source='CATO, "SLA-Awareness for AI-assisted coding" (2025), Algorithm 2',
    run=run,
    plot=plot,
)
