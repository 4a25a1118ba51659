"""Scenes of the matrix as cells: their fleets, calls and users, and what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from itertools import cycle, islice
from math import inf, nan
from pathlib import Path
from random import Random
from statistics import fmean
from types import MappingProxyType

import numpy as np

from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.estimators.usl import UslFit
from cato.lab.experiments.saber_estimators import offline_law
from cato.lab.studies import agent_fleet, completions
from cato.lab.studies.matrix import (
    MOST_SLOW_REPLICAS,
    OPEN_ARMS,
    SABER,
    SESSION_ARMS,
    SESSIONS,
    SLOW_ARMS,
    SPEEDS,
    Scene,
)
from cato.lab.study import NO_POLICIES, Cell
from cato.policies import schedulers
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.sessions import Users
from cato.sim.tasks import Outcome, SimNode, SimTask
from cato.sim.workloads import SABER_CLASSES, SABER_ENGINE, belief, bursts, gamma, lengths, poisson

POOL = PoolName("matrix")
# Users that sticky routing serves in time on a large accelerator: load 1. A quarter of an hour is
# played, while contexts still grow (in the hour of the study of agents it is 6.5).
WARM_UP_S, COUNTED_S, GRACE_S = 300.0, 600.0, 60.0
STICKY_USERS = 8.2

# Enough for a queue to build up in overload; fewer for large fleets, to save time.
CALLS_A_REPLICA, LEAST_CALLS, MOST_CALLS = 300, 600, 4800
# Share of the pace target that decoding in a full batch takes; the rest is for prompts.
PACE_SHARE = 0.75
GAMMA_CV, BURST_PERIOD_S = 4.0, 10.0
# Loads of SABER's offline phase.
OFFLINE_LOADS = (0.05, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 2.0)
# Length that a router expects of an unknown answer.
PRIOR_TOKENS = 64


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


def cell_of(scene: Scene, trace: Path | None) -> Cell:
    """The scene as the harness runs it; `trace` has the recorded sessions."""
    is_live = scene.delays == "live"
    is_sessions = scene.traffic == SESSIONS
    kinds = islice(cycle(SPEEDS[scene.speeds]), scene.replicas)
    fleet = PoolSetup(
        POOL,
        tuple(engine_of(scene).slowed(factor) for factor in kinds),
        NO_POLICIES,
        scene.places,
        _chunk_tokens(scene),
        dispatch_s=completions.DISPATCH_S if is_live else 0.0,
        news_s=completions.NEWS_S if is_live else 0.0,
        cache_block_tokens=agent_fleet.BLOCK_TOKENS if is_sessions else 0,
        believed_slowness=scene.slowness,
    )
    setting = asdict(scene)
    if is_sessions:
        assert trace is not None, "sessions are played from a trace"
        return Cell(setting, fleet, partial(_measure_sessions, scene, trace), SESSION_ARMS)
    arms = tuple(a for a in OPEN_ARMS if scene.replicas <= MOST_SLOW_REPLICAS or a not in SLOW_ARMS)
    makers = {**schedulers.OF_PROFILE}
    makers["saber"] = partial(_saber, scene)
    return Cell(setting, fleet, partial(_measure_calls, scene), arms, makers)


def _saber(scene: Scene, profile: Profile, cap: int) -> Policies:
    """SABER after its offline phase, which measures the fastest engine itself: whatever `profile`
    the others believe in."""
    return schedulers.saber(speed_law(scene.traffic))


@cache
def speed_law(traffic: str) -> UslFit:
    """SABER's law for calls of `traffic`, from one at a time to more than a replica can bear."""
    kinds, scene = TRAFFIC[traffic], Scene(traffic, 1.0, 1)
    rates_per_s = [load * rate_per_s(scene) for load in OFFLINE_LOADS]

    def drawn(rng: np.random.Generator, n: int) -> list[tuple[int, int]]:
        chosen = [kinds[i] for i in rng.integers(len(kinds), size=n)]
        return [(_drawn(rng, kind.prompt), _drawn(rng, kind.output)) for kind in chosen]

    return offline_law(rates_per_s, drawn, engine_of(scene), _chunk_tokens(scene))


def _drawn(rng: np.random.Generator, mean: float) -> int:
    return int(lengths(rng, mean, 1)[0])


def _chunk_tokens(scene: Scene) -> int | None:
    if scene.traffic == SESSIONS:
        return agent_fleet.STOCK.chunk_tokens
    return None if scene.traffic == SABER else completions.CHUNK_TOKENS


def engine_of(scene: Scene) -> Profile:
    if scene.traffic == SESSIONS:
        return agent_fleet.card_profile("large")
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
        prompt, output = _drawn(rng, kind.prompt), _drawn(rng, kind.output)
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
    tuned_on, reported = agent_fleet.halves(trace)
    count = max(1, round(scene.load * STICKY_USERS * _fast_replicas(scene)))
    users = Users(
        reported,
        count,
        pool,
        agent_fleet.length_belief(tuned_on or reported),
        seed,
        partial(changed, scene, seed),
    )
    end_s = WARM_UP_S + COUNTED_S
    outcomes = [p.outcome for p in users.run(end_s + GRACE_S)]
    counted = [o for o in outcomes if WARM_UP_S <= o.task.arrived_at_s < end_s]
    return _metrics(counted, users.fleet.kernel.now_s)


def _metrics(outcomes: Sequence[Outcome], now_s: float) -> dict[str, float]:
    """`wait_s_max`: the longest TTFT among calls that were not refused. Answers are counted."""
    with_slo = [o for o in outcomes if o.task.target_s < inf]
    in_time = sum(o.is_met for o in with_slo)
    first_s = [o.ttft_s for o in outcomes if o.ttft_s == o.ttft_s]
    waits_s = [
        o.ttft_s if o.ttft_s == o.ttft_s else now_s - o.task.arrived_at_s
        for o in outcomes
        if not o.refused
    ]
    return {
        "slo_attainment": in_time / len(with_slo) if with_slo else nan,
        "ttft_s_p95": float(np.quantile(first_s, 0.95)) if first_s else nan,
        "wait_s_max": max(waits_s, default=nan),
        "answers_in_time": float(in_time),
        "answers": float(sum(o.is_finished for o in outcomes)),
        "refused": sum(o.refused for o in outcomes) / len(outcomes) if outcomes else nan,
    }
