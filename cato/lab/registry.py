"""Names of studies, and where they are; imported when asked for, as experiments are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from cato.core.errors import UnknownNameError
from cato.lab.study import Study, as_experiment
from cato.sim.experiment import Experiment
from cato.sim.experiments import registry as experiments

# Name -> module of this package, which has it as `STUDY` or in `STUDIES`.
STUDIES: Mapping[str, str] = MappingProxyType(
    {
        "completions": "completions",
        "agents": "agents",
        "agents-and-completions": "agents_and_completions",
        "robustness": "robustness",
        "length-features": "length_features",
        "cace-windows": "cace_figures",
        "codexglue-tasks": "codexglue_tasks",
        "router-shards": "router_shards",
        **{f"saber-fig{n}": "saber_figures" for n in (4, 6, 7)},
        **{f"slo-sa-fig{n}": "slo_sa_figures" for n in (8, 9, 10, 11)},
        **{f"tempo-fig{n}": "tempo_figures" for n in (9, 14, 16, 17, 18, 19)},
    }
)


def study(name: str) -> Study:
    """The study called `name`; raise `UnknownNameError` for one that is not there."""
    if name not in STUDIES:
        raise UnknownNameError("study", name, tuple(STUDIES))
    module = import_module(f"{__package__}.{STUDIES[name]}")
    one: Study | None = getattr(module, "STUDY", None)
    several: tuple[Study, ...] = getattr(module, "STUDIES", ())
    return next(s for s in (several if one is None else (one,)) if s.name == name)


def names() -> tuple[str, ...]:
    """All that `cato simulate` can run: the papers' experiments, then the studies."""
    return (*experiments.EXPERIMENTS, *STUDIES)


def experiment(name: str) -> Experiment:
    """A study or an experiment; raise `UnknownNameError` for what is neither."""
    if name in STUDIES:
        return as_experiment(study(name))
    if name not in experiments.EXPERIMENTS:
        raise UnknownNameError("experiment", name, names())
    return experiments.experiment(name)
