"""Scaling policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cato.core.errors import UnknownNameError
from cato.core.scaling import ScalingPolicy
from cato.policies.scaling.cato import CatoScaling
from cato.policies.scaling.forecast import Forecast
from cato.policies.scaling.queue_length import QueueLength

SCALING: Mapping[str, ScalingPolicy[Any]] = MappingProxyType(
    {"queue-length": QueueLength(), "cato": CatoScaling(), "forecast": Forecast()}
)


def scaling_policy(name: str) -> ScalingPolicy[Any]:
    """The policy called `name`; raise `UnknownNameError` for one that is not there."""
    if name not in SCALING:
        raise UnknownNameError("scaling policy", name, tuple(SCALING))
    return SCALING[name]
