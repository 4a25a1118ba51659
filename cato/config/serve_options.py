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

_OF_FILE = (
    "proxy_location http_options grpc_options controller_options logging_config tracing_config "
    "applications target_capacity"
)
_OF_HTTP = (
    "host port root_path request_timeout_s keep_alive_timeout_s ssl_keyfile ssl_certfile "
    "ssl_keyfile_password ssl_ca_certs"
)
_OF_APPLICATION = (
    "name route_prefix import_path runtime_env host port deployments autoscaling_policy args "
    "logging_config external_scaler_enabled"
)
_OF_DEPLOYMENT = (
    "name num_replicas max_ongoing_requests max_queued_requests backpressure_config user_config "
    "autoscaling_config graceful_shutdown_wait_loop_s graceful_shutdown_timeout_s "
    "health_check_period_s health_check_timeout_s ray_actor_options placement_group_bundles "
    "placement_group_strategy placement_group_bundle_label_selector max_replicas_per_node "
    "logging_config request_router_config gang_scheduling_config deployment_actors "
    "rolling_update_percentage max_surge_percent"
)
FILE_KEYS, HTTP_KEYS = tuple(_OF_FILE.split()), tuple(_OF_HTTP.split())
APPLICATION_KEYS, DEPLOYMENT_KEYS = tuple(_OF_APPLICATION.split()), tuple(_OF_DEPLOYMENT.split())
"""The keys of Serve's schemas, which ignore all others. A test compares them."""

CONTROL_PLANE = "control-plane"
INGRESS = "ingress"
ENGINES_APP = "engines"
INGRESS_APP = "cato"
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
    """Problems of the file's own keys and of its `http_options`."""
    options = raw.get("http_options", {})
    # A key that resembles none may hold an anchor.
    misspelt = {key: None for key in raw if did_you_mean(key, FILE_KEYS)}
    found = unknown_keys(misspelt, FILE_KEYS, file, "")
    found += unknown_keys(options, HTTP_KEYS, file, "http_options")
    try:
        validate(HttpArgs, options, file, "http_options")
    except ConfigError as error:
        return (*found, *error.problems)
    return tuple(found)


def unknown_keys(data: object, known: Sequence[str], file: str, path: str) -> list[Problem]:
    """Keys of the mapping `data` that Serve ignores; those with `x-` are for anchors."""
    if not isinstance(data, Mapping):
        return []
    return [
        Problem(
            file,
            f"{path}.{key}".lstrip("."),
            "",
            "Serve has no such key" + (did_you_mean(key, known) or f"; known: {', '.join(known)}"),
        )
        for key in data
        if key not in known and not key.startswith("x-")
    ]


def application_problems(app: Mapping[str, object], file: str, path: str) -> list[Problem]:
    """Problems of an application's own keys."""
    found = unknown_keys(app, APPLICATION_KEYS, file, path)
    prefix = app.get("route_prefix", "/")
    if app.get("name") == ENGINES_APP and prefix is not None:
        rule = f"must be null: engines have no HTTP (Serve's default is /, as for {INGRESS_APP!r})"
        found.append(Problem(file, f"{path}.route_prefix", shown(prefix), rule))
    if app.get("name") == INGRESS_APP and prefix is None:
        rule = "must be a path such as /: without one nothing answers over HTTP"
        found.append(Problem(file, f"{path}.route_prefix", "", rule))
    return found


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
        elif config is not None:
            rule = f"only {CONTROL_PLANE!r} has settings that change while it runs"
            problems.append(Problem(file, f"{at}.user_config", shown(config), rule))
        problems += unknown_keys(entry, DEPLOYMENT_KEYS, file, at)
    return problems


def _control_problems(config: object, topology: Topology) -> tuple[Problem, ...]:
    pools = {pool.name: pool.policies for pool in topology.pools}
    return control_problems(config, pools, [shared.name for shared in topology.shared_pools])


def _in_file(problems: Sequence[Problem], file: str, path: str) -> list[Problem]:
    return [replace(p, file=file, path=f"{path}.{p.path}" if p.path else path) for p in problems]
