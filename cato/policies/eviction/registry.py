"""Eviction policies and dispatch orders by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cato.core.errors import UnknownNameError
from cato.core.eviction import DispatchOrder, EvictionPolicy
from cato.core.topology import SharedPoolPolicies
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.foresight import ForesightEviction
from cato.policies.eviction.lfu import LeastFrequentlyUsed
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import BatchedPerModel, InOrder, QueueAware

EVICTIONS: Mapping[str, EvictionPolicy] = MappingProxyType(
    {
        "foresight": ForesightEviction(),
        "cace": Cace(),
        # For the ablation: CACE with one of its factors disabled.
        "cace-without-recency": Cace(recency=False),
        "cace-without-reload-cost": Cace(reload_cost=False),
        "cace-without-demand": Cace(demand=False),
        "cace-without-output": Cace(output=False),
        "lru": LeastRecentlyUsed(),
        "lfu": LeastFrequentlyUsed(),
    }
)
ORDERS: Mapping[str, DispatchOrder] = MappingProxyType(
    {"queue-aware": QueueAware(), "batched": BatchedPerModel(), "in-order": InOrder()}
)


def eviction_names() -> tuple[str, ...]:
    return tuple(EVICTIONS)


def order_names() -> tuple[str, ...]:
    return tuple(ORDERS)


def card_policies(policies: SharedPoolPolicies) -> tuple[EvictionPolicy, DispatchOrder]:
    """The policies that `policies` names; raise `UnknownNameError` for an unknown name."""
    if policies.eviction not in EVICTIONS:
        raise UnknownNameError("eviction policy", policies.eviction, eviction_names())
    if policies.dispatch not in ORDERS:
        raise UnknownNameError("order of dispatch", policies.dispatch, order_names())
    return EVICTIONS[policies.eviction], ORDERS[policies.dispatch]
