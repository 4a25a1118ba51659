"""A scrape says how well predictions hold, how attainment is, and how the store is."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families
from store_kit import a_receipt, an_execution, facts

from cato.core.estimates import PoolErrors
from cato.core.ids import PoolName
from cato.core.receipt import LlmFacts, SlaReceipt
from cato.store.state import StoreState
from cato.telemetry.run_metrics import RunMetrics

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(page: bytes) -> Samples:
    """As Prometheus reads the page: value by name and labels; every family has a help text."""
    found: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        assert family.documentation, f"{family.name} says nothing of itself"
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def page(*receipts: SlaReceipt) -> Samples:
    metrics = RunMetrics()
    for receipt in receipts:
        metrics.record(receipt)
    return scraped(metrics.render())


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def called(*calls: LlmFacts, met: bool = True, status: str = "done") -> SlaReceipt:
    executions = (an_execution(llm=f, status=status) for f in calls)
    return a_receipt(*executions, met=met, status=status)


def test_coverage_counts_the_outputs_that_kept_within_their_bound() -> None:
    lengths = [(10, 9), (10, 10), (10, 11), (10, 200)]
    found = page(*(called(facts(tokens=n, length_bound_tokens=b)) for b, n in lengths))
    by = {"task": "t", "model": "m"}
    assert of(found, "cato_length_bounds_total", covered="true", **by) == 2
    assert of(found, "cato_length_bounds_total", covered="false", **by) == 2


def test_an_output_that_met_its_limit_is_covered_by_a_bound_at_that_limit() -> None:
    found = page(called(facts(tokens=64, reason="length", length_bound_tokens=64)))
    assert of(found, "cato_length_bounds_total", task="t", model="m", covered="true") == 1


def test_outputs_without_a_bound_or_an_end_say_nothing_of_coverage() -> None:
    found = page(
        called(facts(length_bound_tokens=0)),
        called(facts(length_bound_tokens=5, reason="abort")),
        called(facts(length_bound_tokens=5), status="cancelled"),
        called(facts(length_bound_tokens=5, calls=2)),
    )
    assert not any(name.startswith("cato_length_bounds") for name, _ in found)


def test_the_errors_of_service_and_queue_predictions_are_by_pool() -> None:
    call = facts(predicted_service_s=1.0, service_s=2.0, predicted_queue_s=0.5, queue_s=0.1)
    found = page(called(call, replace(call, pool="q", predicted_queue_s=0.0)))
    ratio, error = "cato_service_prediction_ratio", "cato_queue_prediction_error_seconds"
    assert of(found, f"{ratio}_count", pool="p") == of(found, f"{ratio}_count", pool="q") == 1
    assert of(found, f"{ratio}_sum", pool="p") == 0.5
    assert of(found, f"{ratio}_bucket", pool="p", le="0.5") == 1
    assert of(found, f"{ratio}_bucket", pool="p", le="0.25") == 0
    assert of(found, f"{error}_sum", pool="p") == 0.4
    assert of(found, f"{error}_sum", pool="q") == 0.1
    assert of(found, "cato_queue_predicted_seconds_total", pool="p") == 0.5
    assert of(found, "cato_queue_actual_seconds_total", pool="p") == 0.1


def test_what_was_not_predicted_has_no_error() -> None:
    found = page(called(facts(service_s=2.0, queue_s=1.0)))
    assert not any("prediction" in name or "predicted" in name for name, _ in found)


def test_attainment_is_by_task_and_by_pool_with_the_tenant() -> None:
    two_pools = called(facts(), replace(facts(), pool="q"), facts(), met=False)
    found = page(called(facts()), two_pools)
    runs = {"task": "t", "metric": "e2e", "tenant": ""}
    assert of(found, "cato_slo_runs_total", met="true", **runs) == 1
    assert of(found, "cato_slo_runs_total", met="false", **runs) == 1
    pool_runs = "cato_pool_slo_runs_total"
    assert of(found, pool_runs, pool="p", met="true", tenant="") == 1
    assert of(found, pool_runs, pool="p", met="false", tenant="") == 1, "a run counts once"
    assert of(found, pool_runs, pool="q", met="false", tenant="") == 1


def test_latencies_to_the_last_token_are_of_runs_that_are_done() -> None:
    ends = ("refused", "failed", "cancelled", "done")
    found = page(*(called(facts(), status=status, met=status == "done") for status in ends))
    assert of(found, "cato_e2e_seconds_count", task="t") == 1.0
    assert sum(of(found, "cato_runs_total", task="t", status=status) for status in ends) == 4


def test_a_whole_answer_has_no_time_per_token() -> None:
    whole = replace(called(facts(engine_ttft_s=None, first_token_s=None)), tpot_s=None)
    streamed = replace(called(facts()), tpot_s=0.05)
    found = page(whole, streamed)
    assert of(found, "cato_tpot_seconds_count", task="t") == 1
    assert of(found, "cato_invocation_tpot_seconds_count", pool="p") == 1


def test_a_stream_that_rested_has_the_time_of_its_first_token_and_a_slower_pace() -> None:
    rested = facts(
        tokens=11, queue_s=20.5, engine_ttft_s=0.2, first_token_s=0.7, service_s=2.2, attempts=2
    )
    found = page(called(rested))
    assert of(found, "cato_invocation_ttft_seconds_sum", pool="p") == 0.7
    assert of(found, "cato_invocation_e2e_seconds_sum", pool="p") == 22.7
    assert of(found, "cato_invocation_tpot_seconds_sum", pool="p") == 2.2


def test_the_pace_of_several_answers_is_that_of_each() -> None:
    four = facts(tokens=44, calls=4, queue_s=0.0, first_token_s=0.5, service_s=1.5)
    found = page(called(four))
    assert of(found, "cato_invocation_tpot_seconds_sum", pool="p") == 0.1
    assert of(found, "cato_tokens_total", model="m", direction="output") == 44


def test_a_scrape_does_not_say_when_each_series_began() -> None:
    found = page(called(facts()))
    assert of(found, "cato_runs_total", task="t", status="done") == 1
    assert not [name for name, _ in found if name.endswith("_created")]


def test_drift_is_by_pool_and_absent_where_nothing_waited() -> None:
    errors = [PoolErrors(PoolName("p"), 0.0, 0.0, 1.0, 2.0, 9)]
    errors.append(PoolErrors(PoolName("q"), 3.0, 2.0, 1.0, 1.0, 9))
    found = scraped(RunMetrics().render(errors))
    assert of(found, "cato_pool_drift", pool="p", quantity="service") == 0.5
    assert of(found, "cato_pool_drift", pool="q", quantity="queue") == 1.5
    assert ("cato_pool_drift", (("pool", "p"), ("quantity", "queue"))) not in found


def test_the_state_of_the_store_is_told_when_there_is_one() -> None:
    found = scraped(RunMetrics().render(store=StoreState(False, "locked", queued=7, dropped=3)))
    assert of(found, "cato_store_up") == 0.0
    assert of(found, "cato_store_queued") == 7
    assert of(found, "cato_store_dropped_total") == 3
    assert of(scraped(RunMetrics().render(store=StoreState(True, "", 0, 0))), "cato_store_up") == 1
    assert not any(name.startswith("cato_store") for name, _ in scraped(RunMetrics().render()))
