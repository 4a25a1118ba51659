"""Reading and writing the files in `profiles/`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from cato.config.paths import resolve
from cato.config.problems import validate
from cato.config.yaml_file import read_yaml
from cato.core.errors import ConfigError, Problem
from cato.core.profile import Profile
from cato.core.topology import Topology
from cato.core.words import did_you_mean
from cato.profiles.schema import ProfileFile, Provenance

_HEADER = """\
# Service times of a model on an accelerator, in seconds (`cato.core.profile.Profile`). A step with
# b decoding requests, h tokens in the KV cache and n prompt tokens lasts
#   base_s + decode.per_request_s*b + decode.per_context_token_s*h
#   + prefill.per_request_s*(prompts that end) + the longer of
#     weights_read_s + kv_read_token_s*h and
#     (prefill.per_batch_token_s + prefill.per_token_s)*n + per_attended_token_s*(positions before)
# Where weights are read, the tokens of decoding requests count in n, too. step_tokens: the engine's
# budget of prompt tokens a step. latency_s is what a request spends beside the engine's steps; it
# delays no other request.
"""


def profile_name(model: str, accelerator: str) -> str:
    """Name of a profile, and of its file without `.yaml`; a `/` of a model id becomes `--`."""
    return f"{model}@{accelerator}".replace("/", "--")


def load_profile_file(path: Path) -> ProfileFile:
    """The checked file; its name must match its model and accelerator. Raise `ConfigError`."""
    file = validate(ProfileFile, read_yaml(path), str(path))
    expected = profile_name(file.model, file.accelerator)
    if path.stem != expected:
        rule = f"a file with this model and accelerator is named {expected}.yaml"
        raise ConfigError((Problem(str(path), "", "", rule),))
    return file


def load_profile(path: Path) -> Profile:
    """The profile in the file at `path`; raise `ConfigError`."""
    return load_profile_file(path).to_profile()


def profile_if_valid(folder: str, name: str) -> Profile | None:
    """The named profile of a folder, looked up by `resolve`; None where the folder or the file is
    missing or has problems."""
    try:
        return load_profile(resolve(folder) / f"{name}.yaml")
    except ConfigError:
        return None


def load_profiles(folder: Path) -> dict[str, Profile]:
    """All profiles of a folder by name; raise `ConfigError` with the problems of all files."""
    if not folder.is_dir():
        raise ConfigError((Problem(str(folder), "", "", "no such folder of profiles"),))
    profiles: dict[str, Profile] = {}
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            profiles[path.stem] = load_profile(path)
        except ConfigError as exc:
            problems.extend(exc.problems)
    if problems:
        raise ConfigError(tuple(problems))
    return profiles


def check_profiles(topology: Topology, profiles: Mapping[str, Profile]) -> None:
    """Raise `ConfigError` when a deployment or engine names a profile that does not exist."""
    problems: list[Problem] = []
    for pool in topology.pools:
        for deployment in pool.deployments:
            at = f"pools.{pool.name}.deployments.{deployment.name}"
            named = {f"{at}.profile": deployment.profile}
            if deployment.engine.profile != deployment.profile:
                named[f"{at}.engine.profile"] = deployment.engine.profile
            problems += _missing(topology, named, profiles)
    for shared in topology.shared_pools:
        for hosted in shared.models:
            at, of_model = f"shared_pools.{shared.name}", f"models.{hosted.model.name}.profile"
            named = {f"{at}.{of_model}": hosted.profile}
            for where, there in hosted.on.items():
                named[f"{shared.path_of(where)}.{of_model}"] = there.profile
            problems += _missing(topology, named, profiles)
    if problems:
        raise ConfigError(tuple(problems))


def _missing(
    topology: Topology, named: Mapping[str, str | None], profiles: Mapping[str, Profile]
) -> list[Problem]:
    """Problems with the profiles `named` at these paths."""
    return [
        Problem(
            topology.profiles_dir,
            path,
            repr(name),
            "no file of this name" + did_you_mean(name, profiles),
        )
        for path, name in named.items()
        if name is not None and name not in profiles
    ]


def save_profile(path: Path, profile: Profile, provenance: Provenance) -> None:
    """Write the profile atomically, replacing an existing file. May raise OSError."""
    data = ProfileFile.of(profile, provenance).model_dump(exclude_none=True)
    text = _HEADER + yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=98, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes 0600: other users' replicas read profiles too
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class _Dumper(yaml.SafeDumper):
    """Writes times with four significant digits, more than these measurements are good for."""


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = f"{value:.4g}"
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")  # YAML 1.1 readers take `1e-05` for text
    elif "e" not in text and "." not in text:
        text += ".0"
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _represent_float)
