"""The baseline `ray.serve.llm`: Ray Serve's own LLM application in front of the same vLLM engine.

Its replica runs vLLM within a Ray actor, with its own router and queues. It needs packages that
CATO does not need (the extra `serve-llm`); `missing_packages` names them. Import `application` only
where Ray may be imported.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from cato.config.places import model_path
from cato.core.topology import DeploymentSpec, ModelSpec
from cato.engines.vllm.zygote import CPU_ENV, ENGINE_ENV
from cato.lab.bench.deployment import MEMORY_SHARE

NAME = "ray-serve-llm"
APP = "serve-llm"
ROUTE = "/serve-llm"
COMPLETIONS = f"{ROUTE}/v1/completions"
_NEEDED = ("jsonref", "pandas", "pyarrow", "vllm")
# Serve queues nothing: as many as CATO's engine replica accepts.
_MAX_ONGOING = 10_000


def missing_packages() -> tuple[str, ...]:
    """Packages that this arm lacks; empty when it can run."""
    return tuple(name for name in _NEEDED if importlib.util.find_spec(name) is None)


def application(model: ModelSpec, deployment: DeploymentSpec) -> Any:
    """A Serve application that answers `COMPLETIONS` as `deployment` would: same model, same
    engine arguments, on as many logical CPUs and accelerators.
    """
    from ray.serve.llm import LLMConfig, build_openai_app

    engine, is_cpu = deployment.engine, deployment.accelerator == "cpu"
    bundle = {"CPU": deployment.cpus} | ({} if is_cpu else {"GPU": deployment.cards})
    config = LLMConfig(
        model_loading_config={
            "model_id": model.name,
            "model_source": model_path(model.source),
        },
        engine_kwargs={
            "dtype": engine.dtype,
            "max_num_seqs": engine.max_num_seqs,
            "max_model_len": engine.max_model_len,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "enable_prefix_caching": engine.prefix_caching,
            "enforce_eager": engine.enforce_eager,
            "distributed_executor_backend": "uni",
            **(
                {"kv_cache_memory_bytes": engine.kv_cache_memory_bytes}
                if is_cpu
                else {"gpu_memory_utilization": engine.gpu_memory_utilization or MEMORY_SHARE}
            ),
        },
        accelerator_config={"kind": deployment.accelerator},
        placement_group_config={"bundles": [bundle]},
        deployment_config={
            "num_replicas": deployment.initial_replicas,
            "max_ongoing_requests": _MAX_ONGOING,
        },
        runtime_env={
            "env_vars": {**ENGINE_ENV, **(CPU_ENV if is_cpu else {}), "TRANSFORMERS_OFFLINE": "1"}
        },
        log_engine_metrics=False,
    )
    return build_openai_app({"llm_configs": [config]})
