"""A shared pool with slots of two speeds, in one process: real keeper, simulated engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kits.local_slots import LocalSharedPool
from test_shared_pool import (
    GO,
    JAVA,
    QUICK,
    a_pool,
    an_invocation,
    ask,
    books,
    read,
    running,
    text_of,
)

from cato.control.shared_pool import SharedPool
from cato.core.errors import CapacityError, InputError
from cato.core.eviction import CopyId
from cato.core.ids import DeploymentName, HostId, ModelName, ReplicaId
from cato.core.slots import SlotReport, SlotState
from cato.core.topology import HostedModel, HostedOn, ModelSpec, SharedPoolPolicies, SharedPoolSpec

FAST, SLOW = DeploymentName("fast"), DeploymentName("slow")
CRAWLING = replace(QUICK, decode_base_s=0.004)
PROFILES = {JAVA: {FAST: QUICK, SLOW: CRAWLING}, GO: {FAST: QUICK, SLOW: CRAWLING}}
LARGE = ModelName("large")


def two_speeds(*models: HostedModel) -> SharedPoolSpec:
    """One slot of each speed; a fast one has 80 GB of memory, a slow one 24."""
    spec = a_pool(policies=SharedPoolPolicies())
    (shape,) = spec.deployments
    fast = replace(shape, name=FAST, memory_bytes=80 * 10**9)
    slow = replace(shape, name=SLOW, memory_bytes=24 * 10**9)
    return replace(spec, models=models, deployments=(fast, slow))


def a_model(name: ModelName, slo_s: float, gb: int = 10) -> HostedModel:
    on = {SLOW: HostedOn(load_s=0.04)}
    spec = ModelSpec(name, "simulated", "qwen")
    return HostedModel(spec, load_s=0.02, weights_bytes=gb * 10**9, slo_s=slo_s, on=on)


async def test_urgent_calls_are_served_by_fast_slots_and_others_by_slow_ones() -> None:
    spec = two_speeds(a_model(JAVA, slo_s=10.0), a_model(GO, slo_s=1.0))
    async with LocalSharedPool(spec, PROFILES) as pool:
        for id, model, shape in (("1", JAVA, SLOW), ("2", GO, FAST), ("3", JAVA, SLOW)):
            lease, text = await ask(pool, id, model)
            assert (lease.deployment, text) == (shape, text_of(model))
            slot = pool.slots[lease.replica_id].replica
            assert slot.profile == PROFILES[model][shape]
        where = {s.deployment: s.model for s in books(pool).picture().slots}
        assert where == {SLOW: JAVA, FAST: GO}
        assert {(r.deployment, r.model) for r in books(pool).residents()} == {
            (SLOW, JAVA),
            (FAST, GO),
        }


async def test_a_large_model_takes_turns_on_the_slots_where_it_fits() -> None:
    spec = two_speeds(a_model(GO, slo_s=1.0), a_model(LARGE, slo_s=10.0, gb=60))
    profiles = {GO: PROFILES[GO], LARGE: {FAST: QUICK}}
    async with LocalSharedPool(spec, profiles) as pool:
        assert {p.model.name: (p.deployments, p.slots) for p in books(pool).parts()} == {
            GO: ((FAST, SLOW), 2),
            LARGE: ((FAST,), 1),
        }
        for id in ("1", "2"):
            lease, text = await ask(pool, id, LARGE)
            assert (lease.deployment, text) == (FAST, text_of(LARGE))
            lease, _ = await ask(pool, f"go-{id}", GO)
            assert lease.deployment == SLOW  # empty, where the fast one would have to be emptied


async def test_a_model_added_at_run_time_stays_where_it_was_measured() -> None:
    spec = two_speeds(a_model(JAVA, slo_s=1.0))
    async with LocalSharedPool(spec, PROFILES) as pool:
        added = replace(a_model(GO, slo_s=0.5), measured_on=SLOW)
        books(pool).add_model(added, CRAWLING)
        lease = await pool.lease(GO, an_invocation("1"))
        assert lease.deployment == SLOW
        assert await read(pool, GO, lease) == text_of(GO)
        await pool.lease(GO, an_invocation("2"))  # it keeps the slow slot busy
        with pytest.raises(CapacityError, match="none of its slots is idle in slow"):
            await books(pool).measure(added, QUICK)
        gone = replace(added, measured_on=DeploymentName("gone"))
        assert "fits on none of the pool's deployments (fast, slow): measure it again" in str(
            books(pool).why_not_add(gone)
        )


async def test_a_refused_change_of_a_model_changes_nothing() -> None:
    spec = two_speeds(a_model(JAVA, slo_s=1.0))
    async with LocalSharedPool(spec, PROFILES) as pool:
        added = a_model(GO, slo_s=30.0)
        books(pool).add_model(added, CRAWLING)
        async with running(pool, "1", GO) as (lease, _):
            before = books(pool).parts(), dict(books(pool).hosted), dict(books(pool).profiles)
            other = FAST if lease.deployment == SLOW else SLOW
            with pytest.raises(InputError, match="run where it no longer fits"):
                books(pool).add_model(replace(added, measured_on=other), QUICK)
            now = books(pool).parts(), books(pool).hosted, books(pool).profiles
            assert now == before
        impossible = replace(a_model(LARGE, slo_s=1.0), min_copies=2, max_copies=1)
        with pytest.raises(InputError, match="max_copies"):
            books(pool).add_model(impossible, QUICK)
        assert {part.model.name for part in books(pool).parts()} == {JAVA, GO}
        books(pool).add_model(a_model(LARGE, slo_s=1.0), QUICK)
        assert (await ask(pool, "2", LARGE))[1] == text_of(LARGE)


async def test_slots_of_former_deployments_are_not_used() -> None:
    spec = two_speeds(a_model(JAVA, slo_s=1.0))
    pool = SharedPool(spec, {JAVA: PROFILES[JAVA]}, settle_s=0.0)
    former = DeploymentName("cards-slots")
    slot, host = ReplicaId("old"), HostId("h")
    pool.report(SlotReport(slot, 1, host, former, SlotState.READY, CopyId("copy-1"), JAVA))
    assert pool.picture().slots == ()
