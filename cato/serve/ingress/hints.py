"""What a client may say about the SLA of its request.

`X-CATO-Deadline-Ms: 150`, or in the body `{"sla": {"metric": "ttft", "target_ms": 150}}`
(OpenAI bodies: inside the object `cato`). A hint tightens the target, it never loosens it: a
looser or other objective is a right that comes with API keys. A deadline is taken as a target
for the task's own metric, which for TTFT means "the first token by then"; a TPOT is a pace, so
there a deadline says nothing.
"""

from __future__ import annotations

from starlette.requests import Request

from cato.core.errors import InputError
from cato.core.slo import Slo, SloMetric
from cato.serve.ingress.body import known_keys, positive_number, sub_object

DEADLINE_HEADER = "X-CATO-Deadline-Ms"
SLA_SHAPE = '{"metric": "ttft"|"tpot"|"e2e", "target_ms": number}'


def slo_for(request: Request, body: dict[str, object], slo: Slo) -> Slo:
    """`slo` of a task, tightened by the hints in the headers and in `body["sla"]`."""
    target_s = slo.target_s
    deadline_ms = request.headers.get(DEADLINE_HEADER)
    if deadline_ms is not None:
        limit_s = _header_ms(deadline_ms) / 1000
        if slo.metric is not SloMetric.TPOT:
            target_s = min(target_s, limit_s)
    sla = sub_object(body, "sla")
    if sla:
        known_keys(sla, ("metric", "target_ms"), SLA_SHAPE)
        metric = sla.get("metric", slo.metric.value)
        if metric != slo.metric.value:
            raise InputError(f"this task promises {slo.metric.value}, not {metric!r}", "sla.metric")
        target_s = min(target_s, positive_number(sla.get("target_ms"), "sla.target_ms") / 1000)
    return Slo(slo.metric, target_s)


def _header_ms(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    return positive_number(value, DEADLINE_HEADER)
