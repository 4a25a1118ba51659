"""Studies by name; their modules are imported on demand, as experiments are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from cato.core.errors import UnknownNameError
from cato.lab.experiments import registry as experiments
from cato.lab.study import Study, as_experiment
from cato.sim.experiment import Experiment

# Name -> module of this package, which defines it in `STUDY` or `STUDIES`.
STUDIES: Mapping[str, str] = MappingProxyType(
    {
        "completions": "studies.completions",
        "agents": "studies.agents",
        "agents-and-completions": "studies.agents_and_completions",
        "robustness": "studies.robustness",
        "length-features": "studies.length_features",
        "cace-windows": "experiments.cace_figures",
        "codexglue-tasks": "experiments.codexglue_tasks",
        "router-shards": "studies.router_shards",
        **{f"saber-fig{n}": "experiments.saber_figures" for n in (4, 6, 7)},
        **{f"slo-sa-fig{n}": "experiments.slo_sa_figures" for n in (8, 9, 10, 11)},
        **{f"tempo-fig{n}": "experiments.tempo_figures" for n in (9, 14, 16, 17, 18, 19)},
    }
)


def study(name: str) -> Study:
    """The study called `name`; raise `UnknownNameError` if there is none."""
    if name not in STUDIES:
        raise UnknownNameError("study", name, tuple(STUDIES))
    module = import_module(f"{__package__}.{STUDIES[name]}")
    one: Study | None = getattr(module, "STUDY", None)
    several: tuple[Study, ...] = getattr(module, "STUDIES", ())
    return next(s for s in (several if one is None else (one,)) if s.name == name)


def names() -> tuple[str, ...]:
    """All names that `cato simulate` can run: the papers' experiments, then the studies."""
    return (*experiments.EXPERIMENTS, *STUDIES)


def experiment(name: str) -> Experiment:
    """A study or an experiment; raise `UnknownNameError` for any other name."""
    if name in STUDIES:
        return as_experiment(study(name))
    if name not in experiments.EXPERIMENTS:
        raise UnknownNameError("experiment", name, names())
    return experiments.experiment(name)
