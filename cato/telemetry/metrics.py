"""Metrics of runs and pools, rendered by prometheus-client.

One process (the Profiler actor) sees the receipts of all ingress replicas and keeps their
counters, so a load-balanced `/metrics` does not sample private registries at random.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cato.core.estimates import PoolErrors, predictions
from cato.core.ids import PoolName
from cato.core.orchestrator import PoolPicture
from cato.core.receipt import SUPERSEDED, LlmFacts, NodeReceipt, NodeStatus, SlaReceipt
from cato.core.residency import Resident
from cato.core.slo import tpot_s
from cato.core.slots import SharedPoolPicture, SlotState
from cato.estimators.output_lengths import CUT, ENDED
from cato.store.state import StoreState
from cato.telemetry.decisions import PoolDecisions
from cato.telemetry.families import Counter, Histogram
from cato.telemetry.overview import DeploymentOverview, FleetState

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
        self._runs = Counter(
            "cato_runs", "Runs that ended, by task and status.", ["task", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._slo = Counter(
            "cato_slo_runs",
            "Runs that ended, by task, metric, tenant and whether the SLO was met. Attainment: "
            "those with met=true over all; failed and cancelled runs are misses.",
            ["task", "metric", "met", "tenant"], registry=self.registry,
        )  # fmt: skip
        self._pool_slo = Counter(
            "cato_pool_slo_runs",
            "Runs that called a pool, by pool, tenant and whether the SLO was met: attainment of "
            "calls that depend on the pool. A run that calls two pools counts in both.",
            ["pool", "met", "tenant"], registry=self.registry,
        )  # fmt: skip
        self._tokens = Counter(
            "cato_tokens", "Tokens by model and direction (prompt, cached, output).",
            ["model", "direction"], registry=self.registry,
        )  # fmt: skip
        self._ttft = self._latency("cato_ttft_seconds", "Arrival to first token.")
        self._e2e = self._latency("cato_e2e_seconds", "Arrival to last token.")
        self._tpot = Histogram(
            "cato_tpot_seconds", "Time per output token after the first, of a run.", ["task"],
            buckets=TPOT_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._excused = Counter(
            "cato_excused_runs",
            "Runs excluded from attainment, by task and excuse: superseded, "
            "client_left, client_error.",
            ["task", "excuse"], registry=self.registry,
        )  # fmt: skip
        self._superseded = Counter(
            "cato_superseded_runs",
            "Runs ended by a newer run of their editor buffer, by task. They count as "
            "cancelled in cato_runs.",
            ["task"], registry=self.registry,
        )  # fmt: skip
        self._tenant_tokens = Counter(
            "cato_tenant_tokens", "Tokens by tenant and direction (prompt, output).",
            ["tenant", "direction"], registry=self.registry,
        )  # fmt: skip
        self._call_ttft = Histogram(
            "cato_invocation_ttft_seconds",
            "Arrival of an LLM call at its pool to its first token, queueing included.",
            ["pool"], buckets=LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._call_tpot = Histogram(
            "cato_invocation_tpot_seconds",
            "Time per output token after the first, of an LLM call.",
            ["pool"], buckets=TPOT_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._call_e2e = Histogram(
            "cato_invocation_e2e_seconds",
            "Arrival of an LLM call at its pool to its last token, queueing included.",
            ["pool"], buckets=LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._slack = Histogram(
            "cato_dispatch_slack_seconds",
            "Slack when an LLM call got its last lease: time to the deadline of its run, minus "
            "the predicted remaining service. Below 0 it was predicted to be late.",
            ["pool"], buckets=SLACK_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._attempts = Counter(
            "cato_invocation_attempts",
            "Leases of LLM calls, by pool. Exceeds the calls in cato_queue_seconds_count when "
            "replicas were lost or calls preempted.",
            ["pool"], registry=self.registry,
        )  # fmt: skip
        self._queue = Histogram(
            "cato_queue_seconds", "Queueing delay of an invocation.", ["pool"],
            buckets=QUEUE_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._node = Histogram(
            "cato_node_seconds", "Execution of a node, queueing included.", ["task", "node"],
            buckets=LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip

        self._reused = Counter(
            "cato_reused_calls",
            "LLM calls answered by reusing the answer of an identical call, by pool and source "
            "(in flight, memory). No other metric of calls counts them.",
            ["pool", "source"], registry=self.registry,
        )  # fmt: skip
        self._turns = Counter(
            "cato_session_turns",
            "Turns of sessions that ran on a replica, by pool and placement: home (the replica of "
            "the previous turn), moved, or new (no home was known).",
            ["pool", "placement"], registry=self.registry,
        )  # fmt: skip
        self._turn_tokens = Counter(
            "cato_session_prompt_tokens",
            "Prompt tokens of those turns, by pool and whether the engine had them cached. Hit "
            "rate: those with cached=true over all.",
            ["pool", "cached"], registry=self.registry,
        )  # fmt: skip
        self._think = Histogram(
            "cato_session_think_seconds",
            "Time from a session's answer to its next turn, by client (the agent's name).",
            ["client"], buckets=THINK_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._session_slack = Histogram(
            "cato_session_slack_seconds",
            "Slack of sessions with a target when a turn ended: their time left minus the "
            "expected time of later turns. Below 0 they are expected to be late.",
            ["client"], buckets=SESSION_SLACK_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._reactions = Counter(
            "cato_completion_reactions",
            "Users' reactions to completions they were shown, by task, model and reaction "
            "(view, select, dismiss). Acceptance rate: select over view.",
            ["task", "model", "reaction"], registry=self.registry,
        )  # fmt: skip
        self._reaction_e2e = Histogram(
            "cato_completion_reaction_e2e_seconds",
            "Arrival to last token of the completions in cato_completion_reactions, by the same "
            "labels: shows whether users accept late ones.",
            ["task", "model", "reaction"], buckets=LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._bounds = Counter(
            "cato_length_bounds",
            "Outputs with a length bound at arrival that ended by themselves or at their "
            "limit, by task, model and whether they kept within the bound. Coverage: those with "
            "covered=true over all; the bound is the 0.9 quantile, so 0.9 is calibrated.",
            ["task", "model", "covered"], registry=self.registry,
        )  # fmt: skip
        self._service_ratio = Histogram(
            "cato_service_prediction_ratio",
            "Predicted over actual service time of an invocation (dispatch to last token), by "
            "pool; 1 is right, below 1 it took longer than predicted.",
            ["pool"], buckets=RATIO_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._queue_error = Histogram(
            "cato_queue_prediction_error_seconds",
            "Absolute difference of predicted and actual queueing delay of an invocation, by pool. "
            "Not a ratio, since most invocations do not queue at all.",
            ["pool"], buckets=QUEUE_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._predicted_queue = Counter(
            "cato_queue_predicted_seconds",
            "Sum of the predicted queueing delays of the invocations in "
            "cato_queue_prediction_error_seconds, by pool.",
            ["pool"], registry=self.registry,
        )  # fmt: skip
        self._actual_queue = Counter(
            "cato_queue_actual_seconds",
            "Sum of the actual queueing delays of the same invocations, by pool; compared with the "
            "predicted sum it shows the direction of prediction errors.",
            ["pool"], registry=self.registry,
        )  # fmt: skip

    def _latency(self, name: str, help: str) -> Histogram:
        return Histogram(name, help, ["task"], buckets=LATENCY_BUCKETS_S, registry=self.registry)

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
        if receipt.think_s is not None:
            self._think.labels(receipt.client).observe(receipt.think_s)
        if receipt.session_slack_s is not None:
            self._session_slack.labels(receipt.client).observe(receipt.session_slack_s)
        for node in receipt.nodes:
            self._node.labels(task, node.node).observe(node.spent_s)
            if node.llm is not None and node.llm.reused:
                source = node.llm.reused.partition(",")[0]
                self._reused.labels(node.llm.pool, source).inc()
            elif node.llm is not None:
                self._record_call(receipt.tenant, node, node.llm)
                self._queue.labels(node.llm.pool).observe(node.llm.queue_s)
                self._tokens.labels(node.llm.model, "prompt").inc(node.llm.prompt_tokens)
                self._tokens.labels(node.llm.model, "cached").inc(node.llm.cached_prompt_tokens)
                self._tokens.labels(node.llm.model, "output").inc(node.llm.output_tokens)

                if node.status == NodeStatus.DONE.value:
                    self._record_bound(task, node.llm)
        for facts in predictions(receipt):
            self._record_errors(facts)

    def _record_call(self, tenant: str, node: NodeReceipt, call: LlmFacts) -> None:
        pool = call.pool
        self._tenant_tokens.labels(tenant, "prompt").inc(call.prompt_tokens)
        self._tenant_tokens.labels(tenant, "output").inc(call.output_tokens)
        self._attempts.labels(pool).inc(call.attempts)
        if call.placement:
            self._turns.labels(pool, call.placement.value).inc()
            self._turn_tokens.labels(pool, "true").inc(call.cached_prompt_tokens)
            self._turn_tokens.labels(pool, "false").inc(call.uncached_prompt_tokens)
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

    def record_reaction(self, task: str, model: str, reaction: str, e2e_s: float) -> None:
        """Count a user's `reaction` to a completion of `model` that took `e2e_s`."""
        self._reactions.labels(task, model, reaction).inc()
        self._reaction_e2e.labels(task, model, reaction).observe(e2e_s)

    def _record_bound(self, task: str, facts: LlmFacts) -> None:
        # The bound is for the output cut at its limit, so the length of a cut output is exact.
        has_ended = facts.finish_reason in ENDED or facts.finish_reason == CUT
        if facts.length_bound_tokens > 0 and has_ended:
            is_covered = facts.output_tokens <= facts.length_bound_tokens
            self._bounds.labels(task, facts.model, str(is_covered).lower()).inc()

    def _record_errors(self, facts: LlmFacts) -> None:
        ratio = facts.predicted_service_s / facts.service_s
        self._service_ratio.labels(facts.pool).observe(ratio)
        error_s = abs(facts.predicted_queue_s - facts.queue_s)
        self._queue_error.labels(facts.pool).observe(error_s)
        self._predicted_queue.labels(facts.pool).inc(facts.predicted_queue_s)
        self._actual_queue.labels(facts.pool).inc(facts.queue_s)

    def render(self, errors: Iterable[PoolErrors] = (), store: StoreState | None = None) -> bytes:
        """All metrics; with the drift of `errors` and the state of the store, when given."""
        gauges = CollectorRegistry()
        gauges.register(_LearningGauges(tuple(errors), store))
        return generate_latest(self.registry) + generate_latest(gauges)


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


class _FleetMetrics(Collector):
    def __init__(self, pictures: Sequence[PoolPicture], fleet: FleetState) -> None:
        self._pictures = pictures
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "cato_control_actors_silent",
            "Control actors that did not answer this scrape; their metrics are missing from it.",
            value=len(self._fleet.missing),
        )
        yield from _pool_metrics(self._pictures)
        yield _decisions(self._fleet.decisions)
        yield from _deployment_metrics(self._fleet.deployments)
        yield from _resident_metrics(self._fleet.residents)
        yield from _shared_pool_metrics(self._fleet.shared_pools)


def _pool_metrics(pictures: Iterable[PoolPicture]) -> Iterable[Metric]:
    queued = GaugeMetricFamily("cato_pool_queued", "Queued invocations.", labels=["pool"])
    dispatched = CounterMetricFamily(
        "cato_pool_dispatched", "Leases since the router started.", labels=["pool"]
    )
    refused = CounterMetricFamily(
        "cato_pool_refused", "Invocations refused since the router started.", labels=["pool"]
    )
    by_replica = ["pool", "deployment", "replica"]
    held = GaugeMetricFamily(
        "cato_replica_held", "Invocations leased to a replica.", labels=by_replica
    )
    places = GaugeMetricFamily(
        "cato_replica_places", "Invocations that a replica can run at a time.", labels=by_replica
    )
    accepting = GaugeMetricFamily(
        "cato_replica_accepting", "1 when a replica accepts work.", labels=by_replica
    )
    wait = GaugeMetricFamily(
        "cato_replica_wait_seconds", "Expected queueing delay of a new call.", labels=by_replica
    )
    sessions = GaugeMetricFamily(
        "cato_replica_sessions",
        "Sessions whose last call, within 10 minutes, went to this replica.",
        labels=by_replica,
    )
    working_set = GaugeMetricFamily(
        "cato_replica_working_set_tokens", "Context tokens of its sessions.", labels=by_replica
    )
    memory = GaugeMetricFamily(
        "cato_replica_kv_tokens",
        "Capacity of a replica's KV memory in tokens, by memory: kv (the accelerator's) and host.",
        labels=[*by_replica, "memory"],
    )
    for picture in pictures:
        queued.add_metric([picture.name], picture.queued)
        dispatched.add_metric([picture.name], picture.dispatched)
        refused.add_metric([picture.name], picture.refused)
        for replica in picture.replicas:
            labels = [picture.name, replica.deployment, replica.id]
            held.add_metric(labels, replica.held)
            places.add_metric(labels, replica.max_running)
            accepting.add_metric(labels, float(replica.accepting))
            wait.add_metric(labels, replica.wait_s)
            sessions.add_metric(labels, replica.sessions)
            working_set.add_metric(labels, replica.working_set_tokens)
            memory.add_metric([*labels, "kv"], replica.profile.kv_capacity_tokens)
            memory.add_metric([*labels, "host"], replica.host_tokens)
    by_pool = [queued, dispatched, refused]
    return [*by_pool, held, places, accepting, wait, sessions, working_set, memory]


def _decisions(decisions: Mapping[PoolName, PoolDecisions]) -> Metric:
    counter = CounterMetricFamily(
        "cato_decisions",
        "Decisions since the router started, by kind (dispatch, refuse, supersede, preempt, load, "
        "and lost: a replica is gone) and by reason without its numbers.",
        labels=["pool", "decision", "reason"],
    )
    for pool, decided in sorted(decisions.items()):
        for (kind, rule), count in sorted((decided.counts or {}).items()):
            counter.add_metric([pool, kind, rule], count)
    return counter


def _deployment_metrics(deployments: Iterable[DeploymentOverview]) -> Iterable[Metric]:
    replicas = GaugeMetricFamily(
        "cato_deployment_replicas",
        "Replicas of a deployment: running, starting, and the target within min and max.",
        labels=["pool", "deployment", "state"],
    )
    problem = GaugeMetricFamily(
        "cato_deployment_problem",
        "1 while a deployment cannot reach its target; `cato status` says why.",
        labels=["pool", "deployment"],
    )
    for d in deployments:
        for state in ("running", "starting", "wanted", "min", "max"):
            replicas.add_metric([d.pool, d.name, state], getattr(d, state))
        problem.add_metric([d.pool, d.name], float(bool(d.problem)))
    return [replicas, problem]


def _resident_metrics(residents: Iterable[Resident]) -> Iterable[Metric]:
    copies = GaugeMetricFamily(
        "cato_model_copies", "Copies of a model, by state.", labels=["pool", "model", "state"]
    )
    cards = GaugeMetricFamily(
        "cato_cards", "Accelerators that a model's copies occupy.", labels=["accelerator", "model"]
    )
    load = GaugeMetricFamily(
        "cato_model_load_seconds", "Load time of a copy.", labels=["pool", "model", "replica"]
    )
    restarts = CounterMetricFamily(
        "cato_engine_restarts", "Restarts of a replica's engine after it died.",
        labels=["pool", "replica"],
    )  # fmt: skip
    states: Count[tuple[str, str, str]] = Count()
    occupied: Count[tuple[str, str]] = Count()
    for r in residents:
        states[r.pool, r.model, r.state] += 1
        occupied[r.accelerator, r.model] += r.cards
        load.add_metric([r.pool, r.model, r.replica_id], r.load_s)
        restarts.add_metric([r.pool, r.replica_id], r.restarts)
    for name, count in sorted(states.items()):
        copies.add_metric(name, count)
    for place, count in sorted(occupied.items()):
        cards.add_metric(place, count)
    return [copies, cards, load, restarts]


def _shared_pool_metrics(pools: Iterable[SharedPoolPicture]) -> Iterable[Metric]:
    queued = GaugeMetricFamily(
        "cato_shared_pool_queued", "Invocations queued for a slot with their model.",
        labels=["pool", "model"],
    )  # fmt: skip
    slots = GaugeMetricFamily(
        "cato_shared_pool_slots", "Slots by state (empty, loading, ready).",
        labels=["pool", "state"],
    )  # fmt: skip
    served = CounterMetricFamily(
        "cato_shared_pool_served",
        "Invocations that got a slot, by whether their model was already loaded at dispatch.",
        labels=["pool", "hit"],
    )
    loads = CounterMetricFamily(
        "cato_shared_pool_loads", "Loads ordered, by source of the weights.",
        labels=["pool", "source"],
    )  # fmt: skip
    evictions = CounterMetricFamily(
        "cato_shared_pool_evictions", "Models unloaded to make room for another.", labels=["pool"]
    )
    prefetches = CounterMetricFamily(
        "cato_shared_pool_prefetches", "Loads ordered before a call arrived.", labels=["pool"]
    )
    failures = CounterMetricFamily(
        "cato_shared_pool_load_failures", "Loads that failed.", labels=["pool"]
    )
    load_s = CounterMetricFamily(
        "cato_shared_pool_load_seconds", "Time that slots spent loading.", labels=["pool"]
    )
    for pool in pools:
        counts = pool.counts
        for model, waiting in pool.waiting:
            queued.add_metric([pool.name, model], waiting)
        states = Count(s.state for s in pool.slots)
        for state in SlotState:
            slots.add_metric([pool.name, state.value], states[state])
        served.add_metric([pool.name, "true"], counts.hits)
        served.add_metric([pool.name, "false"], counts.served - counts.hits)
        loads.add_metric([pool.name, "host_memory"], counts.from_host_memory)
        loads.add_metric([pool.name, "storage"], counts.loads - counts.from_host_memory)
        evictions.add_metric([pool.name], counts.evictions)
        prefetches.add_metric([pool.name], counts.prefetches)
        failures.add_metric([pool.name], counts.failures)
        load_s.add_metric([pool.name], counts.load_s)
    return [queued, slots, served, loads, evictions, prefetches, failures, load_s]


def render_fleet(pictures: Sequence[PoolPicture], fleet: FleetState) -> bytes:
    """Metrics of the fleet, as its control actors see it now."""
    registry = CollectorRegistry()
    registry.register(_FleetMetrics(pictures, fleet))
    return generate_latest(registry)
