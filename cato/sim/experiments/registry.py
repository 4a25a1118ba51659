"""Names of experiments, and where they are. Imported when asked for: numba and scikit-learn cost
seconds, which neither `cato --help` nor an unknown name should pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from cato.core.errors import UnknownNameError
from cato.sim.experiment import Experiment

# Name -> module of this package, which holds it as `EXPERIMENT` or in `EXPERIMENTS`.
EXPERIMENTS: Mapping[str, str] = MappingProxyType(
    {
        "slo-sa": "slo_sa",
        "length-bounds": "length_bounds",
        "saber-estimators": "saber_estimators",
        "cace-rq1": "cace",
        "cace-rq2": "cace",
        "cace-ablation": "cace",
    }
)


def experiment(name: str) -> Experiment:
    """The experiment called `name`; raise `UnknownNameError` for one that is not there."""
    if name not in EXPERIMENTS:
        raise UnknownNameError("experiment", name, tuple(EXPERIMENTS))
    module = import_module(f"{__package__}.{EXPERIMENTS[name]}")
    held: tuple[Experiment, ...] = getattr(module, "EXPERIMENTS", None) or (module.EXPERIMENT,)
    return next(e for e in held if e.name == name)
