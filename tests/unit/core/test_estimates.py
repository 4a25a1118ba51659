"""Baselines follow what receipts say, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_node, a_workflow, llm_facts

from cato.core.budgets import NodeEstimate
from cato.core.estimates import (
    WEIGHT,
    Baselines,
    NodeMean,
    PoolErrors,
    PredictionErrors,
    estimates_of,
)
from cato.core.ids import NodeId, PoolName, RunId, TaskName
from cato.core.receipt import Excuse, NodeReceipt, SlaReceipt
from cato.core.workflow import LlmSettings, NodeKind

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
    limit_s: float | None = None,
    model: str = "m",
) -> NodeReceipt:
    """An execution of an LLM node when `queue_s` is given."""
    llm, kind = None, "transform"
    if queue_s is not None:
        llm, kind = replace(llm_facts(queue_s=queue_s, ttft_s=ttft_s), model=model), "llm"
    return NodeReceipt(node, kind, round, item, status, 0.0, spent_s, None, limit_s, llm=llm)


def a_receipt(*nodes: NodeReceipt, status: str = "done") -> SlaReceipt:
    return SlaReceipt(
        RunId("r"), TaskName("t"), status, "e2e", 1.0, 1.0, True, 1.0, 0.0, 1.0, 0, 0.0, 0.0, True,
        nodes, (),
    )  # fmt: skip


def learnt(*receipts: SlaReceipt, all_nodes: tuple[NodeId, ...] = (A,)) -> NodeEstimate:
    """Of the only model that node A called."""
    baselines = Baselines()
    for receipt in receipts:
        baselines.record(receipt, all_nodes)
    (estimate,) = [e for (node, _), e in baselines.table()[TaskName("t")].items() if node == A]
    return estimate


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


@pytest.mark.parametrize("status", ["failed", "absent", "running"])
def test_executions_that_failed_teach_nothing(status: str) -> None:
    good = an_execution(spent_s=1.0)
    bad = an_execution(spent_s=9.0, status=status, round=2, limit_s=10.0)
    assert learnt(a_receipt(good, bad)) == NodeEstimate(1.0, 1.0, 1.0)


def a_stopped(how: str, spent_s: float, *, ttft_s: float | None = None) -> SlaReceipt:
    """A run whose node was stopped after that time, at its limit or with its run."""
    limit_s = spent_s if how in ("absent", "failed") else None
    x = an_execution(spent_s=spent_s, queue_s=0.0, ttft_s=ttft_s, status=how, limit_s=limit_s)
    return a_receipt(x, status="done" if how == "absent" else "deadline_exceeded")


@pytest.mark.parametrize("how", ["absent", "failed", "cancelled"])
def test_what_was_stopped_is_known_to_take_longer(how: str) -> None:
    done = [a_receipt(an_execution(spent_s=2.0, queue_s=0.0, ttft_s=1.0))] * 3
    assert learnt(*done, a_stopped(how, 6.0, ttft_s=1.4)).mean_s == pytest.approx(3.0)
    assert learnt(*done, a_stopped(how, 6.0, ttft_s=1.4)).first_token_s == pytest.approx(1.1)
    assert learnt(*done, a_stopped(how, 6.0)).first_token_s == pytest.approx(2.25)
    too_early = learnt(*done, a_stopped(how, 0.5))
    assert (too_early.mean_s, too_early.first_token_s) == (2.0, 1.0)


def test_stopping_the_long_ones_does_not_make_a_node_look_short() -> None:
    """Half of the executions take 2 s, half 8 s; a limit of 6 s stops the latter."""
    short = a_receipt(an_execution(spent_s=2.0, queue_s=0.0))
    mean_s = learnt(*[short, a_stopped("absent", 6.0)] * 50).mean_s
    assert 3.5 < mean_s < 4.5


def test_a_node_that_is_always_stopped_has_run_for_that_long() -> None:
    assert learnt(*[a_stopped("absent", 6.0)] * 3) == NodeEstimate(6.0, 6.0, runs=1.0)


@pytest.mark.parametrize("excuse", [Excuse.CLIENT_LEFT, Excuse.SUPERSEDED])
def test_what_a_client_gave_up_teaches_nothing(excuse: Excuse) -> None:
    done = a_receipt(an_execution(spent_s=1.0, queue_s=0.0, ttft_s=1.0))
    left = replace(a_stopped("cancelled", 9.0), excuse=excuse)
    assert learnt(done, left).mean_s == 1.0


def test_a_call_that_only_waited_teaches_nothing() -> None:
    baselines = Baselines()
    (node,) = a_stopped("cancelled", 9.0).nodes
    assert node.llm is not None
    waited = replace(node, llm=replace(node.llm, replica=""))
    baselines.record(a_receipt(waited, replace(node, llm=None), status="failed"), (A,))
    assert baselines.table() == {}


def test_baselines_of_another_model_are_others() -> None:
    baselines = Baselines()
    for model, spent_s in [("small", 1.0)] * 20 + [("large", 7.0)]:
        x = an_execution(spent_s=spent_s, queue_s=0.0, ttft_s=0.5, model=model)
        baselines.record(a_receipt(x, an_execution(B, 3.0)), (A, B))
    settings = LlmSettings("alias", 10, 5)
    workflow = a_workflow(
        replace(a_node("a"), settings=settings), a_node("b", "a", kind=NodeKind.TRANSFORM)
    )
    measured = baselines.table()[TaskName("t")]

    def times(called: str) -> dict[NodeId, float]:
        known = estimates_of(workflow, measured, {"alias": called}.__getitem__)
        return {node: estimate.mean_s for node, estimate in known.items()}

    assert times("large") == {A: 7.0, B: 3.0}
    assert times("small") == {A: 1.0, B: 3.0}
    assert times("new") == {B: 3.0}


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
        *[a_receipt(an_execution(spent_s=1.0, queue_s=0.0))] * 9,
    ]
    estimate = learnt(*receipts)
    assert estimate.first_token_s == estimate.mean_s == pytest.approx(1.4)


def test_nothing_is_known_of_a_node_that_never_ran() -> None:
    baselines = Baselines()
    baselines.record(a_receipt(an_execution(A)), (A, B))
    assert set(baselines.table()[TaskName("t")]) == {(A, "")}


# What is learnt leaves and comes back


def test_a_run_tells_what_it_changed_and_that_restores_all_that_is_known() -> None:
    before, after = Baselines(), Baselines()
    for spent_s in (1.0, 2.0, 6.0):
        receipt = a_receipt(an_execution(spent_s=spent_s, queue_s=0.0, ttft_s=0.5))
        after.restore(before.record(receipt, (A, B)))
    assert after.table() == before.table() != {}
    (mean,) = [m for m in before.record(a_receipt(an_execution(B)), ()) if m.quantity == "runs"]
    assert mean == NodeMean(TaskName("t"), B, "", "runs", 0.25, 4)


def test_of_two_means_of_the_same_the_one_that_has_seen_more_is_kept() -> None:
    baselines = Baselines()
    baselines.record(a_receipt(an_execution(spent_s=1.0)), (A,))
    for value, samples in ((5.0, 1), (7.0, 50)):
        baselines.restore([NodeMean(TaskName("t"), A, "", "service_s", value, samples)])
    assert baselines.table()[TaskName("t")][A, ""].mean_s == 7.0


# Errors of predictions


def predicted(
    predicted_s: float, service_s: float, *, queue_s: tuple[float, float] = (0.0, 0.0)
) -> SlaReceipt:
    facts = replace(
        llm_facts(queue_s=queue_s[1]),
        predicted_queue_s=queue_s[0],
        predicted_service_s=predicted_s,
        service_s=service_s,
    )
    return a_receipt(NodeReceipt(A, "llm", 1, None, "done", 0.0, 1.0, None, None, llm=facts))


def errors_after(*receipts: SlaReceipt) -> PoolErrors | None:
    errors = PredictionErrors()
    for receipt in receipts:
        errors.record(receipt)
    return errors.table().get(PoolName("p"))


def test_drift_is_the_ratio_of_the_means_of_predicted_and_actual() -> None:
    error = errors_after(predicted(1.0, 2.0), predicted(2.0, 1.0), predicted(3.0, 9.0))
    assert error is not None
    assert error.drift == pytest.approx(6.0 / 12.0)
    assert error.queue_drift is None


def test_drift_follows_a_change_of_speed_within_some_hundred_invocations() -> None:
    error = errors_after(*[predicted(1.0, 1.0)] * 300, *[predicted(1.0, 2.0)] * 150)
    assert error is not None
    assert error.drift == pytest.approx(0.5, abs=0.03)


def test_queueing_has_a_drift_of_its_own() -> None:
    error = errors_after(predicted(1.0, 1.0, queue_s=(1.0, 4.0)))
    assert error is not None
    assert error.queue_drift == 0.25


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.0)])
def test_without_a_prediction_or_a_service_there_is_nothing_to_judge(
    times: tuple[float, float],
) -> None:
    assert errors_after(predicted(*times)) is None


def test_a_failed_invocation_says_nothing_of_predictions() -> None:
    receipt = predicted(1.0, 9.0)
    failed = replace(receipt, nodes=(replace(receipt.nodes[0], status="failed"),))
    assert errors_after(failed) is None


def test_the_last_lease_of_several_predicts_only_the_rest_and_is_no_error_of_the_profile() -> None:
    whole = predicted(1.0, 1.0)
    (node,) = predicted(0.2, 1.0).nodes
    assert node.llm is not None
    resumed = replace(whole, nodes=(replace(node, llm=replace(node.llm, attempts=2)),))
    error = errors_after(whole, *[resumed] * 100)
    assert error is not None
    assert error.drift == 1.0


def test_errors_are_restored_and_learning_goes_on_from_there() -> None:
    receipts = [predicted(1.0, float(n)) for n in range(1, 6)]
    first, second = PredictionErrors(), PredictionErrors()
    for receipt in receipts[:3]:
        changed = first.record(receipt)
    second.restore(changed)
    for receipt in receipts[3:]:
        second.record(receipt)
    assert second.table()[PoolName("p")] == errors_after(*receipts)
    second.restore(changed)  # older: ignored
    assert second.table()[PoolName("p")] == errors_after(*receipts)
