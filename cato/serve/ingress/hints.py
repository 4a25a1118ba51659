"""SLA hints of a request, and what is granted of them.

A class, strongest first: header `X-CATO-SLA`, `{"cato": {"sla": "batch"}}` (natively
`{"sla": ...}`), the base URL's `/t/{task}/{sla}`, OpenAI's `service_tier`. A number: header
`X-CATO-Deadline-Ms`, `{"cato": {"deadline_ms": 150}}`, or a target for the task's own metric,
`{"sla": {"metric": "ttft", "target_ms": 150}}`. Also the client's own timeout, which OpenAI's SDKs
send in a header: a later answer reaches no one. All of these become a target for the task's own
metric; for TTFT that means "the first token by then", and for TPOT, which is a pace, they are
ignored. `X-CATO-Deadline-Ms` and `deadline_ms` also end the run.

`X-CATO-TPOT-Ms` and `tpot_ms` set an additional target for the pace of the stream. A direct call
may choose its metric: `{"sla": {"metric": "e2e", "target_ms": 8000}}`.
`X-CATO-Session-Deadline-Ms` and `session_deadline_ms` set a target for the whole session
(`session_target_s`; `cato.core.session_slo`).

`granted` applies them: an API key limits the most urgent class that can be claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import inf

from starlette.requests import Request

from cato.core.errors import InputError
from cato.core.record import record
from cato.core.slo import Slo, SloMetric
from cato.serve.ingress.body import known_keys, positive_number, sub_object
from cato.serve.ingress.clients import timeouts_s
from cato.serve.ingress.context import caller_of

SLA_HEADER = "X-CATO-SLA"
# Label for the client's own timeout in milliseconds; not a body field.
PATIENCE = "patience of the client"
DEADLINE_HEADER = "X-CATO-Deadline-Ms"
TPOT_HEADER = "X-CATO-TPOT-Ms"
SESSION_HEADER = "X-CATO-Session-Deadline-Ms"
SLA_SHAPE = (
    '"interactive"|"standard"|"batch" or {"metric": "ttft"|"tpot"|"e2e", "target_ms": number}'
)


class SlaClass(StrEnum):
    """How urgent a request is: a user waits at the cursor, a user waits, no one waits."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


# Target of an inline edit: the slowest action that users wait for without looking away.
INTERACTIVE_TARGETS_S = {SloMetric.TTFT: 0.8, SloMetric.TPOT: 0.04, SloMetric.E2E: 8.0}

# OpenAI's tiers: class, and the tier named in answers. `scale` and `fast` are paid-plan synonyms.
TIERS: dict[str, tuple[SlaClass | None, str]] = {
    "auto": (None, "default"),
    "default": (None, "default"),
    "scale": (None, "default"),
    "priority": (SlaClass.INTERACTIVE, "priority"),
    "fast": (SlaClass.INTERACTIVE, "priority"),
    "flex": (SlaClass.BATCH, "flex"),
}


@record
class Claim:
    """The SLA that a request asks for; None means not asked.

    `top` is the most urgent class that its API key may claim; None without a key. The run ends at
    `hard_deadline_s`, if the request set it. `tpot_s` is the pace of the stream.
    """

    sla_class: SlaClass | None = None
    target_s: float | None = None
    deadline_s: float | None = None
    top: SlaClass | None = None
    hard_deadline_s: float = inf
    tpot_s: float = inf


def granted(claim: Claim, slo: Slo, hard_deadline_s: float) -> Slo:
    """The SLO that `claim` gets from a task with `slo`.

    Numbers can tighten a target but not loosen it. `batch` yields to everything else: any time
    before the task's hard deadline is fine. With an API key, numbers cannot claim more than the
    key's top class.
    """
    target_s = slo.target_s
    if claim.sla_class is SlaClass.INTERACTIVE:
        target_s = min(target_s, INTERACTIVE_TARGETS_S[slo.metric])
    if claim.sla_class is SlaClass.BATCH and slo.metric is not SloMetric.TPOT:
        target_s = max(target_s, hard_deadline_s)
    if claim.target_s is not None:
        target_s = min(target_s, claim.target_s)
    if claim.deadline_s is not None and slo.metric is not SloMetric.TPOT:
        target_s = min(target_s, claim.deadline_s)
    if slo.metric is SloMetric.TPOT:
        target_s = min(target_s, claim.tpot_s)
    pace_s = slo.tpot_target_s
    if slo.metric is not SloMetric.TPOT and claim.tpot_s < pace_s:
        pace_s = max(claim.tpot_s, _least_pace_s(claim.top, pace_s))
    if claim.sla_class is SlaClass.BATCH:
        pace_s = inf
    least_s = _least_target_s(claim.top, slo, hard_deadline_s)
    return Slo(slo.metric, max(target_s, least_s), pace_s, claim.hard_deadline_s)


def whole_answer(base: Slo, asked_s: float, tokens: int, top: SlaClass | None) -> Slo:
    """The SLO of a direct call of `tokens` tokens that wants its whole answer within `asked_s`,
    instead of `base` for its first token.

    With an API key it is no tighter than `base` plus the usual pace.
    """
    if top is None:
        return Slo(SloMetric.E2E, asked_s)
    pace_s = min(base.tpot_target_s, INTERACTIVE_TARGETS_S[SloMetric.TPOT])
    usual_s = base.target_s + max(0, tokens - 1) * pace_s
    if top is SlaClass.INTERACTIVE:
        usual_s = min(usual_s, INTERACTIVE_TARGETS_S[SloMetric.E2E])
    return Slo(SloMetric.E2E, max(asked_s, usual_s))


def _least_pace_s(top: SlaClass | None, pace_s: float) -> float:
    """The tightest pace that a key with class `top` can get if `pace_s` is usual."""
    match top:
        case None:
            return 0.0
        case SlaClass.BATCH:
            return pace_s
        case _:
            return min(pace_s, INTERACTIVE_TARGETS_S[SloMetric.TPOT])


def _least_target_s(top: SlaClass | None, slo: Slo, hard_deadline_s: float) -> float:
    """The tightest target that a key with class `top` can get from a task with `slo`."""
    match top:
        case None:
            return 0.0
        case SlaClass.INTERACTIVE:
            return min(slo.target_s, INTERACTIVE_TARGETS_S[slo.metric])
        case SlaClass.BATCH if slo.metric is not SloMetric.TPOT:
            return max(slo.target_s, hard_deadline_s)
        case _:
            return slo.target_s


def claim_of(
    request: Request,
    extra: Mapping[str, object],
    slo: Slo,
    *,
    prefix_class: str = "",
    tier: str = "",
) -> Claim:
    """The claim in headers, `extra` (the body's object `cato`, or a native body), URL and tier.

    Raise `InputError` for an invalid hint.
    """
    sla = extra.get("sla")
    is_word = isinstance(sla, str)
    word = request.headers.get(SLA_HEADER) or (sla if is_word else "") or prefix_class
    sla_class = _class_of(str(word)) if word else TIERS[tier][0] if tier else None
    target = {} if is_word else sub_object(extra, "sla")
    asked_s = _asked_s(request, extra, DEADLINE_HEADER, "deadline_ms")
    # Only sessions have this target, but an invalid one is refused everywhere.
    _asked_s(request, extra, SESSION_HEADER, "session_deadline_ms")
    return Claim(
        sla_class,
        _target_s(target, slo),
        _deadline_s(request, extra, asked_s),
        top_class(request),
        asked_s,
        _asked_s(request, extra, TPOT_HEADER, "tpot_ms"),
    )


def top_class(request: Request) -> SlaClass | None:
    """The most urgent class that the caller's API key may claim; None without a key."""
    top = caller_of(request).sla_class
    return SlaClass(top) if top else None


def session_target_s(
    request: Request, extra: Mapping[str, object], otherwise: float | None
) -> float | None:
    """Target for the whole session, counted from its first call: the request's, else the task's
    (`otherwise`), else the key's."""
    asked_s = _asked_s(request, extra, SESSION_HEADER, "session_deadline_ms")
    return asked_s if asked_s < inf else otherwise or caller_of(request).session_target_s


def target_in(extra: Mapping[str, object]) -> tuple[SloMetric | None, float]:
    """The metric and the target in seconds of the body's `sla`; metric None if it names none."""
    sla = extra.get("sla")
    if isinstance(sla, str):
        return None, inf
    target = sub_object(extra, "sla")
    if "metric" not in target:
        return None, inf
    known_keys(target, ("metric", "target_ms"), SLA_SHAPE)
    metric = target["metric"]
    if not isinstance(metric, str) or metric not in set(SloMetric):
        raise InputError(f"the metric must be one of {', '.join(SloMetric)}", "sla.metric")
    return SloMetric(metric), positive_number(target.get("target_ms"), "sla.target_ms") / 1000


def tier_of(body: Mapping[str, object]) -> str:
    """OpenAI's `service_tier`; empty if the body has none."""
    tier = body.get("service_tier")
    if tier is None:
        return ""
    if not isinstance(tier, str) or tier not in TIERS:
        raise InputError(f"service_tier must be one of {', '.join(TIERS)}", "service_tier")
    return tier


def _class_of(word: str) -> SlaClass:
    try:
        return SlaClass(word)
    except ValueError:
        raise InputError(f"the SLA must be one of {', '.join(SlaClass)}", "sla") from None


def _target_s(sla: dict[str, object], slo: Slo) -> float | None:
    if not sla:
        return None
    known_keys(sla, ("metric", "target_ms"), SLA_SHAPE)
    metric = sla.get("metric", slo.metric.value)
    if metric != slo.metric.value:
        raise InputError(f"this task promises {slo.metric.value}, not {metric!r}", "sla.metric")
    return positive_number(sla.get("target_ms"), "sla.target_ms") / 1000


def _asked_s(request: Request, extra: Mapping[str, object], header: str, field: str) -> float:
    """The shorter of a header's and a field's milliseconds, in seconds; inf if both are absent."""
    found = []
    text = request.headers.get(header)
    if text is not None:
        found.append(positive_number(_number(text), header) / 1000)
    if extra.get(field) is not None:
        found.append(positive_number(extra[field], field) / 1000)
    return min(found, default=inf)


def _deadline_s(request: Request, extra: Mapping[str, object], asked_s: float) -> float | None:
    """The earliest of all deadlines, including the client's own timeout."""
    found = [asked_s] if asked_s < inf else []
    patience_ms = extra.get(PATIENCE)
    if isinstance(patience_ms, int | float):
        found.append(patience_ms / 1000)
    found += timeouts_s(request.headers)
    return min(found, default=None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
