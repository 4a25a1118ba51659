"""Settings of engines: how one starts, and what fits which accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from cato.config.fields import ByteSize, Duration, NonEmpty, StrictModel, Word
from cato.config.problems import Found
from cato.core.pool.prefill import MOST_S
from cato.core.profile import Profile
from cato.core.topology import EngineSpec, flags_set

ProfileOf = Callable[[str], Profile | None]
"""Gives the profile of a name; None where it is not known."""


def no_profile(name: str) -> Profile | None:
    """No profile is known."""
    return None


_OWN_FLAGS = (
    "--model",
    "--served-model-name",
    "--host",
    "--port",
    "--uds",
    "--enable-sleep-mode",
    "--no-enable-sleep-mode",
)
"""Flags that CATO itself passes to a vLLM server."""


class EngineArgs(StrictModel):
    """How a replica starts its engine; see `cato.core.topology.EngineSpec`."""

    kind: Literal["vllm", "simulated", "scripted"]
    """The engine: a vLLM server, simulated timings, or a script of answers."""
    python: NonEmpty | None = None
    """The Python interpreter with vLLM. Default: the replica's own."""
    zygote: bool = False
    """Fork engines from a preloaded process, so that they start in seconds; CPU only."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """vLLM's `--dtype`."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Maximum batch size: calls that run at the same time."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Context length in tokens. Default: the model's own."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in one engine step; fewer stall running streams less."""
    long_prefill_token_threshold: int | None = Field(default=None, ge=0)
    """Most tokens of one prompt in a step shared with other calls; 0: no limit. Default: 256 on GPU
    and NPU, less where the profile says that so many take longer than 40 ms; none on CPU."""
    scheduler: Literal["due-date"] | None = None
    """Scheduler inside the engine: `due-date` orders prompts by due date and bounds their time in
    each step. Default: vLLM's own."""
    prefill_step_s: Annotated[Duration, Field(gt=0)] = Field(default=MOST_S, alias="prefill_step")
    """Most time for prompts in one step, with `scheduler: due-date`."""
    kv_cache_memory_bytes: Annotated[ByteSize, Field(ge=1)] | None = Field(
        default=None, alias="kv_cache_memory"
    )
    """Size of the KV cache."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """vLLM's `--gpu-memory-utilization`."""
    prefix_caching: bool = True
    """Reuse the KV cache for prompts with the same prefix."""
    priority_scheduling: bool = True
    """Let the engine order its own queue by the router's priorities."""
    enforce_eager: bool = False
    """No compilation and no graph capture: starts faster, runs slower."""
    start_timeout_s: Annotated[Duration, Field(gt=0)] = Field(default=600.0, alias="start_timeout")
    """Time limit of an engine's start, of a swap, and of a host's first import of vLLM (`zygote`);
    raise it for slow disks."""
    args: list[Word] = Field(default_factory=list)
    """Extra arguments of the vLLM server, passed unchanged."""
    env: dict[NonEmpty, Word] = Field(default_factory=dict)
    """Environment variables of the vLLM server."""
    profile: NonEmpty | None = None
    """Profile with the timings of a simulated engine. Default: the deployment's profile."""
    seed: int = 0
    """Seed of a simulated engine's text."""
    script: NonEmpty | None = None
    """File with the answers of a scripted engine."""
    swap: bool = False
    """Swap checkpoints of one architecture inside a running vLLM; for shared pools."""
    sleep: bool = False
    """Put the engine of an unloaded model to sleep in host memory; for shared pools on GPU and
    NPU."""
    host_memory: bool | Annotated[ByteSize, Field(ge=1)] | None = None
    """Offload KV blocks to host memory: on, off, or a size. Default: on for vLLM on a GPU, with a
    share of the free memory."""

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _batch_holds_every_sequence(cls, value: int | None, info: ValidationInfo) -> int | None:
        slots = info.data.get("max_num_seqs", 0)
        if value is not None and value < slots:
            raise ValueError(f"must be at least max_num_seqs ({slots}), or vLLM does not start")
        return value

    @field_validator("args")
    @classmethod
    def _leaves_own_flags_alone(cls, value: list[str]) -> list[str]:
        for flag in flags_set(value, _OWN_FLAGS):
            raise ValueError(f"CATO sets {flag} itself")
        return value

    def to_spec(
        self, accelerator: str, profile: str | None, known: Profile | None = None
    ) -> EngineSpec:
        """`profile`: that of its deployment; `known`: its content."""
        spec = self.made(EngineSpec, profile=self.profile or profile)
        return spec.on(accelerator, known)


def engine_problems(engine: EngineArgs, accelerator: str | None) -> Found:
    """Settings that do not fit each other or this accelerator."""
    found: Found = []
    if engine.zygote and (engine.kind != "vllm" or accelerator not in ("cpu", None)):
        rule = "only a vllm engine on cpu can be forked from a zygote"
        found.append((("zygote",), True, rule))
    if (engine.kind == "scripted") != (engine.script is not None):
        rule = "a scripted engine needs a script; other engines must not have one"
        found.append((("script",), engine.script, rule))
    if engine.swap and engine.kind != "vllm":
        found.append((("swap",), True, "only a vllm engine can swap weights"))
    if engine.sleep and engine.kind != "vllm":
        found.append((("sleep",), True, "only a vllm engine can sleep"))
    elif engine.sleep and accelerator == "cpu":
        rule = "vllm sleeps on gpu and npu only; on cpu the page cache keeps weights"
        found.append((("sleep",), True, rule))
    if engine.scheduler and engine.kind == "scripted":
        found.append((("scheduler",), engine.scheduler, "a scripted engine has no scheduler"))
    if engine.sleep and engine.swap:
        found.append((("sleep",), True, "cannot be used with swap; choose one of the two"))
    if engine.host_memory:
        rule = _why_no_host_memory(engine, accelerator)
        if rule:
            found.append((("host_memory",), engine.host_memory, rule))
    if engine.gpu_memory_utilization is not None and accelerator == "cpu":
        rule = "does not apply on cpu; set kv_cache_memory"
        found.append((("gpu_memory_utilization",), engine.gpu_memory_utilization, rule))
    return found


def _why_no_host_memory(engine: EngineArgs, accelerator: str | None) -> str:
    if engine.kind == "simulated":
        is_sized = engine.host_memory is not True
        return "a simulated engine's size is in its profile: set true or false" if is_sized else ""
    if engine.kind == "scripted":
        return "a scripted engine has no KV cache"
    if accelerator == "cpu":
        return "vllm offloads on gpu only; on cpu raise kv_cache_memory"
    if accelerator == "npu":
        return "on npu use vllm-ascend's: args: [--kv-transfer-config, JSON with NPUOffloadingSpec]"
    if engine.swap:
        return "cannot be used with swap: KV blocks of one model's weights are wrong for another"
    return "" if engine.prefix_caching else "needs prefix_caching: true"
