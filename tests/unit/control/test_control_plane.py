"""The control plane outlives a `user_config` that it cannot use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from kits.builders import a_profile
from ray.exceptions import RayError
from test_provisioner import a_deployment
from test_shared_pool import JAVA, QUICK, SHAPE, a_pool

from cato.control import actors
from cato.core.errors import ConfigError
from cato.core.ids import DeploymentName, HostId, ModelName, PoolName, ReplicaId
from cato.core.residency import Resident
from cato.core.topology import ModelSpec, PoolPolicies, PoolSpec, Topology
from cato.core.usage_outbox import UsageParcel
from cato.serve import control_plane
from cato.serve.control_plane import ControlPlane

POOL, SHARED = PoolName("p"), a_pool(JAVA)
SPEC = PoolSpec(POOL, ModelSpec(ModelName("m"), "simulated", "qwen"), (a_deployment(),))
GOOD = {"pools": {POOL: {"routing": "power-of-two"}}}
# Both sections are wrong, and each has something right.
BAD = {
    "pools": {POOL: {"routing": "power-of-tow", "ordering": "fcfs"}},
    "shared_pools": {"crads": {"eviction": "lru"}},
}


class Actors:
    """Control actors that keep what they were last told."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], tuple[Any, ...]] = {}
        self.answers: dict[str, object] = {}  # by method
        self.lost: set[str] = set()
        self.hanging: set[str] = set()
        self.is_stopping = False  # the control plane's own replica, by Serve

    def get(self, name: str) -> Any:
        return _Handle(self, name)

    def create(self, cls: type, name: str, *args: object) -> Any:
        return self.get(name)

    async def stops(self) -> bool:
        if "controller" in self.lost:
            raise RayError("the actor died")
        return self.is_stopping

    @property
    def policies(self) -> object:
        return self.told[actors.router_name(POOL), "configure"][0]


class _Handle:
    def __init__(self, all_: Actors, name: str, method: str = "") -> None:
        self._all, self._name, self._method = all_, name, method

    def __getattr__(self, method: str) -> _Handle:
        return _Handle(self._all, self._name, method)

    async def remote(self, *args: object) -> Any:
        if self._name in self._all.lost:
            raise RayError("the actor died")
        if self._name in self._all.hanging:
            await asyncio.Event().wait()
        self._all.told[self._name, self._method] = args
        return self._all.answers.get(self._method)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Actors:
    local = Actors()
    monkeypatch.setattr(actors, "get", local.get)
    monkeypatch.setattr(actors, "create", local.create)
    monkeypatch.setattr(actors, "remove_routers_but", lambda _: None)
    monkeypatch.setattr(control_plane.ray_private, "is_stopping", local.stops)
    return local


@pytest.fixture
async def control(told: Actors) -> AsyncIterator[ControlPlane]:
    control = await begun()
    yield control
    await end(control)


async def begun() -> ControlPlane:
    control = ControlPlane.__new__(ControlPlane)
    profiles = {DeploymentName("d"): a_profile()}
    hosted = {SHARED.name: {JAVA: {SHAPE: QUICK}}}
    await control.__init__(Topology((SPEC,), shared_pools=(SHARED,)), profiles, {}, hosted)  # type: ignore[misc]
    return control


async def end(control: ControlPlane) -> None:
    control._task.cancel()
    await asyncio.gather(control._task, return_exceptions=True)


async def test_an_actor_that_hangs_keeps_no_other_from_its_configuration(
    told: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "START_WITHIN_S", 0.02)
    monkeypatch.setattr(control_plane, "ASSERT_S", 0.02)
    told.hanging = {actors.PROFILER}
    async with asyncio.timeout(5):
        control = await begun()
        assert told.policies == PoolPolicies()
        told.told.clear()  # the router was restarted
        while (actors.router_name(POOL), "configure") not in told.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await end(control)


async def test_one_that_drains_tells_nothing_more_to_the_actors_of_the_next(
    told: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "ASSERT_S", 0.02)
    control = await begun()
    told.lost = {"controller"}
    told.told.clear()
    async with asyncio.timeout(5):
        while not told.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        told.lost, told.is_stopping = set(), True
        await control._task
    await end(control)


async def test_a_bad_user_config_changes_nothing_and_is_told(
    control: ControlPlane, told: Actors, caplog: pytest.LogCaptureFixture
) -> None:
    await control.reconfigure(GOOD)
    good = told.policies
    assert good == PoolPolicies(routing="power-of-two")
    await control.reconfigure(BAD)
    await control._assert()
    assert told.policies == good
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert "power-of-tow" in record.getMessage()
    assert "crads" in record.getMessage()
    *_, problem = told.told[actors.PROVISIONER, "register"]
    assert str(problem).startswith("the latest user_config is wrong and not used")
    assert "crads" in str(problem)
    await control.reconfigure({})
    *_, problem = told.told[actors.PROVISIONER, "register"]
    assert problem == ""
    assert told.policies == PoolPolicies()


async def test_a_new_replica_with_a_bad_user_config_keeps_the_policies_of_the_file(
    control: ControlPlane, told: Actors
) -> None:
    await control.reconfigure(BAD)
    assert told.policies == PoolPolicies()


async def test_a_change_by_hand_tells_its_problems(control: ControlPlane, told: Actors) -> None:
    with pytest.raises(ConfigError):
        await control.change(BAD)
    assert told.policies == PoolPolicies()


async def test_a_user_config_reaches_an_actor_that_is_lost_meanwhile_later(
    control: ControlPlane, told: Actors
) -> None:
    told.lost = {actors.router_name(POOL)}
    await control.reconfigure(GOOD)
    told.lost = set()
    await control._assert()
    assert told.policies == PoolPolicies(routing="power-of-two")


async def test_accelerator_time_is_counted_once_whichever_actor_is_lost(
    control: ControlPlane, told: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "COUNT_S", 0.0)
    resident = Resident(
        ReplicaId("r"), POOL, DeploymentName("d"), ModelName("m"), HostId("h"), "gpu", 1, "ready", 1
    )
    began_s = control._counted_at_s
    told.answers = {"residents": (resident,), "kept": ("first", 0), "record": "first"}
    for lost in (actors.EVICTION_MANAGER, actors.PROFILER):
        told.lost = {lost}
        with pytest.raises(RayError):
            await control._count_cards()
    told.lost = set()
    await control._count_cards()
    first = parcels(told)
    assert held_s(first) == pytest.approx(control._counted_at_s - began_s)
    told.answers |= {"kept": ("second", 0), "record": "second"}  # restarted, perhaps before a write
    await control._count_cards()
    again = parcels(told)
    assert again[0] == first[0]  # of this number the store keeps one
    assert held_s(again) == pytest.approx(control._counted_at_s - began_s)
    told.answers["kept"] = ("second", 2)
    await control._count_cards()
    assert [p.number for p in parcels(told)] == [3]


def parcels(told: Actors) -> tuple[UsageParcel, ...]:
    """The parcels that the Profiler got last."""
    _, sent, _ = told.told[actors.PROFILER, "record"]
    return cast("tuple[UsageParcel, ...]", sent)


def held_s(parcels: tuple[UsageParcel, ...]) -> float:
    return sum(held.card_s for parcel in parcels for held in parcel.held)
