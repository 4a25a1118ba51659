"""The SLA receipt in HTTP answers: the object `cato` and headers.

The object has the fields of `cato.core.receipt.SlaReceipt` in seconds; headers use milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache

from cato.core.ids import NodeId
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.runs import Run
from cato.core.slo import Slo
from cato.telemetry.overview import Overview


def as_json(receipt: SlaReceipt | Overview | Mapping[str, object]) -> dict[str, object]:
    """Plain values, times rounded to the microsecond.

    Does the work of `SlaReceipt.as_dict` and the rounding in one pass: every answer has a receipt,
    and `dataclasses.asdict` alone took a tenth of the ingress's own work.
    """
    plain = _plain(receipt)
    assert isinstance(plain, dict), f"{type(receipt).__name__} has no fields"
    return plain


def _plain(value: object) -> object:
    match value:
        case str() | int() | None:
            return value
        case float():
            return round(value, 6) if math.isfinite(value) else None
        case tuple() | list():
            return [_plain(inner) for inner in value]
        case Mapping():
            return {key: _plain(inner) for key, inner in value.items()}
        case _:
            kind: type = type(value)
            return {name: _plain(getattr(value, name)) for name in _field_names(kind)}


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def slo_text(slo: Slo) -> str:
    """An SLO in header form, such as `ttft=200ms`."""
    return f"{slo.metric.value}={_ms(slo.target_s)}ms"


def run_headers(run: Run) -> dict[str, str]:
    """Headers known before a run has ended."""
    return {
        "x-request-id": run.id,
        "X-CATO-Task": run.workflow.name,
        "X-CATO-SLA": slo_text(run.slo),
    }


def receipt_headers(receipt: SlaReceipt) -> dict[str, str]:
    """Headers known only after a run has ended."""
    headers = {
        "X-CATO-Met": str(receipt.met).lower(),
        "X-CATO-Queue-Ms": _ms(receipt.queue_s),
        "openai-processing-ms": str(round(receipt.e2e_s * 1000)),
    }
    if receipt.achieved_s is not None:
        headers["X-CATO-Achieved-Ms"] = _ms(receipt.achieved_s)
    replicas = [n.llm.replica for n in receipt.nodes if n.llm is not None and n.llm.replica]
    if replicas:
        headers["X-CATO-Replica"] = replicas[-1]
        headers["X-CATO-Model"] = next(n.llm.model for n in reversed(receipt.nodes) if n.llm)
    if receipt.nodes:
        spent_s = _spent_s(receipt.nodes)
        headers["Server-Timing"] = ", ".join(f"{id};dur={_ms(s)}" for id, s in spent_s.items())
    return headers


def _spent_s(nodes: Sequence[NodeReceipt]) -> dict[NodeId, float]:
    """The time that each node took: the longest item of each round, over all rounds.

    One entry a node: a fan-out may have hundreds of executions, and clients and proxies refuse
    headers of more than 4 to 8 kB.
    """
    rounds_s: dict[tuple[NodeId, int], float] = {}
    for n in nodes:
        rounds_s[n.node, n.round] = max(n.spent_s, rounds_s.get((n.node, n.round), 0.0))
    spent_s: dict[NodeId, float] = {}
    for (id, _), round_s in rounds_s.items():
        spent_s[id] = spent_s.get(id, 0.0) + round_s
    return spent_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f}".rstrip("0").rstrip(".")
