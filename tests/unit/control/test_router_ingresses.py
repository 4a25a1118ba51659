"""A router's queue holds no place for an ingress that died; a router heeds new measurements."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from ingress_kit import until
from kits.builders import a_profile, a_report, an_invocation

from cato.control import leases
from cato.control import router as module
from cato.control.router import ReplicaRouter
from cato.core.events import (
    InvocationEnded,
    InvocationWithdrawn,
    PoliciesChanged,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.topology import PoolPolicies
from cato.estimators.speed_meter import LEAST_CALLS
from cato.policies.admission.saber import SaberAdmission
from cato.policies.registry import policies_of
from cato.telemetry.event_log import read_log


class Clock:
    """The router's clock, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(module, "_now_s", clock)
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=clock))
    return clock


def a_router() -> ReplicaRouter:
    return ReplicaRouter(PoolName("p"), PoolPolicies(), a_profile())


async def test_what_is_cancelled_is_withdrawn_and_keeps_no_place() -> None:
    router = a_router()
    lost = asyncio.ensure_future(router.offer(an_invocation("lost")))
    kept = asyncio.ensure_future(router.offer(an_invocation("kept")))
    await asyncio.sleep(0)
    lost.cancel()
    await asyncio.wait({lost})
    assert (await router.picture()).queued == 1
    router.take(a_report())
    assert (await asyncio.wait_for(kept, 10)).invocation_id == InvocationId("kept")
    assert (await router.picture()).queued == 0


async def test_a_lease_that_was_granted_to_the_dead_is_free_at_once() -> None:
    router = a_router()
    lost = asyncio.ensure_future(router.offer(an_invocation("lost")))
    await asyncio.sleep(0)
    router.take(a_report())
    lost.cancel()  # the lease is on its way to it
    await asyncio.wait({lost})
    assert [r.held for r in (await router.picture()).replicas] == [0]


async def test_an_offer_made_again_outlives_the_end_of_the_first_link() -> None:
    router = a_router()
    first = asyncio.ensure_future(router.offer(an_invocation("i")))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(router.offer(an_invocation("i")))
    await asyncio.wait({first})
    assert first.cancelled()
    assert (await router.picture()).queued == 1
    router.take(a_report())
    assert (await asyncio.wait_for(second, 10)).invocation_id == InvocationId("i")


async def test_a_restarted_router_gets_the_same_offers_again_and_leaks_no_slot() -> None:
    first, second = a_router(), a_router()
    first.take(a_report())
    lease = await first.offer(an_invocation("runs"))
    second.take(a_report(held=["runs"]))
    waiting = asyncio.ensure_future(second.offer(an_invocation("waits")))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "the one slot is still held"
    second.take(InvocationEnded(0.0, lease.invocation_id, lease.attempt, 5, "done"))
    assert (await waiting).replica_id == ReplicaId("r")
    again = await second.offer(an_invocation("waits"))
    assert again == await waiting, "an offer that was answered is answered the same"
    second.take(InvocationEnded(0.0, InvocationId("waits"), 1, 5, "done"))
    assert [r.held for r in (await second.picture()).replicas] == [0]


async def test_a_withdrawal_that_comes_late_leaves_the_next_attempt_waiting() -> None:
    router = a_router()
    again = asyncio.ensure_future(router.offer(an_invocation("i", attempt=2)))
    await asyncio.sleep(0)
    router.take(InvocationWithdrawn(0.0, InvocationId("i"), 1, "its stream broke"))
    router.take(a_report())
    assert (await asyncio.wait_for(again, 10)).attempt == 2
    router.take(InvocationWithdrawn(0.0, InvocationId("i"), 2, "the client left"))
    assert [r.held for r in (await router.picture()).replicas] == [0]


async def test_a_changed_profile_reaches_the_policies_of_a_living_router(
    clock: Clock, tmp_path: Path
) -> None:
    names, first, second = PoolPolicies("saber"), a_profile(), a_profile().slowed(2.0)
    assert policies_of(names, first) != policies_of(names, second)
    router = ReplicaRouter(PoolName("p"), names, first, str(tmp_path))
    await router.configure(names, first)  # nothing new
    await router.configure(names, second)
    await router.configure(names, second)
    router.take(a_report())
    await asyncio.sleep(0.05)  # a tick, which writes out what was logged
    (path,) = tmp_path.iterdir()
    changes = [s.event for s in read_log(path).steps if isinstance(s.event, PoliciesChanged)]
    assert [c.policies for c in changes] == [policies_of(names, second)]


async def test_what_waited_is_dealt_out_when_the_other_replicas_have_reported(clock: Clock) -> None:
    """Early binding, after a restart: the first to report had been given everything."""
    router = ReplicaRouter(PoolName("p"), PoolPolicies("cato"), a_profile())
    asked = [asyncio.ensure_future(router.offer(an_invocation(f"i{n}"))) for n in range(6)]
    await asyncio.sleep(0)
    for id in ("a", "b"):
        router.take(a_report(id))
    await asyncio.sleep(0.05)  # a tick
    loads = [(r.held, r.queued) for r in (await router.picture()).replicas]
    assert loads == [(1, 2), (1, 2)]
    # A router that stands by takes over more than once.
    for id in ("a", "b"):
        router.lose(ReplicaId(id), "went home")
    await asyncio.sleep(0.05)
    for id in ("a", "b"):
        router.take(a_report(id))
    await asyncio.sleep(0.05)
    queued = [r.queued for r in (await router.picture()).replicas]
    assert max(queued) - min(queued) <= 1
    for waiting in asked:
        waiting.cancel()


async def test_saber_is_fitted_to_the_speeds_that_its_engines_have(
    clock: Clock, tmp_path: Path
) -> None:
    names, profile = PoolPolicies("saber"), a_profile(token_s=0.01, batch_token_s=0.001)
    router = ReplicaRouter(PoolName("p"), names, profile, str(tmp_path))
    for n in range(LEAST_CALLS):
        router.take(a_report(slots=2, profile=profile))
        called = [an_invocation(f"{id}{n}") for id in "ab"]
        given = await asyncio.gather(*map(router.offer, called))
        clock.now_s += 4.0  # after five the replica would be silent
        for call, lease in zip(called, given, strict=True):  # 20 tokens/s; the profile expects 100
            router.take(InvocationEnded(0.0, call.id, lease.attempt, 80, "done"))
            await asyncio.sleep(0)  # the router takes note after it has answered
    (log,) = tmp_path.iterdir()

    def changes() -> list[PoliciesChanged]:
        if log.stat().st_size == 0:
            return []  # written at the next tick
        steps = read_log(log).steps
        return [s.event for s in steps if isinstance(s.event, PoliciesChanged)]

    await until(lambda: bool(changes()), within_s=60)
    admission = changes()[-1].policies.admission
    assert isinstance(admission, SaberAdmission)
    assert admission.model.speed(2) == pytest.approx(20.0, rel=0.1)
