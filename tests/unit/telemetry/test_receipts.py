"""A receipt says the truth about its run, in plain values."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from kits.builders import a_node, a_workflow, llm_facts

from cato.core.ids import NodeId, RunId
from cato.core.receipt import WITHHELD
from cato.core.runs import FinishRun, NodeDone, NodeFailed, Run, RunCancelled, RunEvent, TextSent
from cato.core.session import Prompt
from cato.core.slo import Slo, SloMetric, tpot_s
from cato.core.workflow import CallSettings, Node, NodeKind, Workflow

START_S = 100.0


def finish_of(workflow: Workflow, *events: RunEvent) -> FinishRun:
    """The end of a run that arrived at `START_S` and was started 0.2 s later."""
    run = Run(RunId("req-1"), workflow, workflow.slo, {}, {}, START_S)
    commands = [*run.start(START_S + 0.2), *(c for e in events for c in run.handle(e))]
    (finish,) = [c for c in commands if isinstance(c, FinishRun)]
    return finish


def done(node: str, at_s: float, *, tokens: int = 21, queue_s: float = 0.5) -> NodeDone:
    facts = llm_facts(tokens=tokens, queue_s=queue_s)
    return NodeDone(START_S + at_s, NodeId(node), 1, None, {"text": "x"}, facts)


def a_direct_call() -> CallSettings:
    return CallSettings("m", "completions", {}, False, 21, Prompt(9, 9))


def one_call(metric: SloMetric, target_s: float) -> Workflow:
    return a_workflow(a_node("call"), slo=Slo(metric, target_s), stream=["call"])


@pytest.mark.parametrize(
    ("metric", "achieved_s"),
    [(SloMetric.TTFT, 1.0), (SloMetric.E2E, 3.0), (SloMetric.TPOT, 0.1)],
)
def test_what_was_achieved_is_measured_from_the_arrival(
    metric: SloMetric, achieved_s: float
) -> None:
    events = (TextSent(START_S + 1.0), TextSent(START_S + 1.5), done("call", 3.0))
    for target_s, met in ((achieved_s * 1.01, True), (achieved_s * 0.99, False)):
        receipt = finish_of(one_call(metric, target_s), *events).receipt
        assert receipt.achieved_s == pytest.approx(achieved_s)
        assert receipt.met is met
        assert (receipt.metric, receipt.target_s) == (metric.value, target_s)


@pytest.mark.parametrize("metric", list(SloMetric))
def test_without_a_stream_there_is_no_pace_and_none_is_missed(metric: SloMetric) -> None:
    slo = Slo(metric, 3.0, tpot_target_s=0.001)
    workflow = a_workflow(a_node("call"), slo=slo, stream=["call"])
    whole = replace(workflow, nodes=(Node(NodeId("call"), NodeKind.LLM, a_direct_call()),))
    for asked, events in ((workflow, ()), (whole, (TextSent(START_S + 2.999),))):
        receipt = finish_of(asked, *events, done("call", 3.0)).receipt
        assert receipt.tpot_s is None
        assert receipt.as_dict()["tpot_s"] is None
        assert receipt.ttft_s == pytest.approx(3.0, abs=0.01)
        assert receipt.met
    assert metric is not SloMetric.TPOT or receipt.achieved_s == 0.0


def test_a_direct_call_that_is_streamed_has_a_pace() -> None:
    workflow = one_call(SloMetric.TTFT, 3.0)
    node = Node(NodeId("call"), NodeKind.LLM, replace(a_direct_call(), stream=True))
    asked = replace(workflow, nodes=(node,))
    receipt = finish_of(asked, TextSent(START_S + 1.0), done("call", 3.0)).receipt
    assert receipt.tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize("metric", list(SloMetric))
def test_a_run_that_did_not_finish_is_a_miss_even_if_its_first_token_was_in_time(
    metric: SloMetric,
) -> None:
    failed = NodeFailed(START_S + 2.0, NodeId("call"), 1, None, "engine died")
    for last in (failed, RunCancelled(START_S + 2.0, "client left")):
        receipt = finish_of(one_call(metric, 99.0), TextSent(START_S + 1.0), last).receipt
        assert receipt.ttft_s == pytest.approx(1.0)
        assert receipt.achieved_s is None
        assert not receipt.met


def test_the_path_and_the_overhead_make_up_the_whole_latency() -> None:
    workflow = a_workflow(a_node("a"), a_node("side"), a_node("b", "a", "side"))
    run = Run(RunId("r"), workflow, workflow.slo, {}, {}, START_S)
    run.start(START_S + 0.2)
    run.handle(done("side", 0.7))
    run.handle(done("a", 2.2))
    (finish,) = run.handle(done("b", 5.2))
    assert isinstance(finish, FinishRun)
    receipt = finish.receipt
    assert [receipt.nodes[i].node for i in receipt.path] == ["a", "b"]
    assert [receipt.nodes[i].spent_s for i in receipt.path] == pytest.approx([2.0, 3.0])
    assert receipt.overhead_s == pytest.approx(0.2)
    assert receipt.e2e_s == pytest.approx(5.2)
    assert receipt.queue_s == pytest.approx(1.0)  # of the path; the side node waited beside it


def test_a_receipt_becomes_plain_json() -> None:
    receipt = finish_of(one_call(SloMetric.TTFT, 1.0), done("call", 1.0)).receipt
    plain = json.loads(json.dumps(receipt.as_dict(), allow_nan=False))
    assert plain["request_id"] == "req-1"
    assert plain["nodes"][0]["llm"]["output_tokens"] == 21
    assert plain["path"] == [0]
    assert plain["simulated"] is True


def test_a_receipt_holds_predicted_beside_actual() -> None:
    plain = finish_of(one_call(SloMetric.TTFT, 1.0), done("call", 1.0)).receipt.as_dict()
    (node,) = plain["nodes"]  # type: ignore[misc]
    for predicted, actual in (
        ("expected_tokens", "output_tokens"),
        ("length_bound_tokens", "output_tokens"),
        ("predicted_queue_s", "queue_s"),
        ("predicted_service_s", "service_s"),
    ):
        assert {predicted, actual} <= set(node["llm"])


def test_without_its_text_a_receipt_keeps_every_number_and_quotes_nobody() -> None:
    failed = NodeFailed(START_S + 2.0, NodeId("call"), 1, None, "cannot read 'def secret()'")
    receipt = finish_of(one_call(SloMetric.TTFT, 1.0), failed).receipt
    assert "secret" in str(receipt.as_dict())
    kept = receipt.without_text()
    assert "secret" not in str(kept.as_dict())
    assert kept.problem == kept.nodes[0].problem == WITHHELD
    assert (kept.e2e_s, kept.status, kept.nodes[0].spent_s) == (
        receipt.e2e_s,
        receipt.status,
        receipt.nodes[0].spent_s,
    )
    flawless = finish_of(one_call(SloMetric.TTFT, 1.0), done("call", 1.0)).receipt
    assert flawless.without_text() == flawless


def test_a_single_token_has_no_pace() -> None:
    assert tpot_s(1.0, 1.0, 1) == 0.0
    assert tpot_s(1.0, 1.0, 0) == 0.0
    assert tpot_s(1.0, 3.0, 5) == 0.5


def test_a_metric_never_achieved_is_a_miss_and_an_exact_hit_is_met() -> None:
    slo = Slo(SloMetric.E2E, 2.0)
    assert not slo.is_met_by(None)
    assert slo.is_met_by(2.0)
    assert slo.deadline_s(10.0) == 12.0
    assert Slo(SloMetric.TPOT, 0.1).deadline_s(10.0) is None
