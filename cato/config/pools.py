"""Settings of models, pools and shared pools, and their policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from cato.config.engines import DeploymentArgs, SlotsArgs
from cato.config.fields import Alias, ByteSize, Duration, Name, NonEmpty, PublicName, StrictModel
from cato.config.problems import known_name, one_of
from cato.core.ids import ModelName, PoolName
from cato.core.topology import (
    AdapterSpec,
    HostedModel,
    ModelSpec,
    PoolPolicies,
    PoolScaling,
    SharedPoolPolicies,
    SharedPoolSpec,
    is_pattern,
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
# Time to first token, the same as for a direct call of a model (`cato.serve.service.CALL_SLO`).
_DEFAULT_SLO_S = 1.5


class AdapterArgs(StrictModel):
    """A LoRA adapter of a model."""

    source: NonEmpty
    """A folder with the adapter, or a Hugging Face id."""
    aliases: list[PublicName] = Field(default_factory=list)
    """Other names of the adapter."""


class ModelArgs(StrictModel):
    """A model that clients can call; see `ModelSpec`."""

    source: NonEmpty
    """A folder, `demo` for the model that ships with CATO, or a Hugging Face id."""
    family: Annotated[str, AfterValidator(lambda v: one_of(v, tuple(FAMILIES)))] | None = None
    """Family of its fill-in-the-middle format. Default: guessed from the source."""
    aliases: list[Alias] = Field(default_factory=list)
    """Other names that clients may use, or patterns with `*` and `?` such as `claude-*`."""
    adapters: dict[PublicName, AdapterArgs] = Field(default_factory=dict)
    """LoRA adapters by the name that clients use; the model's replicas serve them."""
    adapter_places: Annotated[int, Field(ge=0, le=100)] = 0
    """Adapters that can be added at run time; memory is reserved for them."""

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


class PoliciesArgs(StrictModel):
    """The policies of a pool: a scheduler, or a scheduler with some parts replaced.

    `cato.policies.registry` lists the names and the schedulers that take a `cap`.
    """

    scheduler: Annotated[str, known_name(scheduler_names)] = _DEFAULT_POLICIES.scheduler
    """The scheduler: a set of routing, ordering and binding rules."""
    routing: Annotated[str | None, known_name(routing_names)] = None
    """Replaces the scheduler's routing."""
    ordering: Annotated[str | None, known_name(ordering_names)] = None
    """Replaces the scheduler's queue order."""
    binding: Annotated[str | None, known_name(lambda: BINDINGS)] = None
    """`late`: calls wait in the pool's queue; `early`: they go to a replica's queue on arrival."""
    cap: int | None = Field(default=None, ge=1)
    """Most running calls per replica, for schedulers with a cap. Default: the profile's."""
    max_queued: int = Field(default=_DEFAULT_POLICIES.max_queued, ge=0)
    """Most queued invocations; further ones are refused."""
    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Most queued prompt tokens."""
    refuse_late: bool = False
    """Refuse calls that are predicted to miss their SLO."""
    patience_s: Annotated[Duration, Field(gt=0)] | None = Field(
        default=_DEFAULT_POLICIES.patience_s, alias="patience"
    )
    """Assumed patience of clients that send no time-out: calls expected to wait longer are refused;
    null: no limit."""


class ScalingArgs(StrictModel):
    """How many replicas a pool has, within the bounds of its deployments; see `PoolScaling`."""

    policy: Annotated[str, known_name(scaling_names)] = _DEFAULT_SCALING.policy
    """The scaling policy."""
    idle_timeout_s: Annotated[Duration, Field(gt=0)] = Field(
        default=_DEFAULT_SCALING.idle_timeout_s, alias="idle_timeout"
    )
    """Time without work after which a pool with `min: 0` stops its last replica."""
    every_s: Duration = Field(default=_DEFAULT_SCALING.every_s, alias="every")
    """Interval between scaling decisions."""

    @field_validator("every_s")
    @classmethod
    def _is_not_too_often(cls, value: float) -> float:
        if value < 0.1:
            raise ValueError("must be at least 100ms: each decision calls Serve's controller")
        return value


class PoolArgs(StrictModel):
    """The deployments that serve one model."""

    model: str
    """A name from `models`."""
    policies: PoliciesArgs = PoliciesArgs()
    """Scheduling policies of the router."""
    scaling: ScalingArgs = ScalingArgs()
    """Scaling of the replicas."""
    router_shards: int = Field(default=1, ge=1, le=64)
    """Router actors, each with its own replicas. One handles about 3,000 calls a second."""
    deployments: dict[Name, DeploymentArgs] = Field(min_length=1)
    """Deployments by name, one for each resource shape."""

    @field_validator("policies")
    @classmethod
    def _cap_belongs_to_some(cls, value: PoliciesArgs) -> PoliciesArgs:
        capped = capped_scheduler_names()
        if value.cap is not None and value.scheduler not in capped:
            raise ValueError(
                f"only the schedulers {', '.join(capped)} take a cap, not {value.scheduler}"
            )
        return value


class HostedModelArgs(StrictModel):
    """A model of a shared pool; see `HostedModel`."""

    profile: NonEmpty | None = None
    """The model's profile, as in a deployment."""
    load_s: Annotated[Duration, Field(gt=0)] | None = Field(default=None, alias="load")
    """Time to load it from storage. Default: the profile's."""
    reload_s: Annotated[Duration, Field(gt=0)] | None = Field(default=None, alias="reload")
    """Time to load it from host memory. Default: the profile's."""
    weights_bytes: Annotated[ByteSize, Field(ge=0)] = Field(default=0, alias="weights")
    """Size of its weights."""
    slo_s: Annotated[Duration, Field(gt=0)] = Field(default=_DEFAULT_SLO_S, alias="slo")
    """Target time to first token, which decides how much a load hurts."""
    min_copies: int = Field(default=0, ge=0)
    """Fewest slots with this model loaded."""
    max_copies: int = Field(default=1, ge=1, validate_default=True)
    """Most slots with this model loaded."""

    @field_validator("max_copies")
    @classmethod
    def _not_below_min(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min_copies", 0):
            raise ValueError(f"must be at least min_copies ({info.data['min_copies']})")
        return value


class SharedPoliciesArgs(StrictModel):
    """The policies of a shared pool; see `SharedPoolPolicies`."""

    eviction: Annotated[str, known_name(eviction_names)] = _DEFAULT_SHARED.eviction
    """Policy that chooses the model to unload."""
    dispatch: Annotated[str, known_name(order_names)] = _DEFAULT_SHARED.dispatch
    """Policy that chooses the next queued call to serve or to load a model for."""
    host_memory_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        default=_DEFAULT_SHARED.host_memory_bytes, alias="host_memory"
    )
    """Memory of each host for weights of unloaded models."""
    max_queued: int = Field(default=_DEFAULT_SHARED.max_queued, ge=0)
    """Most queued invocations of a model; further ones are refused."""
    scheduler: Annotated[str, known_name(shared_scheduler_names)] = _DEFAULT_SHARED.scheduler
    """The scheduler of each model's calls."""
    refuse_late: bool = _DEFAULT_SHARED.refuse_late
    """Refuse calls that can no longer meet their SLO."""
    patience_s: Annotated[Duration, Field(gt=0)] | None = Field(
        default=_DEFAULT_SHARED.patience_s, alias="patience"
    )
    """Assumed patience of clients that send no time-out; null: no limit."""


class SharedPoolArgs(StrictModel):
    """Slots that are shared by several models."""

    models: dict[PublicName, HostedModelArgs] = Field(min_length=1)
    """The models, by names from `models`, with their load times."""
    policies: SharedPoliciesArgs = SharedPoliciesArgs()
    """Policies of loading, unloading and queueing."""
    slots: SlotsArgs
    """The replicas that the models share."""

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
        if policies.host_memory_bytes == 0:
            raise ValueError("sleep: set policies.host_memory to the memory for sleeping engines")
        without = [n for n, m in models.items() if m.weights_bytes == 0 or m.reload_s is None]
        if without:
            raise ValueError(
                f"sleep: set weights and reload (the time to wake) of {', '.join(without)}"
            )
        return slots

    def to_spec(self, name: str, models: Mapping[str, ModelArgs]) -> SharedPoolSpec:
        return SharedPoolSpec(
            name=PoolName(name),
            models=tuple(
                h.made(HostedModel, model=models[m].to_spec(m)) for m, h in self.models.items()
            ),
            slots=self.slots.to_spec(slots_name(name)),
            policies=self.policies.made(SharedPoolPolicies),
        )


def slots_name(pool: str) -> str:
    """The deployment whose replicas are the slots of the shared pool `pool`."""
    return f"{pool}-slots"
