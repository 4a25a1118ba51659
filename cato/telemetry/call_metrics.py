"""Metrics of LLM calls, of sessions' turns, and of predictions, from receipts."""

from __future__ import annotations

from math import inf

from cato.core.estimates import predictions
from cato.core.receipt import LlmFacts, NodeReceipt, NodeStatus, SlaReceipt
from cato.core.slo import tpot_s
from cato.estimators.output_lengths import CUT, ENDED
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


class CallMetrics:
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
            "Arrival of an LLM call at its pool to its first token, queueing included. Engines "
            "stream all calls but direct ones whose clients do not ask for a stream.",
            LATENCY_BUCKETS_S, "pool",
        )  # fmt: skip
        self._call_tpot = families.histogram(
            "cato_invocation_tpot_seconds",
            "Time per output token after the first, of a streamed LLM call; its waits for "
            "further leases included.",
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
        if call.first_token_s is not None:
            self._call_ttft.labels(pool).observe(call.first_token_s)
        if node.status != NodeStatus.DONE.value:
            return
        e2e_s = call.queue_s + call.service_s
        self._call_e2e.labels(pool).observe(e2e_s)
        if call.first_token_s is not None and call.tokens_of_each > 1:
            pace_s = tpot_s(call.first_token_s, e2e_s, call.tokens_of_each)
            self._call_tpot.labels(pool).observe(pace_s)


class SessionMetrics:
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


class PredictionMetrics:
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
            if is_done and node.llm is not None and not node.llm.reused and node.llm.calls == 1:
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
