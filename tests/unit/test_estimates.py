"""Baselines follow what receipts say, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.estimates import WEIGHT, Baselines
from cato.core.ids import NodeId, RunId, TaskName
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.runs import NodeEstimate
from cato.testing.builders import llm_facts

A, B = NodeId("a"), NodeId("b")


def an_execution(
    node: NodeId = A,
    spent_s: float = 1.0,
    *,
    queue_s: float | None = None,
    ttft_s: float | None = None,
    status: str = "done",
    round: int = 1,
    item: int | None = None,
) -> NodeReceipt:
    """An execution of an LLM node when `queue_s` is given."""
    llm = None if queue_s is None else llm_facts(queue_s=queue_s, ttft_s=ttft_s)
    return NodeReceipt(node, "llm", round, item, status, 0.0, spent_s, None, None, llm=llm)


def a_receipt(*nodes: NodeReceipt, status: str = "done") -> SlaReceipt:
    return SlaReceipt(
        RunId("r"), TaskName("t"), status, "e2e", 1.0, 1.0, True, 1.0, 0.0, 1.0, 0, 0.0, 0.0, True,
        nodes, (),
    )  # fmt: skip


def learnt(*receipts: SlaReceipt, all_nodes: tuple[NodeId, ...] = (A,)) -> NodeEstimate:
    baselines = Baselines()
    for receipt in receipts:
        baselines.record(receipt, all_nodes)
    return baselines.table()[TaskName("t")][A]


def test_queueing_is_not_part_of_a_baseline() -> None:
    estimate = learnt(a_receipt(an_execution(spent_s=5.0, queue_s=3.0, ttft_s=0.5)))
    assert estimate == NodeEstimate(mean_s=2.0, first_token_s=0.5, runs=1.0)


def test_the_first_samples_weigh_evenly() -> None:
    estimate = learnt(*(a_receipt(an_execution(spent_s=s)) for s in (1.0, 2.0, 6.0)))
    assert estimate.mean_s == pytest.approx(3.0)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_the_mean_lies_within_its_samples_and_forgets_at_the_set_rate(spent_s: list[float]) -> None:
    mean_s = spent_s[0]
    for n, x in enumerate(spent_s[1:], start=2):
        share = 1 / n if n <= 1 / WEIGHT else WEIGHT
        mean_s = (1 - share) * mean_s + share * x
    estimate = learnt(*(a_receipt(an_execution(spent_s=s)) for s in spent_s))
    assert estimate.mean_s == pytest.approx(mean_s)
    assert min(spent_s) - 1e-9 <= estimate.mean_s <= max(spent_s) + 1e-9


def test_a_change_of_speed_is_known_after_some_twenty_executions() -> None:
    slow, fast = a_receipt(an_execution(spent_s=10.0)), a_receipt(an_execution(spent_s=1.0))
    assert learnt(*[slow] * 100, *[fast] * 20).mean_s < 1 + 9 * 0.13


@pytest.mark.parametrize("status", ["failed", "cancelled", "absent", "running"])
def test_executions_that_did_not_end_well_teach_nothing(status: str) -> None:
    good, bad = an_execution(spent_s=1.0), an_execution(spent_s=99.0, status=status, round=2)
    assert learnt(a_receipt(good, bad)) == NodeEstimate(1.0, 1.0, 1.0)


def test_runs_are_rounds_per_finished_run_and_a_skipped_node_counts_as_none() -> None:
    twice = a_receipt(an_execution(round=1), an_execution(round=2))
    fan_out = a_receipt(an_execution(item=0), an_execution(item=1))
    skipped = a_receipt(an_execution(B))
    assert learnt(twice, all_nodes=(A, B)).runs == 2.0
    assert learnt(fan_out, all_nodes=(A, B)).runs == 1.0
    assert learnt(fan_out, skipped, all_nodes=(A, B)).runs == pytest.approx(0.5)


def test_a_run_that_failed_says_nothing_of_how_often_its_nodes_run() -> None:
    failed = a_receipt(an_execution(spent_s=3.0), status="failed")
    assert learnt(failed) == NodeEstimate(3.0, 3.0, runs=1.0)
    assert learnt(a_receipt(an_execution()), replace(failed, nodes=())).runs == 1.0


def test_the_first_token_never_comes_after_the_last() -> None:
    receipts = [
        a_receipt(an_execution(spent_s=5.0, queue_s=0.0, ttft_s=4.0)),
        *[a_receipt(an_execution(spent_s=1.0))] * 9,
    ]
    estimate = learnt(*receipts)
    assert estimate.first_token_s == estimate.mean_s == pytest.approx(1.4)


def test_nothing_is_known_of_a_node_that_never_ran() -> None:
    baselines = Baselines()
    baselines.record(a_receipt(an_execution(A)), (A, B))
    assert set(baselines.table()[TaskName("t")]) == {A}
