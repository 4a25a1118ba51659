"""Metrics of runs and pools, rendered by prometheus-client.

One process (the Profiler actor) sees the receipts of all ingress replicas and keeps their
counters, so a load-balanced `/metrics` does not sample private registries at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cato.core.orchestrator import PoolPicture
from cato.core.receipt import SlaReceipt

LATENCY_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 13, 20, 30, 60, 120,
)  # fmt: skip
QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30)


class RunMetrics:
    """Counters and histograms fed by receipts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._runs = Counter(
            "cato_runs", "Runs that ended, by task and status.", ["task", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._slo = Counter(
            "cato_slo_runs", "Runs by task, metric and whether the SLO was met (attainment).",
            ["task", "metric", "met"], registry=self.registry,
        )  # fmt: skip
        self._tokens = Counter(
            "cato_tokens", "Tokens by model and direction (prompt, cached, output).",
            ["model", "direction"], registry=self.registry,
        )  # fmt: skip
        self._ttft = self._latency("cato_ttft_seconds", "Arrival to first token.")
        self._e2e = self._latency("cato_e2e_seconds", "Arrival to last token.")
        self._queue = Histogram(
            "cato_queue_seconds", "Queueing delay of an invocation.", ["pool"],
            buckets=QUEUE_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._node = Histogram(
            "cato_node_seconds", "Execution of a node, queueing included.", ["task", "node"],
            buckets=LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip

    def _latency(self, name: str, help: str) -> Histogram:
        return Histogram(name, help, ["task"], buckets=LATENCY_BUCKETS_S, registry=self.registry)

    def record(self, receipt: SlaReceipt) -> None:
        task = receipt.task
        self._runs.labels(task, receipt.status).inc()
        self._slo.labels(task, receipt.metric, str(receipt.met).lower()).inc()
        self._e2e.labels(task).observe(receipt.e2e_s)
        if receipt.ttft_s is not None:
            self._ttft.labels(task).observe(receipt.ttft_s)
        for node in receipt.nodes:
            self._node.labels(task, node.node).observe(node.spent_s)
            if node.llm is not None:
                self._queue.labels(node.llm.pool).observe(node.llm.queue_s)
                self._tokens.labels(node.llm.model, "prompt").inc(node.llm.prompt_tokens)
                self._tokens.labels(node.llm.model, "cached").inc(node.llm.cached_prompt_tokens)
                self._tokens.labels(node.llm.model, "output").inc(node.llm.output_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _PoolGauges(Collector):
    def __init__(self, pictures: Sequence[PoolPicture]) -> None:
        self._pictures = pictures

    def collect(self) -> Iterable[Metric]:
        queued = GaugeMetricFamily("cato_pool_queued", "Invocations that wait.", labels=["pool"])
        dispatched = GaugeMetricFamily(
            "cato_pool_dispatched", "Leases since the router started.", labels=["pool"]
        )
        refused = GaugeMetricFamily(
            "cato_pool_refused", "Invocations refused since the router started.", labels=["pool"]
        )
        by_replica = ["pool", "deployment", "replica"]
        held = GaugeMetricFamily(
            "cato_replica_held", "Invocations leased to a replica.", labels=by_replica
        )
        accepting = GaugeMetricFamily(
            "cato_replica_accepting", "1 when a replica takes work.", labels=by_replica
        )
        wait = GaugeMetricFamily(
            "cato_replica_wait_seconds", "Expected queueing time of a newcomer.", labels=by_replica
        )
        for picture in self._pictures:
            queued.add_metric([picture.name], picture.queued)
            dispatched.add_metric([picture.name], picture.dispatched)
            refused.add_metric([picture.name], picture.refused)
            for replica in picture.replicas:
                labels = [picture.name, replica.deployment, replica.id]
                held.add_metric(labels, replica.held)
                accepting.add_metric(labels, float(replica.accepting))
                wait.add_metric(labels, replica.wait_s)
        return [queued, dispatched, refused, held, accepting, wait]


def render_pools(pictures: Sequence[PoolPicture]) -> bytes:
    """Gauges of the pools as their routers see them now."""
    registry = CollectorRegistry()
    registry.register(_PoolGauges(pictures))
    return generate_latest(registry)
