"""Preflight checks: what a deployment file refers to on this machine, checked before Ray starts.

The builders of the Serve applications repeat the checks where they run, but there an error appears
minutes later, in a log.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cato.config.deploy_file import DeployFile
from cato.config.paths import resolve, resolve_index
from cato.config.places import model_path
from cato.core.checkers import CheckerSpec
from cato.core.errors import ConfigError, Problem
from cato.core.topology import DeploymentSpec, ModelSpec, Topology, model_called
from cato.core.workflow import LlmSettings, Workflow
from cato.profiles.load import check_profiles, load_profiles
from cato.serve.nodes.checkers import Checkers
from cato.serve.prompts import prompt_room
from cato.store.errors import StoreError
from cato.store.files import check_is_store
from cato.store.location import default_location, store_url
from cato.workflows.load import load_workflows, read_workflows
from cato.workflows.names import unknown_names, without_suffix


def check_files(deploy: DeployFile) -> None:
    """Raise `ConfigError` with all problems of the files and programs that `deploy` names."""
    topology, ingress = deploy.topology, deploy.ingress
    checks: list[Callable[[], object]] = [
        lambda: check_profiles(topology, load_profiles(resolve(topology.profiles_dir))),
        lambda: load_workflows(resolve(ingress.workflows_dir)),
        lambda: _check_engines(str(deploy.path), topology),
        lambda: _check_store(str(deploy.path), topology.store),
        lambda: _check_event_log(str(deploy.path), topology.event_log),
    ]
    for folder in ingress.indexes.values():
        checks.append(lambda folder=folder: resolve_index(folder))  # type: ignore[misc]
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(tuple(problems))


def own_workflows(deploy: DeployFile) -> dict[Path, Workflow]:
    """The deployment's workflows by file, once `check_files` has found no problem."""
    return read_workflows(resolve(deploy.ingress.workflows_dir))[0]


def problems_of_names(deploy: DeployFile, workflows: Mapping[Path, Workflow]) -> list[Problem]:
    """Models, indexes and checkers that workflows name but the deployment lacks, and token limits
    that do not fit their models.

    They do not prevent serving: `cato models add` may add a model later. Until then runs of these
    workflows fail.
    """
    models = models_of(deploy.topology)
    problems: list[Problem] = []
    for path, workflow in workflows.items():
        problems += unknown_names(str(path), workflow, models, deploy.ingress)
        problems += _limits_without_room(str(path), workflow, deploy.topology)
    return problems


def _limits_without_room(file: str, workflow: Workflow, topology: Topology) -> Iterator[Problem]:
    """Token limits that leave no room for a prompt in the context that the deployment file sets."""
    models = models_of(topology)
    contexts: dict[str, int] = {}
    for _, deployment, loaded in _deployments(topology):
        length = deployment.engine.max_model_len
        if length is not None:
            contexts |= {m.name: min(length, contexts.get(m.name, length)) for m in loaded}
    for node in workflow.nodes:
        settings = node.settings
        if not isinstance(settings, LlmSettings) or settings.token_limit is not None:
            continue
        for name in filter(None, (settings.model, settings.fallback)):
            model = model_called(name, models)
            context = None if model is None else contexts.get(model.name)
            if context is not None and prompt_room(settings.max_tokens, context) < 1:
                rule = f"leaves no room for a prompt in the {context} tokens of {name!r}"
                where = f"nodes.{node.id}.max_tokens"
                yield Problem(file, where, str(settings.max_tokens), rule)


def notes_of_names(deploy: DeployFile, workflows: Mapping[Path, Workflow]) -> list[Problem]:
    """What works in these workflows, but probably not as it is meant."""
    models = models_of(deploy.topology)
    return [
        note
        for path, workflow in workflows.items()
        for note in without_suffix(str(path), workflow, models)
    ]


def problems_of_checkers(deploy: DeployFile) -> list[Problem]:
    """Checkers that do not work on this host, each tried on a correct program.

    They do not prevent serving: code that they should check counts as unchecked.
    """
    specs = deploy.ingress.checkers
    return [
        Problem(
            str(deploy.path), f"checkers.{name}", specs[name].command[0], f"on this host it {why}"
        )
        for name, why in asyncio.run(_troubles(specs)).items()
        if why
    ]


async def _troubles(specs: Mapping[str, CheckerSpec]) -> dict[str, str]:
    checkers = Checkers(specs)
    return {name: await checkers.trouble(name) for name in specs}


def models_of(topology: Topology) -> list[ModelSpec]:
    hosted = [h.model for shared in topology.shared_pools for h in shared.models]
    return [*(pool.model for pool in topology.pools), *hosted]


def _check_engines(file: str, topology: Topology) -> None:
    problems: list[Problem] = []
    for where, spec, models in _deployments(topology):
        if spec.engine.kind != "vllm":
            continue  # nothing is loaded
        problems += _problems_of_python(file, where, spec.engine.python)
        for model in models:
            sources = {f"models.{model.name}": model.source}
            sources |= {f"models.{model.name}.adapters.{a.name}": a.source for a in model.adapters}
            for path, source in sources.items():
                problems += _problems_of_source(file, f"{path}.source", source)
    if problems:
        raise ConfigError(tuple(dict.fromkeys(problems)))


def _deployments(topology: Topology) -> Iterator[tuple[str, DeploymentSpec, list[ModelSpec]]]:
    """Each deployment with its path in the file and the models that it loads."""
    for pool in topology.pools:
        for deployment in pool.deployments:
            yield f"pools.{pool.name}.deployments.{deployment.name}", deployment, [pool.model]
    for shared in topology.shared_pools:
        for deployment in shared.deployments:
            fitting = [h.model for h in shared.models if h.fits(deployment)]
            yield shared.path_of(deployment.name), deployment, fitting


def _problems_of_python(file: str, where: str, python: str | None) -> Iterator[Problem]:
    path = f"{where}.engine.python"
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            rule = "this interpreter has no vLLM: install `cato[vllm]`, or name one that has"
            yield Problem(file, path, "", rule)
    elif shutil.which(os.path.expanduser(python)) is None:
        yield Problem(file, path, repr(python), "no such program on this machine")


def _problems_of_source(file: str, path: str, source: str) -> Iterator[Problem]:
    try:
        found = Path(model_path(source))
    except ConfigError as error:
        yield Problem(file, path, repr(source), error.problems[0].rule)
        return
    # Anything that is not a folder here is a Hugging Face id.
    if found.is_dir() and not any(found.glob("*config.json")):
        yield Problem(file, path, repr(source), "a folder without the model's config.json")


def _check_store(file: str, location: str | None) -> None:
    try:
        url = store_url(location or default_location())
        if url.get_backend_name() == "sqlite":
            path = Path(str(url.database))
            check_is_store(path)
            # The default's folder is no mistake of the file: without it CATO serves all the same.
            if location is not None and (why_not := _why_not_writable(path.parent)):
                raise StoreError(str(path), why_not)
    except StoreError as error:
        raise ConfigError((Problem(file, "store", "", str(error)),)) from error


def _check_event_log(file: str, folder: str | None) -> None:
    if folder is not None and (why_not := _why_not_writable(Path(folder).absolute())):
        raise ConfigError((Problem(file, "event_log", repr(folder), why_not),))


def _why_not_writable(folder: Path) -> str:
    """Why no file can be made in `folder`, which may be made first; empty if one can. Changes
    nothing."""
    try:
        found = next(p for p in (folder, *folder.parents) if p.exists())
        if not found.is_dir():
            return f"{found} is not a folder"
        # Root may write to these by their mode, but no file can be made there.
        kernels = [os.stat(p).st_dev for p in ("/proc", "/sys") if os.path.ismount(p)]
        can_write = os.access(found, os.W_OK | os.X_OK) and found.stat().st_dev not in kernels
    except OSError as error:
        return f"cannot be used: {error}"
    return "" if can_write else f"no file can be made in {found}"
