"""Baselines of nodes and prediction errors, learned from receipts as exponential means.

Results are plain values (`NodeMean`, `PoolErrors`) that a store can keep and restore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cato.core.budgets import NodeEstimate
from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.receipt import LlmFacts, NodeReceipt, NodeStatus, SlaReceipt

# Means cover about the last 20 executions.
WEIGHT = 0.1
# Drift covers about the last 100 invocations of a pool, because single errors are large.
ERROR_WEIGHT = 0.02

SERVICE_S, FIRST_TOKEN_S, RUNS = "service_s", "first_token_s", "runs"


@dataclass(frozen=True, slots=True)
class _Mean:
    value: float
    n: int = 1

    def with_sample(self, x: float, least_weight: float = WEIGHT) -> _Mean:
        # The first samples weigh evenly, so that the very first does not dominate.
        weight = max(least_weight, 1.0 / (self.n + 1))
        return _Mean(self.value + weight * (x - self.value), self.n + 1)


def _learn(old: _Mean | None, x: float) -> _Mean:
    return _Mean(x) if old is None else old.with_sample(x)


@dataclass(frozen=True, slots=True)
class NodeMean:
    """Mean of one `quantity` of a node, after `samples` executions.

    Quantities: `service_s`, without queueing; `first_token_s`, at the engine; `runs`, executions
    per run.
    """

    task: TaskName
    node: NodeId
    quantity: str
    value: float
    samples: int


class Baselines:
    """Mean service time of each node, without queueing, and its executions per run."""

    def __init__(self) -> None:
        self._means: dict[tuple[TaskName, NodeId, str], _Mean] = {}

    def record(self, receipt: SlaReceipt, all_nodes: tuple[NodeId, ...]) -> tuple[NodeMean, ...]:
        """Learn from a run; return what changed.

        Failed and cancelled executions do not count for service times.
        """
        done: dict[NodeId, list[NodeReceipt]] = {id: [] for id in all_nodes}
        for node in receipt.nodes:
            if node.status == NodeStatus.DONE.value:
                done.setdefault(node.node, []).append(node)
        changed: dict[tuple[TaskName, NodeId, str], None] = {}
        for id, executions in done.items():
            samples: list[tuple[str, float]] = []
            for x in executions:
                if x.llm is not None and x.llm.reused:
                    continue  # no engine was called
                queue_s = x.llm.queue_s if x.llm else 0.0
                samples.append((SERVICE_S, x.spent_s - queue_s))
                if x.llm is not None and x.llm.engine_ttft_s is not None:
                    samples.append((FIRST_TOKEN_S, x.llm.engine_ttft_s))
            if receipt.status == "done":
                samples.append((RUNS, float(len({x.round for x in executions}))))
            for quantity, value in samples:
                key = (receipt.task, id, quantity)
                self._means[key] = _learn(self._means.get(key), value)
                changed[key] = None
        return tuple(self._value(key) for key in changed)

    def restore(self, means: Iterable[NodeMean]) -> None:
        """Restore what was learned earlier; of two equal means keep the one with more samples."""
        for mean in means:
            key = (mean.task, mean.node, mean.quantity)
            known = self._means.get(key)
            if known is None or known.n < mean.samples:
                self._means[key] = _Mean(mean.value, mean.samples)

    def table(self) -> dict[TaskName, dict[NodeId, NodeEstimate]]:
        """All means, by task and node."""
        known: dict[TaskName, dict[NodeId, NodeEstimate]] = {}
        for (task, node, quantity), mean in self._means.items():
            if quantity != SERVICE_S:
                continue
            first = self._means.get((task, node, FIRST_TOKEN_S), mean)
            runs = self._means.get((task, node, RUNS))
            known.setdefault(task, {})[node] = NodeEstimate(
                mean.value, min(first.value, mean.value), runs.value if runs else 1.0
            )
        return known

    def _value(self, key: tuple[TaskName, NodeId, str]) -> NodeMean:
        mean = self._means[key]
        return NodeMean(*key, mean.value, mean.n)


@dataclass(frozen=True, slots=True)
class PoolErrors:
    """Mean predicted and mean actual times of a pool's invocations, in seconds.

    Weighted towards the latest hundred. A ratio of means, not a mean of ratios: otherwise one
    invocation with almost no service time would outweigh all others.
    """

    pool: PoolName
    predicted_queue_s: float
    queue_s: float
    predicted_service_s: float
    service_s: float
    samples: int

    @property
    def drift(self) -> float | None:
        """Predicted over actual service time: 1 is exact, 0.5 predicts half the actual time."""
        return self.predicted_service_s / self.service_s if self.service_s > 0.0 else None

    @property
    def queue_drift(self) -> float | None:
        """Predicted over actual queueing delay; None if nothing was queued."""
        return self.predicted_queue_s / self.queue_s if self.queue_s > 0.0 else None


def predictions(receipt: SlaReceipt) -> Iterable[LlmFacts]:
    """A run's successful invocations with a predicted service time.

    Those of one attempt: a lease predicts what is left at that time, and the measured times are
    those of all attempts.
    """
    for node in receipt.nodes:
        facts = node.llm
        if (
            facts is not None
            and node.status == NodeStatus.DONE.value
            and facts.attempts == 1
            and facts.predicted_service_s > 0.0
            and facts.service_s > 0.0
        ):
            yield facts


class PredictionErrors:
    """Predicted against actual times, by pool."""

    def __init__(self) -> None:
        self._by_pool: dict[PoolName, PoolErrors] = {}

    def record(self, receipt: SlaReceipt) -> tuple[PoolErrors, ...]:
        """Learn from a run; return what changed."""
        changed: dict[PoolName, None] = {}
        for facts in predictions(receipt):
            pool = PoolName(facts.pool)
            self._by_pool[pool] = _with_error(self._by_pool.get(pool), pool, facts)
            changed[pool] = None
        return tuple(self._by_pool[pool] for pool in changed)

    def restore(self, errors: Iterable[PoolErrors]) -> None:
        """Restore what was learned earlier; per pool keep the value with more samples."""
        for error in errors:
            known = self._by_pool.get(error.pool)
            if known is None or known.samples < error.samples:
                self._by_pool[error.pool] = error

    def table(self) -> Mapping[PoolName, PoolErrors]:
        return self._by_pool


def _with_error(known: PoolErrors | None, pool: PoolName, facts: LlmFacts) -> PoolErrors:
    if known is None:
        return PoolErrors(
            pool,
            facts.predicted_queue_s,
            facts.queue_s,
            facts.predicted_service_s,
            facts.service_s,
            samples=1,
        )

    def mean(before_s: float, came_s: float) -> float:
        return _Mean(before_s, known.samples).with_sample(came_s, ERROR_WEIGHT).value

    return PoolErrors(
        pool,
        mean(known.predicted_queue_s, facts.predicted_queue_s),
        mean(known.queue_s, facts.queue_s),
        mean(known.predicted_service_s, facts.predicted_service_s),
        mean(known.service_s, facts.service_s),
        known.samples + 1,
    )
