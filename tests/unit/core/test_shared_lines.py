"""A model of a shared pool has what every pool has: order, tenants, refusal, preemption, a log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from kits.local_slots import LocalSharedPool
from test_placement import BY_ARRIVAL, a_call, a_model, wants

from cato.core.commands import Dispatch
from cato.core.errors import CapacityError
from cato.core.events import InvocationEnded, InvocationOffered
from cato.core.eviction import Card, CardId, CardPolicies
from cato.core.fairness import CREDIT_TOKENS
from cato.core.ids import (
    DeploymentName,
    HostId,
    InvocationId,
    ModelName,
    NodeId,
    PoolName,
    RunId,
    TaskName,
)
from cato.core.pool.placement import Placement
from cato.core.pool.placement_events import CardAdded, Load, LoadFinished, Served
from cato.core.profile import UNMEASURED
from cato.core.shared import ModelAdded, OfLine, SharedOrchestrator, Step, Told
from cato.core.snapshot import Invocation
from cato.core.topology import (
    DeploymentSpec,
    EngineSpec,
    HostedModel,
    ModelSpec,
    SharedPoolPolicies,
    SharedPoolSpec,
)
from cato.engines.base import PREEMPTED, Endpoint, EngineRequest
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import BatchedPerModel
from cato.policies.eviction.sites import ShapeBlind
from cato.sim.replay import differences, replay_core
from cato.telemetry.event_log import read_log

JAVA, GO = ModelName("java"), ModelName("go")
PROFILE = replace(
    UNMEASURED, load_s=0.02, prefill_base_s=0.001, decode_base_s=0.01, decode_per_request_s=0.0
)


def a_spec(policies: SharedPoolPolicies, max_running: int = 1) -> SharedPoolSpec:
    models = tuple(HostedModel(ModelSpec(n, "simulated", "qwen")) for n in (JAVA, GO))
    engine = EngineSpec("simulated", max_num_seqs=max_running)
    slots = DeploymentSpec(
        DeploymentName("cards-slots"), "cpu", engine, initial_replicas=1, standby=0
    )
    return SharedPoolSpec(PoolName("cards"), models, (slots,), policies)


def an_invocation(id: str, deadline_s: float = 1.5) -> Invocation:
    return Invocation(
        InvocationId(id), RunId(id), TaskName("test"), NodeId("call"), 10, 8, 0.0, deadline_s,
        until_first_token=True,
    )  # fmt: skip


async def read(pool: LocalSharedPool, lease: Dispatch, tokens: int) -> list[str | None]:
    """How each piece of the answer ended."""
    body = {"prompt": "def f(x):", "max_tokens": tokens, "ignore_eos": True}
    request = EngineRequest(lease.invocation_id, Endpoint.COMPLETIONS, body)
    return [chunk.finish_reason async for chunk in pool.stream(JAVA, lease, request)]


async def queued(pool: LocalSharedPool, calls: int) -> None:
    async with asyncio.timeout(10):
        while pool.present_books().picture().queued != calls:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_its_scheduler_says_who_is_next() -> None:
    async def scenario() -> None:
        spec = a_spec(SharedPoolPolicies("lru", "batched", scheduler="edf"))
        async with LocalSharedPool(spec, dict.fromkeys((JAVA, GO), PROFILE)) as pool:
            lease = await pool.lease(JAVA, an_invocation("runs"))
            later = asyncio.create_task(pool.lease(JAVA, an_invocation("later", 100.0)))
            await queued(pool, 1)
            sooner = asyncio.create_task(pool.lease(JAVA, an_invocation("sooner", 50.0)))
            await queued(pool, 2)
            await read(pool, lease, 4)
            assert (await asyncio.wait_for(sooner, 10)).invocation_id == "sooner"
            assert not later.done()
            later.cancel()

    asyncio.run(scenario())


def test_it_refuses_what_would_be_late() -> None:
    async def scenario() -> None:
        spec = a_spec(SharedPoolPolicies("lru", "batched", refuse_late=True))
        async with LocalSharedPool(spec, dict.fromkeys((JAVA, GO), PROFILE)) as pool:
            await pool.lease(JAVA, an_invocation("runs"))
            with pytest.raises(CapacityError, match="it would miss its SLO"):
                await pool.lease(JAVA, an_invocation("late", 0.01))

    asyncio.run(scenario())


def test_a_newer_run_of_a_buffer_ends_what_runs_of_the_older_one() -> None:
    async def scenario() -> None:
        spec = a_spec(SharedPoolPolicies("lru", "batched"))
        async with LocalSharedPool(spec, dict.fromkeys((JAVA, GO), PROFILE)) as pool:
            older = replace(an_invocation("old"), buffer="b", began_at_s=-2.0)
            lease = await pool.lease(JAVA, older)
            stream = asyncio.create_task(read(pool, lease, 2000))
            await asyncio.sleep(0.05)
            newer = replace(an_invocation("new"), buffer="b", began_at_s=-1.0)
            again = await asyncio.wait_for(pool.lease(JAVA, newer), 10)
            assert again.replica_id == lease.replica_id
            assert (await asyncio.wait_for(stream, 10))[-1] == PREEMPTED

    asyncio.run(scenario())


@pytest.mark.parametrize("scheduler", ["fcfs", "foresight"])
@pytest.mark.parametrize("dispatch", ["batched", "in-order"])
def test_the_log_of_its_line_replays(dispatch: str, scheduler: str, tmp_path: Path) -> None:
    async def ask(pool: LocalSharedPool, model: ModelName, id: str) -> None:
        lease = await pool.lease(model, an_invocation(id))
        body = {"prompt": "def f(x):", "max_tokens": 30, "ignore_eos": True}
        request = EngineRequest(lease.invocation_id, Endpoint.COMPLETIONS, body)
        assert [chunk async for chunk in pool.stream(model, lease, request)]

    async def scenario() -> None:
        spec = a_spec(SharedPoolPolicies("lru", dispatch, scheduler=scheduler), max_running=2)
        profiles = dict.fromkeys((JAVA, GO), PROFILE)
        async with LocalSharedPool(spec, profiles, log_folder=str(tmp_path)) as pool:
            await asyncio.gather(*(ask(pool, (JAVA, GO)[i % 2], f"{i}") for i in range(8)))
            pool.present_books().close()

    asyncio.run(scenario())
    recordings = [read_log(path) for path in sorted(tmp_path.iterdir())]
    assert [r.pool for r in recordings] == ["cards/go", "cards/java"]
    for recording in recordings:
        assert differences(recording, replay_core(recording)) == []
        assert sum(len(step.commands) for step in recording.steps) == 4


def a_loaded_pool(max_running: int = 1) -> SharedOrchestrator:
    """One card, which holds `a`."""
    policies = CardPolicies(LeastRecentlyUsed(), BatchedPerModel(), ShapeBlind())
    pool = SharedOrchestrator(lambda tell: Placement(policies, tell))
    facts = a_model("a", max_running=max_running)
    served = Served(facts, UNMEASURED, DeploymentName("cards"))
    pool.handle(CardAdded(0.0, Card(CardId("card-0"), HostId("h"), DeploymentName("cards"))))
    pool.handle(ModelAdded(0.0, PoolName("p/a"), (served,), BY_ARRIVAL))
    steps = offer(pool, a_call(wants("0", "a", 0.0)), 0.0)
    (load,) = (s for s in steps if isinstance(s, Load))
    pool.handle(LoadFinished(1.0, load.copy_id))
    return pool


def offer(pool: SharedOrchestrator, call: Invocation, now_s: float) -> tuple[Step, ...]:
    return pool.handle(OfLine(ModelName("a"), InvocationOffered(now_s, call)))


def test_tenants_share_it() -> None:
    pool = a_loaded_pool()
    greedy = replace(
        a_call(wants("g", "a", 1.0)), tenant="greedy", prompt_tokens=int(CREDIT_TOKENS)
    )
    for i in range(3):
        offer(pool, replace(greedy, id=InvocationId(f"g{i}"), arrived_at_s=1.0 + i / 10), 2.0)
    modest = replace(a_call(wants("m", "a", 2.5)), tenant="modest")
    offer(pool, modest, 2.5)
    started: list[str] = []
    running = "0"
    for i in range(3):
        ended = InvocationEnded(3.0 + i, InvocationId(running), 1, 10, "done")
        steps = pool.handle(OfLine(ModelName("a"), ended))
        (running,) = (id for s in steps if isinstance(s, Told) for id in s.started)
        started.append(running)
    assert started == ["g0", "m", "g1"]
