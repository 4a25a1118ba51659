"""The Profiler actor: what was measured, learnt from every finished run."""

from __future__ import annotations

from collections import OrderedDict

from cato.core.estimates import Baselines
from cato.core.ids import NodeId, TaskName
from cato.core.receipt import SlaReceipt
from cato.core.runs import NodeEstimate
from cato.telemetry.metrics import RunMetrics

# Receipts kept for `cato explain`, newest last; about 5 kB each.
KEPT_RECEIPTS = 10_000
# Passed-through calls differ too much for a mean per model name to say anything about budgets.
UNLEARNT_PREFIX = "model:"

Finished = tuple[SlaReceipt, tuple[NodeId, ...]]
"""A receipt, and all nodes of its workflow: those without an execution were skipped."""


class Profiler:
    """Baselines of nodes, receipts and run metrics of all ingress replicas."""

    def __init__(self) -> None:
        self._baselines = Baselines()
        self._metrics = RunMetrics()
        self._receipts: OrderedDict[str, SlaReceipt] = OrderedDict()

    async def record(self, finished: tuple[Finished, ...]) -> None:
        """Keep and learn. Of two runs with one id, which clients may choose, the newer is kept."""
        for receipt, all_nodes in finished:
            self._record(receipt, all_nodes)

    def _record(self, receipt: SlaReceipt, all_nodes: tuple[NodeId, ...]) -> None:
        self._receipts[receipt.request_id] = receipt
        self._receipts.move_to_end(receipt.request_id)
        if len(self._receipts) > KEPT_RECEIPTS:
            self._receipts.popitem(last=False)
        self._metrics.record(receipt)
        if not receipt.task.startswith(UNLEARNT_PREFIX):
            self._baselines.record(receipt, all_nodes)

    async def estimates(self) -> dict[TaskName, dict[NodeId, NodeEstimate]]:
        return self._baselines.table()

    async def receipt(self, request_id: str) -> SlaReceipt | None:
        return self._receipts.get(request_id)

    async def metrics(self) -> bytes:
        return self._metrics.render()
