"""The links that a pool's router takes: offers of ingresses, what replicas tell, orders to them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from cato.control.links import Door, Joined, Leased, Offer, Stop, Told, take
from cato.core.commands import Dispatch, Preempt
from cato.core.ids import PoolName, ReplicaId
from cato.core.snapshot import Invocation
from cato.wire.link.connection import Connection, Passive
from cato.wire.link.endpoints import Address, Listener


class Router(Protocol):
    """What links do to the router."""

    async def offer(self, invocation: Invocation, shared_blocks: int = 0) -> Dispatch: ...

    def take(self, told: Told) -> None: ...

    def lose(self, replica: ReplicaId, reason: str) -> None: ...


class RouterLinks(Passive):
    """The end of a link is that of its peer: what an ingress has waiting is withdrawn (its offers
    are cancelled), and the leases of a replica end."""

    def __init__(self, pool: PoolName, secret: bytes, router: Router) -> None:
        self._pool, self._secret, self._router = pool, secret, router
        self._listener: Listener | None = None
        self._opening = asyncio.Lock()
        self._replicas: dict[ReplicaId, Connection] = {}
        self._addresses: dict[ReplicaId, Address] = {}
        self._orders: dict[ReplicaId, list[Stop]] = {}  # of replicas that are not connected now

    async def door(self) -> Door:
        """Where links are taken, from the first call on."""
        async with self._opening:
            if self._listener is None:
                self._listener = await take(self, self._secret, f"a peer of pool {self._pool}")
        return Door(self._listener.address, self._secret)

    def order(self, command: Preempt) -> None:
        """Tell the replica; when it is connected again, if it is not now."""
        stop = Stop(command.invocation_id, command.attempt)
        link = self._replicas.get(command.replica_id)
        if link is None:
            self._orders.setdefault(command.replica_id, []).append(stop)
        else:
            link.note(stop)

    def forget(self, replica: ReplicaId) -> None:
        """The replica has lost what it ran: no orders wait for it any more."""
        self._orders.pop(replica, None)

    async def answer(self, peer: Connection, asked: object) -> Leased:
        assert isinstance(asked, Offer)
        dispatch = await self._router.offer(asked.invocation, asked.shared_blocks)
        return Leased(dispatch, self._addresses.get(dispatch.replica_id))

    def note(self, peer: Connection, note: object) -> None:
        if not isinstance(note, Joined):
            assert isinstance(note, Told)
            self._router.take(note)
            return
        self._replicas[note.replica_id] = peer
        self._addresses[note.replica_id] = note.address
        for stop in self._orders.pop(note.replica_id, ()):
            peer.note(stop)

    def ended(self, peer: Connection) -> None:
        for replica in [r for r, link in self._replicas.items() if link is peer]:
            del self._replicas[replica], self._addresses[replica]
            self._router.lose(replica, "its link ended")
