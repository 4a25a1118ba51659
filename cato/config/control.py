"""The `user_config` of the deployment `control-plane`: settings that change without a restart.

deployments:
  - name: control-plane
    user_config: {pools: {demo: {routing: power-of-two, scaling: {policy: cato}}}}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from cato.config.fields import StrictModel
from cato.config.pools import PoliciesArgs, ScalingArgs, without_cap
from cato.config.problems import validate
from cato.config.shared_pools import SharedPoliciesArgs
from cato.core.errors import ConfigError, Problem
from cato.core.ids import PoolName
from cato.core.topology import RAY_SERVE, PoolPolicies
from cato.policies.registry import capped_scheduler_names

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
    user_config: object, pools: Mapping[PoolName, PoolPolicies], shared_pools: Sequence[PoolName]
) -> tuple[Problem, ...]:
    """All problems of a `user_config` at once, for a deployment with these pools; `pools` has the
    policies of the deployment file."""
    found: list[Problem] = []
    if isinstance(user_config, Mapping):
        for section, known in (("pools", tuple(pools)), ("shared_pools", shared_pools)):
            given = user_config.get(section)
            found += _unknown(section, map(str, given), known) if isinstance(given, Mapping) else ()
    try:
        changes, _ = pool_changes(user_config, tuple(pools))  # type: ignore[arg-type]
        for name, changed in changes.items():
            found += _without_effect(name, changed, pools[name])
        shared_pool_changes(user_config, shared_pools)  # type: ignore[arg-type]
    except ConfigError as error:
        found += error.problems
    return tuple(dict.fromkeys(found))


def _without_effect(
    name: PoolName, changed: Mapping[str, object], of_file: PoolPolicies
) -> Iterator[Problem]:
    """Changes of a pool's policies that would change nothing."""
    where = f"pools.{name}"
    if changed and of_file.scheduler == RAY_SERVE:
        rule = (
            f"the file's scheduler {RAY_SERVE} leaves this pool to Serve: change its policies in "
            "the deployment file and deploy that"
        )
        yield Problem(WHERE, where, "", rule)
        return
    scheduler = changed.get("scheduler", of_file.scheduler)
    if changed.get("cap") is not None and scheduler not in capped_scheduler_names():
        rule = without_cap(str(scheduler))
        yield Problem(WHERE, f"{where}.cap", str(changed["cap"]), rule)


def _unknown(section: str, given: Iterable[str], known: Sequence[PoolName]) -> tuple[Problem, ...]:
    rule = f"no such pool (known: {', '.join(known) or 'none'})"
    return tuple(
        Problem(WHERE, f"{section}.{name}", name, rule) for name in given if name not in known
    )
