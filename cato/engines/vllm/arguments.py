"""The command line of vLLM's server."""

from __future__ import annotations

from cato.core.topology import EngineSpec, ModelSpec
from cato.engines.vllm.adapters import adapter_argv
from cato.engines.vllm.kv_feed import feed_argv, has_events
from cato.engines.vllm.offloading import Offloading
from cato.engines.vllm.scheduler import SCHEDULER

# A domain that can never exist (RFC 2606).
NO_DOMAIN = "none.invalid"
SWAP_EXTENSION = "cato.engines.vllm.worker_extension.SwapExtension"


def server_argv(
    spec: EngineSpec,
    model: ModelSpec,
    model_path: str,
    uds: str,
    *,
    accelerator: str,
    cards: int,
    offloading: Offloading = Offloading(),  # noqa: B008  # frozen
) -> list[str]:
    """Arguments of vLLM's server; `spec.args` come last and so override."""
    spec = spec.on(accelerator)
    argv = ["--model", model_path, "--served-model-name", model.name, "--uds", uds]
    argv += ["--dtype", spec.dtype, "--max-num-seqs", str(spec.max_num_seqs)]
    for flag, value in (
        ("--max-model-len", spec.max_model_len),
        ("--max-num-batched-tokens", spec.max_num_batched_tokens),
        ("--long-prefill-token-threshold", spec.long_prefill_token_threshold or None),
        ("--kv-cache-memory-bytes", spec.kv_cache_memory_bytes),
        ("--gpu-memory-utilization", None if accelerator == "cpu" else spec.gpu_memory_utilization),
        ("--tensor-parallel-size", cards if cards > 1 else None),
    ):
        if value is not None:
            argv += [flag, str(value)]
    if spec.swap:
        argv += ["--worker-extension-cls", SWAP_EXTENSION]
    if spec.scheduler and accelerator != "npu":  # vllm-ascend has its own
        argv += ["--scheduler-cls", SCHEDULER]
    if spec.sleep and accelerator != "cpu":  # vLLM refuses sleep on a CPU
        argv.append("--enable-sleep-mode")
    argv.append("--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching")
    if has_events(spec):
        argv += feed_argv(uds)
    if spec.priority_scheduling:
        argv += ["--scheduling-policy", "priority"]
    if spec.enforce_eager:
        argv.append("--enforce-eager")
    argv += offloading.argv
    argv += adapter_argv(model, accelerator)
    argv += ["--enable-prompt-tokens-details", "--enable-request-id-headers"]
    # Multimodal models fetch URLs in prompts: allow none, unless the deployment lists domains.
    argv += ["--disable-uvicorn-access-log", "--allowed-media-domains", NO_DOMAIN, *spec.args]
    return argv
