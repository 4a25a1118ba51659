"""A slot's reports while its engine dies and a newer order comes."""

from __future__ import annotations

import asyncio

import pytest
from kits.builders import a_profile

from cato.control.messages import Left
from cato.control.staged import Staged
from cato.core.errors import CatoError
from cato.core.eviction import CopyId
from cato.core.ids import DeploymentName, HostId, ModelName, ReplicaId
from cato.core.profile import Profile
from cato.core.slots import SlotOrder, SlotState
from cato.core.topology import EngineSpec, HostedModel, ModelSpec
from cato.engines.base import Engine
from cato.engines.simulated import SimulatedEngine
from cato.serve.ordered_models import OrderedModels
from cato.serve.replica import Replica

FIRST, SECOND = CopyId("first"), CopyId("second")


class Mortal(SimulatedEngine):
    """An engine whose death the test chooses."""

    def __init__(self) -> None:
        super().__init__(a_profile(), EngineSpec(kind="simulated"))
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait_dead(self) -> str:
        return await asyncio.shield(self.death)


class Loader:
    """Loads the first model at once, and never the second."""

    asleep = ()

    def __init__(self) -> None:
        self.engine = Mortal()

    async def load(self, order: SlotOrder, previous: Engine | None) -> Engine:
        if order.copy_id == SECOND:
            await asyncio.Event().wait()
        return self.engine

    async def keep(self, models: tuple[ModelName, ...]) -> None:
        pass

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        raise NotImplementedError


async def _measured(copy_id: CopyId, found: Staged | CatoError) -> None:
    raise NotImplementedError


def an_order(copy_id: CopyId) -> SlotOrder:
    model = ModelSpec(ModelName(copy_id), "simulated", "qwen")
    return SlotOrder(copy_id, HostedModel(model), a_profile())


async def some(steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


@pytest.mark.parametrize("steps", range(12))
async def test_the_death_of_the_engine_before_fails_no_newer_load(steps: int) -> None:
    """At whatever step of the loop it is noticed."""
    loader = Loader()
    holding = OrderedModels(HostId("h"), DeploymentName("d"), loader, _measured)
    replica = Replica(ReplicaId("r"), holding, lambda _: None)
    keeping = asyncio.create_task(holding.keep_forever())
    replica.note(an_order(FIRST))
    await some(40)
    assert replica.engine is loader.engine
    replica.note(an_order(SECOND))
    await some(steps)
    loader.engine.death.set_result("killed by signal 9")
    await some(40)
    report = holding.report()
    keeping.cancel()
    await holding.stop()
    assert not isinstance(report, Left)
    assert (report.copy_id, report.state) == (SECOND, SlotState.LOADING)
