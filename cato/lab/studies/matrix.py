"""The matrix of traffic, fleets and errors on which the default is compared with simple rules.

A scene is one cell: a value on every axis. Arrivals "bursts" stand for a production trace: a fifth
of each 10 s at three times the rate of the rest. Sessions are played by users in a closed loop, so
arrivals are not an axis for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import cycle, islice
from math import inf, nan
from pathlib import Path
from random import Random
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.lab.studies import agents, completions
from cato.lab.study import NO_POLICIES, Cell
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.report import Setting
from cato.sim.sessions import Users
from cato.sim.tasks import Outcome, SimNode, SimTask
from cato.sim.workloads import SABER_CLASSES, SABER_ENGINE, belief, bursts, gamma, lengths, poisson

POOL = PoolName("matrix")
SESSIONS, SABER, CLOSED_LOOP = "sessions", "saber-w3", "closed loop"


@dataclass(frozen=True, slots=True)
class Scene:
    """`load` 1 is the fleet's throughput in full batches; for sessions, the number of users that
    sticky routing serves in time. `slowness`: believed service times as a multiple of the true
    ones.
    """

    traffic: str
    load: float
    replicas: int
    speeds: str = "equal"
    arrivals: str = "poisson"
    beliefs: str = "class"
    slowness: float = 1.0
    sla: str = "x 1"
    places: int = 128
    delays: str = "none"


AXES: Mapping[str, tuple[str | float, ...]] = MappingProxyType(
    {
        "load": (0.3, 0.5, 0.7, 0.9, 1.1, 1.5, 3.0),
        "traffic": ("64/20", "200/20", "800/40", "2000/200", "8000/500", SESSIONS),
        "replicas": (1, 4, 16, 64),
        "speeds": ("equal", "1/2.5/6"),
        "arrivals": ("poisson", "gamma", "bursts"),
        "beliefs": ("class", "exact", "+-30 %", "x 0.5", "x 2", "none"),
        "slowness": (1.0, 0.7, 1.3, 2.0),
        "sla": ("x 1", "x 0.7", "x 3", "half without"),
        "places": (1, 16, 128),
        "delays": ("none", "live"),
    }
)
BASES = (
    Scene("200/20", 0.7, 4),
    Scene(SABER, 0.8, 6),
    Scene(SESSIONS, 0.73, 4, arrivals=CLOSED_LOOP),
)
MOST_SESSION_REPLICAS = 16
# Users that sticky routing serves in time on a large accelerator: load 1. A quarter of an hour is
# played, while contexts still grow (in the hour of the study of agents it is 6.5).
WARM_UP_S, COUNTED_S, GRACE_S = 300.0, 600.0, 60.0
STICKY_USERS = 8.2

# Enough for a queue to build up in overload; fewer for large fleets, to save time.
CALLS_A_REPLICA, LEAST_CALLS, MOST_CALLS = 300, 600, 4800
# Share of the pace target that decoding in a full batch takes; the rest is for prompts.
PACE_SHARE = 0.75
GAMMA_CV, BURST_PERIOD_S = 4.0, 10.0
# Length that a router expects of an unknown answer.
PRIOR_TOKENS = 64

SPEEDS: Mapping[str, tuple[float, ...]] = {"equal": (1.0,), "1/2.5/6": (1.0, 2.5, 6.0)}
"""Slowdown of each kind of replica relative to the first kind."""

OPEN_ARMS = (
    "least-wait",
    "power-of-two",
    "round-robin",
    "ray-serve",
    "sjf-bounded",
    "edf-bounded",
    "sjf",
    "edf",
    "static-cap",
    "sticky",
    "prefix-score",
    "block-cost",
    "plas",
    "plas-waiting",
    "tempo",
    "moore-smith",
    "saber",
    "annealing",
    "cato",
    "cato-batched",
)
"""Baselines for calls without sessions; the other rules behave like one of these there. Fastest to
simulate first: ties go to the first."""
SLOW_ARMS, MOST_SLOW_REPLICAS = ("saber", "annealing", "cato", "cato-batched"), 4
"""Rules that scan everything for every call; with more replicas one run takes minutes."""
SESSION_ARMS = (*agents.SESSION_RULES, "edf-bounded")
"""Rules for sessions; the others ignore caches and serve less than one user per accelerator."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of call: mean tokens, and its SLO metric."""

    name: str
    prompt: int
    output: int
    metric: SloMetric
    target_s: float
    tpot_s: float = inf


def _kinds() -> dict[str, tuple[_Kind, ...]]:
    found = {
        f"{p}/{o}": (_Kind("call", p, o, SloMetric.TTFT, target_s, tpot_s),)
        for p, o, target_s, tpot_s in (
            (64, 20, 0.3, inf),
            (200, 20, 0.3, inf),
            (800, 40, 0.3, inf),
            (2000, 200, 1.0, 0.05),
            (8000, 500, 3.0, 0.05),
        )
    }
    return found | {
        SABER: tuple(
            _Kind(name, p, o, SloMetric.E2E, target_s)
            for name, (p, o, target_s) in SABER_CLASSES.items()
        )
    }


TRAFFIC: Mapping[str, tuple[_Kind, ...]] = MappingProxyType(_kinds())


def axis_scenes(has_sessions: bool) -> list[Scene]:
    """For each base, each value of each axis with the others as in the base."""
    found: dict[Scene, None] = {}
    for base in BASES:
        for axis, values in AXES.items():
            if axis == "traffic" and base is not BASES[0]:
                continue
            for value in values:
                found[_possible(base, **{axis: value})] = None
    return [s for s in found if has_sessions or s.traffic != SESSIONS]


def random_scenes(count: int, draw: int, has_sessions: bool) -> list[Scene]:
    """`count` different scenes, with each axis drawn independently."""
    rng = np.random.default_rng([draw, 5])
    found: dict[Scene, None] = {}
    while len(found) < count:
        values = {axis: of[int(rng.integers(len(of)))] for axis, of in AXES.items()}
        scene = _possible(BASES[0], **values)
        if has_sessions or scene.traffic != SESSIONS:
            found[scene] = None
    return list(found)


def _possible(base: Scene, **changed: Any) -> Scene:
    """`base` with changes, made consistent: one replica has one speed; sessions have few replicas
    and arrive in a closed loop."""
    scene = replace(base, **changed)
    if scene.replicas == 1:
        scene = replace(scene, speeds="equal")
    if scene.traffic == SESSIONS:
        replicas = min(scene.replicas, MOST_SESSION_REPLICAS)
        scene = replace(scene, replicas=replicas, arrivals=CLOSED_LOOP)
    return scene


def words(setting: Setting) -> str:
    """A short name of the cell, without default values."""
    usual = asdict(BASES[0])
    always = f"{setting['traffic']} at {setting['load']:g} on {setting['replicas']}"
    others = list(usual)[3:]
    return ", ".join([always, *(f"{k} {setting[k]}" for k in others if setting[k] != usual[k])])


def cell_of(scene: Scene, trace: Path | None) -> Cell:
    """The scene as the harness runs it; `trace` has the recorded sessions."""
    is_live = scene.delays == "live"
    is_sessions, is_saber = scene.traffic == SESSIONS, scene.traffic == SABER
    chunk_tokens = agents.STOCK.chunk_tokens if is_sessions else completions.CHUNK_TOKENS
    kinds = islice(cycle(SPEEDS[scene.speeds]), scene.replicas)
    fleet = PoolSetup(
        POOL,
        tuple(engine_of(scene).slowed(factor) for factor in kinds),
        NO_POLICIES,
        scene.places,
        None if is_saber else chunk_tokens,
        dispatch_s=completions.DISPATCH_S if is_live else 0.0,
        news_s=completions.NEWS_S if is_live else 0.0,
        cache_block_tokens=agents.BLOCK_TOKENS if is_sessions else 0,
        believed_slowness=scene.slowness,
    )
    setting = asdict(scene)
    if is_sessions:
        assert trace is not None, "sessions are played from a trace"
        return Cell(setting, fleet, partial(_measure_sessions, scene, trace), SESSION_ARMS)
    arms = tuple(a for a in OPEN_ARMS if scene.replicas <= MOST_SLOW_REPLICAS or a not in SLOW_ARMS)
    return Cell(setting, fleet, partial(_measure_calls, scene), arms)


def engine_of(scene: Scene) -> Profile:
    if scene.traffic == SESSIONS:
        return agents.card_profile("large")
    return SABER_ENGINE if scene.traffic == SABER else completions.ENGINE


def rate_per_s(scene: Scene) -> float:
    """Calls per second of the whole fleet."""
    engine, kinds = engine_of(scene), TRAFFIC[scene.traffic]
    context = fmean(k.prompt + k.output / 2 for k in kinds)
    batch = min(scene.places, int(engine.kv_capacity_tokens / context))
    pace_s = PACE_SHARE * min(k.tpot_s for k in kinds)
    while batch > 1 and engine.decode_step_s(batch, context) > pace_s:
        batch -= 1
    step_s = engine.decode_step_s(batch, context) / batch
    call_s = fmean(k.output * step_s + k.prompt * engine.prompt_token_s for k in kinds)
    return scene.load * _fast_replicas(scene) / call_s


def _fast_replicas(scene: Scene) -> float:
    """The fleet's capacity in replicas of the fastest kind."""
    return sum(1 / f for f in islice(cycle(SPEEDS[scene.speeds]), scene.replicas))


@lru_cache(maxsize=4)
def calls(scene: Scene, seed: int) -> Sequence[SimTask]:
    """The calls of a seed, the same for every arm."""
    kinds, rate = TRAFFIC[scene.traffic], rate_per_s(scene)
    rng = np.random.default_rng([seed, 8])
    n = min(MOST_CALLS, max(LEAST_CALLS, CALLS_A_REPLICA * scene.replicas))
    if scene.arrivals == "gamma":
        times = gamma(rng, rate, n, GAMMA_CV)
    elif scene.arrivals == "bursts":
        times = bursts(rng, rate, n, period_s=BURST_PERIOD_S)
    else:
        times = poisson(rng, rate, n)
    found = []
    for i, (at_s, which) in enumerate(zip(times, rng.integers(len(kinds), size=n), strict=True)):
        kind = kinds[int(which)]
        prompt, output = (int(lengths(rng, mean, 1)[0]) for mean in (kind.prompt, kind.output))
        known = belief(kind.output)
        task = SimTask(
            f"c{i}",
            TaskName(kind.name),
            at_s,
            kind.metric,
            kind.target_s,
            (SimNode(POOL, prompt, output, round(known.mean), known),),
            (float(rng.random()),),
            kind.tpot_s,
        )
        found.append(changed(scene, seed, task))
    return found


def changed(scene: Scene, seed: int, task: SimTask) -> SimTask:
    """The task with the scene's beliefs and SLA; independent of when it begins."""
    rng = Random(f"{seed}/{task.id}")
    node = task.nodes[0]
    known, error = node.length, rng.uniform(0.7, 1.3)
    match scene.beliefs:
        case "exact":
            known = LengthBelief((float(node.output_tokens),))
        case "+-30 %":
            known = LengthBelief((max(1.0, error * node.output_tokens),))
        case "x 0.5" | "x 2":
            assert known is not None, "what is scaled is believed"
            known = _scaled(known, float(scene.beliefs.removeprefix("x ")))
        case "none":
            known = None
    expected = PRIOR_TOKENS if known is None else max(1, round(known.mean))
    target_s, tpot_s = task.target_s, task.tpot_target_s
    if scene.sla == "half without":
        if rng.random() < 0.5:
            target_s = tpot_s = inf
    else:
        factor = float(scene.sla.removeprefix("x "))
        target_s, tpot_s = factor * target_s, factor * tpot_s
    node = replace(node, length=known, expected_tokens=expected)
    return replace(task, nodes=(node,), target_s=target_s, tpot_target_s=tpot_s)


@lru_cache(maxsize=64)
def _scaled(known: LengthBelief, factor: float) -> LengthBelief:
    return LengthBelief(tuple(max(1.0, factor * p) for p in known.points))


def _measure_calls(scene: Scene, pool: PoolSetup, seed: int) -> Mapping[str, float]:
    fleet = Fleet([pool])
    return _metrics(fleet.run(calls(scene, seed)), fleet.kernel.now_s)


def _measure_sessions(scene: Scene, trace: Path, pool: PoolSetup, seed: int) -> Mapping[str, float]:
    """Turns that began in the counted time, of users of the half not used for tuning."""
    tuned_on, reported = agents.halves(trace)
    count = max(1, round(scene.load * STICKY_USERS * _fast_replicas(scene)))
    users = Users(
        reported,
        count,
        pool,
        agents.length_belief(tuned_on or reported),
        seed,
        partial(changed, scene, seed),
    )
    end_s = WARM_UP_S + COUNTED_S
    outcomes = [p.outcome for p in users.run(end_s + GRACE_S)]
    counted = [o for o in outcomes if WARM_UP_S <= o.task.arrived_at_s < end_s]
    return _metrics(counted, users.fleet.kernel.now_s)


def _metrics(outcomes: Sequence[Outcome], now_s: float) -> dict[str, float]:
    """`wait_s_max`: the longest TTFT among calls that were not refused."""
    with_slo = [o for o in outcomes if o.task.target_s < inf]
    first_s = [o.ttft_s for o in outcomes if o.ttft_s == o.ttft_s]
    waits_s = [
        o.ttft_s if o.ttft_s == o.ttft_s else now_s - o.task.arrived_at_s
        for o in outcomes
        if not o.refused
    ]
    return {
        "slo_attainment": sum(o.is_met for o in with_slo) / len(with_slo) if with_slo else nan,
        "ttft_s_p95": float(np.quantile(first_s, 0.95)) if first_s else nan,
        "wait_s_max": max(waits_s, default=nan),
        "refused": sum(o.refused for o in outcomes) / len(outcomes) if outcomes else nan,
    }
