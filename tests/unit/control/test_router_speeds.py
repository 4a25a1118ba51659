"""A router fits SABER's law of speed to the calls that its pool has answered."""

from __future__ import annotations

import asyncio

from kits.builders import a_profile, a_report, an_invocation

from cato.control.router import ReplicaRouter
from cato.core.events import InvocationEnded
from cato.core.ids import PoolName, ReplicaId
from cato.core.topology import PoolPolicies
from cato.estimators.speed_meter import LEAST_CALLS
from cato.policies.admission.saber import SaberAdmission


async def test_the_law_follows_calls_as_they_end() -> None:
    router = ReplicaRouter(PoolName("p"), PoolPolicies("saber"), a_profile())
    router.take(a_report(ReplicaId("r")))
    before = admission_of(router)
    for n in range(LEAST_CALLS):
        call = an_invocation(f"i{n}")
        lease = await router.offer(call)
        await asyncio.sleep(0.001)
        router.take(InvocationEnded(0.0, call.id, lease.attempt, 1_000_000, "done"))
        await asyncio.sleep(0)  # the router takes note after it has answered
    await router._refit()
    after = admission_of(router)
    # A million tokens, where the profile expects a hundred a second, however slow this machine is.
    assert after.model.speed(1) > 2 * before.model.speed(1)


def admission_of(router: ReplicaRouter) -> SaberAdmission:
    admission = router._core._backlog.policies.admission
    assert isinstance(admission, SaberAdmission)
    return admission
