"""The args of the two Serve applications become frozen values, or a full list of problems."""

from __future__ import annotations

import contextlib
import copy
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cato.config.control import control_problems
from cato.config.deploy_file import load_deploy_file
from cato.config.deployments import ray_actor_options
from cato.config.paths import resolve, resolve_index
from cato.config.problems import validate
from cato.config.schema import EnginesArgs, IngressArgs
from cato.core.errors import ConfigError
from cato.core.ids import DeploymentName, PoolName
from cato.core.profile import UNMEASURED
from cato.core.reuse import ReuseLimits
from cato.core.topology import (
    CARD_PROMPT_TOKENS,
    CARD_STEP_TOKENS,
    CPU_KV_CACHE_BYTES,
    CPU_STEP_TOKENS,
    RAY_SERVE,
    DeploymentSpec,
    EngineSpec,
    IngressSpec,
    PoolPolicies,
)


def a_deployment(**changes: Any) -> dict[str, Any]:
    return {"accelerator": "cpu", "profile": "p", "engine": {"kind": "simulated"}, **changes}


def a_pool(model: str = "coder", /, **deployments: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "deployments": deployments or {"coder-cpu": a_deployment()}}


def some_args(**changes: Any) -> dict[str, Any]:
    base = {"models": {"coder": {"source": "demo"}}, "pools": {"main": a_pool()}}
    return {**base, **changes}


def problems(data: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(EnginesArgs, data, "f.yaml")
    return [str(p).removeprefix("f.yaml: ") for p in caught.value.problems]


def problems_of_deployment(**changes: Any) -> list[str]:
    at = "pools.main.deployments.coder-cpu."
    data = some_args(pools={"main": a_pool(**{"coder-cpu": a_deployment(**changes)})})
    return [p.removeprefix(at) for p in problems(data)]


def the_deployment(**changes: Any) -> DeploymentSpec:
    data = some_args(pools={"main": a_pool(**{"coder-cpu": a_deployment(**changes)})})
    return EnginesArgs.model_validate(data).to_topology().pools[0].deployments[0]


def test_a_small_file_gets_the_defaults_of_the_core_values() -> None:
    topology = EnginesArgs.model_validate(some_args()).to_topology()
    assert topology.profiles_dir == "profiles"
    (pool,) = topology.pools
    assert (pool.name, pool.model.name, pool.model.family) == ("main", "coder", "demo")
    assert pool.policies == PoolPolicies()
    assert pool.deployments == (
        DeploymentSpec(
            DeploymentName("coder-cpu"), "cpu", EngineSpec("simulated", profile="p"), profile="p"
        ),
    )
    assert IngressArgs.model_validate({}).to_ingress() == IngressSpec()
    assert IngressSpec().reuse is None, "answers are kept only where that is asked for"
    asked = {"reuse": {"memory": "1MB", "tenant_memory": 0, "age": "2m"}}
    limits = IngressArgs.model_validate(asked).to_ingress().reuse
    assert limits == ReuseLimits(tenant_bytes=0, total_bytes=1_000_000, age_s=120.0)


def test_every_setting_of_an_engine_arrives() -> None:
    engine = {
        "kind": "vllm", "python": "/opt/py", "zygote": True, "dtype": "bfloat16",
        "max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 64, "scheduler": "due-date", "prefill_step": "40ms",
        "kv_cache_memory": "256MiB",
        "prefix_caching": False, "priority_scheduling": False,
        "enforce_eager": True, "start_timeout": "2m", "args": ["--swap-space", 4],
        "env": {"OMP_NUM_THREADS": 8}, "profile": "q", "seed": 7,
    }  # fmt: skip
    assert the_deployment(engine=engine).engine == EngineSpec(
        kind="vllm",
        python="/opt/py",
        zygote=True,
        dtype="bfloat16",
        max_num_seqs=16,
        max_model_len=1024,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=64,
        scheduler="due-date",
        prefill_step_s=0.04,
        kv_cache_memory_bytes=256 * 1024**2,
        prefix_caching=False,
        priority_scheduling=False,
        enforce_eager=True,
        start_timeout_s=120.0,
        args=("--swap-space", "4"),
        env={"OMP_NUM_THREADS": "8"},
        profile="q",
        seed=7,
        host_memory=False,
    )


def test_vllm_on_cpu_never_takes_all_memory_for_its_cache() -> None:
    assert the_deployment(engine={"kind": "vllm"}).engine.kv_cache_memory_bytes == (
        CPU_KV_CACHE_BYTES
    )
    on_gpu = the_deployment(accelerator="gpu", engine={"kind": "vllm"})
    assert on_gpu.engine.kv_cache_memory_bytes is None


def test_steps_of_vllm_suit_the_accelerator_unless_the_file_says_otherwise() -> None:
    def steps(accelerator: str, **engine: object) -> tuple[int | None, int | None]:
        spec = the_deployment(accelerator=accelerator, engine={"kind": "vllm", **engine}).engine
        return spec.max_num_batched_tokens, spec.long_prefill_token_threshold

    assert steps("gpu") == steps("npu") == (CARD_STEP_TOKENS, CARD_PROMPT_TOKENS)
    assert steps("cpu") == (CPU_STEP_TOKENS, 0)
    assert steps("gpu", max_num_seqs=4096) == (4096, CARD_PROMPT_TOKENS)
    assert steps("gpu", max_model_len=128) == (CARD_STEP_TOKENS, 128)  # vLLM refuses more
    chosen = {"max_num_batched_tokens": 8192, "long_prefill_token_threshold": 0}
    assert steps("gpu", **chosen) == (8192, 0)
    simulated = the_deployment().engine
    assert simulated.max_num_batched_tokens is None


def test_slow_accelerators_get_less_of_one_prompt_in_a_step() -> None:
    slow = replace(UNMEASURED, prefill_per_batch_token_s=1.0e-4, context_tokens=65_536)
    profiles = {
        "fast": replace(UNMEASURED, prefill_per_batch_token_s=1.0e-5),
        "slow": slow,
        "long": replace(slow, prefill_per_attended_token_s=3.0e-9),
        "slower": replace(slow, prefill_per_batch_token_s=1.0),
    }

    def of_prompt(accelerator: str, profile: str | None, **engine: object) -> int | None:
        deployment = a_deployment(
            accelerator=accelerator, profile=profile, engine={"kind": "vllm", **engine}
        )
        data = some_args(pools={"main": a_pool(**{"coder-cpu": deployment})})
        topology = EnginesArgs.model_validate(data).to_topology(profiles.get)
        return topology.pools[0].deployments[0].engine.long_prefill_token_threshold

    unknown = [of_prompt("gpu", name) for name in (None, "missing", "fast")]
    assert unknown == [CARD_PROMPT_TOKENS] * 3
    # 256 tokens take 26 ms, and 25 more in the middle of 65,536 tokens, but 6 of 16,384.
    assert [of_prompt("npu", name) for name in ("slow", "long")] == [256, 128]
    assert of_prompt("gpu", "long", max_model_len=16_384) == 256
    assert of_prompt("gpu", "slower") == 64
    assert of_prompt("gpu", "slower", long_prefill_token_threshold=512) == 512
    assert of_prompt("cpu", "slower") == 0


def test_an_engine_with_a_cap_for_prompts_or_with_due_dates_mixes_them() -> None:
    def mixes(accelerator: str, **engine: object) -> bool:
        spec = the_deployment(accelerator=accelerator, engine={"kind": "vllm", **engine})
        return spec.engine.mixes_prompts

    assert mixes("gpu")
    assert not mixes("gpu", long_prefill_token_threshold=0)
    assert not mixes("cpu")
    assert mixes("cpu", scheduler="due-date")


def test_a_card_is_the_default_on_gpu_and_npu() -> None:
    assert [the_deployment(accelerator=a).cards for a in ("cpu", "gpu", "npu")] == [0, 1, 1]


def test_replica_counts_left_out_follow_the_others() -> None:
    def counts(**replicas: int) -> tuple[int, int, int]:
        spec = the_deployment(replicas=replicas)
        return spec.min_replicas, spec.initial_replicas, spec.max_replicas

    assert counts() == (1, 1, 1)
    assert counts(min=3) == (3, 3, 3)
    assert counts(min=0, max=4) == (0, 1, 4)
    assert counts(initial=2) == (1, 2, 2)


def test_names_that_clash_or_lead_nowhere_are_problems() -> None:
    data = some_args(
        models={
            "coder": {"source": "demo", "aliases": ["fast", "other"]},
            "other": {"source": "demo", "aliases": ["fast"]},
        },
        pools={
            "a": a_pool("coder", same=a_deployment()),
            "b": a_pool("codre", same=a_deployment()),
            "c": a_pool("coder", third=a_deployment()),
        },
    )
    assert problems(data) == [
        "models.coder.aliases[1]: already the name of the model 'other' (found 'other')",
        "models.other.aliases[0]: already the name of an alias of 'coder' (found 'fast')",
        "pools.b.model: no such model (did you mean 'coder'?); known: coder, other (found 'codre')",
        "pools.c.model: pool 'a' already serves this model; put the deployments there"
        " (found 'coder')",
        "pools.b.deployments.same: pool 'a' has a deployment of this name (found 'same')",
    ]


def test_adapters_have_names_of_their_own_and_no_shared_pool() -> None:
    lora = {"source": "/lora", "aliases": ["fast"]}
    data = some_args(
        models={
            "coder": {"source": "demo", "adapters": {"team": {"source": "/a"}, "other": lora}},
            "other": {"source": "demo", "aliases": ["team", "fast"]},
        },
    )
    assert problems(data) == [
        "models.coder.adapters.other: already the name of the model 'other' (found 'other')",
        "models.other.aliases[0]: already the name of an adapter of 'coder' (found 'team')",
        "models.other.aliases[1]: already the name of an alias of 'other' (found 'fast')",
    ]


def test_schema_problems_and_name_problems_come_together() -> None:
    data = some_args(pools={"main": {**a_pool("nope"), "polices": {}}}, profiles=3)
    assert problems(data) == [
        "profiles: must be text (quote it if it looks like a number) (found 3)",
        "pools.main.polices: unknown key (did you mean 'policies'?)",
        "pools.main.model: no such model; known: coder (found 'nope')",
    ]


def test_cards_fit_the_accelerator() -> None:
    assert problems_of_deployment(cards=1) == [
        "cards: a cpu deployment has no cards: leave it out or set it to 0 (found 1)"
    ]
    assert problems_of_deployment(accelerator="npu", cards=0) == [
        "cards: must be at least 1 on npu (found 0)"
    ]
    assert problems_of_deployment(accelerator="cpuu", cards=0) == [
        "accelerator: must be one of 'cpu', 'gpu' or 'npu' (did you mean 'cpu'?) (found 'cpuu')"
    ]


def test_replicas_are_ordered_min_initial_max() -> None:
    assert problems_of_deployment(replicas={"min": 2, "initial": 1, "max": 1}) == [
        "replicas.initial: must be at least min (2) (found 1)",
        "replicas.max: must be at least min (2) (found 1)",
    ]


def test_an_engine_fits_its_deployment() -> None:
    found = problems_of_deployment(
        profile=None,
        engine={"kind": "simulated", "zygote": True, "gpu_memory_utilization": 0.5},
    )
    assert found == [
        "engine.profile: a simulated engine takes its timings from a profile: name one here or"
        " above (found None)",
        "engine.zygote: only a vllm engine on cpu can be forked from a zygote (found True)",
        "engine.gpu_memory_utilization: does not apply on cpu; set kv_cache_memory (found 0.5)",
    ]
    (host,) = problems_of_deployment(engine={"kind": "vllm", "host_memory": True})
    assert "vllm offloads on gpu only" in host
    (host,) = problems_of_deployment(
        accelerator="npu", engine={"kind": "vllm", "host_memory": "8GiB"}
    )
    assert "NPUOffloadingSpec" in host
    (host,) = problems_of_deployment(engine={"kind": "simulated", "host_memory": "8GiB"})
    assert "true or false" in host
    assert problems_of_deployment(accelerator="gpu", engine={"kind": "vllm", "zygote": True}) == [
        "engine.zygote: only a vllm engine on cpu can be forked from a zygote (found True)"
    ]
    assert problems_of_deployment(
        engine={
            "kind": "vllm",
            "max_num_seqs": 300,
            "max_num_batched_tokens": 256,
            "args": ["--served_model_name=x"],
        }
    ) == [
        "engine.max_num_batched_tokens: must be at least max_num_seqs (300), or vLLM does not start"
        " (found 256)",
        "engine.args: CATO sets --served-model-name itself (found a list of 1)",
    ]


def test_cards_are_not_asked_for_as_resources() -> None:
    assert problems_of_deployment(resources={"NPU": 1}) == [
        "resources: set `cpus` or `cards` instead of NPU"
    ]


def test_a_cap_belongs_to_schedulers_that_have_one() -> None:
    data = some_args(pools={"main": {**a_pool(), "policies": {"cap": 4}}})
    (problem,) = problems(data)
    assert "only the schedulers static-cap, slo-sa, annealing" in problem
    assert "not foresight" in problem
    capped = {"scheduler": "annealing", "cap": 4}
    data = some_args(pools={"main": {**a_pool(), "policies": capped}})
    assert EnginesArgs.model_validate(data).to_topology().pools[0].policies.cap == 4


@pytest.mark.parametrize(("told", "seconds"), [("5m", 300.0), ("45s", 45.0), (None, None)])
def test_a_pool_says_how_long_its_clients_wait(told: object, seconds: float | None) -> None:
    data = some_args(pools={"main": {**a_pool(), "policies": {"patience": told}}})
    assert EnginesArgs.model_validate(data).to_topology().pools[0].policies.patience_s == seconds


def test_unknown_policies_are_named_with_the_known_ones() -> None:
    data = some_args(pools={"main": {**a_pool(), "policies": {"routing": "catoo", "binding": "x"}}})
    first, second = problems(data)
    assert first.startswith("pools.main.policies.routing: must be one of ")
    assert first.endswith("(did you mean 'cato'?) (found 'catoo')")
    assert second.startswith("pools.main.policies.binding: must be one of 'late', 'early'")


@pytest.mark.parametrize("name", ["", "a#b", "a b", "-a", "x" * 64, "ä"])
def test_names_must_fit_into_names_of_serve(name: str) -> None:
    data = some_args(pools={name: a_pool("coder", **{name: a_deployment()})})
    assert len([p for p in problems(data) if "a name has at most 63" in p]) == 2


def test_names_of_workflows_are_not_names_of_models() -> None:
    data = some_args(models={"coder": {"source": "demo", "aliases": ["cato-completion"]}})
    assert problems(data) == [
        "models.coder.aliases[0]: names with 'cato-' belong to the workflows"
        " (found 'cato-completion')"
    ]


def of_two(first: list[str], second: list[str]) -> dict[str, Any]:
    """Two models with these aliases."""
    models = {
        "coder": {"source": "demo", "aliases": first},
        "other": {"source": "demo", "aliases": second},
    }
    pools = {"main": a_pool(), "side": a_pool("other", **{"other-cpu": a_deployment()})}
    return some_args(models=models, pools=pools)


def test_aliases_may_be_patterns_which_are_kept_apart_from_names() -> None:
    data = of_two(["claude-*", "fast"], ["claude-*haiku*", "gpt-?"])
    coder, other = (p.model for p in EnginesArgs.model_validate(data).to_topology().pools)
    assert (coder.aliases, coder.patterns) == (("fast",), ("claude-*",))
    assert (other.aliases, other.patterns) == ((), ("claude-*haiku*", "gpt-?"))


def test_of_two_patterns_that_fit_one_name_one_must_be_longer() -> None:
    assert problems(of_two(["claude-*", "x-*"], ["*-sonnet", "claude-*-b"])) == [
        "models.other.aliases[0]: some names match this pattern and 'claude-*' of 'coder', which "
        "has the same length; make the one that should win longer (found '*-sonnet')"
    ]
    assert problems(of_two(["claude-*"], ["claude-*"])) == [
        "models.other.aliases[0]: already the name of an alias of 'coder' (found 'claude-*')"
    ]
    for first, second in (("claude-*", "gpt-4*"), ("a-*", "b-*"), ("gpt-*", "gpt-*mini*")):
        EnginesArgs.model_validate(of_two([first], [second]))
    EnginesArgs.model_validate(of_two(["claude-*", "*-sonnet"], []))  # of one model


@pytest.mark.parametrize(
    ("alias", "rule"),
    [
        ("cato-*", "names with 'cato-' belong to the workflows"),
        ("a**", "write '*' instead of '**'"),
        ("a[bc]", "an alias has at most 128 letters"),
        ("", "an alias has at most 128 letters"),
    ],
)
def test_a_pattern_has_stars_and_question_marks_only(alias: str, rule: str) -> None:
    (problem,) = problems(some_args(models={"coder": {"source": "demo", "aliases": [alias]}}))
    assert problem.startswith(f"models.coder.aliases[0]: {rule}")


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"cpus": 0.5}, {"num_cpus": 0.5}),
        (
            {"accelerator": "gpu", "cards": 4, "accelerator_type": "H100"},
            {"num_cpus": 1.0, "num_gpus": 4, "accelerator_type": "H100"},
        ),
        (
            {"accelerator": "npu", "cards": 2, "resources": {"rack": 0.1}},
            {"num_cpus": 1.0, "resources": {"NPU": 2, "rack": 0.1}},
        ),
    ],
)
def test_a_replica_asks_ray_for_all_its_cards_at_once(
    changes: dict[str, Any], options: dict[str, Any]
) -> None:
    assert ray_actor_options(the_deployment(**changes)) == options


A_FILE = {
    "http_options": {"port": 8000},
    "applications": [
        {
            "name": "engines",
            "route_prefix": None,
            "import_path": "cato.serve.app:build_engines",
            "external_scaler_enabled": True,
            "args": some_args(),
        },
        {"name": "cato", "import_path": "cato.serve.app:build_ingress", "args": {"replicas": 2}},
    ],
}


def write(folder: Path, data: object) -> Path:
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def test_a_deploy_file_gives_both_applications_and_keeps_the_rest(tmp_path: Path) -> None:
    loaded = load_deploy_file(write(tmp_path, A_FILE))
    assert loaded.raw == A_FILE
    assert loaded.topology.pools[0].name == "main"
    assert loaded.ingress.replicas == 2


def test_problems_of_both_applications_come_at_once(tmp_path: Path) -> None:
    data: dict[str, Any] = copy.deepcopy(A_FILE)
    data["applications"][0] |= {"import_path": "x:y", "external_scaler_enabled": False}
    data["applications"][0]["args"]["pools"]["main"]["model"] = "nope"
    data["applications"][1]["args"] = {"replica": 1}
    with pytest.raises(ConfigError) as caught:
        load_deploy_file(write(tmp_path, data))
    assert [(p.path, p.rule) for p in caught.value.problems] == [
        ("applications[0].import_path", "must be 'cato.serve.app:build_engines'"),
        (
            "applications[0].external_scaler_enabled",
            "must be true: the Resource Provisioner sets the number of replicas",
        ),
        ("applications[0].args.pools.main.model", "no such model; known: coder"),
        ("applications[1].args.replica", "unknown key (did you mean 'replicas'?)"),
    ]


def test_a_misspelt_application_is_named(tmp_path: Path) -> None:
    data: dict[str, Any] = copy.deepcopy(A_FILE)
    data["applications"][0]["name"] = "engine"
    with pytest.raises(ConfigError, match=r"named 'engines', has 0 \(did you mean 'engine'\?\)"):
        load_deploy_file(write(tmp_path, data))


@pytest.mark.parametrize(
    ("options", "path", "rule"),
    [
        ({"port": "abc"}, "http_options.port", "must be a whole number"),
        ({"port": 80.5}, "http_options.port", "must be a whole number"),
        ({"port": -1}, "http_options.port", "must be at least 1"),
        ({"port": 99_999}, "http_options.port", "must be at most 65535"),
        ({"host": [1]}, "http_options.host", "must be text"),
        ({"host": "[::1]"}, "http_options.host", "must be an IP address without brackets"),
        ({"host": "fe80::1%eth0"}, "http_options.host", "must be an IP address"),
        ({"host": "::1::"}, "http_options.host", "must be an IP address"),
        ({"host": "a:80"}, "http_options.host", "`port` is a key of its own"),
        ("foo", "http_options", "must be a mapping"),
    ],
)
def test_a_wrong_address_is_told_before_serve_starts(
    tmp_path: Path, options: object, path: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_deploy_file(write(tmp_path, {**A_FILE, "http_options": options}))
    (problem,) = caught.value.problems
    assert problem.path == path
    assert rule in problem.rule


def test_other_options_of_serve_and_other_hosts_are_left_to_it(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "127.0.0.1", "localhost", "gpu-1.example", "::", "2001:db8::1"):
        options = {"host": host, "port": 65_535, "root_path": "/x"}
        load_deploy_file(write(tmp_path, {**A_FILE, "http_options": options}))
    load_deploy_file(write(tmp_path, {"applications": A_FILE["applications"]}))


def problems_of_deployments(folder: Path, engines: object, ingress: object) -> list[str]:
    data: dict[str, Any] = copy.deepcopy(A_FILE)
    data["applications"][0]["deployments"] = engines
    data["applications"][1]["deployments"] = ingress
    with pytest.raises(ConfigError) as caught:
        load_deploy_file(write(folder, data))
    return [f"{p.path}: {p.rule}" for p in caught.value.problems]


def test_names_in_the_settings_of_the_control_plane_are_checked(tmp_path: Path) -> None:
    config = {"pools": {"mian": {"routing": "power-of-tow"}}, "shared_pools": {"cards": {}}}
    at = "applications[0].deployments[0].user_config"
    told = problems_of_deployments(
        tmp_path, [{"name": "control-plane", "user_config": config}], [{"name": "ingress"}]
    )
    assert told[:2] == [
        f"{at}.pools.mian: no such pool (known: main)",
        f"{at}.shared_pools.cards: no such pool (known: none)",
    ]
    assert told[2].startswith(f"{at}.pools.mian.routing: must be one of")
    assert "did you mean 'power-of-two'?" in told[2]
    assert len(told) == 3


def test_a_cap_that_the_scheduler_in_use_does_not_take_is_a_problem(tmp_path: Path) -> None:
    config = {"pools": {"main": {"cap": 4}}}
    engines = [{"name": "control-plane", "user_config": config}]
    (told,) = problems_of_deployments(tmp_path, engines, [])
    at = "applications[0].deployments[0].user_config.pools.main.cap"
    assert told.startswith(f"{at}: only the schedulers static-cap, ")
    of_file = {PoolName("main"): PoolPolicies(scheduler="static-cap")}
    assert control_problems(config, of_file, ()) == ()
    with_another = {"pools": {"main": {"cap": 4, "scheduler": "foresight"}}}
    (problem,) = control_problems(with_another, of_file, ())
    assert problem.path == "pools.main.cap"


def test_policies_of_a_pool_that_the_file_leaves_to_serve_cannot_change_while_it_runs() -> None:
    of_file = {PoolName("main"): PoolPolicies(scheduler=RAY_SERVE)}
    (problem,) = control_problems({"pools": {"main": {"scheduler": "foresight"}}}, of_file, ())
    assert problem.path == "pools.main"
    assert "change its policies in the deployment file" in problem.rule
    assert control_problems({"pools": {"main": {"scaling": {}}}}, of_file, ()) == ()


def test_a_deployment_that_the_application_lacks_is_named(tmp_path: Path) -> None:
    engines = [{"name": "control-plan"}, 3, {"name": "control-plane", "user_config": 4}]
    first, second, third, fourth = problems_of_deployments(tmp_path, engines, "foo")
    assert first.startswith("applications[0].deployments[0].name: ")
    assert "did you mean 'control-plane'?" in first
    assert second == "applications[0].deployments[1]: must be a mapping with a `name`"
    assert third.startswith("applications[0].deployments[2].user_config: must be a mapping")
    assert fourth == "applications[1].deployments: must be a list"


def test_a_key_that_serve_ignores_is_a_problem(tmp_path: Path) -> None:
    data: dict[str, Any] = copy.deepcopy(A_FILE)
    data |= {"http_option": {"port": 80}, "http_options": {"prot": 80}, "x-a": 1, "defaults": 2}
    data["applications"][1] |= {"argz": {}, "x-b": 1, "deployments": [{"name": "ingress", "n": 1}]}
    with pytest.raises(ConfigError) as caught:
        load_deploy_file(write(tmp_path, data))
    told = {p.path: p.rule for p in caught.value.problems}
    assert list(told) == [
        "http_option",
        "http_options.prot",
        "applications[1].argz",
        "applications[1].deployments[0].n",
    ]
    assert told["http_options.prot"] == "Serve has no such key (did you mean 'port'?)"


def test_engines_have_no_route_and_the_ingress_has_one(tmp_path: Path) -> None:
    data: dict[str, Any] = copy.deepcopy(A_FILE)
    del data["applications"][0]["route_prefix"]  # Serve's default is that of the ingress
    data["applications"][1]["route_prefix"] = None
    with pytest.raises(ConfigError) as caught:
        load_deploy_file(write(tmp_path, data))
    assert [f"{p.path}: {p.rule}".split(":")[:2] for p in caught.value.problems] == [
        ["applications[0].route_prefix", " must be null"],
        ["applications[1].route_prefix", " must be a path such as /"],
    ]


def test_settings_of_a_deployment_that_takes_none_are_a_problem(tmp_path: Path) -> None:
    ingress = [{"name": "ingress", "user_config": {"keys": "required"}}]
    (told,) = problems_of_deployments(tmp_path, [], ingress)
    at = "applications[1].deployments[0].user_config"
    assert told == f"{at}: only 'control-plane' has settings that change while it runs"


def test_right_settings_of_serves_deployments_pass(tmp_path: Path) -> None:
    data: dict[str, Any] = copy.deepcopy(A_FILE)
    name = next(iter(data["applications"][0]["args"]["pools"]["main"]["deployments"]))
    config = {"pools": {"main": {"routing": "power-of-two"}}}
    data["applications"][0]["deployments"] = [
        {"name": "control-plane", "user_config": config},
        {"name": name, "max_ongoing_requests": 5},
    ]
    load_deploy_file(write(tmp_path, data))


LINES = yaml.safe_dump(A_FILE).splitlines()


@given(
    st.integers(0, len(LINES) - 1),
    st.integers(0, len(LINES) - 1),
    st.sampled_from(["", "  ", "- ", "x: ", "[", "1", "null", "{}", "&a ", "*a", "!!int ", "<<: "]),
    st.booleans(),
)
def test_a_damaged_deploy_file_is_loaded_or_refused_with_config_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, other: int, put: str, replace: bool
) -> None:
    lines = list(LINES)
    key = lines[at].split(":")[0]
    lines[at] = f"{key}: {put}" if replace else put + lines[at]
    lines[other], lines[at] = lines[at], lines[other]
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        load_deploy_file(path)


def test_a_path_is_looked_for_here_then_at_home_then_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home):
        (folder / "profiles").mkdir(parents=True)
    (home / "only-at-home").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("CATO_HOME", str(home))
    assert resolve("profiles") == (here / "profiles").resolve()
    assert resolve("only-at-home") == (home / "only-at-home").resolve()
    assert (resolve("deployments") / "local-cpu.yaml").is_file()
    assert resolve(str(home)) == home.resolve()


def test_a_path_that_is_nowhere_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CATO_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError) as caught:
        resolve("nowhere")
    assert f"tried {tmp_path / 'nowhere'}, {tmp_path / 'home' / 'nowhere'}" in str(caught.value)
    with pytest.raises(ConfigError, match="not a usable path"):
        resolve("~no-such-user/x")


def test_the_index_stdlib_is_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "file.py").touch()
    assert resolve_index("stdlib") == Path(sysconfig.get_paths()["stdlib"])
    assert resolve_index("./stdlib") == (tmp_path / "stdlib").resolve()
    with pytest.raises(ConfigError, match="needs a folder"):
        resolve_index("file.py")
