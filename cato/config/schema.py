"""The `args` of the two Serve applications of a deployment file, and what they become.

`EnginesArgs` (application `engines`) becomes a `Topology`, `IngressArgs` (application `cato`) an
`IngressSpec`. Each check sits at the field it is about, so that pydantic reports all of them at
once with their path; the checks that need several parts of the file are in `_name_problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_network
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from cato.config.access import PricesArgs, SignInArgs
from cato.config.checkers import CheckerArgs
from cato.config.yaml_file import (
    ByteSize,
    Duration,
    NonEmpty,
    StrictModel,
    did_you_mean,
    matching,
)
from cato.core.brownout import BrownoutStep
from cato.core.ids import DeploymentName, ModelName, PoolName
from cato.core.pool.prefill import MOST_S
from cato.core.prices import NO_PRICES
from cato.core.reuse import ReuseLimits
from cato.core.topology import (
    RESERVED_PREFIX,
    AdapterSpec,
    BatchLimits,
    BatchSpec,
    DeploymentSpec,
    EngineSpec,
    HostedModel,
    IngressSpec,
    ModelSpec,
    OutputCaps,
    PoolPolicies,
    PoolScaling,
    PoolSpec,
    SharedPoolPolicies,
    SharedPoolSpec,
    Topology,
    is_pattern,
    patterns_meet,
)
from cato.policies.eviction.registry import eviction_names, order_names
from cato.policies.registry import (
    BINDINGS,
    capped_scheduler_names,
    ordering_names,
    routing_names,
    scheduler_names,
    shared_scheduler_names,
)
from cato.policies.scaling.registry import scaling_names
from cato.workflows.fim import FAMILIES, family_of

_DEFAULT_POLICIES = PoolPolicies()
_DEFAULT_SCALING = PoolScaling()
_DEFAULT_SHARED = SharedPoolPolicies()
# Time to the first token, as that of a plain call of a model (`cato.serve.service.CALL_SLO`).
_DEFAULT_SLO_S = 1.5

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


Name = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
        "a name has at most 63 letters, digits, '.', '_' and '-', "
        "and starts with a letter or digit",
    ),
]
"""A pool, deployment or index: becomes part of Serve's and Ray's names, where '#' divides."""

PublicName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}",
        "a model name has at most 128 letters, digits, '.', '_', ':', '/' and '-', "
        "and starts with a letter or digit",
    ),
    matching(
        rf"(?!{RESERVED_PREFIX}).*", f"names with {RESERVED_PREFIX!r} belong to the workflows"
    ),
]
"""A model name, as clients send it."""

Alias = Annotated[
    str,
    matching(
        r"[A-Za-z0-9*?][A-Za-z0-9._:/*?-]{0,127}",
        "an alias has at most 128 letters, digits, '.', '_', ':', '/' and '-', and where it stands "
        "for many names '*' (any characters) and '?' (one)",
    ),
    matching(r"(?!.*\*\*).*", "'**' fits no more than '*'"),
    matching(
        rf"(?!{RESERVED_PREFIX}).*", f"names with {RESERVED_PREFIX!r} belong to the workflows"
    ),
]
"""Another name of a model, or a pattern of such names."""


def _as_text(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


Word = Annotated[str, BeforeValidator(_as_text)]
"""An argument or environment value; a bare number is its digits."""


Found = list[tuple[tuple[str | int, ...], object, str]]
"""Problems as (where, value, rule)."""


def _errors(model: str, found: Found) -> ValidationError:
    """Several problems as one pydantic error."""
    return ValidationError.from_exception_data(
        model,
        [
            InitErrorDetails(
                type=PydanticCustomError("cato_rule", "{rule}", {"rule": rule}),
                loc=loc,
                input=value,
            )
            for loc, value, rule in found
        ],
    )


class AdapterArgs(StrictModel):
    """A LoRA adapter of a model; `source` is a folder or a Hugging Face id."""

    source: NonEmpty
    """A folder with the adapter, or a Hugging Face id."""
    aliases: list[PublicName] = Field(default_factory=list)
    """Further names of it."""


class ModelArgs(StrictModel):
    """A model; `source` is a folder, `demo` or a Hugging Face id; it suggests the `family`.

    `aliases` may be patterns, such as `claude-*`; see `ModelSpec`. `adapters` are called like
    models, by their names, and served by this model's replicas. `adapter_places`: how many more may
    be added while they run; memory is set aside for them.
    """

    source: NonEmpty
    """A folder, `demo` for the model that ships with CATO, or a Hugging Face id."""
    family: Annotated[str, AfterValidator(lambda v: _one_of(v, tuple(FAMILIES)))] | None = None
    """Whose fill-in-the-middle form it knows. Default: as its source suggests."""
    aliases: list[Alias] = Field(default_factory=list)
    """Further names that clients may call; with `*` and `?` patterns of names."""
    adapters: dict[PublicName, AdapterArgs] = Field(default_factory=dict)
    """LoRA adapters by the name that clients call; the model's replicas serve them."""
    adapter_places: Annotated[int, Field(ge=0, le=100)] = 0
    """How many adapters may be added while it runs; memory is set aside for them."""

    def to_spec(self, name: str) -> ModelSpec:
        family = self.family or family_of(self.source)
        adapters = tuple(
            AdapterSpec(ModelName(n), a.source, tuple(a.aliases)) for n, a in self.adapters.items()
        )
        return ModelSpec(
            ModelName(name),
            self.source,
            family,
            tuple(a for a in self.aliases if not is_pattern(a)),
            adapters,
            self.adapter_places,
            tuple(a for a in self.aliases if is_pattern(a)),
        )


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
    prefill_step: Annotated[Duration, Field(gt=0)] = MOST_S
    """Most time of prompts in one step, with `scheduler: due-date`."""
    kv_cache_memory: Annotated[ByteSize, Field(ge=1)] | None = None
    """Memory of the KV cache."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """vLLM's `--gpu-memory-utilization`."""
    prefix_caching: bool = True
    """Keep the KV cache of prompts for others that begin alike."""
    priority_scheduling: bool = True
    """Let the engine order its own queue by the router's priorities."""
    enforce_eager: bool = False
    """Do not compile or capture graphs: starts sooner, runs slower."""
    start_timeout: Annotated[Duration, Field(gt=0)] = 600.0
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
        return EngineSpec(
            kind=self.kind,
            python=self.python,
            zygote=self.zygote,
            dtype=self.dtype,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            scheduler=self.scheduler,
            prefill_step_s=self.prefill_step,
            kv_cache_memory_bytes=self.kv_cache_memory,
            gpu_memory_utilization=self.gpu_memory_utilization,
            prefix_caching=self.prefix_caching,
            priority_scheduling=self.priority_scheduling,
            enforce_eager=self.enforce_eager,
            start_timeout_s=self.start_timeout,
            args=tuple(self.args),
            env=dict(self.env),
            profile=self.profile or profile,
            seed=self.seed,
            script=self.script,
            swap=self.swap,
            sleep=self.sleep,
            host_memory=self.host_memory,
        ).on(accelerator)


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
            raise _errors("engine", found)
        return engine

    def to_spec(self, name: str) -> DeploymentSpec:
        low, initial, high = self.replicas.bounds
        return DeploymentSpec(
            name=DeploymentName(name),
            accelerator=self.accelerator,
            engine=self.engine.to_spec(self.accelerator, self.profile),
            cards=self.cards or 0,
            cpus=self.cpus,
            accelerator_type=self.accelerator_type,
            resources=dict(self.resources),
            min_replicas=low,
            initial_replicas=initial,
            max_replicas=high,
            standby=self.standby,
            profile=self.profile,
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


def _one_of(value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"must be one of {names}{did_you_mean(value, known)}")
    return value


def _known(names: Callable[[], tuple[str, ...]]) -> AfterValidator:
    return AfterValidator(lambda value: value if value is None else _one_of(value, names()))


class PoliciesArgs(StrictModel):
    """The named policies of a pool: a whole scheduler, or parts of it replaced.

    The names are in `cato.policies.registry`, and which of the schedulers a `cap` belongs to.
    """

    scheduler: Annotated[str, _known(scheduler_names)] = _DEFAULT_POLICIES.scheduler
    """The scheduler: a routing, ordering and binding rule that belong together."""
    routing: Annotated[str | None, _known(routing_names)] = None
    """Replaces the scheduler's routing."""
    ordering: Annotated[str | None, _known(ordering_names)] = None
    """Replaces the scheduler's order of the queue."""
    binding: Annotated[str | None, _known(lambda: BINDINGS)] = None
    """`late`: wait in the pool's queue; `early`: in that of a replica, from arrival on."""
    cap: int | None = Field(default=None, ge=1)
    """Most calls that a replica runs, for schedulers that bound it. Default: its profile's."""
    max_queued: int = Field(default=_DEFAULT_POLICIES.max_queued, ge=0)
    """Most invocations in the queue; more are refused."""
    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Most prompt tokens in the queue."""
    refuse_late: bool = False
    """Refuse work that will miss its SLO."""
    patience: Annotated[Duration, Field(gt=0)] | None = _DEFAULT_POLICIES.patience_s
    """After how long clients leave that did not say when they will."""

    def to_policies(self) -> PoolPolicies:
        fields = self.model_dump()
        return PoolPolicies(patience_s=fields.pop("patience"), **fields)


class ScalingArgs(StrictModel):
    """How many replicas a pool has, within the bounds of its deployments; see `PoolScaling`."""

    policy: Annotated[str, _known(scaling_names)] = _DEFAULT_SCALING.policy
    """The rule that sets the number of replicas."""
    idle_timeout: Annotated[Duration, Field(gt=0)] = _DEFAULT_SCALING.idle_timeout_s
    """Without work for so long, a pool whose `min` is 0 lets its last replica go."""
    every: Duration = _DEFAULT_SCALING.every_s
    """How often the rule is asked."""

    @field_validator("every")
    @classmethod
    def _is_not_too_often(cls, value: float) -> float:
        if value < 0.1:
            raise ValueError("must be at least 100ms: each look asks Serve's controller")
        return value

    def given(self) -> dict[str, Any]:
        """The fields of `PoolScaling` that the file names."""
        fields = {"policy": "policy", "idle_timeout": "idle_timeout_s", "every": "every_s"}
        return {fields[name]: getattr(self, name) for name in self.model_fields_set}


class PoolArgs(StrictModel):
    """The deployments that serve one model."""

    model: str
    """The name of a model of `models`."""
    policies: PoliciesArgs = PoliciesArgs()
    """How its router decides."""
    scaling: ScalingArgs = ScalingArgs()
    """How its replicas follow demand."""
    router_shards: int = Field(default=1, ge=1, le=64)
    """Router actors, each with replicas of its own. One decides for 5,000 calls a second."""
    deployments: dict[Name, DeploymentArgs] = Field(min_length=1)
    """Deployments by name: one resource shape each."""

    @field_validator("policies")
    @classmethod
    def _cap_belongs_to_some(cls, value: PoliciesArgs) -> PoliciesArgs:
        capped = capped_scheduler_names()
        if value.cap is not None and value.scheduler not in capped:
            raise ValueError(
                f"cap belongs to the schedulers {', '.join(capped)}, not to {value.scheduler}"
            )
        return value


class HostedModelArgs(StrictModel):
    """A model of a shared pool; see `HostedModel`."""

    profile: NonEmpty | None = None
    """As of a deployment."""
    load: Annotated[Duration, Field(gt=0)] | None = None
    """Time to load it from storage. Default: the profile's."""
    reload: Annotated[Duration, Field(gt=0)] | None = None
    """Time to load it from the host's memory. Default: the profile's."""
    weights: Annotated[ByteSize, Field(ge=0)] = 0
    """Size of its weights."""
    slo: Annotated[Duration, Field(gt=0)] = _DEFAULT_SLO_S
    """Time to the first token that its users expect: how much a load hurts."""
    min_copies: int = Field(default=0, ge=0)
    """At least so many stay loaded."""
    max_copies: int = Field(default=1, ge=1, validate_default=True)
    """At most so many are loaded."""

    @field_validator("max_copies")
    @classmethod
    def _not_below_min(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min_copies", 0):
            raise ValueError(f"must be at least min_copies ({info.data['min_copies']})")
        return value

    def to_hosted(self, model: ModelSpec) -> HostedModel:
        return HostedModel(
            model=model,
            profile=self.profile,
            load_s=self.load,
            reload_s=self.reload,
            weights_bytes=self.weights,
            slo_s=self.slo,
            min_copies=self.min_copies,
            max_copies=self.max_copies,
        )


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
            raise _errors("engine", found)
        return engine

    def to_spec(self, name: str) -> DeploymentSpec:
        return DeploymentSpec(
            name=DeploymentName(name),
            accelerator=self.accelerator,
            engine=self.engine.to_spec(self.accelerator, None),
            cards=self.cards or 0,
            cpus=self.cpus,
            accelerator_type=self.accelerator_type,
            resources=dict(self.resources),
            min_replicas=self.count,
            initial_replicas=self.count,
            max_replicas=self.count,
            standby=0,
        )


class SharedPoliciesArgs(StrictModel):
    """The named policies of a shared pool; see `SharedPoolPolicies`."""

    eviction: Annotated[str, _known(eviction_names)] = _DEFAULT_SHARED.eviction
    """Which model is unloaded for another."""
    dispatch: Annotated[str, _known(order_names)] = _DEFAULT_SHARED.dispatch
    """Which waiting call is served, or loaded for, next."""
    host_memory: Annotated[ByteSize, Field(ge=0)] = _DEFAULT_SHARED.host_memory_bytes
    """Memory of each host for weights that are not loaded."""
    max_queued: int = Field(default=_DEFAULT_SHARED.max_queued, ge=0)
    """Most invocations in the queue of a model; more are refused."""
    scheduler: Annotated[str, _known(shared_scheduler_names)] = _DEFAULT_SHARED.scheduler
    """The scheduler of each model's calls."""
    refuse_late: bool = _DEFAULT_SHARED.refuse_late
    """Refuse calls that cannot meet their SLO any more."""
    patience: Annotated[Duration, Field(gt=0)] | None = _DEFAULT_SHARED.patience_s
    """How long a client waits that does not say so itself; null: for ever."""

    def given(self) -> dict[str, Any]:
        """The fields of `SharedPoolPolicies` that the file names."""
        named = {"host_memory": "host_memory_bytes", "patience": "patience_s"}
        return {named.get(name, name): getattr(self, name) for name in self.model_fields_set}


class SharedPoolArgs(StrictModel):
    """Slots that several models take turns in."""

    models: dict[PublicName, HostedModelArgs] = Field(min_length=1)
    """The names of models that take turns, with what loading them takes."""
    policies: SharedPoliciesArgs = SharedPoliciesArgs()
    """Which model stays, and which is loaded next."""
    slots: SlotsArgs
    """The replicas that they take turns in."""

    @field_validator("slots")
    @classmethod
    def _simulated_models_have_profiles(cls, slots: SlotsArgs, info: ValidationInfo) -> SlotsArgs:
        models: dict[str, HostedModelArgs] = info.data.get("models", {})
        without = [name for name, model in models.items() if model.profile is None]
        if slots.engine.kind == "simulated" and without:
            raise ValueError(
                "a simulated engine takes its timings from profiles: "
                f"name one for {', '.join(without)}"
            )
        return slots

    @field_validator("slots")
    @classmethod
    def _sleep_has_room(cls, slots: SlotsArgs, info: ValidationInfo) -> SlotsArgs:
        models: dict[str, HostedModelArgs] = info.data.get("models", {})
        policies: SharedPoliciesArgs | None = info.data.get("policies")
        if not slots.engine.sleep or policies is None:
            return slots
        if policies.host_memory == 0:
            raise ValueError("sleep: say how much host_memory the policies give it")
        without = [n for n, m in models.items() if m.weights == 0 or m.reload is None]
        if without:
            raise ValueError(
                f"sleep: say weights and reload (the time to wake) of {', '.join(without)}"
            )
        return slots

    def to_spec(self, name: str, models: Mapping[str, ModelArgs]) -> SharedPoolSpec:
        return SharedPoolSpec(
            name=PoolName(name),
            models=tuple(h.to_hosted(models[m].to_spec(m)) for m, h in self.models.items()),
            slots=self.slots.to_spec(slots_name(name)),
            policies=SharedPoolPolicies(**self.policies.given()),
        )


def slots_name(pool: str) -> str:
    """The deployment whose replicas are the slots of the shared pool `pool`."""
    return f"{pool}-slots"


class EnginesArgs(StrictModel):
    """`args` of the application `engines`."""

    profiles: NonEmpty = "profiles"
    """The folder of measured service times."""
    event_log: NonEmpty | None = None
    """A folder for all events and commands of every router, which `cato replay` reads. Default:
    none."""
    store: NonEmpty | None = None
    """The metadata store: a file or a `postgresql://` URL. Default: `CATO_STORE`, else a file in
    the state folder."""
    models: dict[PublicName, ModelArgs] = Field(min_length=1)
    """All models by the name that clients call."""
    pools: dict[Name, PoolArgs] = Field(default_factory=dict)
    """Pools by name: replicas of one model behind one queue."""
    shared_pools: dict[Name, SharedPoolArgs] = Field(default_factory=dict)
    """Pools whose replicas several models take turns in."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_name_problems(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        found = _name_problems(data)
        try:
            args = handler(data)
        except ValidationError as exc:
            if not found:
                raise
            details = [_detail(error) for error in exc.errors(include_url=False)]
            details += [_detail(e) for e in _errors("engines", found).errors(include_url=False)]
            raise ValidationError.from_exception_data("engines", details) from exc
        if found:
            raise _errors("engines", found)
        return args

    def to_topology(self) -> Topology:
        pools = (
            PoolSpec(
                name=PoolName(name),
                model=self.models[pool.model].to_spec(pool.model),
                deployments=tuple(d.to_spec(n) for n, d in pool.deployments.items()),
                policies=pool.policies.to_policies(),
                scaling=PoolScaling(**pool.scaling.given()),
                router_shards=pool.router_shards,
            )
            for name, pool in self.pools.items()
        )
        shared = tuple(p.to_spec(name, self.models) for name, p in self.shared_pools.items())
        return Topology(tuple(pools), self.profiles, self.event_log, self.store, shared)


class OutputCapsArgs(StrictModel):
    """`output_caps` of the application `cato`: tokens that one call of a model may write."""

    completion: int = Field(default=OutputCaps().completion, ge=1)
    """Of completions."""
    chat: int = Field(default=OutputCaps().chat, ge=1)
    """Of chats."""
    agent: int = Field(default=OutputCaps().agent, ge=1)
    """Of calls with tools."""

    def to_caps(self) -> OutputCaps:
        return OutputCaps(self.completion, self.chat, self.agent)


class BrownoutArgs(StrictModel):
    """One step of `brownout`; see `BrownoutStep`."""

    queued: float = Field(gt=0)
    """From so many waiting calls for each place of a pool on."""
    skip_optional: bool = False
    """Skip optional nodes."""
    max_rounds: int | None = Field(default=None, ge=1)
    """Most rounds of a repeated node."""
    use_fallback: bool = False
    """Ask a node's `fallback` instead of its model."""

    def to_step(self) -> BrownoutStep:
        return BrownoutStep(**self.model_dump())


def _network(name: str) -> str:
    ip_network(name, strict=False)  # raises ValueError in its own words
    return name


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if text != "*" and (not parts.netloc or text != f"{parts.scheme}://{parts.netloc}".lower()):
        raise ValueError("a scheme and a host in small letters, such as https://ide.example:8443")
    return text


def _host_name(text: str) -> str:
    if not text or text != text.lower() or set(text) & set(":/@?#* "):
        raise ValueError("a name in small letters and without a port, such as cato.internal")
    return text


class ReuseArgs(StrictModel):
    """`reuse`: identical deterministic calls share answers; see `ReuseLimits`. `memory` is for all
    tenants of an ingress replica together, 0 for none."""

    memory: Annotated[ByteSize, Field(ge=0)] = 64_000_000
    """Memory for kept answers; 0 keeps none."""
    tenant_memory: Annotated[ByteSize, Field(ge=0)] = 16_000_000
    """The most of it for one tenant."""
    age: Annotated[Duration, Field(gt=0)] = 600.0
    """How long an answer is kept."""

    def to_limits(self) -> ReuseLimits:
        return ReuseLimits(int(self.tenant_memory), int(self.memory), self.age)


_DEFAULT_BATCHES = BatchLimits()


class BatchesArgs(StrictModel):
    """`batches`: files of requests that run when there is room; see `BatchSpec`. `file` and `total`
    are sizes, of one upload and of all files of a tenant. Ingress replicas on several hosts need a
    `folder` that all of them see."""

    folder: NonEmpty | None = None
    file: Annotated[ByteSize, Field(ge=1)] = _DEFAULT_BATCHES.file_bytes
    total: Annotated[ByteSize, Field(ge=1)] = _DEFAULT_BATCHES.total_bytes
    lines: int = Field(default=_DEFAULT_BATCHES.lines, ge=1)
    open: int = Field(default=_DEFAULT_BATCHES.open_batches, ge=1)
    keep: Annotated[Duration, Field(gt=0)] = _DEFAULT_BATCHES.keep_s
    at_once: int = Field(default=BatchSpec().at_once, ge=1)

    def to_spec(self) -> BatchSpec:
        limits = BatchLimits(int(self.file), int(self.total), self.lines, self.open, self.keep)
        return BatchSpec(self.folder, limits, self.at_once)


class IngressArgs(StrictModel):
    """`args` of the application `cato`."""

    workflows: NonEmpty = "workflows"
    """The folder of workflow files; followed while it serves."""
    indexes: dict[Name, NonEmpty] = Field(default_factory=dict)
    """Folders of code by index name, for retrieve nodes; `stdlib` is Python's own."""
    checkers: dict[Name, CheckerArgs] = Field(default_factory=dict, max_length=32)
    """Compilers and linters by name, for validate nodes. Default: none runs."""
    replicas: int = Field(default=1, ge=1)
    """Ingress replicas."""
    max_body: Annotated[ByteSize, Field(ge=1)] = 4_000_000
    """The largest request."""
    keys: Literal["auto", "required", "ignored"] = "auto"
    """When a request needs an API key; `auto`: as soon as there is one."""
    output_caps: OutputCapsArgs = OutputCapsArgs()
    """Most output tokens of calls that name a model themselves."""
    brownout: list[BrownoutArgs] = Field(default_factory=list, max_length=20)
    """What runs go without while their pools are full; steps add up."""
    prompt_rules_off: list[
        Literal["billing-block", "deferred-tools", "late-system", "one-json"]
    ] = Field(default_factory=list)
    """Rules that keep agents' prompts stable and that are not applied."""
    proxies: list[Annotated[str, AfterValidator(_network)]] = Field(default_factory=list)
    """Addresses and networks of proxies that are believed when they name the client."""
    origins: list[Annotated[str, AfterValidator(_origin)]] = Field(default_factory=list)
    """Web pages that may ask (CORS); `*`: any, with a key."""
    hosts: list[Annotated[str, AfterValidator(_host_name)]] = Field(default_factory=list)
    """Further names by which clients without a key call this server."""
    shared_prompts: bool = False
    """Let tenants share what engines have cached of prompts."""
    reuse: ReuseArgs | None = None
    """Let identical deterministic calls of a tenant share answers. Default: off."""
    batches: BatchesArgs | None = None
    """Files and batches of requests. Default: off."""
    prices: PricesArgs | None = None
    """What usage costs. Default: costs are not shown."""
    sign_in: SignInArgs | None = None
    """Tokens of an identity provider beside API keys. Default: keys alone."""

    @model_validator(mode="after")
    def _is_signed_in(self) -> Self:
        if self.keys == "ignored" and self.sign_in is not None:
            raise ValueError("keys: ignored serves everybody; leave it or sign_in out")
        return self

    def to_ingress(self) -> IngressSpec:
        return IngressSpec(
            self.workflows,
            dict(self.indexes),
            self.replicas,
            self.max_body,
            self.keys,
            self.output_caps.to_caps(),
            tuple(step.to_step() for step in self.brownout),
            frozenset(self.prompt_rules_off),
            tuple(self.proxies),
            tuple(self.origins),
            tuple(self.hosts),
            self.shared_prompts,
            None if self.reuse is None else self.reuse.to_limits(),
            None if self.batches is None else self.batches.to_spec(),
            NO_PRICES if self.prices is None else self.prices.to_prices(),
            None if self.sign_in is None else self.sign_in.to_sign_in(),
            {name: checker.to_spec() for name, checker in self.checkers.items()},
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


def _detail(error: Any) -> InitErrorDetails:
    """A reported error as input for a new one, its words kept."""
    kind = PydanticCustomError(
        error["type"], "{rule}", {"rule": error["msg"], **error.get("ctx", {})}
    )
    return InitErrorDetails(type=kind, loc=error["loc"], input=error["input"])


def _name_problems(data: object) -> Found:
    """Names that clash or lead nowhere. Reads the raw data: it may be wrong in other places."""
    models = _mapping(_mapping(data).get("models"))
    pools = _mapping(_mapping(data).get("pools"))
    shared = _mapping(_mapping(data).get("shared_pools"))
    found = [
        *_taken_names(models),
        *_ambiguous_patterns(models),
        *_pools_without_own_model(pools, models),
        *_deployments_of_two_pools(pools),
        *_shared_names(shared, pools, models),
    ]
    if not pools and not shared:
        found.append((("pools",), None, "name at least one pool here or in shared_pools"))
    return found


def _shared_names(
    shared: Mapping[str, object], pools: Mapping[str, object], models: Mapping[str, object]
) -> Found:
    found: Found = []
    homes = {
        model: f"pool {name!r}"
        for name, pool in pools.items()
        if isinstance(model := _mapping(pool).get("model"), str)
    }
    deployments = {d for p in pools.values() for d in _mapping(_mapping(p).get("deployments"))}
    for name, settings in shared.items():
        if name in pools:
            found.append((("shared_pools", name), None, "a pool has this name already"))
        if slots_name(name) in deployments:
            rule = f"its slots are the deployment {slots_name(name)!r}, which a pool has already"
            found.append((("shared_pools", name), None, rule))
        for model in _mapping(_mapping(settings).get("models")):
            loc = ("shared_pools", name, "models", model)
            if model not in models:
                rule = f"no such model{did_you_mean(model, models)}"
                found.append((loc, model, f"{rule}; known: {', '.join(models) or 'none'}"))
            elif model in homes:
                found.append((loc, model, f"{homes[model]} serves this model already"))
            elif _mapping(models[model]).get("adapter_places"):
                rule = "models of shared pools have adapters of this file, and no places for more"
                found.append((loc, model, rule))
            homes.setdefault(model, f"shared pool {name!r}")
    return found


def _taken_names(models: Mapping[str, object]) -> Found:
    found: Found = []
    taken = {name: f"the model {name!r}" for name in models}

    def take(name: object, what: str, loc: tuple[str | int, ...]) -> None:
        if isinstance(name, str) and name in taken:
            found.append((loc, name, f"already the name of {taken[name]}"))
        elif isinstance(name, str):
            taken[name] = what

    for model, settings in models.items():
        at = ("models", model)
        for i, alias in enumerate(_list(_mapping(settings).get("aliases"))):
            take(alias, f"an alias of {model!r}", (*at, "aliases", i))
        for adapter, facts in _mapping(_mapping(settings).get("adapters")).items():
            take(adapter, f"an adapter of {model!r}", (*at, "adapters", adapter))
            for i, alias in enumerate(_list(_mapping(facts).get("aliases"))):
                what = f"an alias of {adapter!r}"
                take(alias, what, (*at, "adapters", adapter, "aliases", i))
    return found


def _ambiguous_patterns(models: Mapping[str, object]) -> Found:
    """Of two patterns that fit a name the longer one counts: these are of one length."""
    found: Found = []
    earlier: list[tuple[str, str]] = []
    for model, settings in models.items():
        mine = [
            (i, alias)
            for i, alias in enumerate(_list(_mapping(settings).get("aliases")))
            if isinstance(alias, str) and is_pattern(alias)
        ]
        for i, alias in mine:
            for other, pattern in earlier:
                # Equal ones are reported as taken.
                if (
                    len(pattern) == len(alias)
                    and pattern != alias
                    and patterns_meet(pattern, alias)
                ):
                    rule = (
                        f"some names fit this pattern and {pattern!r} of {other!r}, which is as "
                        "long; make the one that shall count longer"
                    )
                    found.append((("models", model, "aliases", i), alias, rule))
        earlier += [(model, alias) for _, alias in mine]
    return found


def _pools_without_own_model(pools: Mapping[str, object], models: Mapping[str, object]) -> Found:
    found: Found = []
    served: dict[str, str] = {}
    for pool, settings in pools.items():
        model = _mapping(settings).get("model")
        if not isinstance(model, str):
            continue
        loc = ("pools", pool, "model")
        if model not in models:
            rule = f"no such model{did_you_mean(model, models)}"
            found.append((loc, model, f"{rule}; known: {', '.join(models) or 'none'}"))
        elif model in served:
            rule = f"pool {served[model]!r} serves this model already; put the deployments there"
            found.append((loc, model, rule))
        served.setdefault(model, pool)
    return found


def _deployments_of_two_pools(pools: Mapping[str, object]) -> Found:
    found: Found = []
    owners: dict[str, str] = {}
    for pool, settings in pools.items():
        for name in _mapping(_mapping(settings).get("deployments")):
            if name in owners:
                loc = ("pools", pool, "deployments", name)
                found.append((loc, name, f"pool {owners[name]!r} has a deployment of this name"))
            owners.setdefault(name, pool)
    return found


def _list(data: object) -> Sequence[object]:
    return data if isinstance(data, list) else ()


def _mapping(data: object) -> Mapping[str, object]:
    """`data` with its text keys if it is a mapping; else nothing."""
    if not isinstance(data, Mapping):
        return {}
    return {key: value for key, value in data.items() if isinstance(key, str)}
