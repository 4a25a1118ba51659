"""Metrics of runs, from their receipts.

One process (the Profiler actor) sees the receipts of all ingress replicas and keeps their
counters, so a load-balanced `/metrics` does not sample private registries at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cato.core.estimates import PoolErrors, predictions
from cato.core.receipt import SUPERSEDED, LlmFacts, NodeReceipt, NodeStatus, SlaReceipt
from cato.core.slo import tpot_s
from cato.estimators.output_lengths import CUT, ENDED
from cato.store.state import StoreState
from cato.telemetry.families import Families

LATENCY_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 13, 20, 30, 60, 120,
)  # fmt: skip
QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
# Negative too: whether a call is predicted to be late.
SLACK_BUCKETS_S = (-10, -3, -1, -0.3, -0.1, 0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
THINK_BUCKETS_S = (0.5, 1, 2, 5, 10, 20, 45, 90, 180, 600, 1800, 7200)
SESSION_SLACK_BUCKETS_S = (-3600, -600, -120, -30, 0, 30, 120, 600, 1800, 3600, 14_400)
# Ratios of predicted to actual: narrow around 1, where a good profile is.
RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4)


class RunMetrics:
    """Counters and histograms fed by receipts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        families = Families(self.registry)
        self._runs = _Runs(families)
        self._calls = _Calls(families)
        self._sessions = _Sessions(families)
        self._predictions = _Predictions(families)
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
            "cato_e2e_seconds", "Arrival to last token.", LATENCY_BUCKETS_S, "task",
        )  # fmt: skip
        self._tpot = families.histogram(
            "cato_tpot_seconds", "Time per output token after the first, of a run.",
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


class _Calls:
    """Calls that reached an engine or waited for one; reused answers are not among them."""

    def __init__(self, families: Families) -> None:
        self._tokens = families.counter(
            "cato_tokens", "Tokens by model and direction (prompt, cached, output).",
            "model", "direction",
        )  # fmt: skip
        self._tenant_tokens = families.counter(
            "cato_tenant_tokens", "Tokens by tenant and direction (prompt, output).",
            "tenant", "direction",
        )  # fmt: skip
        self._call_ttft = families.histogram(
            "cato_invocation_ttft_seconds",
            "Arrival of an LLM call at its pool to its first token, queueing included.",
            LATENCY_BUCKETS_S, "pool",
        )  # fmt: skip
        self._call_tpot = families.histogram(
            "cato_invocation_tpot_seconds",
            "Time per output token after the first, of an LLM call.",
            TPOT_BUCKETS_S, "pool",
        )  # fmt: skip
        self._call_e2e = families.histogram(
            "cato_invocation_e2e_seconds",
            "Arrival of an LLM call at its pool to its last token, queueing included.",
            LATENCY_BUCKETS_S, "pool",
        )  # fmt: skip
        self._slack = families.histogram(
            "cato_dispatch_slack_seconds",
            "Slack when an LLM call got its last lease: time to the deadline of its run, minus "
            "the predicted remaining service. Below 0 it was predicted to be late.",
            SLACK_BUCKETS_S, "pool",
        )  # fmt: skip
        self._attempts = families.counter(
            "cato_invocation_attempts",
            "Leases of LLM calls, by pool. Exceeds the calls in cato_queue_seconds_count when "
            "replicas were lost or calls preempted.",
            "pool",
        )  # fmt: skip
        self._queue = families.histogram(
            "cato_queue_seconds", "Queueing delay of an invocation.", QUEUE_BUCKETS_S, "pool",
        )  # fmt: skip

    def record(self, tenant: str, node: NodeReceipt, call: LlmFacts) -> None:
        pool = call.pool
        self._queue.labels(pool).observe(call.queue_s)
        self._tokens.labels(call.model, "prompt").inc(call.prompt_tokens)
        self._tokens.labels(call.model, "cached").inc(call.cached_prompt_tokens)
        self._tokens.labels(call.model, "output").inc(call.output_tokens)
        self._tenant_tokens.labels(tenant, "prompt").inc(call.prompt_tokens)
        self._tenant_tokens.labels(tenant, "output").inc(call.output_tokens)
        self._attempts.labels(pool).inc(call.attempts)
        slack_s = call.slack_s - call.predicted_s
        if call.replica and slack_s < inf:
            self._slack.labels(pool).observe(slack_s)
        if call.engine_ttft_s is not None:
            self._call_ttft.labels(pool).observe(call.queue_s + call.engine_ttft_s)
        if node.status != NodeStatus.DONE.value:
            return
        e2e_s = call.queue_s + call.service_s
        self._call_e2e.labels(pool).observe(e2e_s)
        if call.engine_ttft_s is not None and call.output_tokens > 1:
            pace_s = tpot_s(call.queue_s + call.engine_ttft_s, e2e_s, call.output_tokens)
            self._call_tpot.labels(pool).observe(pace_s)


class _Sessions:
    def __init__(self, families: Families) -> None:
        self._turns = families.counter(
            "cato_session_turns",
            "Turns of sessions that ran on a replica, by pool and placement: home (the replica "
            "of the previous turn), moved, or new (no home was known).",
            "pool", "placement",
        )  # fmt: skip
        self._turn_tokens = families.counter(
            "cato_session_prompt_tokens",
            "Prompt tokens of those turns, by pool and whether the engine had them cached. Hit "
            "rate: those with cached=true over all.",
            "pool", "cached",
        )  # fmt: skip
        self._think = families.histogram(
            "cato_session_think_seconds",
            "Time from a session's answer to its next turn, by client (the agent's name).",
            THINK_BUCKETS_S, "client",
        )  # fmt: skip
        self._session_slack = families.histogram(
            "cato_session_slack_seconds",
            "Slack of sessions with a target when a turn ended: their time left minus the "
            "expected time of later turns. Below 0 they are expected to be late.",
            SESSION_SLACK_BUCKETS_S, "client",
        )  # fmt: skip

    def record(self, receipt: SlaReceipt) -> None:
        if receipt.think_s is not None:
            self._think.labels(receipt.client).observe(receipt.think_s)
        if receipt.session_slack_s is not None:
            self._session_slack.labels(receipt.client).observe(receipt.session_slack_s)

    def record_turn(self, call: LlmFacts) -> None:
        if call.placement:
            self._turns.labels(call.pool, call.placement.value).inc()
            self._turn_tokens.labels(call.pool, "true").inc(call.cached_prompt_tokens)
            self._turn_tokens.labels(call.pool, "false").inc(call.uncached_prompt_tokens)


class _Predictions:
    def __init__(self, families: Families) -> None:
        self._bounds = families.counter(
            "cato_length_bounds",
            "Outputs with a length bound at arrival that ended by themselves or at their limit,"
            " by task, model and whether they kept within the bound. Coverage: those with "
            "covered=true over all; the bound is the 0.9 quantile, so 0.9 is calibrated.",
            "task", "model", "covered",
        )  # fmt: skip
        self._service_ratio = families.histogram(
            "cato_service_prediction_ratio",
            "Predicted over actual service time of an invocation (dispatch to last token), by "
            "pool; 1 is right, below 1 it took longer than predicted.",
            RATIO_BUCKETS, "pool",
        )  # fmt: skip
        self._queue_error = families.histogram(
            "cato_queue_prediction_error_seconds",
            "Absolute difference of predicted and actual queueing delay of an invocation, by "
            "pool. Not a ratio, since most invocations do not queue at all.",
            QUEUE_BUCKETS_S, "pool",
        )  # fmt: skip
        self._predicted_queue = families.counter(
            "cato_queue_predicted_seconds",
            "Sum of the predicted queueing delays of the invocations in "
            "cato_queue_prediction_error_seconds, by pool.",
            "pool",
        )  # fmt: skip
        self._actual_queue = families.counter(
            "cato_queue_actual_seconds",
            "Sum of the actual queueing delays of the same invocations, by pool; compared with "
            "the predicted sum it shows the direction of prediction errors.",
            "pool",
        )  # fmt: skip

    def record(self, receipt: SlaReceipt) -> None:
        for node in receipt.nodes:
            is_done = node.status == NodeStatus.DONE.value
            if is_done and node.llm is not None and not node.llm.reused:
                self._record_bound(receipt.task, node.llm)
        for facts in predictions(receipt):
            ratio = facts.predicted_service_s / facts.service_s
            self._service_ratio.labels(facts.pool).observe(ratio)
            error_s = abs(facts.predicted_queue_s - facts.queue_s)
            self._queue_error.labels(facts.pool).observe(error_s)
            self._predicted_queue.labels(facts.pool).inc(facts.predicted_queue_s)
            self._actual_queue.labels(facts.pool).inc(facts.queue_s)

    def _record_bound(self, task: str, facts: LlmFacts) -> None:
        # The bound is for the output cut at its limit, so the length of a cut output is exact.
        has_ended = facts.finish_reason in ENDED or facts.finish_reason == CUT
        if facts.length_bound_tokens > 0 and has_ended:
            is_covered = facts.output_tokens <= facts.length_bound_tokens
            self._bounds.labels(task, facts.model, str(is_covered).lower()).inc()


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
