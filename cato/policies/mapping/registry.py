"""Mappers by name. Import only where needed: importing numba takes half a second."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cato.policies.mapping.annealing import SimulatedAnnealing
from cato.policies.mapping.exhaustive import ExhaustiveSearch
from cato.policies.mapping.fcfs import FirstComeFirstServedBatches
from cato.policies.mapping.moore_smith import MooreSmith
from cato.policies.mapping.problem import Mapper

MAPPERS: Mapping[str, Mapper] = MappingProxyType(
    {
        "fcfs": FirstComeFirstServedBatches(),
        "exhaustive": ExhaustiveSearch(),
        "annealing": SimulatedAnnealing(),
        "moore-smith": MooreSmith(),
    }
)
