"""Adapts deployment files for a measurement: accelerator, profile, model folders."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cato.config.deploy_file import DeployFile, deploy_file_of
from cato.config.paths import resolve
from cato.config.schema import EnginesArgs
from cato.config.serve_options import ENGINES_APP
from cato.core.errors import InputError
from cato.core.topology import ModelSpec
from cato.profiles.load import profile_name, save_profile
from cato.profiles.schema import ProfileFile

# Share of GPU memory: several engines of one benchmark may share the GPU.
MEMORY_SHARE = 0.3
_ONLY_CPU = ("zygote", "kv_cache_memory", "enforce_eager")
# Supported on every GPU that vLLM serves; ten times slower on CPUs without such instructions.
_CARD_DTYPE = "bfloat16"


def on_accelerator(
    deployment: Mapping[str, Any], accelerator: str | None, profile: str | None
) -> dict[str, Any]:
    """`deployment` of a deployment file with these values; None keeps the file's.

    Raise `InputError` for a file written for GPUs when the target is a CPU or another accelerator.
    """
    changed = copy.deepcopy(dict(deployment))
    engine = changed["engine"]
    was = changed["accelerator"]
    if accelerator not in (None, was) and engine["kind"] == "vllm":
        if was != "cpu":
            raise InputError(f"the deployment is for {was}, not {accelerator}: give another file")
        changed["accelerator"] = accelerator
        changed["cards"] = 1
        for key in _ONLY_CPU:
            engine.pop(key, None)
        engine |= {"dtype": _CARD_DTYPE, "gpu_memory_utilization": MEMORY_SHARE}
    if profile is not None:
        changed["profile"] = profile
    return changed


def file_on_accelerator(
    file: DeployFile, accelerator: str | None, profile: str | None
) -> DeployFile:
    """`on_accelerator` for all deployments of the file's pools."""
    if accelerator is None and profile is None:
        return file
    raw = copy.deepcopy(dict(file.raw))
    for deployment in deployments_of(raw).values():
        deployment |= on_accelerator(deployment, accelerator, profile)
    return deploy_file_of(file.path, raw)


def engines_args(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`args` of the application `engines` in a checked file."""
    args: dict[str, Any] = next(
        app["args"] for app in raw["applications"] if app["name"] == ENGINES_APP
    )
    return args


def deployments_of(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The deployments of all pools by name."""
    pools = engines_args(raw).get("pools", {}).values()
    return {name: d for pool in pools for name, d in pool["deployments"].items()}


def with_models_in(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The file with models read from `folder`, which has a folder named after each model."""
    changed = copy.deepcopy(dict(raw))
    for name, model in engines_args(changed)["models"].items():
        if (folder / name).is_dir():
            model["source"] = str((folder / name).resolve())
    return changed


def models_of(deploy: DeployFile) -> tuple[ModelSpec, ...]:
    """Models of the whole file, including those that no pool serves (they are measured alone)."""
    args = EnginesArgs.model_validate(engines_args(deploy.raw))
    return tuple(model.to_spec(name) for name, model in args.models.items())


def with_profile(deploy: DeployFile, measured: ProfileFile | None, folder: Path) -> DeployFile:
    """The file with the measured profile for its first deployment, written to a profile folder."""
    if measured is None:
        return deploy
    shutil.copytree(resolve(deploy.topology.profiles_dir), folder)
    name = profile_name(measured.model, measured.accelerator)
    save_profile(folder / f"{name}.yaml", measured.to_profile(), measured.provenance)
    raw = copy.deepcopy(dict(deploy.raw))
    engines_args(raw)["profiles"] = str(folder)
    first = deploy.topology.pools[0].deployments[0].name
    deployments_of(raw)[first]["profile"] = name
    return deploy_file_of(deploy.path, raw)
