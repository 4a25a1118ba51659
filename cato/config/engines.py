"""Settings of replicas and engines: resources, number of replicas, and how an engine starts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cato.config.fields import ByteSize, Duration, NonEmpty, PublicName, StrictModel, Word
from cato.config.problems import Found, errors_of
from cato.core.ids import DeploymentName
from cato.core.pool.prefill import MOST_S
from cato.core.topology import DeploymentSpec, EngineSpec

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
    """Most tokens of one prompt in a step shared with other calls; 0: no limit."""
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
    """Time limit of an engine's start."""
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
        for word in value:
            flag = word.split("=")[0].replace("_", "-")
            if flag in _OWN_FLAGS:
                raise ValueError(f"CATO sets {flag} itself")
        return value

    def to_spec(self, accelerator: str, profile: str | None) -> EngineSpec:
        return self.made(EngineSpec, profile=self.profile or profile).on(accelerator)


class ReplicasArgs(StrictModel):
    """The number of replicas: at the start, and the bounds of the Resource Provisioner."""

    min: int = Field(default=1, ge=0)
    """Fewest replicas; 0 lets a pool without work scale to zero."""
    initial: int | None = Field(default=None, ge=1)
    """Replicas at the start. Default: `min`, at least 1."""
    max: int | None = Field(default=None, ge=1)
    """Most replicas. Default: `initial`."""

    @field_validator("initial")
    @classmethod
    def _not_below_min(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("min", value):
            raise ValueError(f"must be at least min ({info.data['min']})")
        return value

    @field_validator("max")
    @classmethod
    def _not_below_the_others(cls, value: int | None, info: ValidationInfo) -> int | None:
        for key in ("min", "initial"):
            other = info.data.get(key)
            if value is not None and other is not None and value < other:
                raise ValueError(f"must be at least {key} ({other})")
        return value

    @property
    def bounds(self) -> tuple[int, int, int]:
        """(min, initial, max). Serve cannot start a deployment with 0 replicas: initial >= 1."""
        initial = self.initial if self.initial is not None else max(1, self.min)
        return self.min, initial, self.max if self.max is not None else initial


class ShapeArgs(StrictModel):
    """The Ray resources of one replica."""

    accelerator: Literal["cpu", "gpu", "npu"]
    """The kind of accelerator of a replica."""
    cards: int | None = Field(default=None, ge=0, validate_default=True)
    """Accelerators per replica. Default: 1, and none on a CPU."""
    cpus: float = Field(default=1.0, ge=0)
    """CPU cores that Ray reserves for a replica."""
    accelerator_type: NonEmpty | None = None
    """Ray's accelerator type, such as `A100`. Default: any."""
    resources: dict[NonEmpty, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other Ray resources of a replica, by name."""

    @field_validator("cards")
    @classmethod
    def _cards_fit_the_accelerator(cls, value: int | None, info: ValidationInfo) -> int | None:
        accelerator = info.data.get("accelerator")
        if accelerator is None:
            return value
        if value is None:
            return 0 if accelerator == "cpu" else 1
        if accelerator == "cpu" and value > 0:
            raise ValueError("a cpu deployment has no cards: leave it out or set it to 0")
        if accelerator != "cpu" and value == 0:
            raise ValueError(f"must be at least 1 on {accelerator}")
        return value

    @field_validator("accelerator_type")
    @classmethod
    def _type_of_a_card(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("accelerator") == "cpu":
            raise ValueError("a cpu deployment has no accelerator type")
        return value

    @field_validator("resources")
    @classmethod
    def _only_other_resources(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if name.upper() in ("CPU", "GPU", "NPU"):
                raise ValueError(f"set `cpus` or `cards` instead of {name}")
        return value


class DeploymentArgs(ShapeArgs):
    """One Serve deployment: one resource shape."""

    replicas: ReplicasArgs = ReplicasArgs()
    """The number of replicas and its bounds."""
    standby: int = Field(default=1, ge=0)
    """Invocations that a replica may hold beyond `max_num_seqs`: they hide the dispatch delay."""
    profile: NonEmpty | None = None
    """The profile with the service times for scheduling: a file in the profiles folder, without
    `.yaml`."""
    cost: float | None = Field(default=None, gt=0)
    """Cost of a replica per unit of time; any unit, the same for all deployments of the pool."""
    engine: EngineArgs
    """The engine of a replica."""

    @field_validator("engine")
    @classmethod
    def _engine_fits_the_deployment(cls, engine: EngineArgs, info: ValidationInfo) -> EngineArgs:
        found = _engine_problems(engine, info.data.get("accelerator"))
        if engine.swap:
            found.append((("swap",), True, "only slots of a shared pool can swap models"))
        if engine.sleep:
            found.append((("sleep",), True, "only slots of a shared pool unload their models"))
        if engine.kind != "vllm" and not (engine.profile or info.data.get("profile")):
            has = "timings" if engine.kind == "simulated" else "sizes"
            rule = f"a {engine.kind} engine takes its {has} from a profile: name one here or above"
            found.insert(0, (("profile",), None, rule))
        if found:
            raise errors_of("engine", found)
        return engine

    def to_spec(self, name: str) -> DeploymentSpec:
        low, initial, high = self.replicas.bounds
        return self.made(
            DeploymentSpec,
            name=DeploymentName(name),
            engine=self.engine.to_spec(self.accelerator, self.profile),
            cards=self.cards or 0,
            min_replicas=low,
            initial_replicas=initial,
            max_replicas=high,
            cost=self.cost if self.cost is not None else max(1.0, float(self.cards or 0)),
        )


def _engine_problems(engine: EngineArgs, accelerator: str | None) -> Found:
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


class HostedOnArgs(StrictModel):
    """A model on one deployment of a shared pool; see `HostedOn`."""

    profile: NonEmpty | None = None
    """The model's profile there. Default: that of the pool's `models`, as the other keys."""
    load_s: Annotated[Duration, Field(gt=0)] | None = Field(default=None, alias="load")
    """Time to load it from storage."""
    reload_s: Annotated[Duration, Field(gt=0)] | None = Field(default=None, alias="reload")
    """Time to load it from host memory."""


class SlotsArgs(ShapeArgs):
    """Slots of a shared pool: `count` replicas of one shape, which hold one model each."""

    count: int = Field(ge=1)
    """Number of slots."""
    memory_bytes: Annotated[ByteSize, Field(ge=1)] | None = Field(default=None, alias="memory")
    """Memory of a slot for weights; larger models are never loaded there. Default: all fit."""
    models: dict[PublicName, HostedOnArgs] = Field(default_factory=dict)
    """Profiles and load times of models here, where they differ from the pool's `models`."""
    engine: EngineArgs
    """The engine of a slot."""

    @field_validator("engine")
    @classmethod
    def _engine_fits_the_slots(cls, engine: EngineArgs, info: ValidationInfo) -> EngineArgs:
        found = _engine_problems(engine, info.data.get("accelerator"))
        if engine.profile is not None:
            rule = "set the profile of each model of the shared pool instead"
            found.append((("profile",), engine.profile, rule))
        if found:
            raise errors_of("engine", found)
        return engine

    def to_spec(self, name: str) -> DeploymentSpec:
        return self.made(
            DeploymentSpec,
            name=DeploymentName(name),
            engine=self.engine.to_spec(self.accelerator, None),
            cards=self.cards or 0,
            min_replicas=self.count,
            initial_replicas=self.count,
            max_replicas=self.count,
            standby=0,
        )


def ray_actor_options(spec: DeploymentSpec) -> dict[str, Any]:
    """Ray's resource options for a replica of `spec`. Pure.

    One actor requests all its accelerators: its resources are then on one host and all visible to
    an engine with tensor parallelism. Ray has no `num_npus`: Ascend NPUs are the resource `NPU`.
    """
    options: dict[str, Any] = {"num_cpus": spec.cpus}
    resources = dict(spec.resources)
    if spec.accelerator == "gpu":
        options["num_gpus"] = spec.cards
    elif spec.accelerator == "npu":
        resources["NPU"] = spec.cards
    if resources:
        options["resources"] = resources
    if spec.accelerator_type is not None:
        options["accelerator_type"] = spec.accelerator_type
    return options
