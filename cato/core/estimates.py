"""Baselines of nodes, learnt from receipts: exponentially weighted means."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.ids import NodeId, TaskName
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.runs import NodeEstimate, NodeStatus

# About the last 20 executions count.
WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class _Mean:
    value: float
    n: int = 1

    def with_sample(self, x: float) -> _Mean:
        # The first samples weigh evenly, so that the very first does not dominate.
        weight = max(WEIGHT, 1.0 / (self.n + 1))
        return _Mean(self.value + weight * (x - self.value), self.n + 1)


def _learn(old: _Mean | None, x: float) -> _Mean:
    return _Mean(x) if old is None else old.with_sample(x)


class Baselines:
    """Mean service time of each node, without queueing, and its executions per run."""

    def __init__(self) -> None:
        self._mean_s: dict[tuple[TaskName, NodeId], _Mean] = {}
        self._first_token_s: dict[tuple[TaskName, NodeId], _Mean] = {}
        self._runs: dict[tuple[TaskName, NodeId], _Mean] = {}

    def record(self, receipt: SlaReceipt, all_nodes: tuple[NodeId, ...]) -> None:
        """Learn from a run; failed and cancelled executions say nothing of service times."""
        done: dict[NodeId, list[NodeReceipt]] = {id: [] for id in all_nodes}
        for node in receipt.nodes:
            if node.status == NodeStatus.DONE.value:
                done.setdefault(node.node, []).append(node)
        for id, executions in done.items():
            key = (receipt.task, id)
            for x in executions:
                queue_s = x.llm.queue_s if x.llm else 0.0
                self._mean_s[key] = _learn(self._mean_s.get(key), x.spent_s - queue_s)
                if x.llm is not None and x.llm.engine_ttft_s is not None:
                    self._first_token_s[key] = _learn(
                        self._first_token_s.get(key), x.llm.engine_ttft_s
                    )
            if receipt.status == "done":
                rounds = len({x.round for x in executions})
                self._runs[key] = _learn(self._runs.get(key), float(rounds))

    def table(self) -> dict[TaskName, dict[NodeId, NodeEstimate]]:
        """All that is known, by task and node."""
        known: dict[TaskName, dict[NodeId, NodeEstimate]] = {}
        for (task, node), mean in self._mean_s.items():
            first = self._first_token_s.get((task, node), mean)
            runs = self._runs.get((task, node))
            known.setdefault(task, {})[node] = NodeEstimate(
                mean.value, min(first.value, mean.value), runs.value if runs else 1.0
            )
        return known
