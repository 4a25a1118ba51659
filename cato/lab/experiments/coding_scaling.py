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
from typing import Any

import numpy as np

from cato.core.demand import CallKind
from cato.core.follow_ups import FollowUps
from cato.core.ids import PoolName
from cato.core.policies import Policies
from cato.core.scaling import ScalingPolicy
from cato.lab.experiments.coding_scaling_plots import label, plot
from cato.lab.experiments.common import paired_target
from cato.lab.study import Measured, Study, Trial
from cato.policies import schedulers
from cato.policies.scaling.cato import CatoScaling
from cato.policies.scaling.forecast import Forecast
from cato.policies.scaling.queue_length import QueueLength
from cato.sim.autoscale import AutoscaledFleet, ScaledPool, follow_ups_of
from cato.sim.cato_workload import CATO_CLASSES, LARGE, SMALL, cato_tasks, load_per_task_s
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.metrics import NAMES, metrics_of
from cato.sim.report import Sample, Setting, Target
from cato.sim.tasks import SimTask
from cato.sim.workloads import ARRIVALS, SEVEN_B

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


def _measured(options: Options, setting: Setting, method: str, seed: int) -> Measured:
    """Metrics, and of some methods with the first seed the numbers of replicas over time."""
    duration_s = float(setting["duration_s"])
    scaled = scaled_fleet(METHODS[method], POOLS, _follow_ups())
    metrics = metrics_of(scaled.fleet, scaled.run(tasks_of(setting, seed), duration_s))
    metrics["mean_replicas"] = scaled.mean_provisioned(duration_s)
    is_shown = method in SHOWN and seed == options.seeds[0]
    return Measured(metrics, _series(scaled, duration_s) if is_shown else None)


def _series(scaled: AutoscaledFleet, duration_s: float) -> dict[str, list[list[float]]]:
    """Per pool rows of (time, ready, provisioned, calls waiting or running)."""
    rows: dict[str, list[list[float]]] = {}
    for pool, points in scaled.series.items():
        kept = [p for p in points if p.at_s < duration_s and p.at_s % _SERIES_S == 0]
        rows[pool] = [[p.at_s, p.ready, p.provisioned, p.offered] for p in kept]
    return rows


def _offered(setting: Setting, seed: int) -> dict[str, list[list[float]]]:
    """Per pool rows of (time, work arriving per second, over the surrounding 10 s)."""
    tasks, duration_s = tasks_of(setting, seed), float(setting["duration_s"])
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


def _settings() -> list[Setting]:
    kinds = (("poisson", LONG_S), ("poisson", SHORT_S), ("burst", LONG_S))
    return [
        {"utilization": u, "arrivals": arrivals, "duration_s": duration_s}
        for arrivals, duration_s in kinds
        for u in UTILIZATIONS
    ]


def _cells(options: Options) -> list[Trial]:
    return [Trial(setting, partial(_measured, options, setting)) for setting in _settings()]


def _extra(options: Options, samples: Sequence[Sample]) -> dict[str, Mapping[str, object]]:
    """Replicas and offered load over time, with the first seed."""
    series = {}
    for setting in _settings():
        shown = {s.policy: s.further for s in samples if s.setting == setting and s.further}
        series[label(setting)] = shown | {"offered": _offered(setting, options.seeds[0])}
    return {"series": series}


# Targets


def _targets(samples: Sequence[Sample]) -> list[Target]:
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
        setting: Setting = {
            "utilization": utilization,
            "arrivals": "poisson",
            "duration_s": duration_s,
        }
        what = "attainment [points]" if metric == "slo_attainment" else "mean replicas"
        targets.extend(
            paired_target(
                GROUP,
                f"{what} of {OURS} minus {baseline}, {utilization:g}, {duration_s:g} s",
                goal,
                samples,
                (OURS, setting),
                (baseline, setting),
                lambda a, b: scale * (a[metric] - b[metric]),
                at_least,
            )
        )

    # Two readings of "zero-delay": no delay in either direction, or Ray Serve's 600 s downscale
    # delay kept, which is the stronger baseline.
    for baseline in (ZERO_DELAY, UP_AT_ONCE):
        for utilization, goal in zip(UTILIZATIONS, (7.0, 15.0), strict=True):
            add(baseline, utilization, LONG_S, goal)
    for utilization in UTILIZATIONS:
        add(PUBLISHED, utilization, LONG_S, 3.0)
        add(PUBLISHED, utilization, LONG_S, 0.0, "mean_replicas", 1.0, at_least=False)
        add(PUBLISHED, utilization, SHORT_S, 12.0)
    return targets


STUDY = Study(
    "coding-scaling",
    "Attainment and replicas by scaling policy, from 1 to 6 replicas a pool",
    'CATO, "SLA-Awareness for AI-assisted coding" (2025), Algorithm 2',
    tuple(METHODS),
    _cells,
    _targets,
    plot,
    compared=COMPARED,
    extra=_extra,
    reference=OURS,
    called="scaling method",
    metrics=(*NAMES, "mean_replicas"),
)
