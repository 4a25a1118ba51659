"""The `args` of the two Serve applications of a deployment file, and what they become.

`EnginesArgs` (application `engines`) becomes a `Topology`, `IngressArgs` (application `cato`) an
`IngressSpec`. Each check sits at the field it is about, so that pydantic reports all of them at
once with their path; the checks that need several parts of the file are in `names`.
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
from cato.config.fields import ByteSize, Duration, Name, NonEmpty, PublicName, StrictModel
from cato.config.names import name_problems
from cato.config.pools import ModelArgs, PoolArgs, SharedPoolArgs
from cato.config.problems import detail_of, errors_of
from cato.core.brownout import BrownoutStep
from cato.core.checkers import CheckerSpec
from cato.core.ids import PoolName
from cato.core.prices import NO_PRICES
from cato.core.reuse import ReuseLimits
from cato.core.topology import (
    RECEIPTS_PER_S,
    BatchLimits,
    BatchSpec,
    IngressSpec,
    OutputCaps,
    PoolPolicies,
    PoolScaling,
    PoolSpec,
    Topology,
)


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
    receipts_per_s: float = Field(default=RECEIPTS_PER_S, gt=0)
    """Receipts of so many runs a second are kept; of more, the runs are only counted."""
    models: dict[PublicName, ModelArgs] = Field(min_length=1)
    """All models by the name that clients call."""
    pools: dict[Name, PoolArgs] = Field(default_factory=dict)
    """Pools by name: replicas of one model behind one queue."""
    shared_pools: dict[Name, SharedPoolArgs] = Field(default_factory=dict)
    """Pools whose replicas several models take turns in."""

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

    def to_topology(self) -> Topology:
        pools = (
            PoolSpec(
                name=PoolName(name),
                model=self.models[pool.model].to_spec(pool.model),
                deployments=tuple(d.to_spec(n) for n, d in pool.deployments.items()),
                policies=pool.policies.made(PoolPolicies),
                scaling=pool.scaling.made(PoolScaling),
                router_shards=pool.router_shards,
            )
            for name, pool in self.pools.items()
        )
        shared = tuple(p.to_spec(name, self.models) for name, p in self.shared_pools.items())
        return Topology(
            tuple(pools), self.profiles, self.event_log, self.store, shared, self.receipts_per_s
        )


class OutputCapsArgs(StrictModel):
    """`output_caps` of the application `cato`: tokens that one call of a model may write."""

    completion: int = Field(default=OutputCaps().completion, ge=1)
    """Of completions."""
    chat: int = Field(default=OutputCaps().chat, ge=1)
    """Of chats."""
    agent: int = Field(default=OutputCaps().agent, ge=1)
    """Of calls with tools."""


class BrownoutArgs(StrictModel):
    """One step of `brownout`; see `BrownoutStep`."""

    queued: float = Field(gt=0)
    """Applies from this many waiting calls per batch slot of a pool."""
    skip_optional: bool = False
    """Skip optional nodes."""
    max_rounds: int | None = Field(default=None, ge=1)
    """Most rounds of a repeated node."""
    use_fallback: bool = False
    """Ask a node's `fallback` instead of its model."""


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

    total_bytes: Annotated[ByteSize, Field(ge=0)] = Field(64_000_000, alias="memory")
    """Memory for kept answers; 0 keeps none."""
    tenant_bytes: Annotated[ByteSize, Field(ge=0)] = Field(16_000_000, alias="tenant_memory")
    """The most of it for one tenant."""
    age_s: Annotated[Duration, Field(gt=0)] = Field(600.0, alias="age")
    """How long an answer is kept."""


_DEFAULT_BATCHES = BatchLimits()


class BatchesArgs(StrictModel):
    """`batches`: files of requests that run when there is room; see `BatchSpec`. `file` and `total`
    are sizes, of one upload and of all files of a tenant. Ingress replicas on several hosts need a
    `folder` that all of them see."""

    folder: NonEmpty | None = None
    file_bytes: Annotated[ByteSize, Field(ge=1)] = Field(_DEFAULT_BATCHES.file_bytes, alias="file")
    total_bytes: Annotated[ByteSize, Field(ge=1)] = Field(
        _DEFAULT_BATCHES.total_bytes, alias="total"
    )
    lines: int = Field(default=_DEFAULT_BATCHES.lines, ge=1)
    open_batches: int = Field(default=_DEFAULT_BATCHES.open_batches, ge=1, alias="open")
    keep_s: Annotated[Duration, Field(gt=0)] = Field(_DEFAULT_BATCHES.keep_s, alias="keep")
    at_once: int = Field(default=BatchSpec().at_once, ge=1)

    def to_spec(self) -> BatchSpec:
        return self.made(BatchSpec, limits=self.made(BatchLimits))


class IngressArgs(StrictModel):
    """`args` of the application `cato`."""

    workflows_dir: NonEmpty = Field("workflows", alias="workflows")
    """The folder of workflow files; followed while it serves."""
    indexes: dict[Name, NonEmpty] = Field(default_factory=dict)
    """Folders of code by index name, for retrieve nodes; `stdlib` is Python's own."""
    checkers: dict[Name, CheckerArgs] = Field(default_factory=dict, max_length=32)
    """Compilers and linters by name, for validate nodes. Default: none runs."""
    replicas: int = Field(default=1, ge=1)
    """Ingress replicas."""
    max_body_bytes: Annotated[ByteSize, Field(ge=1)] = Field(4_000_000, alias="max_body")
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
