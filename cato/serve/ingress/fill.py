"""Fill-in-the-middle: `Fill`, the common form of all completion dialects.

OpenAI's `suffix`, sentinels in its `prompt`, `/v1/fim/completions`, Tabby and llama.cpp's `/infill`
all carry the text around the cursor, related code of other files, and a token limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from starlette.requests import Request

from cato.core.errors import InputError
from cato.core.slo import Slo, SloMetric
from cato.core.workflow import Workflow
from cato.engines.base import Endpoint
from cato.serve.executor import RunningTask
from cato.serve.ingress import virtual
from cato.serve.ingress.body import sub_object
from cato.serve.ingress.buffers import completion_buffer, named_buffer
from cato.serve.ingress.calls import text_prompt
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.hints import SlaClass, claim_of, granted, target_in, top_class, whole_answer
from cato.serve.ingress.limits import limited
from cato.serve.ingress.naming import COMPLETION, Target, pool_of, prefix_of
from cato.serve.ingress.parameters import adapted
from cato.serve.nodes.languages import language_named
from cato.serve.pools import PoolInfo
from cato.serve.prompts import fim_stops, fitted, prompt_room
from cato.serve.service import CALL_DEADLINE_S, CALL_SLO, ModelCall, Origin
from cato.workflows.filters import commented
from cato.workflows.fim import parse_fim, render_fim
from cato.workflows.fim_families import fim_family
from cato.workflows.load import check_inputs

# Token limit of a direct call that sets none: as much as an editor shows after the cursor.
DEFAULT_TOKENS = 64
# Where these dialects take a task's inputs besides the main one.
INPUTS_SHAPE = '{"cato": {"inputs": {...}}}'


@dataclass(frozen=True, slots=True)
class Fill:
    """A request to complete at a cursor, or the one text of a task.

    `context` is code of other files as plain text; `sampling` uses vLLM's names. None and empty
    values mean unset.
    """

    prefix: str
    suffix: str = ""
    context: str = ""
    path: str = ""
    language: str = ""
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    sampling: Mapping[str, object] | None = None


def with_sentinels_read(fill: Fill) -> Fill:
    """`fill`, with its prompt split at the sentinels if the client wrote them itself."""
    parts = None if fill.suffix else parse_fim(fill.prefix)
    if parts is None:
        return fill
    return replace(
        fill,
        prefix=parts.prefix,
        suffix=parts.suffix,
        context=parts.context or fill.context,
        path=parts.path or fill.path,
    )


def slo_of(request: Request, tier: str, extra: Mapping[str, object], workflow: Workflow) -> Slo:
    """The SLO of a run of `workflow`."""
    claim = claim_of(request, extra, workflow.slo, prefix_class=prefix_of(request)[1], tier=tier)
    return granted(claim, workflow.slo, workflow.hard_deadline_s)


def call_slo_of(
    request: Request,
    tier: str,
    extra: Mapping[str, object],
    base: Slo = CALL_SLO,
    *,
    is_urgent: bool = True,
    expected_tokens: int = DEFAULT_TOKENS,
) -> Slo:
    """The SLO of a direct call: `base` unless the request asks for another; a batch request gets a
    loose one."""
    metric, target_s = target_in(extra)
    if metric is SloMetric.E2E:
        base = whole_answer(base, target_s, expected_tokens, top_class(request))
    if metric in (SloMetric.E2E, SloMetric.TPOT):
        extra = {name: value for name, value in extra.items() if name != "sla"}
    claim = claim_of(request, extra, base, prefix_class=prefix_of(request)[1], tier=tier)
    if metric is SloMetric.TPOT:
        claim = replace(claim, tpot_s=min(claim.tpot_s, target_s))
    if not is_urgent and claim.sla_class is None:
        claim = replace(claim, sla_class=SlaClass.BATCH)
    return granted(claim, base, CALL_DEADLINE_S)


def objective_of(ingress: Ingress, target: Target) -> Slo:
    """The default SLO of `target`."""
    return CALL_SLO if target.task is None else ingress.service.workflow(target.task).slo


def start_fill(
    ingress: Ingress,
    request: Request,
    target: Target,
    fill: Fill,
    body: Mapping[str, object],
    extra: Mapping[str, object],
    tier: str = "",
) -> RunningTask:
    """Start the workflow or the direct model call that serves `fill`.

    `body` may name the buffer; `tier` is OpenAI's `service_tier`. A completion supersedes the
    previous one in its buffer.
    """
    buffer = named_buffer(request)
    if target.task in (None, COMPLETION):
        buffer = completion_buffer(request, body, fill.path)

    def start(origin: Origin) -> RunningTask:
        if target.task is None:
            tokens = fill.max_tokens or DEFAULT_TOKENS
            slo = call_slo_of(request, tier, extra, expected_tokens=tokens)
            return _start_model(ingress, request, target.model, fill, slo, origin)
        workflow = ingress.service.workflow(target.task)
        given = sub_object(extra, "inputs")
        return ingress.service.run_workflow(
            adapted(workflow, fill.max_tokens, fill.stops, fill.sampling or {}),
            check_inputs(workflow, {**_inputs(workflow, fill), **given}, INPUTS_SHAPE),
            request_id=request_id(request),
            slo=slo_of(request, tier, extra, workflow),
            origin=origin,
        )

    return ingress.started(request, buffer, start)


def _inputs(workflow: Workflow, fill: Fill) -> dict[str, object]:
    """The parts of `fill` that `workflow` has inputs for."""
    known = {i.name for i in workflow.inputs}
    if fill.suffix and "suffix" not in known:
        raise InputError(f"task {workflow.name!r} takes no suffix; leave it out", "suffix")
    offered = {
        "suffix": fill.suffix,
        "context": fill.context,
        "path": fill.path,
        "language": _language(fill),
    }
    return {
        virtual.main_input(workflow): fill.prefix,
        **{name: text for name, text in offered.items() if text and name in known},
    }


def _language(fill: Fill) -> str:
    extension = PurePosixPath(fill.path).suffix.removeprefix(".")
    return fill.language or language_named(extension) or ""


def _context(fill: Fill, pool: PoolInfo, most_tokens: int) -> str:
    """The code of other files as comments, cut to what the code around the cursor leaves."""
    if not fill.context:
        return ""
    room = prompt_room(fill.max_tokens or most_tokens, pool.profile.context_tokens)
    parts = (fill.prefix, fill.suffix, commented(fill.context, _language(fill)))
    return fitted(parts, room, pool.profile.chars_per_token)[2]


def _start_model(
    ingress: Ingress, request: Request, model: str, fill: Fill, slo: Slo, origin: Origin
) -> RunningTask:
    pool = pool_of(ingress, model)
    family = pool.model.family
    if fill.suffix and not fim_family(family).has_suffix:
        raise InputError(f"model {pool.model.name!r} takes no suffix; leave it out", "suffix")
    sampling = fill.sampling or {}
    least = sampling.get("min_tokens")
    most = max(DEFAULT_TOKENS, least) if isinstance(least, int) else DEFAULT_TOKENS
    body: dict[str, object] = {
        **sampling,
        "prompt": render_fim(family, fill.prefix, fill.suffix, _context(fill, pool, most)),
        "max_tokens": fill.max_tokens or most,
        **fim_stops(list(fill.stops), family),
    }
    called, salt = pool.model.called(model), ingress.salt_of(request)
    prompt = text_prompt(body["prompt"], pool, called, salt)
    limited_body, limit = limited(
        body, Endpoint.COMPLETIONS, prompt.tokens, pool.profile.context_tokens, ingress.caps
    )
    call = ModelCall(
        model,
        Endpoint.COMPLETIONS,
        limited_body,
        prompt,
        is_streamed=True,
        expected_tokens=limit or DEFAULT_TOKENS,
        max_tokens=limit,
        slo=slo,
    )
    return ingress.service.run_model(call, request_id=request_id(request), origin=origin)
