"""The OpenAI dialect: completions and chat completions.

A virtual model (`cato-completion`, ...) runs a workflow; its other inputs and its SLA stand in the
body's object `cato`: `{"inputs": {...}, "sla": ..., "task": ..., "deadline_ms": ...}`. A limit of
tokens and stop strings make its answers shorter; other sampling fields do not apply to it: the
workflow's nodes say how they call their models. A conversation is no task: it is passed through to
the model that the task answers with (`cato.serve.ingress.naming`).

Any other model is called directly. Its body and its answer pass through untouched, except that
`suffix`, or a prompt with the sentinels of another family, is rendered in the model's own
fill-in-the-middle form, that the role `developer` is called `system`, as the templates of most
models know it, that a limit of tokens is capped, and that fields which are CATO's business
(`cato`, `user`, `priority`, `request_id`, `service_tier`) are taken out.

Both end with the receipt as the object `cato`: of a whole answer, of the usage chunk of a stream
when the client asked for usage, else of a stream's last chunk. A direct stream without usage has
it only on demand (header `X-CATO-Receipt: 1` or `{"cato": {"receipt": true}}`), in a chunk without
choices.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.core.runs import FinishRun
from cato.engines.base import Endpoint
from cato.serve.access.buffers import BufferId
from cato.serve.executor import Piece
from cato.serve.ingress import document, tabby, virtual
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import cato_of, flag, read_object, sub_object, text_field
from cato.serve.ingress.buffers import completion_buffer
from cato.serve.ingress.calls import start_call, whole_call
from cato.serve.ingress.chats import with_known_roles
from cato.serve.ingress.context import Ingress, finish_of, request_id
from cato.serve.ingress.exchange import Exchange, streamed
from cato.serve.ingress.fill import (
    Fill,
    call_slo_of,
    start_fill,
    with_sentinels_read,
)
from cato.serve.ingress.hints import TIERS, tier_of
from cato.serve.ingress.jsons import DONE_EVENT, sse
from cato.serve.ingress.limits import max_tokens_of, stops_of
from cato.serve.ingress.naming import (
    COMPLETION,
    Target,
    chat_target,
    pool_of,
    resolve,
)
from cato.serve.ingress.receipts import as_json
from cato.serve.pools import PoolInfo
from cato.serve.prompts import fim_stops
from cato.wire.chat import ChatWriter
from cato.wire.choices import ChoicesWriter, UsageIn
from cato.wire.completions import CompletionsWriter
from cato.workflows.fim import fim_family, parse_fim, render_fim

RECEIPT_HEADER = "X-CATO-Receipt"


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", **document.COMPLETIONS)
    async def completions(request: Request) -> Response:
        """Complete a prompt, with `suffix` in the middle of a text; Tabby's bodies too."""
        body = await read_object(request, ingress.max_body_bytes)
        if "segments" in body:
            return await tabby.complete(ingress, request, body)
        return await _completions(ingress, request, body)

    @router.post("/v1/chat/completions", **document.CHAT)
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_object(request, ingress.max_body_bytes)
        return await _chat(ingress, request, body)

    return router


async def _completions(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    extra, is_streamed = cato_of(body), flag(body, "stream")
    body = _with_twinnys_limit(body)
    target = resolve(ingress, request, body.get("model"), extra, COMPLETION)
    if target.task is None:
        passed = _completion_body(pool_of(ingress, target.model), body)
        buffer = _buffer(request, body)
        return await _call(ingress, request, target, Endpoint.COMPLETIONS, body, passed, buffer)
    if body.get("n") not in (None, 1):
        raise InputError("a task gives one answer; n must be 1", "n")
    fill = Fill(
        virtual.prompt_of(body),
        text_field(body, "suffix"),
        max_tokens=max_tokens_of(body, "max_tokens"),
        stops=stops_of(body),
    )
    if any(i.name == "suffix" for i in ingress.service.workflow(target.task).inputs):
        fill = with_sentinels_read(fill)
    task = start_fill(ingress, request, target, fill, body, extra)
    form = _form(request, body, Endpoint.COMPLETIONS)
    return await serve_text(ingress, request, task, form, is_streamed=is_streamed)


async def _chat(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    extra, is_streamed = cato_of(body), flag(body, "stream")
    target = chat_target(ingress, request, body, extra, body.get("messages"))
    if target.task is None:
        passed = {**body, "messages": with_known_roles(body.get("messages"))}
        return await _call(ingress, request, target, Endpoint.CHAT, body, passed)
    if body.get("n") not in (None, 1):
        raise InputError("a task gives one answer; n must be 1", "n")
    fill = Fill(
        virtual.last_user_text(body),
        max_tokens=max_tokens_of(body, "max_completion_tokens", "max_tokens"),
        stops=stops_of(body),
    )
    task = start_fill(ingress, request, target, fill, body, extra)
    form = _form(request, body, Endpoint.CHAT)
    return await serve_text(ingress, request, task, form, is_streamed=is_streamed)


def _form(request: Request, body: dict[str, object], endpoint: Endpoint) -> WrittenForm:
    return WrittenForm(_writer(request, body, endpoint))


def _writer(request: Request, body: dict[str, object], endpoint: Endpoint) -> ChoicesWriter:
    kind = ChatWriter if endpoint is Endpoint.CHAT else CompletionsWriter
    model, usage_in = str(body.get("model") or ""), UsageIn.NO_CHUNK
    if _wants_usage(body):
        usage_in = UsageIn.OWN_CHUNK
    extra = _tier(body) if endpoint is Endpoint.CHAT else {}
    return kind(request_id(request), model, int(time.time()), usage_in, extra)


def _tier(body: dict[str, object]) -> dict[str, object]:
    tier = tier_of(body)
    return {"service_tier": TIERS[tier][1]} if tier else {}


def _wants_usage(body: dict[str, object]) -> bool:
    return flag(sub_object(body, "stream_options"), "include_usage")


def _with_twinnys_limit(body: dict[str, object]) -> dict[str, object]:
    """Twinny sends Ollama's `options.num_predict` to this path, and vLLM's default is 16 tokens."""
    limit = options.get("num_predict") if isinstance(options := body.get("options"), dict) else None
    is_limit = isinstance(limit, int) and limit > 0
    return {**body, "max_tokens": limit} if is_limit and not body.get("max_tokens") else body


# Direct calls


async def _call(
    ingress: Ingress,
    request: Request,
    target: Target,
    endpoint: Endpoint,
    body: dict[str, object],
    passed: dict[str, object],
    buffer: BufferId | None = None,
) -> Response:
    """Ask `target`'s model with `passed`; `body` is the client's own."""
    extra, is_streamed = cato_of(body), flag(body, "stream")
    slo = call_slo_of(request, body, extra)
    task = start_call(
        ingress, request, target.model, endpoint, passed, slo,
        is_streamed=is_streamed, buffer=buffer, why=target.why,
    )  # fmt: skip
    writer = _writer(request, body, endpoint)
    if not is_streamed:
        return await whole_call(ingress, request, task, partial(_with_receipt, extra=writer.extra))
    wants_receipt = request.headers.get(RECEIPT_HEADER) == "1" or flag(extra, "receipt")
    relay = partial(_relayed, writer=writer, has_receipt=wants_receipt)
    exchange = Exchange(request, task, ingress.has_replicas)
    return await streamed(request, exchange, relay, sign=writer.sign)


def _buffer(request: Request, body: dict[str, object]) -> BufferId | None:
    """The buffer of a direct call that fills in the middle; None for any other."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        return None
    fill = with_sentinels_read(Fill(prompt, text_field(body, "suffix")))
    return completion_buffer(request, body, fill.path) if fill.suffix else None


def _with_receipt(
    value: dict[str, object], finish: FinishRun, *, extra: Mapping[str, object]
) -> dict[str, object]:
    return {**value, **extra, "cato": as_json(finish.receipt)}


def _completion_body(pool: PoolInfo, body: dict[str, object]) -> dict[str, object]:
    """The body with its prompt in the form of the pool's model, if it is a fill-in-the-middle."""
    family, prompt, suffix = pool.model.family, body.get("prompt"), text_field(body, "suffix")
    if suffix:
        if not isinstance(prompt, str):
            raise InputError("with a suffix, prompt must be one string", "prompt")
        if not fim_family(family).has_suffix:
            raise InputError(f"model {pool.model.name!r} takes no suffix", "suffix")
        return _rendered(body, family, prompt, suffix)
    parts = parse_fim(prompt) if isinstance(prompt, str) else None
    # A model whose family is not known may well know the sentinels that its client wrote.
    if parts is None or family in parts.families or not fim_family(family).has_suffix:
        return body
    return _rendered(body, family, parts.prefix, parts.suffix)


def _rendered(body: dict[str, object], family: str, prefix: str, suffix: str) -> dict[str, object]:
    stops = fim_stops(body.get("stop"), family)
    return {**body, "prompt": render_fim(family, prefix, suffix), **stops}


async def _relayed(
    exchange: Exchange, batch: list[Piece], *, writer: ChoicesWriter, has_receipt: bool
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
        yield WrittenForm(writer).failed(failure)
        return
    tail = b""
    has_usage = writer.usage_in is UsageIn.OWN_CHUNK
    if has_usage or has_receipt:
        chunk = usage or writer.without_choices()
        if not has_usage:
            chunk.pop("usage", None)
        tail = sse(_with_receipt(chunk, finish_of(exchange.task), extra=writer.extra))
    yield tail + DONE_EVENT


def _usage_chunk(raw: bytes) -> dict[str, object] | None:
    """The usage-only chunk that an engine sends last, alone in its piece; None for any other."""
    if b'"usage"' not in raw or raw.count(b"\n\n") != 1:
        return None
    value: dict[str, object] = json.loads(raw.removeprefix(b"data: "))
    return value if value.get("choices") == [] else None
