"""How a deployment file and the `user_config` of the control plane say how pools are scaled."""

from __future__ import annotations

from typing import Any

import pytest

from cato.config.control import pool_changes
from cato.config.problems import validate
from cato.config.schema import EnginesArgs
from cato.core.errors import ConfigError
from cato.core.ids import PoolName
from cato.core.topology import PoolScaling, PoolSpec


def some_args(scaling: object = None, **deployment: Any) -> dict[str, Any]:
    cpu = {"accelerator": "cpu", "profile": "p", "engine": {"kind": "simulated"}, **deployment}
    pool: dict[str, Any] = {"model": "coder", "deployments": {"coder-cpu": cpu}}
    if scaling is not None:
        pool["scaling"] = scaling
    return {"models": {"coder": {"source": "demo"}}, "pools": {"main": pool}}


def the_pool(scaling: object = None, **deployment: Any) -> PoolSpec:
    return EnginesArgs.model_validate(some_args(scaling, **deployment)).to_topology().pools[0]


def problems(scaling: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(EnginesArgs, some_args(scaling), "f.yaml")
    return [str(p).removeprefix("f.yaml: pools.main.scaling") for p in caught.value.problems]


def test_a_pool_is_scaled_by_the_forecast_unless_the_file_says_otherwise() -> None:
    assert the_pool().scaling == PoolScaling("forecast", idle_timeout_s=300.0, every_s=1.0)
    told = the_pool({"policy": "cato", "idle_timeout": "90s", "every": "250ms"}).scaling
    assert told == PoolScaling("cato", idle_timeout_s=90.0, every_s=0.25)
    assert the_pool({"policy": "none"}).scaling.policy == "none"


def test_what_is_wrong_is_told_all_at_once() -> None:
    found = problems({"policy": "forecats", "every": "50ms", "idle_timeout": 30, "colour": "red"})
    assert len(found) == 4
    text = "\n".join(found)
    for words in (
        "did you mean 'forecast'?",
        "at least 100ms",
        "with a unit, such as 200ms",
        "colour",
    ):
        assert words in text, text


def test_a_replica_costs_its_cards_unless_the_file_says_otherwise() -> None:
    engine = {"kind": "vllm"}
    assert the_pool().deployments[0].cost == 1.0
    assert the_pool(accelerator="gpu", cards=2, engine=engine).deployments[0].cost == 2.0
    assert the_pool(cost=0.25).deployments[0].cost == 0.25


def test_a_pool_may_be_empty_when_all_its_deployments_may() -> None:
    assert the_pool(replicas={"min": 0}).may_be_empty
    assert not the_pool().may_be_empty


MAIN = PoolName("main")


def test_at_run_time_only_what_is_named_changes() -> None:
    config = {"pools": {"main": {"routing": "power-of-two", "scaling": {"every": "2s"}}}}
    policies, scaling = pool_changes(config, [MAIN])
    assert policies == {MAIN: {"routing": "power-of-two"}}
    assert scaling == {MAIN: {"every_s": 2.0}}
    assert pool_changes({}, [MAIN]) == ({}, {})


def test_at_run_time_a_wrong_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pools\.main\.scaling\.policy"):
        pool_changes({"pools": {"main": {"scaling": {"policy": "forecats"}}}}, [MAIN])
    with pytest.raises(ConfigError, match="no such pool"):
        pool_changes({"pools": {"other": {"scaling": {"policy": "none"}}}}, [MAIN])
