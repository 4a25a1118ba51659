"""Checks of Ray Serve's own keys in a deployment file, where a mistake shows late or never.

`http_options` say where `cato serve` waits for the first answer; `deployments` change the
deployments of an application, and Serve finds a wrong name or `user_config` only minutes later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import IPv6Address
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from cato.config.control import control_problems
from cato.config.fields import StrictModel
from cato.config.problems import shown, validate
from cato.core.errors import ConfigError, Problem
from cato.core.topology import Topology
from cato.core.words import did_you_mean

CONTROL_PLANE = "control-plane"
INGRESS = "ingress"
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def _checked_host(host: str) -> str:
    try:
        is_ipv6 = IPv6Address(host).scope_id is None
    except ValueError:
        is_ipv6 = False
    if not is_ipv6 and not _HOST.fullmatch(host):
        rule = "must be an IP address without brackets, or a host name; `port` is a key of its own"
        raise ValueError(rule)
    return host


class HttpArgs(StrictModel):
    """The `http_options` that CATO reads; Serve has more."""

    model_config = ConfigDict(extra="ignore")

    host: Annotated[str, AfterValidator(_checked_host)] = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)

    @property
    def url(self) -> str:
        """Where Serve answers. An IPv6 address is in brackets there, and nowhere else."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def http_problems(raw: Mapping[str, object], file: str) -> tuple[Problem, ...]:
    """Problems of the file's `http_options`."""
    try:
        validate(HttpArgs, raw.get("http_options", {}), file, "http_options")
    except ConfigError as error:
        return error.problems
    return ()


def override_problems(
    app: Mapping[str, object], known: Sequence[str], topology: Topology, file: str, path: str
) -> list[Problem]:
    """Problems of an application's `deployments`; `known` are the deployments that it has."""
    entries, path = app.get("deployments", []), f"{path}.deployments"
    if not isinstance(entries, list):
        return [Problem(file, path, shown(entries), "must be a list")]
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        at = f"{path}[{index}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            problems.append(Problem(file, at, shown(entry), "must be a mapping with a `name`"))
            continue
        name, config = str(entry["name"]), entry.get("user_config")
        if name not in known:
            hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
            rule = f"the application has no such deployment{hint}"
            problems.append(Problem(file, f"{at}.name", repr(name), rule))
        elif name == CONTROL_PLANE and config is not None:
            problems += _in_file(_control_problems(config, topology), file, f"{at}.user_config")
    return problems


def _control_problems(config: object, topology: Topology) -> tuple[Problem, ...]:
    pools = {pool.name: pool.policies for pool in topology.pools}
    return control_problems(config, pools, [shared.name for shared in topology.shared_pools])


def _in_file(problems: Sequence[Problem], file: str, path: str) -> list[Problem]:
    return [replace(p, file=file, path=f"{path}.{p.path}" if p.path else path) for p in problems]
