"""What an ingress knows of the pools while the Provisioner or the Eviction Manager is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kits.local_slots import on_each
from test_provisioner import a_deployment
from test_shared_pool import JAVA, QUICK, a_pool

from cato.control import actors
from cato.control.shared_pool import SharedPool
from cato.core.errors import StartingError, UnknownNameError
from cato.core.ids import ModelName, PoolName
from cato.core.slots import HostedPart
from cato.core.topology import ModelSpec, PoolSpec, Topology
from cato.serve import ray_pools
from cato.serve.lease_link import LeaseLink
from cato.serve.ray_pools import RayPools
from cato.serve.token_streams import TokenStreams

CODER = ModelName("coder")
OWN = PoolSpec(PoolName("p"), ModelSpec(CODER, "simulated", "qwen"), (a_deployment(),))
SHARED = a_pool(JAVA)


class Method:
    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class ControlActors:
    """Provisioner and Eviction Manager; None is what they say before the control plane's visit."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        self.told_parts: tuple[HostedPart, ...] | None = None
        self.announce, self.parts = Method(self._announce), Method(self._parts)
        self.told_warnings: tuple[str, ...] = ()
        self.warnings = Method(self._warnings)

    async def _announce(self, _: object) -> Topology | None:
        return self.topology

    async def _warnings(self) -> tuple[str, ...]:
        return self.told_warnings

    async def _parts(self) -> tuple[HostedPart, ...] | None:
        return self.told_parts

    def tell_topology(self, *, has_shared: bool = True) -> None:
        self.topology = Topology((OWN,), shared_pools=(SHARED,) if has_shared else ())

    def tell_parts(self) -> None:
        self.told_parts = SharedPool(SHARED, on_each(SHARED, {JAVA: QUICK}), settle_s=0.0).parts()


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> ControlActors:
    control = ControlActors()
    monkeypatch.setattr(actors, "get", lambda _: control)
    # Both need Ray.
    monkeypatch.setattr(TokenStreams, "handle", lambda *_: None)
    monkeypatch.setattr(LeaseLink, "open", lambda _: None)
    return control


async def refreshed(pools: RayPools) -> RayPools:
    await pools._refresh_topology()
    await pools._refresh_shared()
    return pools


async def test_before_anything_is_known_every_model_is_starting(control: ControlActors) -> None:
    pools = await refreshed(RayPools({}))
    with pytest.raises(StartingError):
        pools.pool_of(CODER)
    assert pools.why_not_ready() == "the engines application has not started"


async def test_without_the_provisioner_only_models_of_shared_pools_are_known(
    control: ControlActors,
) -> None:
    control.tell_parts()
    pools = await refreshed(RayPools({}))
    assert pools.pool_of(JAVA).name == SHARED.part_of(JAVA)
    with pytest.raises(StartingError):
        pools.pool_of(CODER)
    assert pools.why_not_ready() == "the pools are not known yet"


async def test_without_the_eviction_manager_models_of_shared_pools_are_starting(
    control: ControlActors,
) -> None:
    control.tell_topology()
    pools = await refreshed(RayPools({}))
    assert pools.pool_of(CODER).name == OWN.name
    with pytest.raises(StartingError):
        pools.pool_of(JAVA)
    assert pools.why_not_ready() == f"models are not known yet of: {SHARED.name}"


async def test_once_all_is_known_other_models_are_unknown(control: ControlActors) -> None:
    control.tell_topology()
    control.tell_parts()
    pools = await refreshed(RayPools({}))
    with pytest.raises(UnknownNameError):
        pools.pool_of("other")
    assert pools.why_not_ready().startswith("no replica is ready in: ")


async def test_a_deployment_without_shared_pools_waits_for_none(control: ControlActors) -> None:
    control.tell_topology(has_shared=False)
    pools = await refreshed(RayPools({}))
    with pytest.raises(UnknownNameError):
        pools.pool_of(JAVA)


async def test_what_was_known_stays_known_when_both_are_lost(control: ControlActors) -> None:
    control.tell_topology()
    control.tell_parts()
    pools = await refreshed(RayPools({}))
    control.topology = control.told_parts = None
    await refreshed(pools)
    assert [pools.pool_of(m).name for m in (CODER, JAVA)] == [OWN.name, SHARED.part_of(JAVA)]
    with pytest.raises(UnknownNameError):
        pools.pool_of("other")


@pytest.mark.parametrize("is_told_by_actors", [False, True])
@pytest.mark.parametrize(
    "error", [ValueError("no node"), OSError("the GCS is away"), asyncio.CancelledError()]
)
async def test_a_cluster_that_cannot_be_read_does_not_end_the_refreshing(
    control: ControlActors,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    is_told_by_actors: bool,
) -> None:
    """Ray raises these while its GCS restarts; Serve cancels the calls of a replica that ends."""
    has_asked_again = asyncio.Event()

    async def application(_: str) -> None:
        if asked:
            has_asked_again.set()
        asked.append(1)
        raise error

    asked: list[int] = []
    monkeypatch.setattr(ray_pools, "REFRESH_S", 0.0)
    monkeypatch.setattr(ray_pools.ray_private, "application", application)
    if is_told_by_actors:
        control.announce = control.parts = Method(application)
    pools = RayPools({})
    pools.start()
    refresher = pools._refresher
    assert refresher is not None
    again = asyncio.create_task(has_asked_again.wait())
    await asyncio.wait((again, refresher), return_when=asyncio.FIRST_COMPLETED)
    assert not refresher.done()
    refresher.cancel()


async def test_what_an_operator_must_mend_is_known_until_it_is_mended(
    control: ControlActors,
) -> None:
    pools = RayPools({})
    for told in (("the last deployment failed",), ()):
        control.told_warnings = told
        assert (await refreshed(pools)).warnings == told
