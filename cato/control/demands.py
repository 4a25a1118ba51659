"""The demand on the pools, asked of their routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ray.exceptions import RayError

from cato.control import actors
from cato.core.demand import PoolDemand, together
from cato.core.ids import PoolName
from cato.core.topology import PoolSpec

log = logging.getLogger("cato.provisioner")

# A router that takes longer is busy or restarting; its pool is not scaled until it answers.
ANSWER_WITHIN_S = 2.0


class Demands:
    """What the routers told. Each tells an arrival once, so an answer that comes late, or while
    another shard of the pool does not answer, is kept until the pool's demand is taken."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[PoolDemand]] = {}
        self._told: dict[str, PoolDemand] = {}
        self._current: set[str] = set()  # routers that answered when last asked

    async def ask(self, pools: Sequence[PoolSpec]) -> None:
        """Ask the routers of these pools, and forget all others. Returns when all have answered, or
        after `ANSWER_WITHIN_S`."""
        routers = [name for pool in pools for name in actors.routers_of(pool)]
        for name in [n for n in self._asked if n not in routers]:
            self._asked.pop(name).cancel()
        self._told = {name: told for name, told in self._told.items() if name in routers}
        self._note()  # late answers: the routers are asked again for their present load
        self._current.clear()
        for name in routers:
            if name not in self._asked:
                self._asked[name] = asyncio.ensure_future(_demand(name))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=ANSWER_WITHIN_S)
        self._note()
        for name in self._asked:
            _warn(name, TimeoutError())

    def _note(self) -> None:
        for name, answer in list(self._asked.items()):
            if not answer.done():
                continue
            del self._asked[name]
            try:
                told = answer.result()
            except (ValueError, RayError) as error:
                _warn(name, error)
                continue
            untold = self._told.get(name)
            self._told[name] = told if untold is None else told.since(untold)
            self._current.add(name)

    def take(self, pools: Sequence[PoolSpec]) -> dict[PoolName, PoolDemand]:
        """The demand on each pool of which all routers answered when last asked."""
        found = {}
        for pool in pools:
            names = actors.routers_of(pool)
            if self._current.issuperset(names):
                found[pool.name] = together([self._told.pop(name) for name in names])
                self._current.difference_update(names)
        return found


async def _demand(router: str) -> PoolDemand:
    told: PoolDemand = await actors.get(router).demand.remote()
    return told


def _warn(router: str, error: Exception) -> None:
    log.warning("router %s did not report its demand: %r", router, error)
