"""Eviction policies, dispatch orders and placement rules of shared pools by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cato.core.errors import UnknownNameError
from cato.core.eviction import CardPolicies, DispatchOrder, EvictionPolicy, SitePolicy
from cato.core.topology import SharedPoolPolicies
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.foresight import ForesightEviction
from cato.policies.eviction.lfu import LeastFrequentlyUsed
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import BatchedPerModel, InOrder, QueueAware
from cato.policies.eviction.sites import ShapeBlind, UrgentOnFast

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
SITES: Mapping[str, SitePolicy] = MappingProxyType(
    {"urgent-on-fast": UrgentOnFast(), "shape-blind": ShapeBlind()}
)


def eviction_names() -> tuple[str, ...]:
    return tuple(EVICTIONS)


def order_names() -> tuple[str, ...]:
    return tuple(ORDERS)


def site_names() -> tuple[str, ...]:
    return tuple(SITES)


def card_policies(policies: SharedPoolPolicies) -> CardPolicies:
    """The policies that `policies` names; raise `UnknownNameError` for an unknown name."""
    if policies.eviction not in EVICTIONS:
        raise UnknownNameError("eviction policy", policies.eviction, eviction_names())
    if policies.dispatch not in ORDERS:
        raise UnknownNameError("order of dispatch", policies.dispatch, order_names())
    if policies.placement not in SITES:
        raise UnknownNameError("placement rule", policies.placement, site_names())
    return CardPolicies(
        EVICTIONS[policies.eviction], ORDERS[policies.dispatch], SITES[policies.placement]
    )
