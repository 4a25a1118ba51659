"""Settings of deployments: the resources of a replica, and how many there are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cato.config.engines import EngineArgs, ProfileOf, engine_problems
from cato.config.fields import NonEmpty, StrictModel
from cato.config.problems import errors_of
from cato.core.ids import DeploymentName
from cato.core.topology import DeploymentSpec


class ReplicasArgs(StrictModel):
    """The number of replicas: at the start, and the bounds of the Resource Provisioner."""

    min: int = Field(default=1, ge=0)
    """Fewest replicas; 0 lets a pool without work scale to zero."""
    initial: int | None = Field(default=None, ge=1)
    """Replicas at the start. Default: `min`, at least 1."""
    max: int | None = Field(default=None, ge=1)
    """Most replicas. Default: `initial`."""
    start_first: bool = False
    """At an update, start a new replica before an old one ends. It needs room for one replica more:
    without that room the update waits."""

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
        found = engine_problems(engine, info.data.get("accelerator"))
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

    def to_spec(self, name: str, profile_of: ProfileOf) -> DeploymentSpec:
        low, initial, high = self.replicas.bounds
        known = profile_of(self.profile) if self.profile is not None else None
        return self.made(
            DeploymentSpec,
            name=DeploymentName(name),
            engine=self.engine.to_spec(self.accelerator, self.profile, known),
            cards=self.cards or 0,
            min_replicas=low,
            initial_replicas=initial,
            max_replicas=high,
            start_first=self.replicas.start_first,
            cost=self.cost if self.cost is not None else max(1.0, float(self.cards or 0)),
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
