"""Whole schedulers by name: the published methods as they are compared, and the default.

`cato.policies.registry` names the parts; an experiment, or a pool, chooses a combination here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType

from cato.core.policies import OrderingPolicy, Policies, RoutingPolicy
from cato.core.profile import Profile
from cato.core.topology import PATIENCE_S, RAY_SERVE
from cato.estimators.speed_meter import Speeds
from cato.policies.admission.foresight import AGED_S, ForesightAdmission
from cato.policies.admission.prompt_window import PromptWindow
from cato.policies.admission.saber import SaberAdmission, SaberOrdering, SpeedModel, speed_model
from cato.policies.admission.static_cap import StaticCap
from cato.policies.admission.tempo import TempoAdmission
from cato.policies.admission.working_set import WorkingSetAdmission
from cato.policies.ordering.edf import EarliestDeadlineFirst
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.ordering.foresight import ForesightOrdering
from cato.policies.ordering.hopeless_last import HopelessLast
from cato.policies.ordering.jitserve import JitServeOrdering
from cato.policies.ordering.plas import LeastAttainedService
from cato.policies.ordering.sjf import ShortestJobFirst
from cato.policies.ordering.slack_priority import SlackPriority
from cato.policies.ordering.tempo import GainDensity, TempoOrdering
from cato.policies.preemption.foresight import ForesightPreemption
from cato.policies.preemption.plas import LeastAttainedPreemption
from cato.policies.preemption.tempo import TempoPreemption
from cato.policies.routing.block_cost import AGENTIC, BlockCost
from cato.policies.routing.cato import CatoRouting
from cato.policies.routing.foresight import ForesightRouting
from cato.policies.routing.least_wait import LeastWait
from cato.policies.routing.power_of_two import PowerOfTwo
from cato.policies.routing.prefix_affinity import PrefixAffinity
from cato.policies.routing.prefix_score import PrefixScore
from cato.policies.routing.remaining_memory import RemainingMemory
from cato.policies.routing.round_robin import RoundRobin
from cato.policies.routing.sticky import SessionHash, SmallestWorkingSet, Sticky

# No queue bound: experiments count misses themselves, and a bound would hide them.
UNBOUNDED = 1_000_000_000

# Continuum's fixed time limit of KV blocks after a tool call, as it is usually compared.
CONTINUUM_S = 30.0

# Calls mapped at a time; for the exhaustive search, as many as take 1 ms.
MAPPED, EXHAUSTED = 40, 6

KNOWS_BATCHES = "cato-batched"
"""`cato` with knowledge of batching: the stronger baseline where engines batch or replicas differ
in speed."""

FORESIGHT = "foresight"
"""The default: see `foresight()`."""


def foresight() -> Policies:
    """CATO's default: late binding, hopeless last, urgent feasible first.

    Every new call is projected onto the whole running set, and prompts join by a window. One set of
    constants for everything.
    """
    return Policies(
        ForesightRouting(),
        ForesightOrdering(),
        admission=ForesightAdmission(),
        preemption=ForesightPreemption(),
        max_queued=UNBOUNDED,
        window=16,
        reserve=0.05,
        reserve_after_s=AGED_S,
        patience_s=PATIENCE_S,
        corrects=True,
        asks_at_once=True,
        knows_stages=True,
    )


def early(routing: str) -> Policies:
    """A router from the literature: bound on arrival, then first come, first served per replica."""
    rules: dict[str, RoutingPolicy] = {
        "round-robin": RoundRobin(),
        "power-of-two": PowerOfTwo(),
        "least-wait": LeastWait(),
        "sticky": Sticky(),
        "session-hash": SessionHash(),
        "prefix-score": PrefixScore(),
        "block-cost": BlockCost(),
        "block-cost-8": BlockCost(prefill_scale=8.0),
        "block-cost-agentic": AGENTIC,
    }
    return Policies(
        rules[routing], FirstComeFirstServed(), late_binding=False, max_queued=UNBOUNDED
    )


def cato(knows_batches: bool = False) -> Policies:
    """CATO, Algorithm 1: routing by slack on arrival, each replica's queue by priority.

    `knows_batches` (not as printed): see `CatoRouting`.
    """
    routing = CatoRouting(knows_batches=knows_batches)
    return Policies(routing, SlackPriority(), late_binding=False, max_queued=UNBOUNDED)


def static_cap(cap: int) -> Policies:
    """First come, first served with a cap on running calls, least-loaded replica first."""
    return Policies(
        LeastWait(), FirstComeFirstServed(), admission=StaticCap(cap), max_queued=UNBOUNDED
    )


def saber(model: SpeedModel, window: int = 10) -> Policies:
    """SABER's online phase over one shared queue: see `SaberOrdering` and `SaberAdmission`."""
    return Policies(
        LeastWait(),
        SaberOrdering(model),
        admission=SaberAdmission(model),
        window=window,
        shuffled=True,
        strict=True,
        max_queued=UNBOUNDED,
    )


def in_order(ordering: OrderingPolicy) -> Policies:
    """One shared queue in this order, least-loaded replica first; only the engine's cap applies."""
    return Policies(LeastWait(), ordering, max_queued=UNBOUNDED)


def sjf() -> Policies:
    """Shortest job first, by the predicted length."""
    return in_order(ShortestJobFirst())


def edf() -> Policies:
    """Earliest deadline first."""
    return in_order(EarliestDeadlineFirst())


def bounded(ordering: OrderingPolicy) -> Policies:
    """The order as a careful engineer would use it.

    Late-bound to the least loaded replica, hopeless last, and no more prompts on a replica than its
    next steps can take.
    """
    return replace(in_order(HopelessLast(ordering)), admission=PromptWindow())


def ray_serve() -> Policies:
    """Ray Serve's behaviour: the power of two choices among replicas with room.

    Calls beyond `max_ongoing_requests` wait in the handle, first come, first served.
    """
    return Policies(PowerOfTwo(), FirstComeFirstServed(), max_queued=UNBOUNDED)


def prefix_affinity() -> Policies:
    """Ray Serve LLM's prefix-aware router; calls beyond the replicas' room wait in the handle."""
    return replace(ray_serve(), routing=PrefixAffinity())


def continuum() -> Policies:
    """Sticky sessions whose KV blocks are kept for a time after each tool call.

    Continuum (arXiv 2511.02230). Its order, programs by their arrival, is left out: sticky sessions
    wait at their engine, first come, first served.
    """
    return replace(early("sticky"), retain_s=CONTINUUM_S)


def working_set() -> Policies:
    """Sticky sessions; new ones wait until KV caches have room for their contexts."""
    return Policies(
        SmallestWorkingSet(),
        FirstComeFirstServed(),
        admission=WorkingSetAdmission(),
        max_queued=UNBOUNDED,
    )


def plas(profile: Profile) -> Policies:
    """Program-level least attained service (Autellix), preemptive as published."""
    ordering = LeastAttainedService(token_s=profile.decode_step_s(profile.max_running))
    return replace(in_order(ordering), preemption=LeastAttainedPreemption(ordering))


def plas_waiting(profile: Profile) -> Policies:
    """`plas` without preemption: only the queue is ordered by attained service."""
    return replace(plas(profile), preemption=None)


def tempo(density: GainDensity, reserve: float = 0.1, fairness: float = 0.1) -> Policies:
    """Tempo: densest gain first, preempted by larger gains, a reserve for calls without SLO."""
    return Policies(
        LeastWait(),
        TempoOrdering(density, fairness),
        admission=TempoAdmission(reserve),
        preemption=TempoPreemption(density),
        max_queued=UNBOUNDED,
        knows_stages=True,
    )


def jitserve(profile: Profile, frame_s: float = 1.0, group: float = 1.25) -> Policies:
    """JITServe: Tempo with hard goodput in place of a decaying gain, just in time."""
    hard = GainDensity(profile, a=inf)
    return replace(tempo(hard), ordering=JitServeOrdering(hard, frame_s, group), knows_stages=False)


def mapped(mapper: str, cap: int, looked_at: int = MAPPED) -> Policies:
    """SLO-SA with that mapper: on arrival the least-loaded replica, whose queue is mapped.

    `cap`: maximum batch size. `looked_at`: how many queued calls are mapped.
    """
    # Imported here: numba would make a router's restart half a second longer.
    from cato.policies.mapping.queue import MappedQueue
    from cato.policies.mapping.registry import MAPPERS

    return Policies(
        LeastWait(),
        FirstComeFirstServed(),
        late_binding=False,
        mapping=MappedQueue(MAPPERS[mapper], cap, looked_at).warmed_up(),
        max_queued=UNBOUNDED,
    )


def slo_sa(cap: int) -> Policies:
    """Complete SLO-SA, its Algorithm 2: instances by remaining memory, each queue by annealing."""
    return replace(mapped("annealing", cap), routing=RemainingMemory())


BY_NAME: Mapping[str, Callable[[], Policies]] = MappingProxyType(
    {
        FORESIGHT: foresight,
        "cato": cato,
        **{name: partial(early, name) for name in ("power-of-two", "least-wait", "round-robin")},
    }
)
"""Schedulers that need no model of the engine."""


def _ignoring_profile(make: Callable[[], Policies]) -> Callable[[Profile, int], Policies]:
    return lambda profile, cap: make()


OF_PROFILE: Mapping[str, Callable[[Profile, int], Policies]] = MappingProxyType(
    {
        **{name: _ignoring_profile(make) for name, make in BY_NAME.items()},
        **{
            name: _ignoring_profile(partial(early, name))
            for name in (
                *("sticky", "session-hash", "prefix-score"),
                *("block-cost", "block-cost-8", "block-cost-agentic"),
            )
        },
        "prefix-affinity": _ignoring_profile(prefix_affinity),
        "continuum": _ignoring_profile(continuum),
        "working-set": _ignoring_profile(working_set),
        "fcfs": lambda profile, cap: in_order(FirstComeFirstServed()),
        "sjf": _ignoring_profile(sjf),
        "edf": _ignoring_profile(edf),
        "edf-bounded": lambda profile, cap: bounded(EarliestDeadlineFirst()),
        "sjf-bounded": lambda profile, cap: bounded(ShortestJobFirst()),
        RAY_SERVE: _ignoring_profile(ray_serve),
        KNOWS_BATCHES: _ignoring_profile(partial(cato, knows_batches=True)),
        "static-cap": lambda profile, cap: static_cap(cap),
        "saber": lambda profile, cap: saber(speed_model(profile)),
        "plas": lambda profile, cap: plas(profile),
        "plas-waiting": lambda profile, cap: plas_waiting(profile),
        "tempo": lambda profile, cap: tempo(GainDensity(profile)),
        "jitserve": lambda profile, cap: jitserve(profile),
        "slo-sa": lambda profile, cap: slo_sa(cap),
        "annealing": lambda profile, cap: mapped("annealing", cap),
        "moore-smith": lambda profile, cap: mapped("moore-smith", cap),
        "exhaustive": lambda profile, cap: mapped("exhaustive", cap, EXHAUSTED),
    }
)
"""All schedulers, for replicas with that profile; the number is the cap of those in `CAPPED`."""

OF_SPEEDS: Mapping[str, Callable[[Profile, Speeds], Policies]] = MappingProxyType(
    {"saber": lambda profile, speeds: saber(speed_model(profile, speeds))}
)
"""Schedulers whose model of the engine is fitted again to speeds that were measured online."""

CAPPED = ("static-cap", "slo-sa", "annealing", "moore-smith", "exhaustive")
"""Schedulers with their own cap on running calls."""
