"""Schema of deployment files: the `args` of their two Serve applications.

`EnginesArgs` (application `engines`) becomes a `Topology`, `IngressArgs` (application `cato`) an
`IngressSpec`. Each check belongs to a field, so that pydantic reports all problems at once with
their paths; checks across several parts of the file are in `names`.
"""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from cato.config.access import PricesArgs, SignInArgs
from cato.config.checkers import CheckerArgs
from cato.config.engines import ProfileOf, no_profile
from cato.config.fields import ByteSize, Duration, Name, NonEmpty, PublicName, StrictModel
from cato.config.names import name_problems
from cato.config.pools import ModelArgs, PoolArgs
from cato.config.problems import detail_of, errors_of
from cato.config.shared_pools import SharedPoolArgs
from cato.core.brownout import BrownoutStep
from cato.core.checkers import CheckerSpec
from cato.core.ids import PoolName
from cato.core.prices import NO_PRICES
from cato.core.reuse import ReuseLimits
from cato.core.topology import (
    BatchLimits,
    BatchSpec,
    IngressSpec,
    Kept,
    OutputCaps,
    PoolPolicies,
    PoolScaling,
    PoolSpec,
    Topology,
)


class EnginesArgs(StrictModel):
    """`args` of the application `engines`."""

    profiles: NonEmpty = "profiles"
    """The folder of profiles: measured service times."""
    event_log: NonEmpty | None = None
    """A folder for the events and commands of all routers, for `cato replay`. Default: not
    logged."""
    store: NonEmpty | None = None
    """The metadata store: a file or a `postgresql://` URL. Default: `CATO_STORE`, else a file in
    the state folder."""
    receipts_per_s: float = Field(default=Kept().receipts_per_s, gt=0)
    """Most receipts stored per second; runs beyond it are only counted."""
    usage_days: int = Field(default=Kept().usage_days, ge=62, le=36_500)
    """Days for which usage and accelerator time are kept."""
    audit_days: int = Field(default=Kept().audit_days, ge=400, le=36_500)
    """Days for which the log of changes to keys, tenants, models and rollouts is kept."""
    models: dict[PublicName, ModelArgs] = Field(min_length=1)
    """All models by the name that clients use."""
    pools: dict[Name, PoolArgs] = Field(default_factory=dict)
    """Pools by name: replicas of one model behind one queue."""
    shared_pools: dict[Name, SharedPoolArgs] = Field(default_factory=dict)
    """Pools whose replicas are shared by several models."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_name_problems(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        found = name_problems(data)
        try:
            args = handler(data)
        except ValidationError as exc:
            if not found:
                raise
            details = [detail_of(error) for error in exc.errors(include_url=False)]
            details += [detail_of(e) for e in errors_of("engines", found).errors(include_url=False)]
            raise ValidationError.from_exception_data("engines", details) from exc
        if found:
            raise errors_of("engines", found)
        return args

    def to_topology(self, profile_of: ProfileOf = no_profile) -> Topology:
        """`profile_of` gives a named profile, from which engines take defaults."""
        pools = (
            PoolSpec(
                name=PoolName(name),
                model=self.models[pool.model].to_spec(pool.model),
                deployments=tuple(d.to_spec(n, profile_of) for n, d in pool.deployments.items()),
                policies=pool.policies.made(PoolPolicies),
                scaling=pool.scaling.made(PoolScaling),
                router_shards=pool.router_shards,
                router_standby=pool.router_standby,
            )
            for name, pool in self.pools.items()
        )
        shared = tuple(
            p.to_spec(name, self.models, profile_of) for name, p in self.shared_pools.items()
        )
        kept = Kept(self.receipts_per_s, self.usage_days, self.audit_days)
        return Topology(tuple(pools), self.profiles, self.event_log, self.store, shared, kept)


class OutputCapsArgs(StrictModel):
    """`output_caps` of the application `cato`: most output tokens of one direct model call."""

    completion: int = Field(default=OutputCaps().completion, ge=1)
    """For completions."""
    chat: int = Field(default=OutputCaps().chat, ge=1)
    """For chats without tools."""
    agent: int = Field(default=OutputCaps().agent, ge=1)
    """For calls with tools."""


class BrownoutArgs(StrictModel):
    """One step of `brownout`; see `BrownoutStep`."""

    queued: float = Field(gt=0)
    """Queued calls per batch slot of a pool from which this step applies."""
    skip_optional: bool = False
    """Skip optional nodes."""
    max_rounds: int | None = Field(default=None, ge=1)
    """Most rounds of a repeated node."""
    use_fallback: bool = False
    """Call a node's `fallback` instead of its model."""


def _network(name: str) -> str:
    ip_network(name, strict=False)  # raises ValueError with a good message
    return name


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if text != "*" and (not parts.netloc or text != f"{parts.scheme}://{parts.netloc}".lower()):
        raise ValueError("must be a lower-case scheme and host, such as https://ide.example:8443")
    return text


def _host_name(text: str) -> str:
    if not text or text != text.lower() or set(text) & set(":/@?#* "):
        raise ValueError("must be a lower-case host name without a port, such as cato.internal")
    return text


class ReuseArgs(StrictModel):
    """`reuse`: identical deterministic calls share answers; see `ReuseLimits`."""

    total_bytes: Annotated[ByteSize, Field(ge=0)] = Field(default=64_000_000, alias="memory")
    """Memory per ingress replica for stored answers of all tenants; 0 stores none."""
    tenant_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        default=16_000_000, alias="tenant_memory"
    )
    """Most memory for one tenant."""
    age_s: Annotated[Duration, Field(gt=0)] = Field(default=600.0, alias="age")
    """Time that an answer is stored."""


_DEFAULT_BATCHES = BatchLimits()


class BatchesArgs(StrictModel):
    """`batches`: files of requests that run when there is capacity; see `BatchSpec`. `file` is the
    largest upload, `total` the most for all files of a tenant. Ingress replicas on several hosts
    need a shared `folder`."""

    folder: NonEmpty | None = None
    file_bytes: Annotated[ByteSize, Field(ge=1)] = Field(
        default=_DEFAULT_BATCHES.file_bytes, alias="file"
    )
    total_bytes: Annotated[ByteSize, Field(ge=1)] = Field(
        default=_DEFAULT_BATCHES.total_bytes, alias="total"
    )
    lines: int = Field(default=_DEFAULT_BATCHES.lines, ge=1)
    open_batches: int = Field(default=_DEFAULT_BATCHES.open_batches, ge=1, alias="open")
    keep_s: Annotated[Duration, Field(gt=0)] = Field(default=_DEFAULT_BATCHES.keep_s, alias="keep")
    at_once: int = Field(default=BatchSpec().at_once, ge=1)

    def to_spec(self) -> BatchSpec:
        return self.made(BatchSpec, limits=self.made(BatchLimits))


class IngressArgs(StrictModel):
    """`args` of the application `cato`."""

    workflows_dir: NonEmpty = Field(default="workflows", alias="workflows")
    """The folder of workflow files; changes take effect while it serves."""
    indexes: dict[Name, NonEmpty] = Field(default_factory=dict)
    """Code folders by index name, for retrieve nodes; `stdlib` is Python's standard library. Edits
    take effect within minutes."""
    checkers: dict[Name, CheckerArgs] = Field(default_factory=dict, max_length=32)
    """Compilers and linters by name, for validate nodes. Default: none."""
    replicas: int = Field(default=1, ge=1)
    """Ingress replicas."""
    max_body_bytes: Annotated[ByteSize, Field(ge=1)] = Field(default=4_000_000, alias="max_body")
    """Largest request body."""
    keys: Literal["auto", "required", "ignored"] = "auto"
    """Whether requests need an API key; `auto`: once a key exists."""
    output_caps: OutputCapsArgs = OutputCapsArgs()
    """Most output tokens of direct model calls."""
    brownout: list[BrownoutArgs] = Field(default_factory=list, max_length=20)
    """How to degrade runs while their pools are full; steps add up."""
    prompt_rules_off: list[
        Literal["billing-block", "deferred-tools", "late-system", "one-json"]
    ] = Field(default_factory=list)
    """Rules for stable agent prompts to turn off."""
    proxies: list[Annotated[str, AfterValidator(_network)]] = Field(default_factory=list)
    """Addresses and networks of trusted proxies, whose headers name the client."""
    origins: list[Annotated[str, AfterValidator(_origin)]] = Field(default_factory=list)
    """Allowed web origins (CORS); `*`: any, with a key."""
    hosts: list[Annotated[str, AfterValidator(_host_name)]] = Field(default_factory=list)
    """Other host names of this server, for clients without a key."""
    shared_prompts: bool = False
    """Share prefix caches between tenants."""
    reuse: ReuseArgs | None = None
    """Share answers of identical deterministic calls of a tenant. Default: off."""
    batches: BatchesArgs | None = None
    """The files and batches APIs. Default: off."""
    prices: PricesArgs | None = None
    """The cost of usage. Default: costs are not shown."""
    sign_in: SignInArgs | None = None
    """Accept tokens of an identity provider beside API keys. Default: off."""

    @model_validator(mode="after")
    def _is_signed_in(self) -> Self:
        if self.keys == "ignored" and self.sign_in is not None:
            raise ValueError("`keys: ignored` serves everybody: leave out that or sign_in")
        return self

    def to_ingress(self) -> IngressSpec:
        return self.made(
            IngressSpec,
            output_caps=self.output_caps.made(OutputCaps),
            brownout=tuple(step.made(BrownoutStep) for step in self.brownout),
            prompt_rules_off=frozenset(self.prompt_rules_off),
            reuse=None if self.reuse is None else self.reuse.made(ReuseLimits),
            batches=None if self.batches is None else self.batches.to_spec(),
            prices=NO_PRICES if self.prices is None else self.prices.to_prices(),
            sign_in=None if self.sign_in is None else self.sign_in.to_sign_in(),
            checkers={name: c.made(CheckerSpec) for name, c in self.checkers.items()},
        )
