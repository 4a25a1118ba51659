"""Shared pools in a deployment file, and what changes of them at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cato.config.control import shared_pool_changes
from cato.config.problems import validate
from cato.config.schema import EnginesArgs
from cato.core.errors import ConfigError
from cato.core.ids import PoolName
from cato.core.profile import UNMEASURED
from cato.core.topology import CARD_PROMPT_TOKENS
from cato.profiles.load import check_profiles

SIMULATED = {"kind": "simulated", "max_num_seqs": 4}


def a_file(**shared: Any) -> dict[str, Any]:
    """One shared pool of two models; `shared` replaces parts of it."""
    pool: dict[str, Any] = {
        "models": {"java": {"profile": "p"}, "go": {"profile": "p"}},
        "slots": {"count": 2, "accelerator": "cpu", "engine": SIMULATED},
    }
    models = {name: {"source": "simulated", "family": "qwen"} for name in ("java", "go", "rust")}
    return {"models": models, "shared_pools": {"cards": {**pool, **shared}}}


def problems(file: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as found:
        validate(EnginesArgs, file, "file")
    return str(found.value)


def test_a_shared_pool_becomes_its_values() -> None:
    file = a_file(
        models={
            "java": {
                "profile": "p", "load": "14s", "reload": "3s", "weights": "15GB", "slo": "5s",
                "max_copies": 2,
            },
        },
        policies={"eviction": "cace", "dispatch": "in-order", "host_memory": "32GB"},
    )  # fmt: skip
    topology = validate(EnginesArgs, file, "file").to_topology()
    (pool,) = topology.shared_pools
    (java,) = pool.models
    assert topology.pools == ()
    assert (java.load_s, java.reload_s, java.weights_bytes) == (14.0, 3.0, 15_000_000_000)
    assert (java.slo_s, java.min_copies, java.max_copies) == (5.0, 0, 2)
    assert [(d.name, d.initial_replicas) for d in pool.deployments] == [("cards-slots", 2)]
    assert pool.policies.host_memory_bytes == 32_000_000_000
    assert pool.part_of(java.model.name) == "cards/java"


def test_all_that_is_wrong_is_told_at_once() -> None:
    slots = {"count": 0, "accelerator": "cpu", "engine": {**SIMULATED, "swap": True}}
    found = problems(
        a_file(
            models={"jva": {"profile": "p"}, "go": {"profile": "p", "min_copies": 2}},
            slots=slots,
            policies={"eviction": "lrv"},
        )
    )
    assert "no such model (did you mean 'java'?)" in found
    assert "must be at least min_copies (2)" in found
    assert "count" in found
    assert "only a vllm engine can swap weights" in found
    assert "did you mean 'lru'?" in found


def test_engines_sleep_on_cards_only_and_within_a_budget() -> None:
    engine = {"kind": "vllm", "sleep": True}
    slots = {"count": 1, "accelerator": "gpu", "engine": engine}
    models = {"java": {"weights": "15GB", "reload": "2s"}}
    room = {"host_memory": "64GB"}
    whole = a_file(models=models, slots=slots, policies=room)
    (pool,) = validate(EnginesArgs, whole, "file").to_topology().shared_pools
    assert pool.deployments[0].engine.sleep
    assert "set policies.host_memory" in problems(a_file(models=models, slots=slots))
    found = problems(a_file(models={"java": {}, "go": {}}, slots=slots, policies=room))
    assert "set weights and reload (the time to wake) of java, go" in found
    on_cpu = problems(a_file(slots={**slots, "accelerator": "cpu"}))
    assert "vllm sleeps on gpu and npu only" in on_cpu
    both = {**slots, "engine": {**engine, "swap": True}}
    assert "cannot be used with swap" in problems(a_file(slots=both))
    simulated = {**slots, "engine": {**SIMULATED, "sleep": True}}
    assert "only a vllm engine can sleep" in problems(a_file(slots=simulated))
    own = {"accelerator": "gpu", "engine": engine}
    alone = {"pools": {"own": {"model": "rust", "deployments": {"rust-gpu": own}}}}
    assert "only slots of a shared pool unload" in problems({**a_file(), **alone})


def test_a_model_has_one_home_and_a_deployment_one_owner() -> None:
    file = a_file()
    deployment = {"accelerator": "cpu", "profile": "p", "engine": SIMULATED}
    file["pools"] = {"own": {"model": "java", "deployments": {"cards-slots": deployment}}}
    found = problems(file)
    assert "pool 'own' already serves this model" in found
    assert "'cards-slots', which a pool has" in found


def test_simulated_models_need_profiles_and_engines_none() -> None:
    assert "name one for go" in problems(a_file(models={"go": {}}))
    engine = {**SIMULATED, "profile": "p"}
    found = problems(a_file(slots={"count": 1, "accelerator": "cpu", "engine": engine}))
    assert "set the profile of each model" in found


def test_a_file_without_any_pool_is_refused() -> None:
    assert "name at least one pool here or in shared_pools" in problems(
        {"models": {"java": {"source": "simulated"}}}
    )


def test_policies_of_a_shared_pool_change_by_name() -> None:
    known = (PoolName("cards"),)
    change = {"shared_pools": {"cards": {"eviction": "lfu", "host_memory": "1GB"}}}
    assert shared_pool_changes(change, known) == {
        "cards": {"eviction": "lfu", "host_memory_bytes": 1_000_000_000}
    }
    with pytest.raises(ConfigError, match=r"shared_pools\.crds: no such pool \(known: cards\)"):
        shared_pool_changes({"shared_pools": {"crds": {}}}, known)


def test_models_of_a_shared_pool_have_the_adapters_of_the_file() -> None:
    file = a_file()
    file["models"]["java"]["adapters"] = {"team": {"source": "/lora", "aliases": ["ours"]}}
    (pool,) = validate(EnginesArgs, file, "file").to_topology().shared_pools
    assert pool.models[0].model.names == ("java", "team", "ours")
    file["models"]["java"]["adapter_places"] = 2
    assert "cannot have adapter_places" in problems(file)


SHAPES: dict[str, Any] = {
    "fast": {"count": 2, "accelerator": "cpu", "memory": "80GB", "engine": SIMULATED},
    "slow": {
        "count": 1, "accelerator": "cpu", "memory": "24GB", "engine": SIMULATED,
        "models": {"java": {"profile": "q", "load": "20s"}},
    },
}  # fmt: skip
SIZED = {
    "java": {"profile": "p", "load": "8s", "reload": "2s", "weights": "15GB"},
    "go": {"profile": "p", "weights": "60GB"},
}


def shaped(models: dict[str, Any] | None = None, **shapes: Any) -> dict[str, Any]:
    """A file whose pool has `deployments` instead of slots."""
    file = a_file(models=models or SIZED, deployments={**SHAPES, **shapes})
    del file["shared_pools"]["cards"]["slots"]
    return file


def test_deployments_are_slots_of_several_shapes_with_times_and_memory_of_their_own() -> None:
    (pool,) = validate(EnginesArgs, shaped(), "file").to_topology().shared_pools
    java, go = pool.models
    assert [(d.name, d.initial_replicas) for d in pool.deployments] == [("fast", 2), ("slow", 1)]
    fast, slow = (java.at(d.name) for d in pool.deployments)
    assert (fast.profile, fast.load_s, fast.reload_s) == ("p", 8.0, 2.0)
    assert (slow.profile, slow.load_s, slow.reload_s) == ("q", 20.0, 2.0)
    assert [d.name for d in pool.where_fits(java)] == ["fast", "slow"]
    assert [d.name for d in pool.where_fits(go)] == ["fast"]


def test_slots_get_as_much_of_a_prompt_in_a_step_as_the_slowest_of_their_models() -> None:
    profiles = {"p": UNMEASURED, "q": replace(UNMEASURED, prefill_per_token_s=1e-4)}
    of_gpu = {"accelerator": "gpu", "engine": {"kind": "vllm"}}
    shapes = {name: {**shape, **of_gpu} for name, shape in SHAPES.items()}
    (pool,) = validate(EnginesArgs, shaped(**shapes), "file").to_topology(profiles.get).shared_pools
    caps = [d.engine.long_prefill_token_threshold for d in pool.deployments]
    assert caps == [CARD_PROMPT_TOKENS, CARD_PROMPT_TOKENS // 2]


def test_a_shared_pool_has_slots_or_deployments() -> None:
    rule = "name either `slots` of one shape or `deployments` of several"
    assert rule in problems(a_file(deployments=SHAPES))
    neither = a_file()
    del neither["shared_pools"]["cards"]["slots"]
    assert rule in problems(neither)


def test_models_fit_somewhere_and_their_sizes_and_profiles_are_known() -> None:
    found = problems(
        shaped(
            {"java": {"profile": "p", "weights": "100GB"}, "go": {}},
            small={**SHAPES["fast"], "models": {"jva": {}}},
        )
    )
    assert (
        "java has 100 GB of weights, but no slot has more than 80 GB of memory: remove the model, "
        "or add a shape for it" in found
    )
    assert "set weights of go, to know whether they fit" in found
    assert "shared_pools.cards.deployments.slow: " in found
    assert "name one for go" in found
    assert "no such model of this pool (did you mean 'java'?)" in found
    assert "set weights of java" not in problems(shaped({"java": {"weights": "1GB"}}))


def test_a_model_needs_its_profile_only_where_it_fits() -> None:
    own = {**SHAPES["fast"], "models": {"go": {"profile": "q"}}}
    models = {**SIZED, "go": {"weights": "60GB"}}
    validate(EnginesArgs, shaped(models, fast=own), "file")
    assert "name one for go" in problems(shaped(models))


def test_deployments_of_all_pools_have_different_names() -> None:
    file = shaped()
    deployment = {"accelerator": "cpu", "profile": "p", "engine": SIMULATED}
    file["pools"] = {"own": {"model": "rust", "deployments": {"fast": deployment}}}
    assert "pool 'own' has a deployment of this name" in problems(file)


def test_a_profile_of_a_shape_must_exist() -> None:
    topology = validate(EnginesArgs, shaped(), "file").to_topology()
    with pytest.raises(ConfigError, match=r"deployments\.slow\.models\.java\.profile: .*no file"):
        check_profiles(topology, {"p": UNMEASURED})
    check_profiles(topology, {"p": UNMEASURED, "q": UNMEASURED})
    slots = {"count": 1, "accelerator": "cpu", "engine": SIMULATED}
    own = a_file(slots={**slots, "models": {"java": {"profile": "q"}}})
    with pytest.raises(ConfigError, match=r"cards\.slots\.models\.java\.profile: .*no file"):
        check_profiles(validate(EnginesArgs, own, "file").to_topology(), {"p": UNMEASURED})
