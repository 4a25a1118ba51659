"""Links between the Ray processes of a deployment: listeners and open connections.

`cato.control.messages` lists what they carry. A pool's router owns the secret of the pool's links
and hands it out by an actor call: a caller that can call the actor may do everything that links
allow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayError

from cato.config.places import run_dir
from cato.control import actors
from cato.control.messages import CODEC, Door
from cato.core.errors import LinkError
from cato.core.ids import PoolName, ReplicaId
from cato.wire.link.connection import Connection, Handler, Passive
from cato.wire.link.endpoints import Address, Listener, Tls, connect, listen

log = logging.getLogger("cato.link")

# A peer that refused a link is not tried again for this long.
REFUSED_S = 1.0
# Retry interval for a router that is being restarted.
RETRY_S = 0.1
DOOR_S, DOOR_TRIES = 0.5, 8


def _tls() -> Tls | None:
    """Ray's own certificates, if its TLS is on."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return Tls(*(os.environ[name] for name in names))


def _host() -> str:
    """Raylets that share a machine count as separate hosts."""
    return str(ray.get_runtime_context().get_node_id())


async def take(handler: Handler, secret: bytes, name: str) -> Listener:
    """Listen for links of this process' pool; raise OSError."""
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
    """Open a link to `name`; raise `LinkError`."""
    return await connect(address, CODEC, secret, handler, name=name, host=_host(), tls=_tls())


async def link_to_router(
    pool: PoolName,
    handler: Handler,
    shard: int = 0,
    tries: int = DOOR_TRIES,
    *,
    is_shared: bool = False,
) -> tuple[Connection, bytes]:
    """A link to a shard of the pool's router in its current incarnation, and the pool's secret.

    The Eviction Manager is the router of all shared pools, with a door for each. Raise `LinkError`
    when the actor does not answer within `tries` times `DOOR_S`.
    """
    name = actors.EVICTION_MANAGER if is_shared else actors.router_name(pool, shard)
    door = await _door(name, tries, *((pool,) if is_shared else ()))
    return await open_link(door.address, door.secret, name, handler), door.secret


async def _door(name: str, tries: int, *args: object) -> Door:
    """The actor's answer. Ray is slow to report that the actor of a call has died, and a busy actor
    answers late: it is asked again while earlier answers may still arrive."""
    asked: set[asyncio.Future[Door]] = set()
    try:
        for _ in range(tries):
            asked.add(asyncio.ensure_future(actors.get(name).door.remote(*args)))
            done, asked = await asyncio.wait(asked, timeout=DOOR_S, return_when=FIRST_COMPLETED)
            for answer in done:
                if answer.exception() is None:
                    return answer.result()
            if done:
                await asyncio.sleep(RETRY_S)
    except (ValueError, RayError) as error:
        raise LinkError(name, f"there is no such actor: {error}") from error
    finally:
        for answer in asked:
            answer.cancel()
    raise LinkError(name, "the actor does not answer")


Dial = Callable[[Address, bytes, str, Handler], Coroutine[Any, Any, Connection]]
"""As `open_link`."""


class ReplicaLinks:
    """The links of an ingress to replicas, opened on first use and kept."""

    def __init__(self, dial: Dial = open_link) -> None:
        self._dial = dial
        self._open: dict[ReplicaId, Connection] = {}
        self._opening: dict[ReplicaId, asyncio.Task[Connection]] = {}
        self._refused: dict[ReplicaId, tuple[LinkError, float]] = {}

    def get(self, replica: ReplicaId) -> Connection | None:
        """The link, if there is one."""
        link = self._open.get(replica)
        return link if link is not None and link.is_open else None

    async def reach(self, replica: ReplicaId, address: Address, secret: bytes) -> None:
        """Return once a link is open; raise `LinkError` when none can be opened now."""
        if self.get(replica) is not None:
            return
        error, until_s = self._refused.get(replica, (None, 0.0))
        if error is not None and time.monotonic() < until_s:
            raise error
        if replica not in self._opening:
            opening = self._dial(address, secret, f"replica {replica}", Passive())
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
            log.warning("no link to a replica: streams use Serve's handle instead: %s", error)
            self._refused[replica] = (error, now_s + REFUSED_S)
        elif error is None:
            self._open[replica] = done.result()
