"""Names of experiments, and where they are. Imported when asked for: numba and scikit-learn cost
seconds, which neither `cato --help` nor an unknown name should pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType

from cato.core.errors import UnknownNameError
from cato.sim.experiment import Experiment

# Name -> module of this package, which has it as `EXPERIMENT` or in `EXPERIMENTS`.
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
        "azure-replay": "azure_replay",
        "codexglue": "codexglue",
    }
)


def experiment(name: str) -> Experiment:
    """The experiment called `name`; raise `UnknownNameError` for one that is not there."""
    if name not in EXPERIMENTS:
        raise UnknownNameError("experiment", name, tuple(EXPERIMENTS))
    module = import_module(f"{__package__}.{EXPERIMENTS[name]}")
    return next(e for e in held_by(module) if e.name == name)


def held_by(module: ModuleType) -> tuple[Experiment, ...]:
    """The experiments of a module of this package; none of one that only helps the others."""
    one: Experiment | None = getattr(module, "EXPERIMENT", None)
    several: tuple[Experiment, ...] = getattr(module, "EXPERIMENTS", ())
    return several if one is None else (one,)
