"""Settings of models and pools, and the policies of pools."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from cato.config.deployments import DeploymentArgs
from cato.config.fields import Alias, Duration, Name, NonEmpty, PublicName, StrictModel
from cato.config.problems import known_name, one_of
from cato.core.ids import ModelName
from cato.core.topology import AdapterSpec, ModelSpec, PoolPolicies, PoolScaling, is_pattern
from cato.policies.registry import (
    BINDINGS,
    capped_scheduler_names,
    ordering_names,
    routing_names,
    scheduler_names,
)
from cato.policies.scaling.registry import scaling_names
from cato.workflows.fim_families import FAMILIES, family_of

_DEFAULT_POLICIES = PoolPolicies()
_DEFAULT_SCALING = PoolScaling()


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
        if value.cap is not None and value.scheduler not in capped_scheduler_names():
            raise ValueError(without_cap(value.scheduler))
        return value


def without_cap(scheduler: str) -> str:
    """The problem of a `cap` with a scheduler that has none."""
    return f"only the schedulers {', '.join(capped_scheduler_names())} take a cap, not {scheduler}"
