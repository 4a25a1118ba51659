"""Messages of links, and the codec that knows their types. Nothing here imports Ray.

Replicas' bodies, drills and tests run without Ray; Ray reads its environment when it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.commands import Dispatch
from cato.core.events import (
    CacheChanged,
    FirstTokenSent,
    InvocationEnded,
    InvocationWithdrawn,
    ReplicaProgressed,
    ReplicaReported,
    StreamLost,
)
from cato.core.ids import InvocationId, ReplicaId
from cato.core.kv_events import NodeNews
from cato.core.length import LengthBelief, received
from cato.core.pool.prefill import CallTarget
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.shards import ShardLoad
from cato.core.slots import SlotOrder, SlotReport, SlotState
from cato.core.snapshot import Invocation
from cato.core.topology import AdapterSpec, HostedModel, HostedOn, ModelSpec, Shards, TemplateFacts
from cato.engines.base import EngineChunk, EngineRequest
from cato.wire.endpoint import Endpoint
from cato.wire.link.codec import Codec
from cato.wire.link.endpoints import Address


@record
class Generate:
    """To a replica: generate one attempt of an invocation. Answered with `EngineChunk`s."""

    request: EngineRequest
    invocation_id: InvocationId
    attempt: int
    model: str = ""
    """The model that the replica must hold; empty if its pool has only one."""


@record
class Offer:
    """To a router: wait for a lease, see `ReplicaRouter.offer`. Answered with `Leased`.

    `model` is the requested model, in pools whose replicas change models.
    """

    invocation: Invocation
    shared_blocks: int = 0
    model: str = ""


@record
class Leased:
    """A lease, and the address where its replica accepts links (None: not reported yet)."""

    dispatch: Dispatch
    address: Address | None


@record
class Joined:
    """A replica's first note to its router: its id and the address where it accepts links."""

    replica_id: ReplicaId
    address: Address


@record
class Stop:
    """A router's note to a replica: stop this attempt."""

    invocation_id: InvocationId
    attempt: int


@record
class Follow:
    """An ingress' note to a router shard: start or stop sending the shard's load (`ShardLoad`) when
    it changes."""

    is_on: bool = True


@record
class Left:
    """To a router: Serve no longer lists the replica, or the replica drains."""

    replica_id: ReplicaId


Told = (
    ReplicaReported
    | ReplicaProgressed
    | FirstTokenSent
    | InvocationEnded
    | InvocationWithdrawn
    | StreamLost
    | CacheChanged
)
"""Notes to a router: events whose `now_s` the router replaces by its own clock."""

CODEC = Codec(
    (
        Generate, EngineRequest, CallTarget, EngineChunk, Endpoint, AdapterSpec,
        Offer, Invocation, LengthBelief, Leased, Dispatch, Address, Joined, Stop, Left,
        ReplicaReported, Profile, ReplicaProgressed, FirstTokenSent, InvocationEnded,
        InvocationWithdrawn, StreamLost, CacheChanged, NodeNews, Follow, ShardLoad, Shards,
        SlotReport, SlotState, SlotOrder, HostedModel, HostedOn, ModelSpec, TemplateFacts,
    ),
    {LengthBelief: received},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Door:
    """Where a pool's router accepts links, and the secret of all links of the pool."""

    address: Address
    secret: bytes
