"""Rollouts in the Profiler: counted from runs and reactions, moved by rule, kept over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from store_kit import a_receipt, an_execution, facts

from cato.control.profiler import Profiler
from cato.core.errors import InputError
from cato.core.ids import NodeId, TaskName
from cato.core.receipt import Drawn, SlaReceipt, TrafficArm
from cato.core.rollout import Phase, Rollout
from cato.core.rollout_book import PromoteRollout, RollBackRollout, StartRollout
from cato.core.rollout_rule import RolloutRule
from cato.core.tenancy import Usage
from cato.core.usage_outbox import UsageParcel
from cato.serve.ingress.feedback import Feedback, Reaction
from cato.store.errors import StoreError
from cato.store.store import MetadataStore

RULE = RolloutRule(
    shares=(0.2,), shadow_share=0.0, min_calls=200, hold_s=0.0, error_limit=0.05, miss_limit=0.05
)
START = StartRollout("coder", "coder-1", "coder-2", RULE)


@asynccontextmanager
async def a_life(path: Path) -> AsyncIterator[Profiler]:
    profiler = Profiler(path)
    try:
        yield profiler
    finally:
        await profiler.close()


def some_runs(rollout: Rollout, arm: TrafficArm, n: int = 200) -> list[SlaReceipt]:
    model = rollout.stable if arm is TrafficArm.STABLE else rollout.canary
    execution = an_execution(llm=facts(model=model))
    drawn = (Drawn(rollout.name, rollout.id, rollout.stage, arm),)
    made = (a_receipt(execution, id=f"{arm}-{i}", task="chat") for i in range(n))
    return [replace(r, ttft_s=0.2 + 0.001 * (i % 9), rollouts=drawn) for i, r in enumerate(made)]


async def seen(profiler: Profiler, receipts: list[SlaReceipt]) -> None:
    await profiler.record(tuple((r, ()) for r in receipts))


async def test_a_restart_goes_on_with_the_step_and_what_it_has_seen(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    async with a_life(path) as profiler:
        started = await profiler.order_rollout(START, "key:ops")
        await seen(profiler, some_runs(started, TrafficArm.STABLE))
        await profiler.rollouts()
    async with a_life(path) as profiler:
        (known,) = await profiler.rollouts() or ()
        assert known.stable_counts.calls == 200
        assert replace(known, stable_counts=started.stable_counts) == started
        await seen(profiler, some_runs(started, TrafficArm.CANARY))
        (known,) = await profiler.rollouts() or ()
        assert known.phase is Phase.PROMOTED
    async with a_life(path) as profiler:
        assert await profiler.rollouts() == (known,)
        back = await profiler.order_rollout(RollBackRollout("coder"), "key:ops")
    async with a_life(path) as profiler:
        assert await profiler.rollouts() == (back,)


async def test_a_store_that_was_deleted_gets_all_rollouts_again(tmp_path: Path) -> None:
    """Also those that have ended: their models answer under other names."""
    path = tmp_path / "metadata.db"
    used = Usage("2026-11-26", "t", "k", "chat", "m", 1, 1, 0, 1)
    async with a_life(path) as profiler:
        await profiler.order_rollout(START, "key:ops")
        await profiler.order_rollout(PromoteRollout("coder"), "key:ops")
        await profiler.order_rollout(replace(START, name="other"), "key:ops")
        before = await profiler.rollouts()
        for file in tmp_path.glob("metadata.db*"):
            file.unlink()
        id = await profiler.record(())
        await profiler.record((), (UsageParcel("ingress", 1, (used,)),), id)
        for _ in range(600):
            if await stored_usage(profiler):  # in the new store
                break
            await asyncio.sleep(0.1)
        assert await profiler.rollouts() == before
    async with a_life(path) as profiler:
        assert await profiler.rollouts() == before


async def stored_usage(profiler: Profiler) -> tuple[Usage, ...]:
    try:
        return await profiler.usage(None)
    except StoreError:
        return ()


async def test_a_wrong_order_changes_nothing(tmp_path: Path) -> None:
    async with a_life(tmp_path / "metadata.db") as profiler:
        started = await profiler.order_rollout(START, "key:ops")
        await profiler.order_rollout(PromoteRollout("coder"), "key:ops")
        with pytest.raises(InputError, match="promoted already"):
            await profiler.order_rollout(PromoteRollout("coder"), "key:ops")
        (known,) = await profiler.rollouts() or ()
        entries = await profiler.audit(None, 10, None)
    assert (known.id, known.phase) == (started.id, Phase.PROMOTED)
    assert [(e.who, e.action, e.target) for e in entries] == [
        ("key:ops", "rollout.promote", "coder"),
        ("key:ops", "rollout.start", "coder"),
    ]
    before, after = entries[0].before or {}, entries[0].after or {}
    assert (before["phase"] == Phase.PROMOTED, after["phase"]) == (False, Phase.PROMOTED)


async def test_an_order_that_comes_again_is_audited_once(tmp_path: Path) -> None:
    async with a_life(tmp_path / "metadata.db") as profiler:
        started = await profiler.order_rollout(START, "key:ops")
        order = PromoteRollout("coder", stage=started.stage)
        promoted = await profiler.order_rollout(order, "key:ops")
        assert await profiler.order_rollout(order, "key:ops") == promoted
        entries = await profiler.audit(None, 10, None)
    assert [e.action for e in entries] == ["rollout.promote", "rollout.start"]


async def test_each_completion_counts_once_as_shown_and_once_as_taken(tmp_path: Path) -> None:
    async with a_life(tmp_path / "metadata.db") as profiler:
        rollout = await profiler.order_rollout(START, "key:ops")
        runs = some_runs(rollout, TrafficArm.CANARY, 3)
        await seen(profiler, runs)
        told = [
            Feedback(runs[0].request_id, Reaction.VIEW),
            Feedback(runs[0].request_id, Reaction.VIEW, choice=1),
            Feedback(runs[0].request_id, Reaction.SELECT),
            Feedback(runs[1].request_id, Reaction.VIEW),
            Feedback(runs[1].request_id, Reaction.DISMISS),
            Feedback("made-up", Reaction.VIEW),
        ]
        await profiler.react(tuple(told))
        (known,) = await profiler.rollouts() or ()
    assert (known.canary_counts.shown, known.canary_counts.taken) == (2, 1)


async def test_a_shadow_run_teaches_lengths_and_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    async with a_life(path) as profiler:
        rollout = await profiler.order_rollout(
            replace(START, rule=RolloutRule(shadow_share=0.1)), "key:ops"
        )
        runs = some_runs(rollout, TrafficArm.SHADOW, 4)
        await seen(profiler, runs)
        (known,) = await profiler.rollouts() or ()
        assert await profiler.receipt(runs[0].request_id, None) is None
        assert (await profiler.recent(None)).runs == ()
    with_store = MetadataStore.open(path)
    learnt = with_store.learnt()
    with_store.close()
    assert known.canary_counts.calls == 4
    assert {s.model for s in learnt.samples} == {"coder-2"}
    assert learnt.means == ()


async def test_a_canary_has_baselines_of_its_own(tmp_path: Path) -> None:
    async with a_life(tmp_path / "metadata.db") as profiler:
        rollout = await profiler.order_rollout(START, "key:ops")
        await seen(profiler, some_runs(rollout, TrafficArm.CANARY, 3))
        known = (await profiler.estimates())[TaskName("chat")]
        assert set(known) == {(NodeId("draft"), "coder-2")}
        await seen(profiler, some_runs(rollout, TrafficArm.STABLE, 3))
        both = (await profiler.estimates())[TaskName("chat")]
        assert len(both) == 2
        assert both.items() > known.items()


async def test_nothing_is_said_of_rollouts_before_the_store_was_read(tmp_path: Path) -> None:
    """Ingress replicas then go on with what they know."""
    path = tmp_path / "metadata.db"
    async with a_life(path) as profiler:
        await profiler.order_rollout(START, "key:ops")
    hidden = path.rename(tmp_path / "hidden.db")
    path.mkdir()
    async with a_life(path) as profiler:
        assert await profiler.rollouts() is None
        with pytest.raises(StoreError):
            await profiler.order_rollout(START, "key:ops")
    path.rmdir()
    hidden.rename(path)
    async with a_life(path) as profiler:
        (known,) = await profiler.rollouts() or ()
    assert known.canary == "coder-2"
