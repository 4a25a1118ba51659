"""Links of a shared pool: those of any pool, plus the reports and orders of slots."""

from __future__ import annotations

from typing import Protocol

from cato.control.messages import Leased, Offer, Told
from cato.control.router_links import RouterLinks
from cato.core.commands import Dispatch
from cato.core.ids import PoolName, ReplicaId
from cato.core.shards import ShardLoad
from cato.core.slots import SlotOrder, SlotReport
from cato.core.snapshot import Invocation
from cato.wire.link.connection import Connection

CLOSED = "the pool was redeployed"


class SlotKeeper(Protocol):
    """The shared pool's methods that links call: see `Router`."""

    async def offer(
        self, invocation: Invocation, shared_blocks: int = 0, model: str = ""
    ) -> Dispatch: ...

    def take(self, told: Told) -> None: ...

    def lose(self, replica: ReplicaId, reason: str) -> None: ...

    def leave(self, replica: ReplicaId) -> None: ...

    def load(self) -> ShardLoad: ...

    def report(self, report: SlotReport) -> None: ...


class SlotLinks(RouterLinks):
    """When the pool's state is replaced all links end, as when a router dies: peers reconnect."""

    def __init__(self, pool: PoolName, secret: bytes, keeper: SlotKeeper) -> None:
        super().__init__(pool, secret, keeper)
        self._keeper = keeper
        self._peers: set[Connection] = set()
        self._is_closed = False

    def hold(self, slot: ReplicaId, order: SlotOrder) -> None:
        """Tell the slot what to hold. A slot that is not connected is told at its next report."""
        link = self._replicas.get(slot)
        if link is not None:
            link.note(order)

    async def answer(self, peer: Connection, asked: object) -> Leased:
        assert isinstance(asked, Offer)
        self._meet(peer)
        dispatch = await self._keeper.offer(asked.invocation, asked.shared_blocks, asked.model)
        return Leased(dispatch, self._addresses.get(dispatch.replica_id))

    def note(self, peer: Connection, note: object) -> None:
        self._meet(peer)
        if self._is_closed:
            return
        if isinstance(note, SlotReport):
            self._keeper.report(note)
        else:
            super().note(peer, note)

    def _meet(self, peer: Connection) -> None:
        """A new peer; one that was idle when the state was replaced is told now."""
        self._peers.add(peer)
        if self._is_closed:
            peer.close(CLOSED)

    def ended(self, peer: Connection) -> None:
        self._peers.discard(peer)
        super().ended(peer)

    def close(self) -> None:
        self._is_closed = True
        if self._listener is not None:
            self._listener.close()
        for peer in list(self._peers):
            peer.close(CLOSED)
