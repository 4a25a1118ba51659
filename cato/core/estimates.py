"""Baselines of nodes and prediction errors, learned from receipts as exponential means.

Results are plain values (`NodeMean`, `PoolErrors`) that a store can keep and restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from cato.core.budgets import NodeEstimate
from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.receipt import Excuse, LlmFacts, NodeReceipt, NodeStatus, SlaReceipt
from cato.core.workflow import CallSettings, LlmSettings, NodeKind, Workflow

# Means cover about the last 20 executions.
WEIGHT = 0.1
# Drift covers about the last 100 invocations of a pool, because single errors are large.
ERROR_WEIGHT = 0.02

# Times in receipts are differences of instants.
_ROUNDING_S = 1e-6

SERVICE_S, FIRST_TOKEN_S, RUNS = "service_s", "first_token_s", "runs"


@dataclass(frozen=True, slots=True)
class _Mean:
    value: float
    n: int = 1

    def with_sample(self, x: float, least_weight: float = WEIGHT) -> _Mean:
        # The first samples weigh evenly, so that the very first does not dominate.
        weight = max(least_weight, 1.0 / (self.n + 1))
        return _Mean(self.value + weight * (x - self.value), self.n + 1)


@dataclass(frozen=True, slots=True)
class NodeMean:
    """Mean of one `quantity` of a node with a `model`, after `samples` executions.

    Quantities: `service_s`, without queueing; `first_token_s`, at the engine; `runs`, executions
    per run. `model` is empty for other nodes than LLM nodes, and for `runs`.
    """

    task: TaskName
    node: NodeId
    model: str
    quantity: str
    value: float
    samples: int


ByModel = Mapping[tuple[NodeId, str], NodeEstimate]
"""A task's baselines, by node and the model that it called (empty for nodes that call none)."""


def estimates_of(
    workflow: Workflow, measured: ByModel, called: Callable[[str], str]
) -> dict[NodeId, NodeEstimate]:
    """The baselines of the nodes of `workflow` with the models that it names now.

    `called` is the name in receipts of a model that is named so.
    """
    found = {}
    for node in workflow.nodes if measured else ():
        settings, model = node.settings, ""
        if isinstance(settings, LlmSettings | CallSettings):
            model = called(settings.model)
        known = measured.get((node.id, model))
        if known is not None:
            found[node.id] = known
    return found


_Key = tuple[TaskName, NodeId, str, str]


class Baselines:
    """Mean service time of each node with each model, without queueing, and its executions per
    run."""

    def __init__(self) -> None:
        self._means: dict[_Key, _Mean] = {}

    def record(self, receipt: SlaReceipt, all_nodes: tuple[NodeId, ...]) -> tuple[NodeMean, ...]:
        """Learn from a run; return what changed.

        An execution that was stopped counts as one of the time that it had, if that is more than
        the mean: it would have taken longer. Without them the nodes that deadlines stop would look
        short. Those of a run that its client gave up do not count, nor those that failed.
        """
        rounds: dict[NodeId, set[int]] = {id: set() for id in all_nodes}
        changed: dict[_Key, None] = {}
        for x in receipt.nodes:
            is_stopped = _was_stopped(x, receipt.excuse)
            if not is_stopped and x.status != NodeStatus.DONE.value:
                continue
            rounds.setdefault(x.node, set()).add(x.round)
            if x.llm is not None and x.llm.reused:
                continue  # no engine was called
            took_s = x.spent_s - (x.llm.queue_s if x.llm else 0.0)
            key = (receipt.task, x.node, x.llm.model if x.llm else "")
            self._learn((*key, SERVICE_S), took_s, changed, at_least=is_stopped)
            if x.llm is not None and x.llm.engine_ttft_s is not None:
                self._learn((*key, FIRST_TOKEN_S), x.llm.engine_ttft_s, changed)
            elif x.llm is not None and is_stopped:
                self._learn((*key, FIRST_TOKEN_S), took_s, changed, at_least=True)
        if receipt.status == "done":
            for id, numbers in rounds.items():
                self._learn((receipt.task, id, "", RUNS), float(len(numbers)), changed)
        return tuple(self._value(key) for key in changed)

    def _learn(
        self, key: _Key, x: float, changed: dict[_Key, None], *, at_least: bool = False
    ) -> None:
        """Learn `x`; `at_least`: only a longer time than `x` would be the true one."""
        known = self._means.get(key)
        if at_least and known is not None and x <= known.value:
            return
        self._means[key] = _Mean(x) if known is None else known.with_sample(x)
        changed[key] = None

    def restore(self, means: Iterable[NodeMean]) -> None:
        """Restore what was learned earlier; of two equal means keep the one with more samples."""
        for mean in means:
            key = (mean.task, mean.node, mean.model, mean.quantity)
            known = self._means.get(key)
            if known is None or known.n < mean.samples:
                self._means[key] = _Mean(mean.value, mean.samples)

    def table(self) -> dict[TaskName, dict[tuple[NodeId, str], NodeEstimate]]:
        """All means, by task; see `ByModel`."""
        known: dict[TaskName, dict[tuple[NodeId, str], NodeEstimate]] = {}
        for (task, node, model, quantity), mean in self._means.items():
            if quantity != SERVICE_S:
                continue
            first = self._means.get((task, node, model, FIRST_TOKEN_S), mean)
            runs = self._means.get((task, node, "", RUNS))
            known.setdefault(task, {})[node, model] = NodeEstimate(
                mean.value, min(first.value, mean.value), runs.value if runs else 1.0
            )
        return known

    def _value(self, key: _Key) -> NodeMean:
        mean = self._means[key]
        return NodeMean(*key, mean.value, mean.n)


def _was_stopped(x: NodeReceipt, excuse: Excuse) -> bool:
    """Whether CATO stopped an execution that had begun, at its limit or with its run."""
    if excuse is not Excuse.NONE or (x.kind == NodeKind.LLM and not (x.llm and x.llm.replica)):
        return False
    if x.status == NodeStatus.CANCELLED.value:
        return True
    is_failed = x.status in (NodeStatus.ABSENT.value, NodeStatus.FAILED.value)
    limit_s = x.limit_s or inf
    return is_failed and x.spent_s >= limit_s - _ROUNDING_S


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
