"""Experiments by name. Modules are imported on demand: numba and scikit-learn take seconds, which
neither `cato --help` nor an unknown name should cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType

from cato.core.errors import UnknownNameError
from cato.sim.experiment import Experiment

# Name -> module of this package, which defines it in `EXPERIMENT` or `EXPERIMENTS`.
EXPERIMENTS: Mapping[str, str] = MappingProxyType(
    {
        "cato-rq1": "cato_rq",
        "cato-rq2": "cato_rq",
        "cato-rq3": "cato_rq",
        "cato-rq4": "cato_rq4",
        "coding-small-first": "coding_mixes",
        "coding-large-first": "coding_mixes",
        "coding-mixes": "coding_mixes",
        "coding-scaling": "coding_scaling",
        "saber-rq1": "saber",
        "saber-rq2": "saber",
        "saber-estimators": "saber_estimators",
        "slo-sa": "slo_sa",
        "tempo-e2e": "tempo",
        "tempo-ablation": "tempo",
        "length-bounds": "length_bounds",
        "cace-rq1": "cace",
        "cace-rq2": "cace",
        "cace-ablation": "cace",
        "cace-mixed": "cace_mixed",
        "azure-replay": "azure_replay",
        "codexglue": "codexglue",
    }
)


def experiment(name: str) -> Experiment:
    """The experiment called `name`; raise `UnknownNameError` if there is none."""
    if name not in EXPERIMENTS:
        raise UnknownNameError("experiment", name, tuple(EXPERIMENTS))
    module = import_module(f"{__package__}.{EXPERIMENTS[name]}")
    return next(e for e in held_by(module) if e.name == name)


def held_by(module: ModuleType) -> tuple[Experiment, ...]:
    """The experiments of a module of this package; empty for a helper module."""
    one: Experiment | None = getattr(module, "EXPERIMENT", None)
    several: tuple[Experiment, ...] = getattr(module, "EXPERIMENTS", ())
    return several if one is None else (one,)
