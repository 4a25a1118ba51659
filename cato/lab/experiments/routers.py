"""Routers compared with the default on CATO's coding tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from cato.core.policies import Policies
from cato.core.topology import RAY_SERVE
from cato.policies import schedulers
from cato.policies.ordering.slack_priority import LateLast
from cato.policies.routing.cato import CatoRouting
from cato.sim.workloads import SEVEN_B

AS_PRINTED = "cato, line 24 as printed"


def _as_printed() -> Policies:
    """Algorithm 1 with its line 24: the first replica for a call that is not late, fits nowhere."""
    return replace(schedulers.cato(), routing=CatoRouting(takes_first=True))


def _late_last() -> Policies:
    """Algorithm 1 with late work behind everything else."""
    return replace(schedulers.cato(), ordering=LateLast())


def _of_engine(name: str) -> Callable[[], Policies]:
    return partial(schedulers.OF_PROFILE[name], SEVEN_B, 0)


ROUTERS: Mapping[str, Callable[[], Policies]] = MappingProxyType(
    {
        schedulers.FORESIGHT: schedulers.foresight,
        "cato": schedulers.cato,
        AS_PRINTED: _as_printed,
        "cato, late work last": _late_last,
        **{
            name: _of_engine(name)
            for name in (
                schedulers.KNOWS_BATCHES,
                RAY_SERVE,
                "round-robin",
                "power-of-two",
                "least-wait",
                "edf-bounded",
                "sjf-bounded",
                "plas-waiting",
            )
        },
    }
)
"""`ray-serve` binds late, as Serve's handle does; `power-of-two` binds on arrival."""
