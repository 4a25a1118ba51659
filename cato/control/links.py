"""Links between the Ray processes of a deployment: what they carry, where they are taken, and those
that this process has opened.

The secret of a pool's links is its router's, which hands it out by an actor call: who may call it
may do all that links allow.
"""

from __future__ import annotations

import asyncio
import os
import time

import ray

from cato.config.places import run_dir
from cato.core.commands import Dispatch
from cato.core.errors import LinkError
from cato.core.ids import InvocationId, ReplicaId
from cato.core.record import record
from cato.core.topology import AdapterSpec
from cato.engines.base import EngineChunk, EngineRequest
from cato.wire.endpoint import Endpoint
from cato.wire.link.codec import Codec
from cato.wire.link.connection import Connection, Handler, Passive
from cato.wire.link.endpoints import Address, Listener, Tls, connect, listen

# A peer that refused is not asked again by every call.
RETRY_S = 1.0


@record
class Generate:
    """To a replica: the tokens of one attempt of an invocation. Answered with `EngineChunk`s."""

    request: EngineRequest
    invocation_id: InvocationId
    attempt: int


@record
class Leased:
    """A lease, and where its replica takes links (None: it has not told)."""

    dispatch: Dispatch
    address: Address | None


CODEC = Codec((Generate, EngineRequest, EngineChunk, Endpoint, AdapterSpec))


def _tls() -> Tls | None:
    """Ray's own certificates, where its TLS is on."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return Tls(*(os.environ[name] for name in names))


def _host() -> str:
    """Raylets that share a machine are hosts of their own."""
    return str(ray.get_runtime_context().get_node_id())


async def take(handler: Handler, secret: bytes, name: str) -> Listener:
    """Take links of this process' pool; raise OSError."""
    return await listen(
        CODEC,
        secret,
        handler,
        name=name,
        host=_host(),
        ip=ray.util.get_node_ip_address(),
        folder=run_dir() / "links",
        tls=_tls(),
    )


async def open_link(address: Address, secret: bytes, name: str, handler: Handler) -> Connection:
    """A link to `name`; raise `LinkError`."""
    return await connect(address, CODEC, secret, handler, name=name, host=_host(), tls=_tls())


class ReplicaLinks:
    """The links of an ingress to replicas, opened when they are first needed and kept."""

    def __init__(self) -> None:
        self._open: dict[ReplicaId, Connection] = {}
        self._opening: dict[ReplicaId, asyncio.Task[Connection]] = {}
        self._refused: dict[ReplicaId, tuple[LinkError, float]] = {}

    def get(self, replica: ReplicaId) -> Connection | None:
        """The link, if there is one."""
        link = self._open.get(replica)
        return link if link is not None and link.is_open else None

    async def reach(self, replica: ReplicaId, address: Address, secret: bytes) -> None:
        """Return when there is a link; raise `LinkError` when there can be none now."""
        if self.get(replica) is not None:
            return
        error, until_s = self._refused.get(replica, (None, 0.0))
        if error is not None and time.monotonic() < until_s:
            raise error
        if replica not in self._opening:
            opening = open_link(address, secret, f"replica {replica}", Passive())
            task = asyncio.get_running_loop().create_task(opening)
            self._opening[replica] = task
            task.add_done_callback(lambda done: self._opened(replica, done))
        await asyncio.shield(self._opening[replica])

    def _opened(self, replica: ReplicaId, done: asyncio.Task[Connection]) -> None:
        self._opening.pop(replica, None)
        now_s = time.monotonic()
        self._refused = {r: found for r, found in self._refused.items() if found[1] > now_s}
        self._open = {r: link for r, link in self._open.items() if link.is_open}
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, LinkError):
            self._refused[replica] = (error, now_s + RETRY_S)
        elif error is None:
            self._open[replica] = done.result()
