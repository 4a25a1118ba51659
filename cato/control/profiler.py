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


class Profiler:
    """Baselines of nodes, receipts and run metrics of all ingress replicas."""

    def __init__(self) -> None:
        self._baselines = Baselines()
        self._metrics = RunMetrics()
        self._receipts: OrderedDict[str, SlaReceipt] = OrderedDict()

    async def record(self, receipt: SlaReceipt, all_nodes: tuple[NodeId, ...]) -> None:
        """Keep and learn; recording a receipt twice changes nothing."""
        if receipt.request_id in self._receipts:
            return
        self._receipts[receipt.request_id] = receipt
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
