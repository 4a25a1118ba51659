"""The `user_config` of the deployment `control-plane`: what changes at run time, without restarts.

deployments:
  - name: control-plane
    user_config: {pools: {demo: {routing: power-of-two, scaling: {policy: cato}}}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from cato.config.schema import PoliciesArgs, ScalingArgs
from cato.config.yaml_file import StrictModel, validate
from cato.core.errors import ConfigError, Problem
from cato.core.ids import PoolName
from cato.core.topology import RAY_SERVE

WHERE = "control-plane user_config"


class PoolControlArgs(PoliciesArgs):
    """What can be changed of a pool."""

    scaling: ScalingArgs = ScalingArgs()


class ControlArgs(StrictModel):
    """Policies by pool; a key that is left out stays as the deployment file has it."""

    pools: dict[str, PoolControlArgs] = Field(default_factory=dict)


Changes = dict[PoolName, dict[str, Any]]
"""Fields to replace, by pool."""


def pool_changes(
    user_config: Mapping[str, object], known: Sequence[PoolName]
) -> tuple[Changes, Changes]:
    """Changes of `PoolPolicies` and of `PoolScaling`; raise `ConfigError` with all problems."""
    args = validate(ControlArgs, user_config, WHERE)
    unknown = tuple(
        Problem(WHERE, f"pools.{name}", name, f"no such pool (known: {', '.join(known)})")
        for name in args.pools
        if name not in known
    )
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
        PoolName(name): pool.model_dump(include=pool.model_fields_set - {"scaling"})
        for name, pool in args.pools.items()
    }
    return policies, {PoolName(name): pool.scaling.given() for name, pool in args.pools.items()}
