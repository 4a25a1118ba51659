"""The router tells everyone concerned that a newer run of a buffer replaced theirs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.control.messages import Stop
from cato.control.router import ReplicaRouter
from cato.core.errors import SupersededError
from cato.core.ids import PoolName, ReplicaId, RunId
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from tests.unit.link_kit import joined

REPLICA = ReplicaId("r")


async def a_router() -> ReplicaRouter:
    """With one replica that runs one call at a time."""
    router = ReplicaRouter(PoolName("p"), PoolPolicies(), a_profile())
    router.take(a_report(REPLICA))
    return router


def a_call(run: str, *, began_s_ago: float, buffer: str = "b") -> Invocation:
    """As an ingress offers it: times count from now."""
    call = an_invocation(f"{run}.fill", arrived_at_s=-began_s_ago)
    return replace(call, run_id=RunId(run), buffer=buffer, began_at_s=-began_s_ago)


async def test_a_replica_is_told_to_stop_and_the_ingress_where_it_asks_again(
    tmp_path: Path,
) -> None:
    router = await a_router()
    older, newer = a_call("old", began_s_ago=2.0), a_call("new", began_s_ago=1.0)
    async with joined(router, REPLICA, tmp_path) as orders:
        assert (await router.offer(older)).replica_id == REPLICA
        assert (await router.offer(newer)).replica_id == REPLICA
        assert await orders.next() == Stop(older.id, 1)
    with pytest.raises(SupersededError, match="run new"):
        await router.offer(older.continued(2, 5))


async def test_an_ingress_that_waits_is_told_at_once() -> None:
    router = await a_router()
    await router.offer(a_call("busy", began_s_ago=3.0, buffer=""))
    waits = asyncio.ensure_future(router.offer(a_call("old", began_s_ago=2.0)))
    await asyncio.sleep(0)
    newer = asyncio.ensure_future(router.offer(a_call("new", began_s_ago=1.0)))
    with pytest.raises(SupersededError, match="run new"):
        await asyncio.wait_for(waits, 5)
    assert (await router.picture()).queued == 1
    newer.cancel()
