"""Settings of replicas and engines: what a deployment or a slot asks for, and how it starts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cato.config.fields import ByteSize, Duration, NonEmpty, StrictModel, Word
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
"""What CATO itself passes to a vLLM server."""


class EngineArgs(StrictModel):
    """How a replica starts its engine; see `cato.core.topology.EngineSpec`."""

    kind: Literal["vllm", "simulated", "scripted"]
    """What serves the model: a vLLM server, simulated timings, or a script of answers."""
    python: NonEmpty | None = None
    """The interpreter that has vLLM. Default: the replica's own."""
    zygote: bool = False
    """Fork engines from a preloaded process, which starts them in seconds; CPU only."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """vLLM's `--dtype`."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Most calls that run at the same time."""
    max_model_len: int | None = Field(default=None, ge=1)
    """The context in tokens. Default: the model's own."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one step of the engine; fewer stall running streams less."""
    long_prefill_token_threshold: int | None = Field(default=None, ge=0)
    """The most of a step that one prompt gets beside other calls; 0: all."""
    scheduler: Literal["due-date"] | None = None
    """Inside the engine: `due-date` orders prompts by due date and bounds their work in each step.
    Default: vLLM's own."""
    prefill_step_s: Annotated[Duration, Field(gt=0)] = Field(MOST_S, alias="prefill_step")
    """Most time of prompts in one step, with `scheduler: due-date`."""
    kv_cache_memory_bytes: Annotated[ByteSize, Field(ge=1)] | None = Field(
        None, alias="kv_cache_memory"
    )
    """Memory of the KV cache."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """vLLM's `--gpu-memory-utilization`."""
    prefix_caching: bool = True
    """Keep the KV cache of prompts for others that begin alike."""
    priority_scheduling: bool = True
    """Let the engine order its own queue by the router's priorities."""
    enforce_eager: bool = False
    """Do not compile or capture graphs: starts sooner, runs slower."""
    start_timeout_s: Annotated[Duration, Field(gt=0)] = Field(600.0, alias="start_timeout")
    """How long a start may take."""
    args: list[Word] = Field(default_factory=list)
    """Further arguments of the vLLM server, as they are."""
    env: dict[NonEmpty, Word] = Field(default_factory=dict)
    """Environment of the vLLM server."""
    profile: NonEmpty | None = None
    """Timings that a simulated engine keeps. Default: the deployment's profile."""
    seed: int = 0
    """Seed of a simulated engine's text."""
    script: NonEmpty | None = None
    """The file by which a scripted engine answers."""
    swap: bool = False
    """Exchange checkpoints of one architecture inside a running vLLM; for shared pools."""
    sleep: bool = False
    """Models that leave a slot keep a sleeping engine in the host's memory; GPU and NPU."""
    host_memory: bool | Annotated[ByteSize, Field(ge=1)] | None = None
    """Keep KV blocks that leave the cache in the host's memory: on, off, or so many bytes of it.
    Default: on for vLLM on a GPU, with a share of the memory that is free."""

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _batch_holds_every_sequence(cls, value: int | None, info: ValidationInfo) -> int | None:
        slots = info.data.get("max_num_seqs", 0)
        if value is not None and value < slots:
            raise ValueError(f"must be at least max_num_seqs ({slots}); vLLM refuses less")
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
    """How many replicas: at the start, and the bounds of the Resource Provisioner."""

    min: int = Field(default=1, ge=0)
    """The fewest; 0 lets a pool without work sleep."""
    initial: int | None = Field(default=None, ge=1)
    """How many at the start. Default: `min`, at least 1."""
    max: int | None = Field(default=None, ge=1)
    """The most. Default: `initial`."""

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
        """Min, initial and max. Serve cannot start a deployment with 0 replicas: initial >= 1."""
        initial = self.initial if self.initial is not None else max(1, self.min)
        return self.min, initial, self.max if self.max is not None else initial


class ShapeArgs(StrictModel):
    """What one replica asks of Ray."""

    accelerator: Literal["cpu", "gpu", "npu"]
    """What a replica runs on."""
    cards: int | None = Field(default=None, ge=0, validate_default=True)
    """Accelerators of one replica. Default: 1, on a CPU none."""
    cpus: float = Field(default=1.0, ge=0)
    """Cores that Ray sets aside for a replica."""
    accelerator_type: NonEmpty | None = None
    """Ray's type of accelerator, such as `A100`, when it matters."""
    resources: dict[NonEmpty, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Further Ray resources of a replica, by name."""

    @field_validator("cards")
    @classmethod
    def _cards_fit_the_accelerator(cls, value: int | None, info: ValidationInfo) -> int | None:
        accelerator = info.data.get("accelerator")
        if accelerator is None:
            return value
        if value is None:
            return 0 if accelerator == "cpu" else 1
        if accelerator == "cpu" and value > 0:
            raise ValueError("a cpu deployment has no cards: leave it out or set 0")
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
                raise ValueError(f"{name} is asked for with `cpus` or `cards`")
        return value


class DeploymentArgs(ShapeArgs):
    """One Serve deployment: one resource shape."""

    replicas: ReplicasArgs = ReplicasArgs()
    """Their number, and its bounds."""
    standby: int = Field(default=1, ge=0)
    """Invocations that a replica may hold beyond `max_num_seqs`: they hide the message gap."""
    profile: NonEmpty | None = None
    """A file of the profiles folder, without `.yaml`: the service times that decisions rest on."""
    cost: float | None = Field(default=None, gt=0)
    """Cost of a replica for a time, in any unit that the pool's deployments share."""
    engine: EngineArgs
    """How its engine starts."""

    @field_validator("engine")
    @classmethod
    def _engine_fits_the_deployment(cls, engine: EngineArgs, info: ValidationInfo) -> EngineArgs:
        found = _engine_problems(engine, info.data.get("accelerator"))
        if engine.swap:
            found.append((("swap",), True, "only slots of a shared pool have other models to hold"))
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
    """What cannot be on this accelerator."""
    found: Found = []
    if engine.zygote and (engine.kind != "vllm" or accelerator not in ("cpu", None)):
        rule = "only a vllm engine on cpu can be forked from a zygote"
        found.append((("zygote",), True, rule))
    if (engine.kind == "scripted") != (engine.script is not None):
        rule = "a scripted engine needs a script, and no other engine has one"
        found.append((("script",), engine.script, rule))
    if engine.swap and engine.kind != "vllm":
        found.append((("swap",), True, "only vllm swaps weights; a simulated engine just loads"))
    if engine.sleep and engine.kind != "vllm":
        found.append((("sleep",), True, "only vllm sleeps; a simulated engine just loads"))
    elif engine.sleep and accelerator == "cpu":
        rule = "vllm sleeps on gpu and npu only; on cpu the page cache keeps weights"
        found.append((("sleep",), True, rule))
    if engine.scheduler and engine.kind == "scripted":
        found.append((("scheduler",), engine.scheduler, "a scripted engine has no steps to plan"))
    if engine.sleep and engine.swap:
        found.append((("sleep",), True, "an engine whose weights are swapped has none to sleep"))
    if engine.host_memory:
        rule = _why_no_host_memory(engine, accelerator)
        if rule:
            found.append((("host_memory",), engine.host_memory, rule))
    if engine.gpu_memory_utilization is not None and accelerator == "cpu":
        rule = "not on cpu; set kv_cache_memory"
        found.append((("gpu_memory_utilization",), engine.gpu_memory_utilization, rule))
    return found


def _why_no_host_memory(engine: EngineArgs, accelerator: str | None) -> str:
    if engine.kind == "simulated":
        is_sized = engine.host_memory is not True
        return "a simulated engine has that of its profile: true or false" if is_sized else ""
    if engine.kind == "scripted":
        return "a scripted engine keeps no KV blocks"
    if accelerator == "cpu":
        return "vllm offloads on gpu only; on cpu give kv_cache_memory more"
    if accelerator == "npu":
        return "vllm-ascend has its own: args: [--kv-transfer-config, JSON with NPUOffloadingSpec]"
    if engine.swap:
        return "blocks of weights that were swapped out are wrong for the next"
    return "" if engine.prefix_caching else "needs prefix_caching"


class SlotsArgs(ShapeArgs):
    """The slots of a shared pool: `count` replicas of one shape, which hold one model each."""

    count: int = Field(ge=1)
    """How many slots: replicas that hold one model each."""
    engine: EngineArgs
    """How an engine starts in a slot."""

    @field_validator("engine")
    @classmethod
    def _engine_fits_the_slots(cls, engine: EngineArgs, info: ValidationInfo) -> EngineArgs:
        found = _engine_problems(engine, info.data.get("accelerator"))
        if engine.profile is not None:
            rule = "every model of a shared pool has a profile of its own: name it there"
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
    """What a replica of `spec` asks of Ray. Pure.

    The actor asks for all its cards itself: an actor's resources are on one host, and the cards
    that Ray makes visible are those of the actor, so that an engine with tensor parallelism sees
    them all. Ray has no `num_npus`: Ascend cards are the resource `NPU`.
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
