"""Checks whether a task's SLA is realistic, from the measured baselines of its nodes.

CATO (2025), Profiler: a task's baselines show whether this hardware can meet its SLA at all, before
any call is queued.
"""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.budgets import NodeEstimate, RunBudgets
from cato.core.ids import NodeId
from cato.core.slo import SloMetric
from cato.core.workflow import NodeKind, Workflow


def baseline_s(workflow: Workflow, measured: Mapping[NodeId, NodeEstimate]) -> float | None:
    """Expected seconds to the SLO's event without queueing.

    None until every LLM node that all runs execute has been measured. None for TPOT objectives,
    which are a pace.
    """
    always = (n.id for n in workflow.nodes if n.kind is NodeKind.LLM and n.when is None)
    if workflow.slo.metric is SloMetric.TPOT or any(id not in measured for id in always):
        return None
    if not measured:
        return None
    return RunBudgets(workflow, workflow.slo, measured).expected_s()


def warning(workflow: Workflow, measured: Mapping[NodeId, NodeEstimate]) -> str:
    """What is wrong with the target of `workflow`; empty if nothing is, or nothing is known."""
    expected_s = baseline_s(workflow, measured)
    if expected_s is None or expected_s <= workflow.slo.target_s:
        return ""
    return (
        f"{workflow.name}: the {workflow.slo.metric.value} target of "
        f"{workflow.slo.target_s * 1000:.0f} ms is below the measured baseline of "
        f"{expected_s * 1000:.0f} ms: most runs miss it even without queueing"
    )
