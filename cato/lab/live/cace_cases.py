"""CACE live: what is measured, and what it should reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cato.core.errors import InputError, UnknownNameError
from cato.core.topology import SharedPoolPolicies
from cato.lab.experiments.cace import MEMORY, OVERLOAD_PER_S, PATTERNS, UNDERLOAD_PER_S
from cato.policies.eviction.registry import eviction_names

NAME = "cace"
TASKS = 150
SLOWDOWN = 0.1
IN_ORDER, QUEUE_AWARE = "in-order", "queue-aware"


@dataclass(frozen=True, slots=True)
class Arm:
    """A combination of policies, under its name in `cato simulate`."""

    name: str
    eviction: str
    dispatch: str
    host_memory: str = "none"

    @property
    def policies(self) -> SharedPoolPolicies:
        room = MEMORY[self.host_memory]
        return SharedPoolPolicies(
            self.eviction, self.dispatch, host_memory_bytes=room, max_queued=100_000
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A rate, and the arms compared at it."""

    name: str
    rate_per_s: float
    arms: tuple[Arm, ...]


CASES: Mapping[str, Case] = {
    c.name: c
    for c in (
        *(
            Case(
                f"in-order at {rate:g}/s",
                rate,
                tuple(Arm(e, e, IN_ORDER) for e in ("foresight", "lru", "lfu", "cace")),
            )
            for rate in UNDERLOAD_PER_S
        ),
        Case(
            "overload",
            OVERLOAD_PER_S,
            (
                Arm("foresight, queue-aware", "foresight", QUEUE_AWARE),
                Arm("lru, in-order", "lru", IN_ORDER),
            ),
        ),
        Case(
            "host-memory",
            UNDERLOAD_PER_S[0],
            (
                Arm("foresight, 128 GB", "foresight", QUEUE_AWARE, "128 GB"),
                Arm("foresight, none", "foresight", QUEUE_AWARE),
            ),
        ),
        Case(
            # In overload all do equally badly: factors differ only with some idle accelerators.
            "ablation",
            UNDERLOAD_PER_S[1],
            tuple(Arm(e, e, IN_ORDER) for e in eviction_names() if e.startswith("cace")),
        ),
    )
}
METRICS = (
    "hit_rate",
    "ttft_s_mean",
    "load_s",
    "evictions",
    "loads",
    "e2e_s_mean",
    "slo_attainment",
)
# Metrics that the simulator should predict, and the allowed error: a tenth; for hit rates also one
# call in a hundred, since a tenth of few hits in overload is less than one call.
PREDICTED = ("hit_rate", "ttft_s_mean", "load_s")
SHOWN = (*PREDICTED, "loads", "slo_attainment")
MOST_OFF = 0.1
MOST_HITS_OFF = 0.01


@dataclass(frozen=True, slots=True)
class Goal:
    """Required relation between two arms of a case: a difference of hit rates or a ratio."""

    case: str
    text: str
    metric: str
    ours: str
    theirs: str
    is_points: bool
    least: float


GOALS = (
    *(
        Goal(
            f"in-order at {rate:g}/s",
            "hit rate minus LRU's [points]",
            "hit_rate",
            "foresight",
            "lru",
            True,
            6.0,
        )
        for rate in UNDERLOAD_PER_S
    ),
    Goal(
        "overload",
        "mean TTFT of LRU in order over ours",
        "ttft_s_mean",
        "foresight, queue-aware",
        "lru, in-order",
        False,
        2.5,
    ),
    Goal(
        "host-memory",
        "load time without over with host memory",
        "load_s",
        "foresight, 128 GB",
        "foresight, none",
        False,
        2.5,
    ),
)


def workload_name(pattern: str, case: str) -> str:
    return f"{pattern}, {case}"


WORKLOADS: Mapping[str, tuple[str, Case]] = {
    workload_name(p, c.name): (p, c) for p in PATTERNS for c in CASES.values()
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Size of the measurement, and its arms (empty: all).

    Raise `UnknownNameError` for an unknown workload or arm, and `InputError` for a workload without
    any of the arms.
    """

    seeds: tuple[int, ...] = (0,)
    tasks: int = TASKS
    slowdown: float = SLOWDOWN
    workloads: tuple[str, ...] = tuple(workload_name("skewed", g.case) for g in GOALS)
    chosen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise UnknownNameError("workload", name, tuple(WORKLOADS))
            arms = [a.name for a in WORKLOADS[name][1].arms]
            if self.chosen and not self.arms_of(name):
                raise InputError(f"{name!r} has none of these arms; its arms are {', '.join(arms)}")
        known = {a.name for name in self.workloads for a in WORKLOADS[name][1].arms}
        for arm in self.chosen:
            if arm not in known:
                raise UnknownNameError("arm", arm, tuple(sorted(known)))

    def arms_of(self, workload: str) -> tuple[Arm, ...]:
        """The workload's chosen arms; all when none was chosen."""
        arms = WORKLOADS[workload][1].arms
        return tuple(a for a in arms if not self.chosen or a.name in self.chosen)


@dataclass(frozen=True, slots=True)
class Run:
    """One arm with one seed: measured and simulated, both in the experiment's seconds."""

    workload: str
    arm: str
    seed: int
    measured: Mapping[str, float]
    simulated: Mapping[str, float]
    problems: tuple[str, ...]
