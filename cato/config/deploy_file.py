"""Deployment files: a Serve config file with CATO's two applications, checked before Ray starts.

The values of most of Serve's own keys are passed through; Serve checks them when it deploys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cato.config.fields import StrictModel
from cato.config.paths import resolve
from cato.config.problems import validate
from cato.config.schema import EnginesArgs, IngressArgs
from cato.config.serve_options import (
    CONTROL_PLANE,
    ENGINES_APP,
    INGRESS,
    INGRESS_APP,
    application_problems,
    http_problems,
    override_problems,
)
from cato.config.yaml_file import read_yaml, unlike_serve
from cato.core.errors import ConfigError, Problem
from cato.core.topology import IngressSpec, Topology
from cato.core.words import did_you_mean
from cato.profiles.load import profile_if_valid

IMPORT_PATHS: Mapping[str, str] = {
    ENGINES_APP: "cato.serve.app:build_engines",
    INGRESS_APP: "cato.serve.app:build_ingress",
}

M = TypeVar("M", bound=StrictModel)


@dataclass(frozen=True, slots=True)
class DeployFile:
    """A checked deployment file; `raw` is the whole file, for Serve."""

    path: Path
    raw: Mapping[str, object]
    topology: Topology
    ingress: IngressSpec


def load_deploy_file(path: str | Path) -> DeployFile:
    """Read and check the file; a relative `path` is looked up by `resolve`.

    Raise `ConfigError` with the problems of both applications, and of values that Serve would read
    as something else.
    """
    found = resolve(str(path))
    raw = read_yaml(found)
    problems = unlike_serve(found, str(path))
    try:
        file = deploy_file_of(found, raw, str(path))
    except ConfigError as error:
        raise ConfigError((*error.problems, *problems)) from error
    if problems:
        raise ConfigError(tuple(problems))
    return file


def deploy_file_of(path: Path, raw: object, name: str | None = None) -> DeployFile:
    """Check a file's content; problems call the file `name`. Raise `ConfigError`."""
    file = name or str(path)
    if not isinstance(raw, dict):
        raise ConfigError((Problem(file, "", "", "must be a mapping with the key `applications`"),))
    apps = raw.get("applications")
    if not isinstance(apps, list):
        raise ConfigError((Problem(file, "applications", "", "must be a list"),))
    problems = list(http_problems(raw, file))
    engines = _args(apps, ENGINES_APP, EnginesArgs, file, problems)
    ingress = _args(apps, INGRESS_APP, IngressArgs, file, problems)
    if engines is None or ingress is None:
        raise ConfigError(tuple(problems))
    topology = engines.to_topology(lambda name: profile_if_valid(engines.profiles, name))
    problems += _override_problems(apps, topology, file)
    if problems:
        raise ConfigError(tuple(problems))
    return DeployFile(path, raw, topology, ingress.to_ingress())


def _override_problems(apps: list[object], topology: Topology, file: str) -> list[Problem]:
    """Problems of the `deployments` of both applications."""
    engines = [d.name for pool in topology.pools for d in pool.deployments]
    engines += [d.name for shared in topology.shared_pools for d in shared.deployments]
    known = {ENGINES_APP: [CONTROL_PLANE, *engines], INGRESS_APP: [INGRESS]}
    return [
        problem
        for index, app in enumerate(apps)
        if isinstance(app, dict) and app.get("name") in (ENGINES_APP, INGRESS_APP)
        for problem in override_problems(
            app, known[app["name"]], topology, file, f"applications[{index}]"
        )
    ]


def _args(
    apps: list[object], name: str, model: type[M], file: str, problems: list[Problem]
) -> M | None:
    """The checked `args` of application `name`; problems are added to `problems`."""
    named = [(i, a) for i, a in enumerate(apps) if isinstance(a, dict) and a.get("name") == name]
    if len(named) != 1:
        others = [str(a["name"]) for a in apps if isinstance(a, dict) and "name" in a]
        rule = f"must have exactly one application named {name!r}, has {len(named)}"
        hint = "" if named else did_you_mean(name, others)
        problems.append(Problem(file, "applications", "", rule + hint))
        return None
    index, app = named[0]
    at = f"applications[{index}]"
    if app.get("import_path") != IMPORT_PATHS[name]:
        rule = f"must be {IMPORT_PATHS[name]!r}"
        problems.append(Problem(file, f"{at}.import_path", repr(app.get("import_path")), rule))
    if name == ENGINES_APP and app.get("external_scaler_enabled") is not True:
        rule = "must be true: the Resource Provisioner sets the number of replicas"
        problems.append(Problem(file, f"{at}.external_scaler_enabled", "", rule))
    problems += application_problems(app, file, at)
    try:
        return validate(model, app.get("args", {}), file, f"{at}.args")
    except ConfigError as exc:
        problems.extend(exc.problems)
        return None
