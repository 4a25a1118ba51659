"""A change of the deployment file restarts the replicas whose own part of it has changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig

from cato.config.schema import EnginesArgs
from cato.serve.app import build_engines

ROOT = Path(__file__).resolve().parents[3]
ENGINE = {"kind": "simulated", "max_num_seqs": 8}
FAST = {"accelerator": "cpu", "replicas": {"min": 1, "max": 2}, "profile": "saber@gpu"}
ARGS: dict[str, Any] = {
    "profiles": str(ROOT / "profiles"),
    "models": {
        "small": {"source": "simulated", "aliases": ["coder"], "adapter_places": 1},
        "large": {"source": "simulated"},
        "idle": {"source": "simulated"},
    },
    "pools": {
        "fast": {"model": "small", "deployments": {"fast-cpu": {**FAST, "engine": ENGINE}}},
        "slow": {"model": "large", "deployments": {"slow-cpu": {**FAST, "engine": ENGINE}}},
    },
}


def versions(args: dict[str, Any]) -> dict[str, str]:
    """Deployment -> the version that Serve compares, set to one of the application before."""
    built = build_app(build_engines(EnginesArgs.model_validate(args)), name="engines")
    found = {}
    for deployment in built.deployments:
        config = deployment._deployment_config
        config.version = "of the application"
        sent = DeploymentConfig.from_proto_bytes(config.to_proto_bytes())
        assert sent.max_ongoing_requests == config.max_ongoing_requests
        assert sent.request_router_config == config.request_router_config
        found[deployment.name] = sent.version
    return found


def changed(path: str, value: Any) -> dict[str, Any]:
    args = copy.deepcopy(ARGS)
    place = args
    *parents, last = path.split(".")
    for name in parents:
        place = place[name]
    place[last] = value
    return args


def test_the_same_file_restarts_nothing_but_the_control_plane() -> None:
    first, second = versions(ARGS), versions(copy.deepcopy(ARGS))
    assert first == second
    assert first["control-plane"] == "of the application"
    assert len(set(first.values())) == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pools.fast.deployments.fast-cpu.engine", {**ENGINE, "max_num_seqs": 16}),
        ("pools.fast.deployments.fast-cpu.profile", "reference-1.5b@gpu"),
        ("pools.fast.deployments.fast-cpu.standby", 3),
        ("models.small.source", "demo"),
        ("models.small.adapter_places", 2),
    ],
)
def test_a_change_of_one_engine_restarts_its_pool_alone(path: str, value: Any) -> None:
    before, after = versions(ARGS), versions(changed(path, value))
    assert {name for name in before if before[name] != after[name]} == {"fast-cpu"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pools.more", {"model": "idle", "deployments": {"more-cpu": {**FAST, "engine": ENGINE}}}),
        ("pools.fast.deployments.fast-cpu.replicas", {"min": 2, "max": 5}),
        ("pools.fast.deployments.fast-cpu.cost", 3.0),
        ("pools.fast.policies", {"scheduler": "edf"}),
        ("models.small.aliases", ["coder", "coder-fast"]),
        ("store", "sqlite:///elsewhere.db"),
    ],
)
def test_what_engines_do_not_know_restarts_none(path: str, value: Any) -> None:
    before, after = versions(ARGS), versions(changed(path, value))
    assert {name: after[name] for name in before} == before
