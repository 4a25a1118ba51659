"""What a client may say about the SLA of its request.

A class, from strong to weak sign: header `X-CATO-SLA`, `{"cato": {"sla": "batch"}}` (natively
`{"sla": ...}`), the base URL's `/t/{task}/{sla}`, OpenAI's `service_tier`. A number: header
`X-CATO-Deadline-Ms`, `{"cato": {"deadline_ms": 150}}`, or a target for the task's own metric,
`{"sla": {"metric": "ttft", "target_ms": 150}}`. And the time-out of the client itself, which
OpenAI's SDKs tell in a header: what comes later meets nobody. All of these are taken as a target
for the task's own metric, which for TTFT means "the first token by then"; a TPOT is a pace, so
there they say nothing. At `X-CATO-Deadline-Ms` and `deadline_ms` the run also ends.

`X-CATO-TPOT-Ms` and `tpot_ms` are a target for the pace of the stream, beside the other. A direct
call may choose its metric: `{"sla": {"metric": "e2e", "target_ms": 8000}}`.
`X-CATO-Session-Deadline-Ms` and `session_deadline_ms` are a target for the whole session
(`session_target_s`; `cato.core.session_slo`).

`granted` decides what of it counts: an API key has a class beyond which nothing can be claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from starlette.requests import Request

from cato.core.errors import InputError
from cato.core.slo import Slo, SloMetric
from cato.serve.ingress.body import known_keys, positive_number, sub_object
from cato.serve.ingress.clients import timeouts_s
from cato.serve.ingress.context import caller_of

SLA_HEADER = "X-CATO-SLA"
# How long a client waits, in milliseconds; no field of a body has this name.
PATIENCE = "patience of the client"
DEADLINE_HEADER = "X-CATO-Deadline-Ms"
TPOT_HEADER = "X-CATO-TPOT-Ms"
SESSION_HEADER = "X-CATO-Session-Deadline-Ms"
SLA_SHAPE = (
    '"interactive"|"standard"|"batch" or {"metric": "ttft"|"tpot"|"e2e", "target_ms": number}'
)


class SlaClass(StrEnum):
    """How urgent a request is: someone waits at the cursor, someone waits, nobody waits."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


# What an inline edit needs: the slowest thing that people wait for without looking away.
INTERACTIVE_TARGETS_S = {SloMetric.TTFT: 0.8, SloMetric.TPOT: 0.04, SloMetric.E2E: 8.0}

# OpenAI's tiers; the second is the tier that answers name. `scale` and `fast` are synonyms of paid
# plans.
TIERS: dict[str, tuple[SlaClass | None, str]] = {
    "auto": (None, "default"),
    "default": (None, "default"),
    "scale": (None, "default"),
    "priority": (SlaClass.INTERACTIVE, "priority"),
    "fast": (SlaClass.INTERACTIVE, "priority"),
    "flex": (SlaClass.BATCH, "flex"),
}


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request asks of its SLA; None asks nothing.

    `top` is the most urgent class that its API key may claim; None when there is no key. Of the
    deadlines that were asked for, the run ends at `hard_deadline_s`. `tpot_s` is the pace of the
    stream.
    """

    sla_class: SlaClass | None = None
    target_s: float | None = None
    deadline_s: float | None = None
    top: SlaClass | None = None
    hard_deadline_s: float = inf
    tpot_s: float = inf


def granted(claim: Claim, slo: Slo, hard_deadline_s: float) -> Slo:
    """The objective that `claim` gets of a task with `slo`.

    Numbers tighten a target and never loosen it. `batch` gives way to everyone else: any moment
    before the task's hard deadline will do. With an API key, nothing gets more than the key's top
    class gives: numbers are no way around it.
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
    """The objective of a direct call of some `tokens` whose whole answer is wanted within
    `asked_s`, instead of `base` for its first token.

    With an API key it is not tighter than `base` and a usual pace are together.
    """
    if top is None:
        return Slo(SloMetric.E2E, asked_s)
    pace_s = min(base.tpot_target_s, INTERACTIVE_TARGETS_S[SloMetric.TPOT])
    usual_s = base.target_s + max(0, tokens - 1) * pace_s
    if top is SlaClass.INTERACTIVE:
        usual_s = min(usual_s, INTERACTIVE_TARGETS_S[SloMetric.E2E])
    return Slo(SloMetric.E2E, max(asked_s, usual_s))


def _least_pace_s(top: SlaClass | None, pace_s: float) -> float:
    """The tightest pace that a key with the class `top` can get where `pace_s` is usual."""
    match top:
        case None:
            return 0.0
        case SlaClass.BATCH:
            return pace_s
        case _:
            return min(pace_s, INTERACTIVE_TARGETS_S[SloMetric.TPOT])


def _least_target_s(top: SlaClass | None, slo: Slo, hard_deadline_s: float) -> float:
    """The tightest target of a task with `slo` that a key with the class `top` can get."""
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
    """What headers, `extra` (the body's object `cato`, or a native body) and the rest ask for.

    Raise `InputError` for a hint that cannot be read.
    """
    sla = extra.get("sla")
    is_word = isinstance(sla, str)
    word = request.headers.get(SLA_HEADER) or (sla if is_word else "") or prefix_class
    sla_class = _class_of(str(word)) if word else TIERS[tier][0] if tier else None
    target = {} if is_word else sub_object(extra, "sla")
    asked_s = _asked_s(request, extra, DEADLINE_HEADER, "deadline_ms")
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
    """How long after its first call the caller's session is to end: as the request says, or as its
    task does (`otherwise`), or its key."""
    asked_s = _asked_s(request, extra, SESSION_HEADER, "session_deadline_ms")
    return asked_s if asked_s < inf else otherwise or caller_of(request).session_target_s


def target_in(extra: Mapping[str, object]) -> tuple[SloMetric | None, float]:
    """The metric and the target that the body's `sla` names, in seconds; None where it names no
    metric."""
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
    """OpenAI's `service_tier`; empty when the body has none."""
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
    """The shorter of a header's milliseconds and a field's, in seconds; inf when neither is
    there."""
    found = []
    text = request.headers.get(header)
    if text is not None:
        found.append(positive_number(_number(text), header) / 1000)
    if extra.get(field) is not None:
        found.append(positive_number(extra[field], field) / 1000)
    return min(found, default=inf)


def _deadline_s(request: Request, extra: Mapping[str, object], asked_s: float) -> float | None:
    """The soonest of all deadlines, the client's own patience included."""
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
