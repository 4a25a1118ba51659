"""Settings of models, pools and shared pools, and their policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from cato.config.engines import DeploymentArgs, HostedOnArgs, SlotsArgs
from cato.config.fields import Alias, ByteSize, Duration, Name, NonEmpty, PublicName, StrictModel
from cato.config.problems import Found, did_you_mean, errors_of, known_name, one_of
from cato.core.ids import DeploymentName, ModelName, PoolName
from cato.core.topology import (
    AdapterSpec,
    HostedModel,
    HostedOn,
    ModelSpec,
    PoolPolicies,
    PoolScaling,
    SharedPoolPolicies,
    SharedPoolSpec,
    is_pattern,
    slots_name,
)
from cato.policies.eviction.registry import eviction_names, order_names, site_names
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
    """Router actors, each with its own replicas. One handles about 5,000 calls a second."""
    router_standby: bool = False
    """Run one more router, which takes over at once while another one is being restarted."""
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
    placement: Annotated[str, known_name(site_names)] = _DEFAULT_SHARED.placement
    """Policy that chooses the accelerators of a load, where they have several shapes."""
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
    """Slots that are shared by several models: `slots` of one shape, or `deployments`."""

    models: dict[PublicName, HostedModelArgs] = Field(min_length=1)
    """The models, by names from `models`, with their load times."""
    policies: SharedPoliciesArgs = SharedPoliciesArgs()
    """Policies of loading, unloading and queueing."""
    slots: SlotsArgs | None = None
    """The replicas that the models share, all of one shape."""
    deployments: dict[Name, SlotsArgs] = Field(default_factory=dict, validate_default=True)
    """Instead of `slots`: replicas of several shapes, one deployment for each."""

    @field_validator("slots")
    @classmethod
    def _models_fit_the_slots(
        cls, slots: SlotsArgs | None, info: ValidationInfo
    ) -> SlotsArgs | None:
        if slots is not None and (found := _shape_problems({"": slots}, info)):
            raise errors_of("slots", [(loc[1:], value, rule) for loc, value, rule in found])
        return slots

    @field_validator("deployments")
    @classmethod
    def _models_fit_the_deployments(
        cls, deployments: dict[str, SlotsArgs], info: ValidationInfo
    ) -> dict[str, SlotsArgs]:
        if "slots" not in info.data:
            return deployments  # it has its own problems
        if bool(deployments) == (info.data["slots"] is not None):
            raise ValueError("name either `slots` of one shape or `deployments` of several")
        if found := _shape_problems(deployments, info):
            raise errors_of("deployments", found)
        return deployments

    def to_spec(self, name: str, models: Mapping[str, ModelArgs]) -> SharedPoolSpec:
        shapes = self.deployments if self.slots is None else {slots_name(name): self.slots}
        return SharedPoolSpec(
            name=PoolName(name),
            models=tuple(
                h.made(
                    HostedModel,
                    model=models[m].to_spec(m),
                    on={
                        DeploymentName(d): shape.models[m].made(HostedOn)
                        for d, shape in shapes.items()
                        if m in shape.models
                    },
                )
                for m, h in self.models.items()
            ),
            deployments=tuple(shape.to_spec(d) for d, shape in shapes.items()),
            policies=self.policies.made(SharedPoolPolicies),
        )


def _shape_problems(shapes: Mapping[str, SlotsArgs], info: ValidationInfo) -> Found:
    """Models and policies of a shared pool that do not fit its shapes."""
    if "models" not in info.data:
        return []  # they have their own problems
    models: dict[str, HostedModelArgs] = info.data["models"]
    policies: SharedPoliciesArgs | None = info.data.get("policies")
    found: Found = []
    fits_somewhere: set[str] = set()
    for name, shape in shapes.items():
        for model in [m for m in shape.models if m not in models]:
            rule = f"no such model of this pool{did_you_mean(model, models)}"
            found.append(((name, "models", model), model, rule))
        there = {m: hosted for m, hosted in models.items() if _fits(hosted, shape)}
        fits_somewhere |= there.keys()
        unsized = [m for m, hosted in models.items() if not hosted.weights_bytes]
        if unsized and shape.memory_bytes is not None:
            rule = f"set weights of {', '.join(unsized)}, to know whether they fit"
            found.append(((name, "memory"), shape.memory_bytes, rule))
        own = {m: shape.models.get(m, HostedOnArgs()) for m in there}
        without = [m for m, h in there.items() if h.profile is None and own[m].profile is None]
        if shape.engine.kind == "simulated" and without:
            rule = (
                "a simulated engine takes its timings from profiles: "
                f"name one for {', '.join(without)}"
            )
            found.append(((name,), None, rule))
        if shape.engine.sleep and policies is not None:
            unready = [
                m
                for m, h in there.items()
                if not h.weights_bytes or (h.reload_s is None and own[m].reload_s is None)
            ]
            if policies.host_memory_bytes == 0:
                rule = "sleep: set policies.host_memory to the memory for sleeping engines"
                found.append(((name,), None, rule))
            elif unready:
                rule = f"sleep: set weights and reload (the time to wake) of {', '.join(unready)}"
                found.append(((name,), None, rule))
    for model in [m for m in models if shapes and m not in fits_somewhere]:
        largest = max(shape.memory_bytes or 0 for shape in shapes.values())
        rule = (
            f"{model} has {models[model].weights_bytes / 1e9:g} GB of weights, but no slot has "
            f"more than {largest / 1e9:g} GB of memory: remove the model, or add a shape for it"
        )
        found.append(((next(iter(shapes)), "memory"), largest, rule))
    return found


def _fits(hosted: HostedModelArgs, shape: SlotsArgs) -> bool:
    return shape.memory_bytes is None or hosted.weights_bytes <= shape.memory_bytes
