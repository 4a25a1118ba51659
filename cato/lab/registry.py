"""Studies by name. Modules are imported on demand: numba and scikit-learn take seconds, which
neither `cato --help` nor an unknown name should cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from cato.core.errors import UnknownNameError
from cato.lab.study import Study, as_experiment
from cato.sim.experiment import Experiment

# Name -> module of this package, which defines it in `STUDY` or `STUDIES`.
STUDIES: Mapping[str, str] = MappingProxyType(
    {
        **{f"cato-rq{n}": "experiments.cato_rq" for n in (1, 2, 3)},
        "cato-rq4": "experiments.cato_rq4",
        "coding-small-first": "experiments.coding_mixes",
        "coding-large-first": "experiments.coding_mixes",
        "coding-mixes": "experiments.coding_mixes",
        "coding-scaling": "experiments.coding_scaling",
        **{f"saber-rq{n}": "experiments.saber" for n in (1, 2)},
        "saber-estimators": "experiments.saber_estimators",
        "slo-sa": "experiments.slo_sa",
        "tempo-e2e": "experiments.tempo",
        "tempo-ablation": "experiments.tempo",
        "length-bounds": "experiments.length_bounds",
        **{f"cace-{name}": "experiments.cace" for name in ("rq1", "rq2", "ablation")},
        "cace-mixed": "experiments.cace_mixed",
        "azure-replay": "experiments.azure_replay",
        "codexglue": "experiments.codexglue",
        "completions": "studies.completions",
        "agents": "studies.agents",
        "agents-and-completions": "studies.agents_and_completions",
        "agents-and-changes": "studies.agents_and_changes",
        "robustness": "studies.robustness",
        "length-features": "studies.length_features",
        "cace-windows": "experiments.cace_figures",
        "codexglue-tasks": "experiments.codexglue_tasks",
        "router-shards": "studies.router_shards",
        **{f"saber-fig{n}": "experiments.saber_figures" for n in (4, 6, 7)},
        **{f"slo-sa-fig{n}": "experiments.slo_sa_figures" for n in (8, 9, 10)},
        "slo-sa-fig11": "experiments.slo_sa_instances",
        "tempo-fig9": "experiments.tempo_hour",
        **{f"tempo-fig{n}": "experiments.tempo_figures" for n in (14, 16, 17, 18, 19)},
    }
)


def study(name: str) -> Study:
    """The study called `name`; raise `UnknownNameError` if there is none."""
    if name not in STUDIES:
        raise UnknownNameError("experiment", name, tuple(STUDIES))
    module = import_module(f"{__package__}.{STUDIES[name]}")
    one: Study | None = getattr(module, "STUDY", None)
    several: tuple[Study, ...] = getattr(module, "STUDIES", ())
    return next(s for s in (several if one is None else (one,)) if s.name == name)


def experiment(name: str) -> Experiment:
    """As `study`, to run."""
    return as_experiment(study(name))
