"""The OpenAI dialect: models, completions, chat completions.

A virtual model (`cato-completion`, ...) runs a workflow; its other inputs and its SLA stand in the
body's object `cato`: `{"inputs": {...}, "sla": {...}}`. Sampling fields of the body do not apply
to it: the workflow's nodes say how they call their models.

Any other model is called directly. Its body and its answer pass through untouched, except that
`suffix` is rendered in the model's own fill-in-the-middle form and that fields which are CATO's
business (`cato`, `user`, `priority`, `request_id`) are taken out.

Both end with the receipt as the object `cato`: of a whole answer, of the usage chunk of a stream
when the client asked for usage, else of a stream's last chunk. A direct stream without usage has
it only on demand (header `X-CATO-Receipt: 1` or `{"cato": {"receipt": true}}`), in a chunk without
choices.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError, UnknownNameError
from cato.core.ids import TaskName
from cato.core.workflow import CallSettings, LlmSettings, Workflow
from cato.engines.base import Endpoint
from cato.serve.executor import Piece, RunningTask
from cato.serve.ingress import virtual
from cato.serve.ingress.body import flag, known_keys, read_object, sub_object
from cato.serve.ingress.context import Ingress, finish_of, request_id
from cato.serve.ingress.exchange import Exchange, streamed, whole
from cato.serve.ingress.hints import slo_for
from cato.serve.ingress.jsons import DONE_EVENT, JsonAnswer, sse
from cato.serve.ingress.receipts import as_json
from cato.serve.ingress.shapes import Shape, finish_reason_of, usage_of
from cato.serve.pools import PoolInfo
from cato.serve.prompts import fim_stops
from cato.serve.service import CALL_SLO
from cato.workflows.fim import fim_family, render_fim

RECEIPT_HEADER = "X-CATO-Receipt"
CATO_SHAPE = '{"cato": {"inputs": {...}, "sla": {...}, "receipt": bool}}'
# Fields of a body that never reach an engine: CATO's own, and those that it sets.
OWN_FIELDS = frozenset({"model", "stream", "suffix", "cato", "user", "priority", "request_id"})


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["openai"])
    names = virtual.model_names(ingress.service.workflows)

    @router.get("/v1/models")
    async def models() -> Response:
        """Real models first: some clients take the first of the list."""
        return JsonAnswer({"object": "list", "data": list(_models(ingress).values())})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One model."""
        known = _models(ingress)
        if model in names:
            return JsonAnswer(_virtual_model(ingress, model, names[model]))
        if model not in known:
            raise UnknownNameError("model", model, tuple(known))
        return JsonAnswer(known[model])

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Complete a prompt, with `suffix` in the middle of a text."""
        return await _serve(ingress, names, request, Endpoint.COMPLETIONS)

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await _serve(ingress, names, request, Endpoint.CHAT)

    return router


async def _serve(
    ingress: Ingress, names: dict[str, TaskName], request: Request, endpoint: Endpoint
) -> Response:
    body = await read_object(request, ingress.max_body_bytes)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InputError("model must name a model; see GET /v1/models", "model")
    extra = sub_object(body, "cato")
    known_keys(extra, ("inputs", "sla", "receipt"), CATO_SHAPE)
    is_streamed = flag(body, "stream")
    shape = Shape(request_id(request), model, int(time.time()), endpoint is Endpoint.CHAT)
    if model in names:
        task = _start_task(ingress, names[model], request, body, extra, endpoint)
        exchange = Exchange(request, task, ingress.has_replicas)
        if is_streamed:
            return await streamed(
                request, exchange, partial(_chunks, shape=shape, has_usage=_wants_usage(body))
            )
        return await whole(request, exchange, lambda _: _task_answer(shape, task))
    task = ingress.service.run_model(
        model,
        endpoint.value,
        _engine_body(_pool_of(ingress, model), body, endpoint, is_streamed=is_streamed),
        request_id=request_id(request),
        stream=is_streamed,
        slo=slo_for(request, extra, CALL_SLO),
    )
    exchange = Exchange(request, task, ingress.has_replicas)
    if not is_streamed:
        return await whole(request, exchange, lambda pieces: _call_answer(task, pieces))
    wants_receipt = request.headers.get(RECEIPT_HEADER) == "1" or flag(extra, "receipt")
    relay = partial(_relayed, shape=shape, has_usage=_wants_usage(body), has_receipt=wants_receipt)
    return await streamed(request, exchange, relay)


def _wants_usage(body: dict[str, object]) -> bool:
    return flag(sub_object(body, "stream_options"), "include_usage")


# Virtual models


def _start_task(
    ingress: Ingress,
    name: TaskName,
    request: Request,
    body: dict[str, object],
    extra: dict[str, object],
    endpoint: Endpoint,
) -> RunningTask:
    workflow = ingress.service.workflow(name)
    if body.get("n") not in (None, 1):
        raise InputError("a task gives one answer; n must be 1", "n")
    suffix = ""
    if endpoint is Endpoint.CHAT:
        prompt = virtual.last_user_text(body)
    else:
        prompt, suffix = virtual.prompt_of(body), _suffix(body)
    return ingress.service.run_task(
        name,
        virtual.inputs_of(workflow, prompt, suffix, sub_object(extra, "inputs")),
        request_id=request_id(request),
        slo=slo_for(request, extra, workflow.slo),
    )


def _suffix(body: dict[str, object]) -> str:
    suffix = body.get("suffix")
    if suffix is not None and not isinstance(suffix, str):
        raise InputError("suffix must be a string", "suffix")
    return suffix or ""


def _task_answer(shape: Shape, task: RunningTask) -> dict[str, object]:
    finish = finish_of(task)
    text = virtual.text_of(finish.output)
    return {
        **shape.whole(text, finish_reason_of(finish)),
        "usage": usage_of(finish.receipt),
        "cato": as_json(finish.receipt),
    }


async def _chunks(
    exchange: Exchange, batch: list[Piece], *, shape: Shape, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    """A run as chunks. Text that was sent cannot be taken back: only more of it can follow."""
    sent = ""
    while batch:
        text = "".join(piece.text for piece in batch)
        if text:
            sent += text
            yield sse(shape.delta(text))
        batch = await exchange.next()
    failure = exchange.failure()
    if failure is not None:
        yield sse(failure.as_json()) + DONE_EVENT
        return
    finish = finish_of(exchange.task)
    text = virtual.text_of(finish.output)
    tail = b""
    if len(text) > len(sent) and text.startswith(sent):
        tail = sse(shape.delta(text[len(sent) :]))
    last = shape.last(finish_reason_of(finish))
    receipt = as_json(finish.receipt)
    if has_usage:
        usage = {**shape.without_choices(), "usage": usage_of(finish.receipt), "cato": receipt}
        tail += sse(last) + sse(usage)
    else:
        tail += sse({**last, "cato": receipt})
    yield tail + DONE_EVENT


# Direct calls


def _engine_body(
    pool: PoolInfo, body: dict[str, object], endpoint: Endpoint, *, is_streamed: bool
) -> dict[str, object]:
    """What the engine is asked: `body` without CATO's fields, a suffix rendered."""
    passed = {key: value for key, value in body.items() if key not in OWN_FIELDS}
    if not is_streamed:
        passed.pop("stream_options", None)  # an engine refuses it there
    suffix = _suffix(body) if endpoint is Endpoint.COMPLETIONS else ""
    if suffix:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise InputError("with a suffix, prompt must be one string", "prompt")
        if not fim_family(pool.model.family).has_suffix:
            raise InputError(f"model {pool.model.name!r} takes no suffix", "suffix")
        passed["prompt"] = render_fim(pool.model.family, prompt, suffix)
        passed |= fim_stops(body.get("stop"), pool.model.family)
    return passed


def _pool_of(ingress: Ingress, model: str) -> PoolInfo:
    pools = ingress.service.pools()
    for pool in pools:
        if model == pool.model.name or model in pool.model.aliases:
            return pool
    real = (name for pool in pools for name in (pool.model.name, *pool.model.aliases))
    tasks = (virtual.model_name(task) for task in ingress.service.workflows)
    raise UnknownNameError("model", model, (*real, *sorted(tasks)))


def _call_answer(task: RunningTask, pieces: list[Piece]) -> dict[str, object]:
    value: dict[str, object] = json.loads(b"".join(piece.raw for piece in pieces))
    value["cato"] = as_json(finish_of(task).receipt)
    return value


async def _relayed(
    exchange: Exchange, batch: list[Piece], *, shape: Shape, has_usage: bool, has_receipt: bool
) -> AsyncGenerator[bytes, None]:
    """The engine's own events, but for the usage chunk, which comes when the receipt is known."""
    usage: dict[str, object] | None = None
    while batch:
        raw = []
        for piece in batch:
            found = None if piece.text else _usage_chunk(piece.raw)
            if found is None:
                raw.append(piece.raw)
            else:
                usage = found
        if raw:
            yield b"".join(raw)
        batch = await exchange.next()
    failure = exchange.failure()
    if failure is not None:
        yield sse(failure.as_json()) + DONE_EVENT
        return
    finish = finish_of(exchange.task)
    tail = b""
    if has_usage or has_receipt:
        chunk = usage or shape.without_choices()
        if not has_usage:
            chunk.pop("usage", None)
        tail = sse({**chunk, "cato": as_json(finish.receipt)})
    yield tail + DONE_EVENT


def _usage_chunk(raw: bytes) -> dict[str, object] | None:
    """The usage-only chunk that an engine sends last, alone in its piece; None for any other."""
    if b'"usage"' not in raw or raw.count(b"\n\n") != 1:
        return None
    value: dict[str, object] = json.loads(raw.removeprefix(b"data: "))
    return value if value.get("choices") == [] else None


# Models


def _models(ingress: Ingress) -> dict[str, dict[str, object]]:
    known: dict[str, dict[str, object]] = {}
    for pool in ingress.service.pools():
        for name in (pool.model.name, *pool.model.aliases):
            known[name] = _model(ingress, name, pool.profile.context_tokens, pool.model.name)
    for task in sorted(ingress.service.workflows):
        name = virtual.model_name(task)
        known[name] = _virtual_model(ingress, name, task)
    return known


def _model(ingress: Ingress, name: str, context_tokens: int | None, root: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": ingress.started_at,
        "owned_by": "cato",
        "root": root,
        "max_model_len": context_tokens,
    }


def _virtual_model(ingress: Ingress, name: str, task: TaskName) -> dict[str, object]:
    context = _context_tokens(ingress.service.workflow(task), partial(_pool_of, ingress))
    return _model(ingress, name, context, task)


def _context_tokens(workflow: Workflow, pool_of: Callable[[str], PoolInfo]) -> int | None:
    """The shortest context of the models that a workflow calls; None when one is not served."""
    called = {
        n.settings.model
        for n in workflow.nodes
        if isinstance(n.settings, LlmSettings | CallSettings)
    }
    try:
        return min((pool_of(m).profile.context_tokens for m in called), default=None)
    except UnknownNameError:
        return None
