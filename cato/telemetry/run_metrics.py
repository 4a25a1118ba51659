"""Metrics of runs, from their receipts.

One process (the Profiler actor) sees the receipts of all ingress replicas and keeps their
counters, so a load-balanced `/metrics` does not sample private registries at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cato.core.estimates import PoolErrors
from cato.core.receipt import SUPERSEDED, SlaReceipt
from cato.store.state import StoreState
from cato.telemetry.call_metrics import (
    LATENCY_BUCKETS_S,
    TPOT_BUCKETS_S,
    CallMetrics,
    PredictionMetrics,
    SessionMetrics,
)
from cato.telemetry.families import Families


class RunMetrics:
    """Counters and histograms fed by receipts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        families = Families(self.registry)
        self._runs = _Runs(families)
        self._calls = CallMetrics(families)
        self._sessions = SessionMetrics(families)
        self._predictions = PredictionMetrics(families)
        self._reactions = _Reactions(families)

    def record(self, receipt: SlaReceipt) -> None:
        self._runs.record(receipt)
        self._sessions.record(receipt)
        for node in receipt.nodes:
            if node.llm is not None and not node.llm.reused:
                self._calls.record(receipt.tenant, node, node.llm)
                self._sessions.record_turn(node.llm)
        self._predictions.record(receipt)

    def record_reaction(self, task: str, model: str, reaction: str, e2e_s: float) -> None:
        """Count a user's `reaction` to a completion of `model` that took `e2e_s`."""
        self._reactions.record(task, model, reaction, e2e_s)

    def render(self, errors: Iterable[PoolErrors] = (), store: StoreState | None = None) -> bytes:
        """All metrics; with the drift of `errors` and the state of the store, when given."""
        gauges = CollectorRegistry()
        gauges.register(_LearningGauges(tuple(errors), store))
        return generate_latest(self.registry) + generate_latest(gauges)


class _Runs:
    def __init__(self, families: Families) -> None:
        self._runs = families.counter(
            "cato_runs", "Runs that ended, by task and status.", "task", "status",
        )  # fmt: skip
        self._slo = families.counter(
            "cato_slo_runs",
            "Runs that ended, by task, metric, tenant and whether the SLO was met. Attainment: "
            "those with met=true over all; failed and cancelled runs are misses.",
            "task", "metric", "met", "tenant",
        )  # fmt: skip
        self._pool_slo = families.counter(
            "cato_pool_slo_runs",
            "Runs that called a pool, by pool, tenant and whether the SLO was met: attainment "
            "of calls that depend on the pool. A run that calls two pools counts in both.",
            "pool", "met", "tenant",
        )  # fmt: skip
        self._ttft = families.histogram(
            "cato_ttft_seconds", "Arrival to first token.", LATENCY_BUCKETS_S, "task",
        )  # fmt: skip
        self._e2e = families.histogram(
            "cato_e2e_seconds", "Arrival to last token, of runs that are done.",
            LATENCY_BUCKETS_S, "task",
        )  # fmt: skip
        self._tpot = families.histogram(
            "cato_tpot_seconds", "Time per output token after the first, of a streamed run.",
            TPOT_BUCKETS_S, "task",
        )  # fmt: skip
        self._excused = families.counter(
            "cato_excused_runs",
            "Runs excluded from attainment, by task and excuse: superseded, client_left, "
            "client_error.",
            "task", "excuse",
        )  # fmt: skip
        self._superseded = families.counter(
            "cato_superseded_runs",
            "Runs ended by a newer run of their editor buffer, by task. They count as cancelled"
            " in cato_runs.",
            "task",
        )  # fmt: skip
        self._node = families.histogram(
            "cato_node_seconds", "Execution of a node, queueing included.",
            LATENCY_BUCKETS_S, "task", "node",
        )  # fmt: skip
        self._reused = families.counter(
            "cato_reused_calls",
            "LLM calls answered by reusing the answer of an identical call, by pool and source "
            "(in flight, memory). No other metric of calls counts them.",
            "pool", "source",
        )  # fmt: skip

    def record(self, receipt: SlaReceipt) -> None:
        task, met = receipt.task, str(receipt.met).lower()
        self._runs.labels(task, receipt.status).inc()
        if receipt.excuse:
            self._excused.labels(task, receipt.excuse.value).inc()
        else:
            self._slo.labels(task, receipt.metric, met, receipt.tenant).inc()
            for pool in {node.llm.pool for node in receipt.nodes if node.llm is not None}:
                self._pool_slo.labels(pool, met, receipt.tenant).inc()
        if receipt.status == "done":  # others end early: most refusals take a millisecond
            self._e2e.labels(task).observe(receipt.e2e_s)
        if receipt.ttft_s is not None:
            self._ttft.labels(task).observe(receipt.ttft_s)
        if receipt.tpot_s is not None and receipt.output_tokens > 1:
            self._tpot.labels(task).observe(receipt.tpot_s)
        if receipt.problem == SUPERSEDED:
            self._superseded.labels(task).inc()
        for node in receipt.nodes:
            self._node.labels(task, node.node).observe(node.spent_s)
            if node.llm is not None and node.llm.reused:
                source = node.llm.reused.partition(",")[0]
                self._reused.labels(node.llm.pool, source).inc()


class _Reactions:
    def __init__(self, families: Families) -> None:
        self._reactions = families.counter(
            "cato_completion_reactions",
            "Users' reactions to completions they were shown, by task, model and reaction "
            "(view, select, dismiss). Acceptance rate: select over view.",
            "task", "model", "reaction",
        )  # fmt: skip
        self._reaction_e2e = families.histogram(
            "cato_completion_reaction_e2e_seconds",
            "Arrival to last token of the completions in cato_completion_reactions, by the same"
            " labels: shows whether users accept late ones.",
            LATENCY_BUCKETS_S, "task", "model", "reaction",
        )  # fmt: skip

    def record(self, task: str, model: str, reaction: str, e2e_s: float) -> None:
        self._reactions.labels(task, model, reaction).inc()
        self._reaction_e2e.labels(task, model, reaction).observe(e2e_s)


class _LearningGauges(Collector):
    def __init__(self, errors: Sequence[PoolErrors], store: StoreState | None) -> None:
        self._errors = errors
        self._store = store

    def collect(self) -> Iterable[Metric]:
        drift = GaugeMetricFamily(
            "cato_pool_drift",
            "Ratio of predicted to actual, from exponentially weighted means over about the "
            "last 100 invocations of a pool, by quantity (service, queue). If service stays "
            "below 0.8 or above 1.25: measure the profile again.",
            labels=["pool", "quantity"],
        )
        for error in self._errors:
            for quantity, ratio in (("service", error.drift), ("queue", error.queue_drift)):
                if ratio is not None:
                    drift.add_metric([error.pool, quantity], ratio)
        return [drift] if self._store is None else [drift, *_store_metrics(self._store)]


def _store_metrics(store: StoreState) -> Sequence[Metric]:
    return [
        GaugeMetricFamily(
            "cato_store_up",
            "1 while the metadata store accepts writes; 0 while it is degraded: serving goes on, "
            "and the Profiler's log says why.",
            value=float(store.is_ok),
        ),
        GaugeMetricFamily("cato_store_queued", "Records queued for writing.", value=store.queued),
        CounterMetricFamily(
            "cato_store_dropped",
            "Records lost since the Profiler started: the queue was full, or one did not fit.",
            value=store.dropped,
        ),
    ]
