"""Splitting an SLO over the nodes of a DAG in proportion to their expected latency.

CATO (2025), Profiler: with baseline latencies 5, 15, 5 s and an SLA of 50 s the nodes get 10, 30,
10 s. For a DAG each node's factor is set by the longest path through it: the budgets of any path
then sum to at most the target, and to exactly the target on the critical path. Slack that a node
leaves unused is carried forward because the split is made again from what is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from cato.core.ids import NodeId
from cato.core.record import record
from cato.core.slo import Slo, SloMetric
from cato.core.workflow import Node, NodeKind, Workflow

# Expected executions of a node with a condition, until the profiler has seen runs.
CONDITIONAL_RUNS = 0.5

K = TypeVar("K", bound=str)


def longest_before(
    order: Sequence[K], needs: Mapping[K, Sequence[K]], weight_s: Mapping[K, float]
) -> dict[K, float]:
    """Longest path, in seconds, that ends just before each node. `order` is topological."""
    before: dict[K, float] = {}
    for node in order:
        before[node] = max(
            (before[n] + weight_s[n] for n in needs[node] if n in before), default=0.0
        )
    return before


def longest_after(
    order: Sequence[K], needs: Mapping[K, Sequence[K]], weight_s: Mapping[K, float]
) -> dict[K, float]:
    """Longest path, in seconds, from just after each node to the end."""
    after: dict[K, float] = dict.fromkeys(order, 0.0)
    for node in reversed(order):
        for need in needs[node]:
            if need in after:
                after[need] = max(after[need], after[node] + weight_s[node])
    return after


def split_slack(
    order: Sequence[K], needs: Mapping[K, Sequence[K]], weight_s: Mapping[K, float], total_s: float
) -> dict[K, float]:
    """Budget of each node, in seconds, out of `total_s`.

    Nodes of `needs` that are not in `order` (finished ones) count 0. If the longest path through a
    node has weight 0, because nothing is known, its nodes share evenly.
    """
    before = longest_before(order, needs, weight_s)
    after = longest_after(order, needs, weight_s)
    path_s = {n: before[n] + weight_s[n] + after[n] for n in order}
    unknown = [n for n in order if path_s[n] <= 0]
    budgets = {n: weight_s[n] * total_s / path_s[n] for n in order if path_s[n] > 0}
    if unknown:
        budgets |= split_slack(unknown, needs, dict.fromkeys(unknown, 1.0), total_s)
    return budgets


@record
class NodeEstimate:
    """A node's baseline: seconds per execution, seconds to first token, executions per run."""

    mean_s: float
    first_token_s: float
    runs: float = 1.0


def expected_runs(node: Node) -> float:
    """Executions of a node per run, before any run was seen."""
    return 1.0 if node.when is None else CONDITIONAL_RUNS


class RunBudgets:
    """The SLO of one run that arrived at `arrived_at_s`, split over its nodes.

    `settled` are the nodes that will not execute again; they need no time any more. Budgets are
    None and times 0 for nodes off the path to the SLO's event.
    """

    def __init__(
        self,
        workflow: Workflow,
        slo: Slo,
        estimates: Mapping[NodeId, NodeEstimate],
        arrived_at_s: float = 0.0,
    ) -> None:
        self.slo = slo
        self._arrived_at_s = arrived_at_s
        self.hard_deadline_s = arrived_at_s + workflow.hard_deadline_s
        self._needs = {n.id: n.needs for n in workflow.nodes}
        self._estimates = {n.id: estimates.get(n.id) or _guess(n) for n in workflow.nodes}
        is_ttft = slo.metric is SloMetric.TTFT and bool(workflow.stream)
        # Nodes on the path to the SLO's event, in order: for TTFT up to the streamed node.
        on_path = self._with_ancestors(workflow.stream if is_ttft else workflow.output)
        self._on_path = {n.id: n for n in workflow.nodes if n.id in on_path}
        redone = {id for n in workflow.nodes if n.repeat is not None for id in n.repeat.redo}
        self._streams = frozenset(
            n.id
            for n in workflow.nodes
            if is_ttft and n.id not in redone and self._streams_alone(n, workflow.stream)
        )

    def is_first_token_the_event(self, node: Node) -> bool:
        """Whether the node streams as it is written and no other node can replace it."""
        return node.id in self._streams

    def expected_s(self) -> float:
        """Seconds from start to the SLO's event without queueing.

        The longest path by the nodes' baselines.
        """
        weight_s = {node.id: self._weight_s(node) for node in self._on_path.values()}
        after_s = longest_after(list(weight_s), self._needs, weight_s)
        return max(weight_s[id] + after_s[id] for id in weight_s)

    def budget_s(self, node: Node, settled: Collection[NodeId], now_s: float) -> float | None:
        """The node's share of the slack: of the time that is left, in proportion to baselines."""
        if node.id not in self._on_path or self.slo.metric is SloMetric.TPOT:
            return None
        weight_s, left_s = self._open_weights_s(node, settled), self.left_s(now_s)
        if len(weight_s) == 1:  # every direct call
            return left_s
        return split_slack(list(weight_s), self._needs, weight_s, left_s)[node.id]

    def downstream_s(self, node: Node, settled: Collection[NodeId]) -> float:
        """The expected time of the nodes after it."""
        if node.id not in self._on_path or self.is_first_token_the_event(node):
            return 0.0
        weight_s = self._open_weights_s(node, settled)
        if len(weight_s) == 1:
            return 0.0
        return longest_after(list(weight_s), self._needs, weight_s)[node.id]

    def shared(
        self, node: Node, share: float | None, settled: Collection[NodeId], now_s: float
    ) -> tuple[float | None, float]:
        """The node's budget and the expected time of the nodes after it.

        `share`: of the time left, from the most similar past run (Tempo, "DAG matching"); else both
        come from the nodes' baselines.
        """
        if not share:
            return self.budget_s(node, settled, now_s), self.downstream_s(node, settled)
        return share * self.left_s(now_s), self._estimates[node.id].mean_s * (1 / share - 1)

    def is_for_the_run(self, node: Node) -> bool:
        """Whether the SLO is for the end of the whole run, and the node is on the path to it."""
        return self.slo.metric is SloMetric.E2E and node.id in self._on_path

    def deadline_s(self, node: Node) -> float:
        deadline_s = self.slo.deadline_s(self._arrived_at_s)
        if deadline_s is None or node.id not in self._on_path:
            return self.hard_deadline_s
        return min(deadline_s, self.hard_deadline_s)

    def left_s(self, now_s: float) -> float:
        """Seconds left until the SLO's target."""
        return max(0.0, self._arrived_at_s + self.slo.target_s - now_s)

    def limit_s(self, node: Node, settled: Collection[NodeId], now_s: float) -> float | None:
        """The longest time `node` may take; an optional node must not cost the others their SLO."""
        if not node.optional:
            return node.budget_s
        deadline_s = self.deadline_s(node)
        if self.is_first_token_the_event(node):
            deadline_s = self.hard_deadline_s  # once it streams, the SLO's event has passed
        spare_s = deadline_s - now_s - self.downstream_s(node, settled)
        return spare_s if node.budget_s is None else min(node.budget_s, spare_s)

    def why_no_round(self, node: Node, settled: Collection[NodeId], now_s: float) -> str:
        """Why another round of a repeating node would miss the SLO; empty if it would not.

        If it would, the current result is the answer: an on-time answer beats a better one that is
        late.
        """
        assert node.repeat is not None, f"{node.id} does not repeat"
        if node.id not in self._on_path:
            return ""
        round_s = sum(self._estimates[id].mean_s for id in (node.id, *node.repeat.redo))
        slack_s = self.deadline_s(node) - now_s - self.downstream_s(node, settled)
        if round_s <= slack_s:
            return ""
        return f"another takes {round_s:.2f} s, {max(0.0, slack_s):.2f} s are left"

    def _open_weights_s(self, starting: Node, settled: Collection[NodeId]) -> dict[NodeId, float]:
        """Expected seconds of each unfinished node before the SLO's event, in order."""
        return {
            id: self._weight_s(node, once=id == starting.id)
            for id, node in self._on_path.items()
            if id == starting.id or id not in settled
        }

    def _weight_s(self, node: Node, *, once: bool = False) -> float:
        """Expected seconds of the node before the SLO's event; `once`: for a single execution."""
        estimate = self._estimates[node.id]
        is_event = self.is_first_token_the_event(node)
        mean_s = estimate.first_token_s if is_event else estimate.mean_s
        return mean_s * (1.0 if once else estimate.runs)

    def _streams_alone(self, node: Node, stream: Sequence[NodeId]) -> bool:
        if node.id not in stream or node.kind is not NodeKind.LLM:
            return False
        if node.each is not None or node.repeat is not None:
            return False
        if node.optional and node.id != stream[-1]:
            return False
        others = (id for id in stream if id != node.id)
        return not any(node.id in self._with_ancestors((other,)) for other in others)

    def _with_ancestors(self, ids: Iterable[NodeId]) -> set[NodeId]:
        seen: set[NodeId] = set()
        todo = list(ids)
        while todo:
            id = todo.pop()
            if id not in seen:
                seen.add(id)
                todo += self._needs[id]
        return seen


def _guess(node: Node) -> NodeEstimate:
    guess_s = node.budget_s or 0.0
    return NodeEstimate(guess_s, guess_s, expected_runs(node))
