"""Names of policies, as deployment files write them; whole schedulers are in `schedulers`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cato.core.errors import UnknownNameError
from cato.core.policies import OrderingPolicy, Policies, RoutingPolicy
from cato.core.topology import PoolPolicies
from cato.policies.ordering.edf import EarliestDeadlineFirst
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.ordering.sjf import ShortestJobFirst
from cato.policies.ordering.slack_priority import LateLast, SlackPriority
from cato.policies.routing.cato import CatoRouting
from cato.policies.routing.least_wait import LeastWait
from cato.policies.routing.power_of_two import PowerOfTwo
from cato.policies.routing.round_robin import RoundRobin

ROUTING: Mapping[str, RoutingPolicy] = MappingProxyType(
    {
        "round-robin": RoundRobin(),
        "power-of-two": PowerOfTwo(),
        "least-wait": LeastWait(),
        "cato": CatoRouting(),
    }
)
ORDERING: Mapping[str, OrderingPolicy] = MappingProxyType(
    {
        "fcfs": FirstComeFirstServed(),
        "sjf": ShortestJobFirst(),
        "edf": EarliestDeadlineFirst(),
        "slack-priority": SlackPriority(),
        "late-last": LateLast(),
    }
)
BINDINGS = ("late", "early")


def routing_names() -> tuple[str, ...]:
    return tuple(ROUTING)


def ordering_names() -> tuple[str, ...]:
    return tuple(ORDERING)


def policies_of(names: PoolPolicies) -> Policies:
    """The policy objects that `names` name; raise `UnknownNameError` for one that is not."""
    if names.routing not in ROUTING:
        raise UnknownNameError("routing policy", names.routing, routing_names())
    if names.ordering not in ORDERING:
        raise UnknownNameError("ordering policy", names.ordering, ordering_names())
    if names.binding not in BINDINGS:
        raise UnknownNameError("binding", names.binding, BINDINGS)
    return Policies(
        routing=ROUTING[names.routing],
        ordering=ORDERING[names.ordering],
        late_binding=names.binding == "late",
        max_queued=names.max_queued,
    )
