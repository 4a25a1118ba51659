"""A run's stages, and what past runs say of the time that the next one needs."""

from __future__ import annotations

import pickle

import pytest
from store_kit import TASK, a_receipt, an_execution, facts

from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.estimators.dag_match import FROM_USER, SuperNode
from cato.estimators.stages import (
    KEPT_RUNS,
    FinishedStages,
    PastRuns,
    RunHistory,
    finished_stages,
    past_runs,
    stages_of,
)


def a_call(
    node: str, started_s: float, spent_s: float, *, tokens: int = 10, prompt: int = 100,
    queue_s: float = 0.0, status: str = "done",
) -> NodeReceipt:  # fmt: skip
    llm = facts(tokens=tokens, prompt=prompt, queue_s=queue_s)
    return an_execution(node, llm=llm, started_s=started_s, spent_s=spent_s, status=status)


def two_stages(first_s: float, second_s: float, *, tokens: int) -> SlaReceipt:
    return a_receipt(
        a_call("draft", 0.0, first_s, tokens=tokens), a_call("refine", first_s, second_s)
    )


def learnt(*receipts: SlaReceipt) -> PastRuns:
    history = RunHistory()
    for receipt in receipts:
        stages = finished_stages(receipt)
        assert stages is not None
        history.add([stages])
    return past_runs(history.by_task(), version=1)


def test_calls_that_overlap_are_one_stage_and_share_its_time() -> None:
    graph = stages_of(
        [
            an_execution("lookup", spent_s=9.0),
            a_call("refine", 5.0, 2.0, prompt=30),
            a_call("part", 0.0, 5.0, tokens=20, queue_s=1.0),
            a_call("part", 0.5, 2.0, tokens=40),
            a_call("lost", 1.0, 9.0, status="cancelled"),
        ]
    )
    assert graph.stages == (
        SuperNode(((FROM_USER, 200),), 60, 4.0),
        SuperNode(((FROM_USER, 30),), 10, 2.0),
    )


def test_a_run_of_one_stage_or_without_an_end_teaches_nothing() -> None:
    assert finished_stages(a_receipt(a_call("only", 0.0, 1.0))) is None
    both = two_stages(1.0, 3.0, tokens=10)
    assert finished_stages(both) is not None
    assert finished_stages(a_receipt(*both.nodes, status="failed")) is None


def test_the_next_stage_gets_the_share_that_it_had_in_the_most_similar_run() -> None:
    runs = learnt(two_stages(1.0, 9.0, tokens=10), two_stages(6.0, 2.0, tokens=500))
    start = runs.share(TASK, [])
    assert start is not None
    assert start.share == pytest.approx(6.0 / 8.0), "of equals the latest"
    runs = learnt(
        a_receipt(*(a_call("a", 0, 1, tokens=10), a_call("b", 1, 3), a_call("c", 4, 1))),
        a_receipt(*(a_call("a", 0, 1, tokens=900), a_call("b", 1, 1), a_call("c", 2, 9))),
    )
    for tokens, share in ((12, 3 / 4), (700, 1 / 10)):
        found = runs.share(TASK, [a_call("a", 0, 1, tokens=tokens)])
        assert found is not None
        assert found.share == pytest.approx(share)


def test_without_a_run_that_went_on_from_here_there_is_no_share() -> None:
    runs = learnt(two_stages(1.0, 1.0, tokens=10))
    assert runs.share(TASK, two_stages(1.0, 1.0, tokens=10).nodes) is None
    assert PastRuns().share(TASK, []) is None


def test_past_runs_can_be_sent_and_mapped_read_only() -> None:
    runs = learnt(two_stages(1.0, 3.0, tokens=10))
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(runs, protocol=5, buffer_callback=buffers.append)
    mapped: PastRuns = pickle.loads(sent, buffers=[bytes(b) for b in buffers])
    assert not mapped.tasks[TASK].rows.flags.writeable
    mapped.warm_up()
    assert mapped.share(TASK, []) == runs.share(TASK, [])


def test_the_history_keeps_the_newest_and_puts_earlier_ones_in_front() -> None:
    def stages(tokens: int) -> FinishedStages:
        found = finished_stages(two_stages(1.0, 1.0, tokens=tokens))
        assert found is not None
        return found

    history = RunHistory()
    history.add([stages(999)])
    history.restore([stages(n) for n in range(KEPT_RUNS)])
    kept = [graph.stages[0].output_tokens for graph in history.by_task()[TASK]]
    assert kept == [*range(1, KEPT_RUNS), 999]
