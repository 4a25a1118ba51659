"""Settings of shared pools: their models, policies and slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from cato.config.deployments import ShapeArgs
from cato.config.engines import EngineArgs, ProfileOf, engine_problems
from cato.config.fields import ByteSize, Duration, Name, NonEmpty, PublicName, StrictModel
from cato.config.pools import ModelArgs
from cato.config.problems import Found, errors_of, known_name
from cato.core.ids import DeploymentName, PoolName
from cato.core.profile import Profile
from cato.core.topology import (
    DeploymentSpec,
    HostedModel,
    HostedOn,
    SharedPoolPolicies,
    SharedPoolSpec,
    card_prompt_tokens,
    slots_name,
)
from cato.core.words import did_you_mean
from cato.policies.eviction.registry import eviction_names, order_names, site_names
from cato.policies.registry import shared_scheduler_names

_DEFAULT_SHARED = SharedPoolPolicies()
# Time to first token, the same as for a direct call of a model (`cato.serve.service.CALL_SLO`).
_DEFAULT_SLO_S = 1.5


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
        found = engine_problems(engine, info.data.get("accelerator"))
        if engine.profile is not None:
            rule = "set the profile of each model of the shared pool instead"
            found.append((("profile",), engine.profile, rule))
        if found:
            raise errors_of("engine", found)
        return engine

    def to_spec(self, name: str, profiles: Iterable[Profile]) -> DeploymentSpec:
        """`profiles`: the known ones of the models here, which have one engine's settings."""
        slowest = min(profiles, key=card_prompt_tokens, default=None)
        return self.made(
            DeploymentSpec,
            name=DeploymentName(name),
            engine=self.engine.to_spec(self.accelerator, None, slowest),
            cards=self.cards or 0,
            min_replicas=self.count,
            initial_replicas=self.count,
            max_replicas=self.count,
            standby=0,
        )


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

    def to_spec(
        self, name: str, models: Mapping[str, ModelArgs], profile_of: ProfileOf
    ) -> SharedPoolSpec:
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
            deployments=tuple(
                shape.to_spec(d, self._profiles_on(shape, profile_of))
                for d, shape in shapes.items()
            ),
            policies=self.policies.made(SharedPoolPolicies),
        )

    def _profiles_on(self, shape: SlotsArgs, profile_of: ProfileOf) -> Iterator[Profile]:
        for name, hosted in self.models.items():
            there = shape.models.get(name)
            named = (there and there.profile) or hosted.profile
            known = profile_of(named) if named is not None else None
            if known is not None:
                yield known


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
