"""A shared pool with its real books, slots and simulated engines, in one process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from kits.local_slots import LocalSharedPool, LocalSlot, on_each

from cato.control import shared_pool
from cato.control.eviction import EvictionManager
from cato.control.shared_pool import SETTLE_S, SharedPool
from cato.control.slots import Slots
from cato.control.staged import Staged
from cato.core.commands import Dispatch
from cato.core.errors import (
    CapacityError,
    EngineDeadError,
    EngineError,
    InputError,
    NotLoadedError,
    ReplicaLostError,
    SupersededError,
    UnknownNameError,
)
from cato.core.events import InvocationWithdrawn
from cato.core.eviction import CardId, CopyId
from cato.core.ids import (
    DeploymentName,
    HostId,
    InvocationId,
    ModelName,
    NodeId,
    PoolName,
    ReplicaId,
    RunId,
    TaskName,
)
from cato.core.profile import UNMEASURED, Profile
from cato.core.slots import SlotOrder, SlotReport, SlotState
from cato.core.snapshot import Invocation
from cato.core.topology import (
    AdapterSpec,
    DeploymentSpec,
    EngineSpec,
    HostedModel,
    ModelSpec,
    SharedPoolPolicies,
    SharedPoolSpec,
    TemplateFacts,
)
from cato.engines.base import Endpoint, Engine, EngineRequest, EngineState
from cato.engines.simulated import SimulatedEngine, simulated_seed, simulated_text
from cato.profiles.schema import ProfileFile, Provenance
from cato.serve.engine_loader import EngineLoader
from cato.serve.lease_link import LeaseLink
from cato.store.records import RegisteredModel
from cato.wire.link.connection import Connection, Handler
from tests.unit.link_kit import SECRET, dial, taken

SHAPE = DeploymentName("cards-slots")
JAVA, GO, RUST = ModelName("java"), ModelName("go"), ModelName("rust")
PROMPT = "def f(x):\n    return"
QUICK = replace(
    UNMEASURED,
    load_s=0.02,
    prefill_base_s=0.001,
    prefill_per_batch_token_s=0.0,
    decode_base_s=0.001,
    decode_per_request_s=0.0,
)
# One that still runs when the test looks.
SLOW = replace(QUICK, decode_base_s=0.02)
LONG_TOKENS = 2000


def a_pool(
    *names: ModelName,
    slots: int = 1,
    max_running: int = 4,
    policies: SharedPoolPolicies | None = None,
) -> SharedPoolSpec:
    models = tuple(HostedModel(ModelSpec(n, "simulated", "qwen")) for n in names)
    engine = EngineSpec("simulated", max_num_seqs=max_running)
    deployment = DeploymentSpec(SHAPE, "cpu", engine, initial_replicas=slots, standby=0)
    chosen = policies or SharedPoolPolicies("lru", "batched")
    return SharedPoolSpec(PoolName("cards"), models, (deployment,), chosen)


def an_invocation(id: str, attempt: int = 1) -> Invocation:
    return Invocation(
        id=InvocationId(id),
        run_id=RunId(id),
        task=TaskName("test"),
        node=NodeId("call"),
        prompt_tokens=10,
        expected_tokens=8,
        arrived_at_s=0.0,
        deadline_s=1.5,
        until_first_token=True,
        attempt=attempt,
    )


def a_request(id: str, tokens: int = 8) -> EngineRequest:
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}
    return EngineRequest(id, Endpoint.COMPLETIONS, body)


def text_of(model: ModelName, tokens: int = 8) -> str:
    """What only this model says."""
    return simulated_text(simulated_seed(0, model), PROMPT, tokens)


async def ask(pool: LocalSharedPool, id: str, model: ModelName) -> tuple[Dispatch, str]:
    lease = await pool.lease(model, an_invocation(id))
    return lease, await read(pool, model, lease)


async def read(pool: LocalSharedPool, model: ModelName, lease: Dispatch, tokens: int = 8) -> str:
    chunks = pool.stream(model, lease, a_request(lease.invocation_id, tokens))
    return "".join([chunk.text async for chunk in chunks])


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if claim():
                return
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    pool: LocalSharedPool, id: str, model: ModelName
) -> AsyncIterator[tuple[Dispatch, asyncio.Task[str]]]:
    """A long call under way; cancelled at the end."""
    lease = await pool.lease(model, an_invocation(id))
    task = asyncio.create_task(read(pool, model, lease, LONG_TOKENS))
    slot = pool.slots[lease.replica_id]
    await until(lambda: task.done() or InvocationId(id) in slot.replica.calls.attempts)
    try:
        yield lease, task
    finally:
        task.cancel()
        await asyncio.wait((task,))


def withdrawn(id: str) -> InvocationWithdrawn:
    return InvocationWithdrawn(0.0, InvocationId(id), 1, "its client left")


def books(pool: LocalSharedPool) -> SharedPool:
    return pool.present_books()


def test_one_load_serves_all_that_wait_and_every_answer_is_of_the_right_model() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, GO, RUST, slots=2)
        async with LocalSharedPool(spec, dict.fromkeys((JAVA, GO, RUST), QUICK)) as pool:
            asked = [(f"{i}", (JAVA, GO, RUST)[i % 3]) for i in range(12)]
            answers = await asyncio.gather(*(ask(pool, id, model) for id, model in asked))
            for (_, model), (lease, text) in zip(asked, answers, strict=True):
                assert text == text_of(model)
                assert lease.deployment == "cards-slots"
            counts = books(pool).picture().counts
            assert (counts.served, counts.loads, counts.evictions) == (12, 3, 1)
            # The one that had the load ordered missed; those that came while it loaded did not.
            assert counts.hits == 9

    asyncio.run(scenario())


def test_a_model_with_running_work_stays_until_that_has_ended() -> None:
    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA, GO), {JAVA: SLOW, GO: QUICK}) as pool:
            async with running(pool, "java", JAVA) as (_, stream):
                other = asyncio.create_task(ask(pool, "go", GO))
                await until(lambda: books(pool).picture().queued == 1)
                await asyncio.sleep(0.05)
                assert not other.done()
                assert books(pool).picture().counts.evictions == 0
                assert not stream.done()
            _, text = await other
            assert text == text_of(GO)
            assert books(pool).picture().counts.evictions == 1

    asyncio.run(scenario())


def test_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA, GO), {JAVA: SLOW, GO: QUICK}) as pool:
            async with running(pool, "java", JAVA):
                waiting = asyncio.create_task(pool.lease(GO, an_invocation("go")))
                await until(lambda: books(pool).picture().queued == 1)
                books(pool).take(withdrawn("go"))
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert books(pool).picture().queued == 0
            _, text = await ask(pool, "java-2", JAVA)
            assert text == text_of(JAVA)

    asyncio.run(scenario())


def test_a_withdrawal_that_comes_late_leaves_the_next_attempt_alone() -> None:
    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA, GO), {JAVA: SLOW, GO: QUICK}) as pool:
            async with running(pool, "java", JAVA):
                call = an_invocation("go", attempt=2)
                waiting = asyncio.create_task(pool.lease(GO, call))
                await until(lambda: books(pool).picture().queued == 1)
                books(pool).take(withdrawn(call.id))
                await asyncio.sleep(0)
                assert not waiting.done()
            lease = await waiting
            books(pool).take(withdrawn(call.id))
            assert await read(pool, GO, lease) == text_of(GO)

    asyncio.run(scenario())


class Breaks:
    """A loader that fails the first `times` loads of each model."""

    def __init__(
        self,
        spec: SharedPoolSpec,
        times: int,
        error: Exception | None = None,
    ) -> None:
        self._error = error or EngineError("no space left on device")
        self._loader = EngineLoader(spec.deployments[0], "", _never)
        self._times = times
        self._failed: dict[ModelName, int] = {}

    async def load(self, order: SlotOrder, previous: Engine | None) -> Engine:
        assert order.model is not None
        name = order.model.model.name
        self._failed[name] = self._failed.get(name, 0) + 1
        if self._failed[name] <= self._times:
            raise self._error
        return await self._loader.load(order, previous)

    @property
    def asleep(self) -> tuple[ModelName, ...]:
        return self._loader.asleep

    async def keep(self, models: tuple[ModelName, ...]) -> None:
        await self._loader.keep(models)

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        return await self._loader.measure(hosted, profile)


async def _never() -> str:
    raise AssertionError("nothing is forked")


@pytest.mark.parametrize(
    "error", [EngineError("no space"), OSError("stale"), ValueError("no JSON")], ids=repr
)
def test_a_failed_load_is_tried_again_and_the_call_is_served(error: Exception) -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA)
        async with LocalSharedPool(spec, {JAVA: QUICK}, loader=Breaks(spec, 1, error)) as pool:
            _, text = await ask(pool, "1", JAVA)
            assert text == text_of(JAVA)
            picture = books(pool).picture()
            assert (picture.counts.loads, picture.counts.failures) == (2, 1)
            assert not any(s.is_failing for s in picture.slots)

    asyncio.run(scenario())


def test_the_slot_where_the_latest_load_failed_is_shown() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, slots=2)
        async with LocalSharedPool(spec, {JAVA: QUICK}, loader=Breaks(spec, 1)) as pool:
            await ask(pool, "1", JAVA)
            shown = {s.state: s.is_failing for s in books(pool).picture().slots}
        assert shown == {SlotState.EMPTY: True, SlotState.READY: False}

    asyncio.run(scenario())


def test_a_source_that_is_not_there_is_refused_with_its_name() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA)
        (java,) = spec.models
        lost = replace(java, model=replace(java.model, source="./no-such-folder"))
        (shape,) = spec.deployments
        real = replace(shape, engine=replace(shape.engine, kind="vllm"))
        spec = replace(spec, models=(lost,), deployments=(real,))
        async with LocalSharedPool(spec, {JAVA: QUICK}) as pool:
            with pytest.raises(CapacityError, match="no-such-folder"):
                await pool.lease(JAVA, an_invocation("1"))

    asyncio.run(scenario())


def test_a_model_that_never_loads_is_refused_with_its_problem() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA)
        async with LocalSharedPool(spec, {JAVA: QUICK}, loader=Breaks(spec, 99)) as pool:
            with pytest.raises(NotLoadedError, match="no space left on device") as refused:
                await pool.lease(JAVA, an_invocation("1"))
            assert refused.value.pool == "cards/java"
            assert refused.value.retry_after_s >= 1.0

    asyncio.run(scenario())


def test_new_books_learn_what_is_loaded_and_what_runs() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, GO, slots=2)
        async with (
            LocalSharedPool(spec, {JAVA: SLOW, GO: QUICK}) as pool,
            running(pool, "java", JAVA) as (lease, stream),
        ):
            await ask(pool, "go", GO)
            pool.lose_books()
            await asyncio.sleep(0.05)
            pool.restart_books()
            await until(lambda: _ready(pool) == 2)
            again, text = await ask(pool, "go-2", GO)
            assert text == text_of(GO)
            assert again.replica_id != lease.replica_id
            assert books(pool).picture().counts.loads == 0
            assert not stream.done()

    asyncio.run(scenario())


def test_a_call_that_new_books_found_and_that_is_left_frees_its_slot() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, GO)
        async with LocalSharedPool(spec, {JAVA: SLOW, GO: QUICK}) as pool:
            async with running(pool, "java", JAVA):
                pool.restart_books()
                await until(lambda: _ready(pool) == 1)
                books(pool).take(withdrawn("java"))
            async with asyncio.timeout(10):
                _, text = await ask(pool, "go", GO)
            assert text == text_of(GO)

    asyncio.run(scenario())


def test_a_model_that_a_slot_has_held_says_what_its_template_drops() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, GO)
        pool = SharedPool(spec, on_each(spec, {JAVA: QUICK, GO: QUICK}))
        drops = TemplateFacts(renders_tools=False)
        slot, host = ReplicaId("s"), HostId("h")
        loaded = SlotReport(
            slot, 1, host, SHAPE, SlotState.READY, CopyId("copy-1"), JAVA, template=drops
        )
        for report in (loaded, SlotReport(slot, 2, host, SHAPE, SlotState.EMPTY)):
            pool.report(report)
            assert {p.model.name: p.template for p in pool.parts()} == {JAVA: drops, GO: None}

    asyncio.run(scenario())


def test_new_books_order_nothing_until_all_slots_have_spoken() -> None:
    """A model that must be loaded is, in the slot that speaks last."""

    def ready(slot: str, copy_id: CopyId, model: ModelName, *held: str) -> SlotReport:
        calls = tuple((InvocationId(id), 1) for id in held)
        return SlotReport(
            ReplicaId(slot), 1, HostId("h"), SHAPE, SlotState.READY, copy_id, model, held=calls
        )

    async def scenario() -> None:
        spec = a_pool(JAVA, GO, slots=2)
        java, go = spec.models
        spec = replace(spec, models=(replace(java, min_copies=1), go))
        profiles = on_each(spec, {JAVA: QUICK, GO: QUICK})
        new = SharedPool(spec, profiles)
        new.report(ready("a", CopyId("copy-old-2"), GO))
        new.report(ready("b", CopyId("copy-old-1"), JAVA, "1", "2"))
        await asyncio.sleep(SETTLE_S)
        new.tick()
        assert new.picture().counts.loads == 0
        assert [s.running for s in new.picture().slots] == [0, 2]
        # Copies of other books have other names, or one would be taken for another's.
        names = set()
        for _ in range(2):
            other = SharedPool(spec, profiles, settle_s=0.0)
            ordered: list[SlotOrder] = []
            other.slots = Slots(other, lambda slot, order, told=ordered: told.append(order))
            other.report(SlotReport(ReplicaId("s"), 1, HostId("h"), SHAPE, SlotState.EMPTY))
            names.add(ordered[-1].copy_id)
        assert len(names) == 2

    asyncio.run(scenario())


def test_a_slot_that_left_its_deployment_ends_what_it_has_and_gets_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, slots=2, max_running=1)
        async with (
            LocalSharedPool(spec, {JAVA: SLOW}) as pool,
            running(pool, "1", JAVA) as (lease, stream),
        ):
            slot = pool.slots[lease.replica_id]
            waiting = asyncio.create_task(pool.lease(JAVA, an_invocation("2")))
            await until(lambda: books(pool).picture().queued == 1)
            books(pool).leave(lease.replica_id)
            again = await waiting  # not one of the places that it no longer offers
            assert again.replica_id != lease.replica_id
            slot.replica.report()
            assert [s.slot for s in books(pool).picture().slots] == [again.replica_id]
            assert await read(pool, JAVA, again) == text_of(JAVA)
            assert not stream.done()
            other = SharedPool(
                spec, on_each(spec, {JAVA: SLOW})
            )  # a pool that is redeployed knows it too
            other.slots.leave(books(pool).slots.have_left)
            other.report(report_of(slot))
            assert other.picture().slots == ()
            assert not caplog.records, "it leaves as planned"
            books(pool).lose(again.replica_id, "its link ended")
            assert [r.levelno for r in caplog.records] == [logging.WARNING]

    asyncio.run(scenario())


def report_of(slot: LocalSlot) -> SlotReport:
    report = slot.holding.report()
    assert isinstance(report, SlotReport)
    return report


def _ready(pool: LocalSharedPool) -> int:
    return sum(s.model is not None for s in books(pool).picture().slots)


def test_what_ran_on_a_lost_slot_goes_on_in_another() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, slots=2)
        async with LocalSharedPool(spec, {JAVA: SLOW}) as pool:
            async with running(pool, "1", JAVA) as (lease, stream):
                await pool.remove_slot(lease.replica_id)
                with pytest.raises(EngineDeadError):
                    await stream
                again = await pool.lease(JAVA, an_invocation("1", attempt=2))
                assert again.replica_id != lease.replica_id
                assert again.attempt == 2
                assert await read(pool, JAVA, again) == text_of(JAVA)
            await until(lambda: books(pool).picture().queued == 0)

    asyncio.run(scenario())


def test_an_engine_that_dies_is_loaded_again() -> None:
    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA), {JAVA: SLOW}) as pool:
            async with running(pool, "1", JAVA) as (lease, stream):
                engine = pool.slots[lease.replica_id].replica.engine
                assert isinstance(engine, SimulatedEngine)
                await engine.kill()
                with pytest.raises(EngineDeadError):
                    await stream
                await until(lambda: books(pool).picture().counts.failures == 1)
                again = await pool.lease(JAVA, an_invocation("1", attempt=2))
                assert await read(pool, JAVA, again) == text_of(JAVA)
            counts = books(pool).picture().counts
            assert (counts.loads, counts.failures) == (2, 1)

    asyncio.run(scenario())


def test_a_slot_refuses_a_call_of_a_model_that_it_does_not_hold() -> None:
    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA, GO), {JAVA: QUICK, GO: QUICK}) as pool:
            lease, _ = await ask(pool, "1", JAVA)
            with pytest.raises(ReplicaLostError, match="it holds java, not go"):
                await read(pool, GO, lease)

    asyncio.run(scenario())


def test_a_model_answers_with_the_adapter_that_is_asked_for() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, GO)
        java, go = spec.models
        team = AdapterSpec(ModelName("team"), "/lora")
        java = replace(java, model=replace(java.model, adapters=(team,)))
        spec = replace(spec, models=(java, go))
        async with LocalSharedPool(spec, dict.fromkeys((JAVA, GO), QUICK)) as pool:
            lease, _ = await ask(pool, "1", JAVA)
            asked = replace(a_request("1"), adapter=team)
            text = "".join([c.text async for c in pool.stream(JAVA, lease, asked)])
            own = simulated_seed(simulated_seed(0, JAVA), "team")
            assert text == simulated_text(own, PROMPT, 8)
            assert text != text_of(JAVA)

    asyncio.run(scenario())


def test_a_full_queue_refuses_and_an_unknown_model_has_no_place() -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA, GO, policies=SharedPoolPolicies("lru", "batched", max_queued=1))
        async with LocalSharedPool(spec, {JAVA: SLOW, GO: QUICK}) as pool:
            async with running(pool, "java", JAVA):
                first = asyncio.create_task(pool.lease(GO, an_invocation("1")))
                await until(lambda: books(pool).picture().queued == 1)
                with pytest.raises(
                    CapacityError, match="1 invocations are queued, the limit of pool 'cards/go'"
                ) as refused:
                    await pool.lease(GO, an_invocation("2"))
                assert refused.value.pool == "cards/go"  # as ingresses know it
                with pytest.raises(
                    UnknownNameError, match="no model named 'rust'; known: go, java"
                ):
                    await pool.lease(RUST, an_invocation("3"))
            await first

    asyncio.run(scenario())


def test_the_same_offer_again_gets_the_same_lease() -> None:
    async def scenario() -> None:
        async with (
            LocalSharedPool(a_pool(JAVA), {JAVA: SLOW}) as pool,
            running(pool, "1", JAVA) as (lease, _),
        ):
            again = await pool.lease(JAVA, an_invocation("1"))
            assert lease == replace(again, reason=f"miss: {again.reason}")

    asyncio.run(scenario())


def test_weights_in_host_memory_are_loaded_faster() -> None:
    policies = SharedPoolPolicies("lru", "batched", host_memory_bytes=10)

    async def scenario() -> None:
        spec = a_pool(JAVA, GO, policies=policies)
        models = tuple(replace(m, load_s=0.2, reload_s=0.01, weights_bytes=5) for m in spec.models)
        spec = replace(spec, models=models)
        async with LocalSharedPool(spec, {JAVA: QUICK, GO: QUICK}) as pool:
            for i, model in enumerate((JAVA, GO, JAVA, GO)):
                await ask(pool, str(i), model)
            picture = books(pool).picture()
            assert (picture.counts.loads, picture.counts.from_host_memory) == (4, 2)
            assert picture.in_host_memory == (("host", (GO, JAVA)),)

    asyncio.run(scenario())


def test_new_policies_of_the_queues_forget_no_weights() -> None:
    policies = SharedPoolPolicies("lru", "batched", host_memory_bytes=10)

    async def scenario() -> None:
        spec = a_pool(JAVA, GO, policies=policies)
        spec = replace(spec, models=tuple(replace(m, weights_bytes=5) for m in spec.models))
        async with LocalSharedPool(spec, {JAVA: QUICK, GO: SLOW}) as pool:
            for i, model in enumerate((JAVA, GO)):
                await ask(pool, str(i), model)
            books(pool).configure(replace(policies, max_queued=1))
            assert books(pool).picture().in_host_memory == (("host", (GO, JAVA)),)
            async with running(pool, "2", GO):
                waiting = asyncio.create_task(ask(pool, "3", JAVA))
                await until(lambda: books(pool).picture().queued == 1)
                with pytest.raises(CapacityError, match="the limit of pool 'cards/java'"):
                    await ask(pool, "4", JAVA)
            await waiting

    asyncio.run(scenario())


def test_what_waits_of_an_older_run_of_a_buffer_is_refused_when_a_newer_one_comes() -> None:
    def call(run: str, began_s_ago: float) -> Invocation:
        ours = replace(an_invocation(f"{run}.fill"), run_id=RunId(run), buffer="b")
        return replace(ours, began_at_s=-began_s_ago)

    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA, GO), {JAVA: QUICK, GO: SLOW}) as pool:
            async with running(pool, "1", JAVA):
                older = asyncio.create_task(pool.lease(GO, call("old", 2.0)))
                await until(lambda: books(pool).picture().queued == 1)
                newer = asyncio.create_task(pool.lease(GO, call("new", 1.0)))
                with pytest.raises(SupersededError, match="run new of the same buffer"):
                    await asyncio.wait_for(older, 5)
                with pytest.raises(SupersededError, match="run new of the same buffer"):
                    await pool.lease(GO, call("older still", 3.0))
                assert books(pool).picture().queued == 1
            lease = await asyncio.wait_for(newer, 30)
            assert await read(pool, GO, lease) == text_of(GO)

    asyncio.run(scenario())


def test_a_model_in_use_is_removed_when_those_who_asked_for_it_are_served() -> None:
    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA), {JAVA: QUICK}) as pool:
            books(pool).add_model(HostedModel(ModelSpec(GO, "simulated", "qwen")), QUICK)
            async with running(pool, "1", GO) as (lease, task):
                removed = asyncio.create_task(books(pool).remove_model(GO))
                await asyncio.sleep(0)
                with pytest.raises(UnknownNameError, match="no model named 'go'; known: java"):
                    await pool.lease(GO, an_invocation("2"))
                again = await pool.lease(GO, an_invocation("1"))  # its answer went astray
                assert again.replica_id == lease.replica_id
                parts = books(pool).parts()
                assert [p.name for p in parts] == ["cards/go", "cards/java"]
                assert [p.template for p in parts] == [TemplateFacts(), None]  # go was loaded
                assert not removed.done()
                assert not task.done()
            await asyncio.wait_for(removed, 10)
            assert [p.name for p in books(pool).parts()] == ["cards/java"]

    asyncio.run(scenario())


def test_a_model_whose_calls_do_not_end_is_served_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pool, "REMOVE_WITHIN_S", 0.2)

    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA), {JAVA: QUICK}) as pool:
            books(pool).add_model(HostedModel(ModelSpec(GO, "simulated", "qwen")), QUICK)
            async with running(pool, "1", GO):
                with pytest.raises(InputError, match="1 invocations wait for 'go' or run there"):
                    await books(pool).remove_model(GO)
            assert (await ask(pool, "2", GO))[1] == text_of(GO)

    asyncio.run(scenario())


def test_models_and_policies_change_at_run_time_and_a_reset_empties_the_slots() -> None:
    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA), {JAVA: SLOW}) as pool:
            books(pool).add_model(HostedModel(ModelSpec(GO, "simulated", "qwen")), QUICK)
            _, text = await ask(pool, "1", GO)
            assert text == text_of(GO)
            books(pool).configure(SharedPoolPolicies("cace", "in-order"))
            async with running(pool, "2", JAVA):
                with pytest.raises(InputError, match="1 invocations wait or run"):
                    books(pool).reset()
            with pytest.raises(InputError, match="'java' is a model of the deployment file"):
                await books(pool).remove_model(JAVA)
            why_not = books(pool).why_not_add(
                HostedModel(ModelSpec(RUST, "simulated", "qwen", (JAVA,)))
            )
            assert why_not == "'java' is the name of another model of cards"
            await books(pool).remove_model(GO)
            assert [p.name for p in books(pool).parts()] == ["cards/java"]
            await until(lambda: _is_idle(books(pool)))
            books(pool).reset()
            await until(lambda: all(s.model is None for s in books(pool).picture().slots))
            _, text = await ask(pool, "3", JAVA)
            assert text == text_of(JAVA)
            assert books(pool).picture().counts.loads == 1

    asyncio.run(scenario())


def _is_idle(pool: SharedPool) -> bool:
    return all(s.running == 0 for s in pool.picture().slots)


def test_a_slot_that_was_lost_and_lives_comes_back() -> None:
    async def scenario() -> None:
        async with LocalSharedPool(a_pool(JAVA), {JAVA: QUICK}) as pool:
            await ask(pool, "1", JAVA)
            books(pool).lose(ReplicaId("slot-0"), "its link ended")
            # It lives, and says so.
            _, text = await ask(pool, "2", JAVA)
            assert text == text_of(JAVA)

    asyncio.run(scenario())


NEW = HostedModel(ModelSpec(GO, "simulated", "qwen"))


async def test_weights_that_a_slot_kept_through_the_removal_of_their_model_are_not_served(
    tmp_path: Path,
) -> None:
    spec, manager = a_pool(JAVA), EvictionManager()
    await manager.register(
        [(spec, on_each(spec, {JAVA: QUICK}))], {spec.name: spec.policies}, str(tmp_path / "m.db")
    )
    pool, slot = manager._shared[spec.name], ReplicaId("slot")
    file = ProfileFile.of(QUICK, Provenance())
    await manager.add_model(RegisteredModel(spec.name, 1, 0.0, NEW, file))
    report = SlotReport(slot, 1, HostId("host"), SHAPE, SlotState.READY, CopyId("copy-1"), GO)
    pool.report(report)
    pool.lose(slot, "its link ended")
    await manager.remove_model(spec.name, GO)
    pool.report(replace(report, number=2))
    other = HostedModel(ModelSpec(GO, "other", "qwen"))
    await manager.add_model(RegisteredModel(spec.name, 1, 0.0, other, file))
    pool.report(replace(report, number=3))
    waiting = asyncio.create_task(pool.offer(an_invocation("1"), 0, GO))
    await asyncio.sleep(0)
    assert not waiting.done(), "the slot holds the weights of the removed model"
    pool.report(
        replace(report, number=4, state=SlotState.EMPTY, copy_id=CopyId("none"), model=None)
    )
    assert pool.placement.cards() == {CardId("slot"): None}, "it is free for a load"
    waiting.cancel()
    await asyncio.wait([waiting])


class Held(EngineLoader):
    """A loader whose measurements go on until `gate` is set, and end with `error` if there is one.

    What a measurement finds is `test_models.py`'s matter.
    """

    def __init__(self, spec: SharedPoolSpec) -> None:
        super().__init__(spec.deployments[0], "", _never)
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.engine: Engine | None = None

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        self.engine = await self.load(SlotOrder(CopyId("measured"), hosted, profile), None)
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return Staged(hosted, ProfileFile.of(QUICK, Provenance(simulated=True)), 0)
        finally:
            await self.engine.stop()


@asynccontextmanager
async def measuring() -> AsyncIterator[tuple[LocalSharedPool, Held, asyncio.Task[Staged]]]:
    """A pool in whose only slot a model is being measured."""
    spec = a_pool(JAVA)
    loader = Held(spec)
    async with LocalSharedPool(spec, {JAVA: QUICK}, loader=loader) as pool:
        await ask(pool, "before", JAVA)
        await until(lambda: _is_idle(books(pool)))
        task = asyncio.create_task(books(pool).measure(NEW, QUICK))
        await until(lambda: loader.engine is not None)
        yield pool, loader, task


async def _serves_as_before(pool: LocalSharedPool, loader: Held) -> None:
    _, text = await ask(pool, "after", JAVA)
    assert text == text_of(JAVA)
    assert [s.model for s in books(pool).picture().slots] == [JAVA]
    assert loader.engine is not None
    assert loader.engine.state is EngineState.STOPPED


def test_a_model_is_measured_in_an_idle_slot_and_who_asks_meanwhile_waits() -> None:
    async def scenario() -> None:
        async with measuring() as (pool, loader, task):
            with pytest.raises(CapacityError, match="none of its slots is idle"):
                await books(pool).measure(NEW, QUICK)
            with pytest.raises(InputError, match="a model is measured in cards"):
                books(pool).reset()
            assert [p.slots for p in books(pool).parts()] == [1]
            asked = asyncio.create_task(ask(pool, "2", JAVA))
            await asyncio.sleep(0.05)
            assert not asked.done()
            loader.gate.set()
            assert (await task).hosted == NEW
            _, text = await asked
            assert text == text_of(JAVA)
            await _serves_as_before(pool, loader)
            assert books(pool).picture().counts.evictions == 1

    asyncio.run(scenario())


def test_a_busy_slot_measures_nothing() -> None:
    async def scenario() -> None:
        async with (
            LocalSharedPool(a_pool(JAVA), {JAVA: SLOW}) as pool,
            running(pool, "1", JAVA),
        ):
            with pytest.raises(CapacityError, match="none of its slots is idle"):
                await books(pool).measure(NEW, QUICK)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EngineError("no space left on device"), "no space left on device"),
        (RuntimeError("maximum of iterations"), "RuntimeError: maximum of iterations"),
    ],
)
def test_what_a_measurement_breaks_on_is_told_and_its_slot_goes_on(
    error: Exception, said: str
) -> None:
    async def scenario() -> None:
        async with measuring() as (pool, loader, task):
            loader.error = error
            loader.gate.set()
            with pytest.raises(EngineError, match=said):
                await task
            await _serves_as_before(pool, loader)

    asyncio.run(scenario())


def test_a_slot_that_ends_while_it_measures_says_so_and_stops_the_engine() -> None:
    async def scenario() -> None:
        async with measuring() as (pool, loader, task):
            await pool.remove_slot(ReplicaId("slot-0"))
            with pytest.raises(ReplicaLostError, match="ended while it measured a model"):
                await task
            assert loader.engine is not None
            assert loader.engine.state is EngineState.STOPPED

    asyncio.run(scenario())


def test_a_measurement_that_nobody_waits_for_ends_and_its_slot_is_back() -> None:
    async def scenario() -> None:
        async with measuring() as (pool, loader, task):
            task.cancel()
            await asyncio.wait((task,))
            await _serves_as_before(pool, loader)

    asyncio.run(scenario())


def test_new_books_take_a_slot_back_that_the_old_ones_lent() -> None:
    async def scenario() -> None:
        async with measuring() as (pool, loader, task):
            old = books(pool)
            pool.restart_books()
            old.close()
            with pytest.raises(ReplicaLostError, match="redeployed"):
                await task
            await _serves_as_before(pool, loader)

    asyncio.run(scenario())


def test_what_was_measured_while_the_books_were_away_arrives() -> None:
    async def scenario() -> None:
        async with measuring() as (pool, loader, task):
            there = books(pool)
            pool.lose_books()
            loader.gate.set()
            await asyncio.sleep(0.1)
            assert not task.done()
            pool.books = there
            assert (await task).hosted == NEW
            await _serves_as_before(pool, loader)

    asyncio.run(scenario())


def test_a_pool_that_is_deployed_anew_ends_what_is_measured_in_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = a_pool(JAVA)
        manager, store = EvictionManager(), str(tmp_path / "m.db")
        await manager.register(
            [(spec, on_each(spec, {JAVA: QUICK}))], {spec.name: spec.policies}, store
        )
        manager._shared[spec.name].report(
            SlotReport(ReplicaId("slot"), 1, HostId("host"), SHAPE, SlotState.EMPTY)
        )
        task = asyncio.create_task(manager.measure(spec.name, NEW, QUICK))
        await asyncio.sleep(0)
        await manager.register(
            [(spec, on_each(spec, {JAVA: QUICK}))], {spec.name: spec.policies}, store
        )
        assert not task.done()
        other = replace(spec, models=(replace(spec.models[0], slo_s=9.0),))
        await manager.register(
            [(other, on_each(other, {JAVA: QUICK}))], {spec.name: spec.policies}, store
        )
        with pytest.raises(ReplicaLostError, match="redeployed"):
            await task

    asyncio.run(scenario())


async def test_who_waits_in_a_pool_that_is_deployed_anew_is_served_by_the_new_one(
    tmp_path: Path,
) -> None:
    """Links end with the books, as with a router's life; over them the ingress asks the next."""
    spec = a_pool(JAVA)
    manager, store = EvictionManager(SECRET), str(tmp_path / "m.db")

    async def dialled(shard: int, handler: Handler) -> tuple[Connection, bytes]:
        links = manager._shared[spec.name].links
        links._listener = links._listener or await taken(links, tmp_path)
        address = links._listener.address
        return await dial(address, SECRET, "manager", handler), SECRET

    await manager.register(
        [(spec, on_each(spec, {JAVA: QUICK}))], {spec.name: spec.policies}, store
    )
    link = LeaseLink(spec.name, dialled)
    waiting = asyncio.create_task(link.lease(an_invocation("1"), JAVA))
    await until(lambda: manager._shared[spec.name].picture().queued == 1)
    await asyncio.sleep(0.2)
    other = replace(spec, models=(replace(spec.models[0], slo_s=9.0),))
    await manager.register(
        [(other, on_each(other, {JAVA: QUICK}))], {spec.name: spec.policies}, store
    )
    loaded = SlotReport(
        ReplicaId("slot"), 1, HostId("host"), SHAPE, SlotState.READY, CopyId("copy-1"), JAVA
    )
    manager._shared[spec.name].report(loaded)
    async with asyncio.timeout(10):
        lease = (await waiting).dispatch
    assert lease.replica_id == "slot"
    assert lease.queue_s >= 0.2  # the clock of the SLO went on
    assert lease.slack_s <= 1.3
    with pytest.raises(UnknownNameError, match="no model named 'go'; known: java"):
        await link.lease(an_invocation("2"), GO)
    await manager.register([], {}, store)


def a_sleepy_pool(*names: ModelName, room: int, slots: int = 1) -> SharedPoolSpec:
    """Models of 100 bytes whose engines sleep in `room` bytes of the host's memory."""
    policies = SharedPoolPolicies("lru", "batched", host_memory_bytes=room)
    spec = a_pool(*names, slots=slots, policies=policies)
    models = tuple(replace(m, weights_bytes=100) for m in spec.models)
    (shape,) = spec.deployments
    sleepy = replace(shape, engine=replace(shape.engine, sleep=True))
    return replace(spec, models=models, deployments=(sleepy,))


@pytest.mark.parametrize(("room", "remembered"), [(200, {(), (JAVA,), (GO,)}), (199, {()})])
def test_slots_whose_engines_sleep_have_a_memory_each_and_share_the_budget(
    room: int, remembered: set[tuple[ModelName, ...]]
) -> None:
    async def scenario() -> None:
        spec = a_sleepy_pool(JAVA, GO, RUST, room=room, slots=2)
        loader = Remembers(spec)
        profiles = dict.fromkeys((JAVA, GO, RUST), QUICK)
        async with LocalSharedPool(spec, profiles, loader=loader) as pool:
            await until(lambda: len(books(pool).picture().slots) == 2)
            for i, model in enumerate((JAVA, GO, RUST, JAVA)):
                _, text = await ask(pool, f"{i}", model)
                assert text == text_of(model)
                await until(lambda: _is_idle(books(pool)))
            # Half of it for each of the two slots.
            assert set(loader.remembered) == remembered
            hosts = [host for host, _ in books(pool).picture().in_host_memory]
            assert hosts == (["host"] if room == 200 else [])

    asyncio.run(scenario())


class Remembers(EngineLoader):
    """Notes which models' engines could sleep at each load."""

    def __init__(self, spec: SharedPoolSpec) -> None:
        super().__init__(spec.deployments[0], "", _never)
        self.remembered: list[tuple[ModelName, ...]] = []

    async def load(self, order: SlotOrder, previous: Engine | None) -> Engine:
        self.remembered.append(order.remembered)
        return await super().load(order, previous)


class Sleepers(EngineLoader):
    """A loader of which `asleep` says what it is told; only vLLM sleeps."""

    def __init__(self, spec: SharedPoolSpec) -> None:
        super().__init__(spec.deployments[0], "", _never)
        self.names: tuple[ModelName, ...] = ()

    @property
    def asleep(self) -> tuple[ModelName, ...]:
        return self.names

    async def keep(self, models: tuple[ModelName, ...]) -> None:
        self.names = tuple(n for n in self.names if n in models)


def test_what_sleeps_ends_when_its_memory_shrinks_and_the_books_believe_the_slot() -> None:
    async def scenario() -> None:
        spec = a_sleepy_pool(JAVA, GO, room=300)
        loader = Sleepers(spec)
        async with LocalSharedPool(spec, {JAVA: QUICK, GO: QUICK}, loader=loader) as pool:
            await ask(pool, "1", JAVA)
            loader.names = (JAVA,)
            await ask(pool, "2", GO)

            def in_memory() -> dict[str, tuple[ModelName, ...]]:
                return dict(books(pool).picture().in_host_memory)

            await until(lambda: in_memory() == {"host": (GO, JAVA)})
            loader.names = ()  # it ended in its sleep
            await until(lambda: in_memory() == {"host": (GO,)})
            loader.names = (JAVA,)
            books(pool).configure(replace(spec.policies, host_memory_bytes=0))
            await until(lambda: loader.names == ())

    asyncio.run(scenario())
