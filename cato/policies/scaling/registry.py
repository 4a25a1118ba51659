"""Scaling policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from cato.core.errors import UnknownNameError
from cato.core.scaling import ScalingPolicy
from cato.core.topology import PoolScaling
from cato.policies.scaling.cato import CatoScaling
from cato.policies.scaling.forecast import Forecast
from cato.policies.scaling.idle import IdleToZero
from cato.policies.scaling.queue_length import QueueLength

NONE = "none"
"""Keep the initial replicas, or the number requested from the provisioner with `scale`."""

SCALING: Mapping[str, Callable[[PoolScaling], ScalingPolicy[Any]]] = MappingProxyType(
    {
        "queue-length": lambda _: QueueLength(),
        "cato": lambda scaling: CatoScaling(idle_timeout_s=scaling.idle_timeout_s),
        "forecast": lambda _: Forecast(),
    }
)


def scaling_names() -> tuple[str, ...]:
    return (*SCALING, NONE)


def scaling_policy(scaling: PoolScaling) -> ScalingPolicy[Any] | None:
    """The policy that `scaling` names, None for `none`; raise `UnknownNameError` for others."""
    if scaling.policy == NONE:
        return None
    if scaling.policy not in SCALING:
        raise UnknownNameError("scaling policy", scaling.policy, scaling_names())
    return IdleToZero(SCALING[scaling.policy](scaling), scaling.idle_timeout_s)
