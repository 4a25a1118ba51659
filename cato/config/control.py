"""The `user_config` of the deployment `control-plane`: settings that change without a restart.

deployments:
  - name: control-plane
    user_config: {pools: {demo: {routing: power-of-two, scaling: {policy: cato}}}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from cato.config.fields import StrictModel
from cato.config.pools import PoliciesArgs, ScalingArgs
from cato.config.problems import validate
from cato.config.shared_pools import SharedPoliciesArgs
from cato.core.errors import ConfigError, Problem
from cato.core.ids import PoolName
from cato.core.topology import RAY_SERVE

WHERE = "control-plane user_config"


class PoolControlArgs(PoliciesArgs):
    """Settings of a pool that can be changed at run time."""

    scaling: ScalingArgs = ScalingArgs()


class ControlArgs(StrictModel):
    """Policies by pool; a key that is left out keeps its value from the deployment file."""

    pools: dict[str, PoolControlArgs] = Field(default_factory=dict)
    shared_pools: dict[str, SharedPoliciesArgs] = Field(default_factory=dict)


Changes = dict[PoolName, dict[str, Any]]
"""Fields to replace, by pool."""


def pool_changes(
    user_config: Mapping[str, object], known: Sequence[PoolName]
) -> tuple[Changes, Changes]:
    """Changes of `PoolPolicies` and of `PoolScaling`; raise `ConfigError` with all problems."""
    args = validate(ControlArgs, user_config, WHERE)
    unknown = _unknown("pools", args.pools, known)
    redeployed = tuple(
        Problem(
            WHERE,
            f"pools.{name}.scheduler",
            RAY_SERVE,
            "has its own deployments: change it in the deployment file and deploy that",
        )
        for name, policies in args.pools.items()
        if policies.scheduler == RAY_SERVE
    )
    if unknown or redeployed:
        raise ConfigError(unknown + redeployed)
    policies = {
        PoolName(name): {k: v for k, v in pool.given().items() if k != "scaling"}
        for name, pool in args.pools.items()
    }
    return policies, {PoolName(name): pool.scaling.given() for name, pool in args.pools.items()}


def shared_pool_changes(user_config: Mapping[str, object], known: Sequence[PoolName]) -> Changes:
    """Changes of `SharedPoolPolicies`; raise `ConfigError` with all problems."""
    args = validate(ControlArgs, user_config, WHERE)
    unknown = _unknown("shared_pools", args.shared_pools, known)
    if unknown:
        raise ConfigError(unknown)
    return {PoolName(name): pool.given() for name, pool in args.shared_pools.items()}


def control_problems(
    user_config: object, pools: Sequence[PoolName], shared_pools: Sequence[PoolName]
) -> tuple[Problem, ...]:
    """All problems of a `user_config` at once, for a deployment with these pools."""
    found: list[Problem] = []
    if isinstance(user_config, Mapping):
        for section, known in (("pools", pools), ("shared_pools", shared_pools)):
            given = user_config.get(section)
            found += _unknown(section, map(str, given), known) if isinstance(given, Mapping) else ()
    try:
        pool_changes(user_config, pools)  # type: ignore[arg-type]  # validated there
        shared_pool_changes(user_config, shared_pools)  # type: ignore[arg-type]
    except ConfigError as error:
        found += error.problems
    return tuple(dict.fromkeys(found))


def _unknown(section: str, given: Iterable[str], known: Sequence[PoolName]) -> tuple[Problem, ...]:
    rule = f"no such pool (known: {', '.join(known) or 'none'})"
    return tuple(
        Problem(WHERE, f"{section}.{name}", name, rule) for name in given if name not in known
    )
