"""The `user_config` of the deployment `control-plane`: what changes at run time, without restarts.

deployments:
  - name: control-plane
    user_config: {pools: {demo: {routing: power-of-two}}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from cato.config.schema import PoliciesArgs
from cato.config.yaml_file import StrictModel, validate
from cato.core.errors import ConfigError, Problem
from cato.core.ids import PoolName

WHERE = "control-plane user_config"


class ControlArgs(StrictModel):
    """Policies by pool; a key that is left out stays as the deployment file has it."""

    pools: dict[str, PoliciesArgs] = Field(default_factory=dict)


def policy_changes(
    user_config: Mapping[str, object], known: Sequence[PoolName]
) -> dict[PoolName, dict[str, Any]]:
    """Fields of `PoolPolicies` to replace, by pool; raise `ConfigError` with all problems."""
    args = validate(ControlArgs, user_config, WHERE)
    unknown = tuple(
        Problem(WHERE, f"pools.{name}", name, f"no such pool (known: {', '.join(known)})")
        for name in args.pools
        if name not in known
    )
    if unknown:
        raise ConfigError(unknown)
    return {
        PoolName(name): policies.model_dump(include=policies.model_fields_set)
        for name, policies in args.pools.items()
    }
