"""The Profiler learns from every run, and a restart loses nothing of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families
from store_kit import MODEL, NODE, TASK, a_receipt, an_execution, facts

from cato.control.profiler import Profiler
from cato.core.ids import NodeId, TaskName
from cato.core.receipt import WITHHELD, SlaReceipt
from cato.core.topology import Kept
from cato.estimators.prompt_features import Asked, features_of

T = TypeVar("T")
Alive = Callable[[], AbstractAsyncContextManager[Profiler]]
FEATURES = features_of(Asked(100))
SECRET = "api_key = 'hunter2'"
WAIT_S = 0.01
PATIENCE = 6_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "metadata.db"


@pytest.fixture
def life(path: Path) -> Alive:
    """One life of the Profiler, on the same store as the others."""

    @asynccontextmanager
    async def alive() -> AsyncIterator[Profiler]:
        profiler = Profiler(path)
        try:
            yield profiler
        finally:
            await profiler.close()

    return alive


async def seen(profiler: Profiler, receipts: Sequence[SlaReceipt]) -> None:
    await profiler.record(tuple((r, tuple(n.node for n in r.nodes)) for r in receipts))


async def newer(ask: Callable[[int], Awaitable[T | None]], known_version: int = 0) -> T:
    """What the background learning brings."""
    for _ in range(PATIENCE):
        if (found := await ask(known_version)) is not None:
            return found
        await asyncio.sleep(WAIT_S)
    raise AssertionError("nothing was learnt")


async def gauge(profiler: Profiler, name: str) -> dict[tuple[str, ...], float]:
    page = (await profiler.metrics()).decode()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


def some_receipts(n: int = 20) -> list[SlaReceipt]:
    return [
        a_receipt(
            an_execution("lookup", spent_s=0.25),
            an_execution(
                llm=facts(tokens=10 + i, predicted_service_s=1.0, service_s=2.0), started_s=0.25
            ),
            an_execution("refine", llm=facts(tokens=5), started_s=1.25, spent_s=3.0),
            id=f"req-{i}",
        )
        for i in range(n)
    ]


async def test_node_latencies_retrieval_times_lengths_errors_and_stages_are_learnt(
    life: Alive,
) -> None:
    async with life() as profiler:
        await seen(profiler, some_receipts())
        estimates = (await profiler.estimates())[TASK]
        assert estimates[NodeId("lookup"), ""].mean_s == pytest.approx(0.25)
        assert estimates[NodeId("refine"), MODEL].mean_s == pytest.approx(3.0)
        lengths = await newer(profiler.lengths)
        belief = lengths.belief(TASK, NODE, MODEL, FEATURES, 1_000)
        assert belief is not None
        assert belief.mean == pytest.approx(20, abs=2)
        share = (await newer(profiler.past_runs)).share(TASK, [])
        assert share is not None
        assert share.share == pytest.approx(0.25)
        assert await gauge(profiler, "cato_pool_drift") == {("p", "service"): pytest.approx(0.5)}
        news = await profiler.news(0, 0)
        assert news.estimates[TASK] == estimates
        assert news.rollouts == ()
        assert news.access is not None
        assert news.lengths is not None
        assert news.past_runs is not None
        later = await profiler.news(news.lengths.version, news.past_runs.version)
        assert (later.lengths, later.past_runs) == (None, None)


async def test_a_restart_keeps_everything_that_was_learnt(life: Alive) -> None:
    async with life() as first:
        await seen(first, some_receipts())
        before = await first.estimates(), await gauge(first, "cato_pool_drift")
        lengths, runs = await newer(first.lengths), await newer(first.past_runs)
    async with life() as second:
        assert (await second.estimates(), await gauge(second, "cato_pool_drift")) == before
        again = await newer(second.lengths, lengths.version)
        assert again.version > lengths.version, "an ingress takes it for newer than what it has"
        assert again.keys == lengths.keys
        more = await newer(second.past_runs, runs.version)
        assert more.share(TASK, []) == runs.share(TASK, [])
        await seen(second, some_receipts(1))
    async with life() as third:
        assert (await third.estimates())[TASK][NodeId("lookup"), ""].mean_s == pytest.approx(0.25)


async def test_a_receipt_can_be_asked_for_after_a_restart_without_its_text(
    life: Alive, path: Path
) -> None:
    failed = an_execution(llm=facts(), status="failed", problem=f"cannot parse {SECRET}")
    receipt = a_receipt(
        failed, id="a", status="failed", problem=f"node 'draft': {SECRET}", notes=[SECRET]
    )
    async with life() as first:
        await seen(first, [receipt])
        now = await first.receipt("a", None)
        assert now == receipt.as_dict()
    async with life() as second:
        later = await second.receipt("a", None)
        assert later is not None
        assert later["problem"] == WITHHELD
        assert later["e2e_s"] == receipt.e2e_s
        assert await second.receipt("unknown", None) is None
    for file in path.parent.iterdir():
        assert b"hunter2" not in file.read_bytes(), f"{file.name} quotes a request"


async def test_passed_through_calls_teach_lengths_but_no_baselines(life: Alive) -> None:
    async with life() as profiler:
        calls = [
            a_receipt(an_execution(llm=facts(tokens=7)), task="model:m", id=f"{i}")
            for i in range(9)
        ]
        await seen(profiler, calls)
        assert await profiler.estimates() == {}
        lengths = await newer(profiler.lengths)
        assert lengths.belief(TaskName("model:m"), NODE, MODEL, FEATURES, 99) is not None


async def test_beliefs_follow_what_comes_and_are_sent_only_when_newer(
    life: Alive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cato.control.learning.RELEARN_S", 0.0)
    async with life() as profiler:
        await seen(profiler, some_receipts(10))
        first = await newer(profiler.lengths)
        assert await profiler.lengths(first.version) is None
        long = [a_receipt(an_execution(llm=facts(tokens=500)), id=f"{i}") for i in range(90)]
        await seen(profiler, long)
        second = await newer(profiler.lengths, first.version)
        belief = second.belief(TASK, NODE, MODEL, FEATURES, 1_000)
        assert belief is not None
        assert belief.mean > 400


async def test_learning_does_not_hold_up_the_event_loop(life: Alive) -> None:
    async with life() as profiler:
        runs = [
            a_receipt(an_execution(llm=facts(tokens=i, prompt=i)), id=f"{i}") for i in range(1, 500)
        ]
        await seen(profiler, runs)
        answered = 0
        while await profiler.lengths(0) is None:
            answered += 1
            await asyncio.sleep(0.001)
        assert answered > 3


# When the store is not well


async def test_without_a_store_the_profiler_learns_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    profiler = Profiler(in_the_way / "metadata.db")
    await seen(profiler, some_receipts())
    assert (NODE, MODEL) in (await profiler.estimates())[TASK]
    assert await profiler.receipt("req-1", None) is not None
    assert await profiler.receipt("unknown", None) is None
    assert await gauge(profiler, "cato_store_up") == {(): 0.0}
    assert "serving continues, records are queued" in caplog.text
    await profiler.close()


async def test_what_was_learnt_before_is_taken_up_when_the_store_comes_late(
    life: Alive, path: Path
) -> None:
    async with life() as first:
        await seen(first, some_receipts())
    aside = path.parent.rename(path.parent.with_name("aside"))
    path.parent.write_text("in the way")
    async with life() as second:
        new = a_receipt(an_execution("new", spent_s=9.0), an_execution("lookup", spent_s=9.0))
        await seen(second, [new])
        assert set((await second.estimates())[TASK]) == {("new", ""), ("lookup", "")}
        path.parent.unlink()
        aside.rename(path.parent)
        for _ in range(PATIENCE):
            if (NODE, MODEL) in (estimates := (await second.estimates())[TASK]):
                break
            await asyncio.sleep(WAIT_S)
        assert estimates[NodeId("new"), ""].mean_s == 9.0
        assert estimates[NodeId("lookup"), ""].mean_s == pytest.approx(0.25), "it has seen more"
        assert await gauge(second, "cato_store_dropped_total") == {(): 0.0}


async def test_a_store_of_a_later_version_is_left_alone(life: Alive, path: Path) -> None:
    async with life() as first:
        await seen(first, some_receipts())
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    before = connection.execute("SELECT count(*) FROM receipts").fetchall()
    async with life() as second:
        await seen(second, [a_receipt(id="new")])
        assert await gauge(second, "cato_store_up") == {(): 0.0}
        assert await second.receipt("new", None) is not None
    assert connection.execute("SELECT count(*) FROM receipts").fetchall() == before
    connection.close()


async def test_above_a_rate_runs_are_counted_and_no_receipt_is_kept(life: Alive) -> None:
    async with life() as profiler:
        await profiler.keep(Kept(receipts_per_s=2))
        receipts = [a_receipt(an_execution(llm=facts()), id=f"r{n}") for n in range(5)]
        await seen(profiler, receipts)
        kept = [await profiler.receipt(f"r{n}", "") for n in range(5)]
        rendered = (await profiler.metrics()).decode()
    assert sum(found is not None for found in kept) in (2, 3, 4), "two of each second"
    runs = next(f for f in text_string_to_metric_families(rendered) if f.name == "cato_runs")
    assert sum(s.value for s in runs.samples if s.name == "cato_runs_total") == 5
