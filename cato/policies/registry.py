"""Names of policies in deployment files: whole schedulers, and parts of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from types import MappingProxyType

from cato.core.errors import UnknownNameError
from cato.core.policies import OrderingPolicy, Policies, RoutingPolicy
from cato.core.profile import UNMEASURED, Profile
from cato.core.topology import RAY_SERVE, PoolPolicies
from cato.estimators.speed_meter import NO_SPEEDS, Speeds
from cato.policies import schedulers
from cato.policies.ordering.edf import EarliestDeadlineFirst
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.ordering.foresight import ForesightOrdering
from cato.policies.ordering.sjf import ShortestJobFirst
from cato.policies.ordering.slack_priority import LateLast, SlackPriority
from cato.policies.routing.cato import CatoRouting
from cato.policies.routing.foresight import ForesightRouting
from cato.policies.routing.least_wait import LeastWait
from cato.policies.routing.power_of_two import PowerOfTwo
from cato.policies.routing.remaining_memory import RemainingMemory
from cato.policies.routing.round_robin import RoundRobin

ROUTING: Mapping[str, RoutingPolicy] = MappingProxyType(
    {
        "round-robin": RoundRobin(),
        "power-of-two": PowerOfTwo(),
        "least-wait": LeastWait(),
        "remaining-memory": RemainingMemory(),
        "cato": CatoRouting(),
        "foresight": ForesightRouting(),
    }
)
ORDERING: Mapping[str, OrderingPolicy] = MappingProxyType(
    {
        "fcfs": FirstComeFirstServed(),
        "sjf": ShortestJobFirst(),
        "edf": EarliestDeadlineFirst(),
        "slack-priority": SlackPriority(),
        "late-last": LateLast(),
        "foresight": ForesightOrdering(),
    }
)
BINDINGS = ("late", "early")


def scheduler_names() -> tuple[str, ...]:
    return tuple(schedulers.OF_PROFILE)


def shared_scheduler_names() -> tuple[str, ...]:
    """Schedulers available for the models of a shared pool."""
    return tuple(name for name in scheduler_names() if name != RAY_SERVE)


def capped_scheduler_names() -> tuple[str, ...]:
    """Schedulers for which `cap` can be set."""
    return schedulers.CAPPED


def routing_names() -> tuple[str, ...]:
    return tuple(ROUTING)


def ordering_names() -> tuple[str, ...]:
    return tuple(ORDERING)


def refits(names: PoolPolicies) -> bool:
    """Whether the scheduler's model of the engine follows measured speeds."""
    return names.scheduler in schedulers.OF_SPEEDS


def policies_of(
    names: PoolPolicies, profile: Profile = UNMEASURED, speeds: Speeds = NO_SPEEDS
) -> Policies:
    """The policy objects that `names` name, for replicas of `profile`.

    `speeds` were measured with the pool's engines, for schedulers that follow them (`refits`).
    Raise `UnknownNameError` for an unknown name.
    """
    if names.scheduler not in schedulers.OF_PROFILE:
        raise UnknownNameError("scheduler", names.scheduler, scheduler_names())
    if names.routing is not None and names.routing not in ROUTING:
        raise UnknownNameError("routing policy", names.routing, routing_names())
    if names.ordering is not None and names.ordering not in ORDERING:
        raise UnknownNameError("ordering policy", names.ordering, ordering_names())
    if names.binding is not None and names.binding not in BINDINGS:
        raise UnknownNameError("binding", names.binding, BINDINGS)
    if speeds and refits(names):
        chosen = schedulers.OF_SPEEDS[names.scheduler](profile, speeds)
    else:
        chosen = schedulers.OF_PROFILE[names.scheduler](profile, names.cap or profile.max_running)
    ordering = names.ordering
    if ordering is None and names.refuse_late and chosen.late_binding:
        ordering = "edf"  # promised SLOs come before calls that would count more
    return replace(
        chosen,
        routing=chosen.routing if names.routing is None else ROUTING[names.routing],
        ordering=chosen.ordering if ordering is None else ORDERING[ordering],
        late_binding=chosen.late_binding if names.binding is None else names.binding == "late",
        max_queued=names.max_queued,
        max_queued_tokens=names.max_queued_tokens,
        refuse_late=names.refuse_late,
        patience_s=inf if names.patience_s is None else names.patience_s,
        by_turns=names.by_turns,
    )
