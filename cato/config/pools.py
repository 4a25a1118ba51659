"""Settings of models and pools, and the named policies of a pool."""

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
# Time to the first token, as that of a plain call of a model (`cato.serve.service.CALL_SLO`).
_DEFAULT_SLO_S = 1.5


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
    family: Annotated[str, AfterValidator(lambda v: one_of(v, tuple(FAMILIES)))] | None = None
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


class PoliciesArgs(StrictModel):
    """The named policies of a pool: a whole scheduler, or parts of it replaced.

    The names are in `cato.policies.registry`, and which of the schedulers a `cap` belongs to.
    """

    scheduler: Annotated[str, known_name(scheduler_names)] = _DEFAULT_POLICIES.scheduler
    """The scheduler: a routing, ordering and binding rule that belong together."""
    routing: Annotated[str | None, known_name(routing_names)] = None
    """Replaces the scheduler's routing."""
    ordering: Annotated[str | None, known_name(ordering_names)] = None
    """Replaces the scheduler's order of the queue."""
    binding: Annotated[str | None, known_name(lambda: BINDINGS)] = None
    """`late`: wait in the pool's queue; `early`: in that of a replica, from arrival on."""
    cap: int | None = Field(default=None, ge=1)
    """Most calls that a replica runs, for schedulers that bound it. Default: its profile's."""
    max_queued: int = Field(default=_DEFAULT_POLICIES.max_queued, ge=0)
    """Most invocations in the queue; more are refused."""
    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Most prompt tokens in the queue."""
    refuse_late: bool = False
    """Refuse work that will miss its SLO."""
    patience_s: Annotated[Duration, Field(gt=0)] | None = Field(
        _DEFAULT_POLICIES.patience_s, alias="patience"
    )
    """How long clients wait that name no time themselves."""


class ScalingArgs(StrictModel):
    """How many replicas a pool has, within the bounds of its deployments; see `PoolScaling`."""

    policy: Annotated[str, known_name(scaling_names)] = _DEFAULT_SCALING.policy
    """The rule that sets the number of replicas."""
    idle_timeout_s: Annotated[Duration, Field(gt=0)] = Field(
        _DEFAULT_SCALING.idle_timeout_s, alias="idle_timeout"
    )
    """After this time without work, a pool whose `min` is 0 stops its last replica."""
    every_s: Duration = Field(_DEFAULT_SCALING.every_s, alias="every")
    """How often the rule is asked."""

    @field_validator("every_s")
    @classmethod
    def _is_not_too_often(cls, value: float) -> float:
        if value < 0.1:
            raise ValueError("must be at least 100ms: each look asks Serve's controller")
        return value


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
    load_s: Annotated[Duration, Field(gt=0)] | None = Field(None, alias="load")
    """Time to load it from storage. Default: the profile's."""
    reload_s: Annotated[Duration, Field(gt=0)] | None = Field(None, alias="reload")
    """Time to load it from the host's memory. Default: the profile's."""
    weights_bytes: Annotated[ByteSize, Field(ge=0)] = Field(0, alias="weights")
    """Size of its weights."""
    slo_s: Annotated[Duration, Field(gt=0)] = Field(_DEFAULT_SLO_S, alias="slo")
    """Time to the first token that its users expect: how much a load hurts."""
    min_copies: int = Field(default=0, ge=0)
    """Copies that stay loaded."""
    max_copies: int = Field(default=1, ge=1, validate_default=True)
    """Most copies that are loaded."""

    @field_validator("max_copies")
    @classmethod
    def _not_below_min(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min_copies", 0):
            raise ValueError(f"must be at least min_copies ({info.data['min_copies']})")
        return value


class SharedPoliciesArgs(StrictModel):
    """The named policies of a shared pool; see `SharedPoolPolicies`."""

    eviction: Annotated[str, known_name(eviction_names)] = _DEFAULT_SHARED.eviction
    """Which model is unloaded for another."""
    dispatch: Annotated[str, known_name(order_names)] = _DEFAULT_SHARED.dispatch
    """Which waiting call is served, or loaded for, next."""
    host_memory_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        _DEFAULT_SHARED.host_memory_bytes, alias="host_memory"
    )
    """Memory of each host for weights that are not loaded."""
    max_queued: int = Field(default=_DEFAULT_SHARED.max_queued, ge=0)
    """Most invocations in the queue of a model; more are refused."""
    scheduler: Annotated[str, known_name(shared_scheduler_names)] = _DEFAULT_SHARED.scheduler
    """The scheduler of each model's calls."""
    refuse_late: bool = _DEFAULT_SHARED.refuse_late
    """Refuse calls that cannot meet their SLO any more."""
    patience_s: Annotated[Duration, Field(gt=0)] | None = Field(
        _DEFAULT_SHARED.patience_s, alias="patience"
    )
    """How long a client waits that names no time itself; null: without limit."""


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
        if policies.host_memory_bytes == 0:
            raise ValueError("sleep: say how much host_memory the policies give it")
        without = [n for n, m in models.items() if m.weights_bytes == 0 or m.reload_s is None]
        if without:
            raise ValueError(
                f"sleep: say weights and reload (the time to wake) of {', '.join(without)}"
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
