"""Links of a pool's router: offers from ingresses, events from replicas, orders to replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from cato.control.links import take
from cato.control.messages import Door, Follow, Joined, Leased, Left, Offer, Stop, Told
from cato.core.commands import Dispatch, Preempt
from cato.core.events import StreamLost
from cato.core.ids import PoolName, ReplicaId
from cato.core.shards import NO_LOAD, ShardLoad
from cato.core.snapshot import Invocation
from cato.core.topology import ONE_SHARD, Shards
from cato.wire.link.connection import Connection, Passive
from cato.wire.link.endpoints import Address, Listener

# Maximum age of an ingress' view of a shard's load; it counts its own calls since then itself.
LOAD_EVERY_S = 0.05


class Router(Protocol):
    """The router's methods that links call."""

    async def offer(self, invocation: Invocation, shared_blocks: int = 0) -> Dispatch: ...

    def take(self, told: Told) -> None: ...

    def lose(self, replica: ReplicaId, reason: str) -> None: ...

    def leave(self, replica: ReplicaId) -> None: ...

    def load(self) -> ShardLoad: ...


class RouterLinks(Passive):
    """The router's end of its links. When a link ends the peer is gone: an ingress' pending offers
    are cancelled, and so withdrawn, and a replica's leases end."""

    def __init__(
        self, pool: PoolName, secret: bytes, router: Router, shards: Shards = ONE_SHARD
    ) -> None:
        self._pool, self._secret, self._router = pool, secret, router
        self._listener: Listener | None = None
        self._opening = asyncio.Lock()
        self._replicas: dict[ReplicaId, Connection] = {}
        self._addresses: dict[ReplicaId, Address] = {}
        self._shards = shards
        self._followers: set[Connection] = set()
        self._told = NO_LOAD
        self._offers = 0
        self._teller: asyncio.TimerHandle | None = None

    async def door(self) -> Door:
        """Where links are accepted; starts the listener on the first call."""
        async with self._opening:
            if self._listener is None:
                self._listener = await take(self, self._secret, f"a peer of pool {self._pool}")
        return Door(self._listener.address, self._secret)

    @property
    def frames(self) -> int:
        """Frames sent and received so far, to and from ingresses and replicas."""
        return 0 if self._listener is None else self._listener.frames.count

    def resize(self, shards: Shards) -> None:
        """Set the pool's router shards; replicas move to the one they belong to."""
        if shards != self._shards:
            self._shards = shards
            for link in self._replicas.values():
                link.note(shards)

    def order(self, command: Preempt) -> None:
        """Tell the replica to stop a call. A replica that is not connected has no leases."""
        link = self._replicas.get(command.replica_id)
        if link is not None:
            link.note(Stop(command.invocation_id, command.attempt))

    async def answer(self, peer: Connection, asked: object) -> Leased:
        assert isinstance(asked, Offer)
        self._offers += 1
        dispatch = await self._router.offer(asked.invocation, asked.shared_blocks)
        return Leased(dispatch, self._addresses.get(dispatch.replica_id))

    def note(self, peer: Connection, note: object) -> None:
        match note:
            case Joined(replica, address):
                self._replicas[replica], self._addresses[replica] = peer, address
                peer.note(self._shards)
            case Left(replica):
                self._router.leave(replica)
            case StreamLost(_, replica, _, _, reason) if replica not in self._replicas:
                self._router.lose(replica, reason)  # it has no link of its own that would tell
            case Follow(False):
                self._followers.discard(peer)
            case Follow():
                self._followers.add(peer)
                peer.note(self._load())
                if self._teller is None:
                    self._tell_load()
            case _:
                assert isinstance(note, Told)
                self._router.take(note)

    def ended(self, peer: Connection) -> None:
        self._followers.discard(peer)
        for replica in [r for r, link in self._replicas.items() if link is peer]:
            del self._replicas[replica], self._addresses[replica]
            self._router.lose(replica, "its link ended")

    def _load(self) -> ShardLoad:
        return replace(self._router.load(), offered=self._offers)

    def _tell_load(self) -> None:
        """Send the load to all followers when it has changed; runs while there are followers."""
        self._teller = None
        if not self._followers:
            return
        load = self._load()
        if load != self._told:
            self._told = load
            for peer in self._followers:
                peer.note(load)
        self._teller = asyncio.get_running_loop().call_later(LOAD_EVERY_S, self._tell_load)
