"""OpenAI's completions.

A virtual model (`cato-completion`, ...) runs a workflow; see `cato.serve.ingress.dialects.chat` for
its other inputs, its SLA and its receipts. Token limits, stop strings and sampling apply to the
nodes that write the answer.

Any other model is called directly. The body and the answer pass through unchanged, with four
exceptions: a list of one text as the prompt becomes that text; `suffix`, or a prompt with another
family's sentinels, is rendered in the model's own fill-in-the-middle form, with code of other files
as comments; a token limit is cut to what fits; and CATO's own fields, and those that say nothing,
are removed.
"""

from __future__ import annotations

import time
from pathlib import PurePosixPath

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.serve.access.buffers import BufferId
from cato.serve.ingress import document, virtual
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import cato_of, flag, read_object, text_field
from cato.serve.ingress.bounds import bounds_of, count_calls
from cato.serve.ingress.buffers import completion_buffer
from cato.serve.ingress.calls import engine_body, longest_prompt, start_call, text_prompt
from cato.serve.ingress.context import Ingress, caller_of, request_id, session_of
from cato.serve.ingress.dialects import tabby
from cato.serve.ingress.dialects.chat import usage_in_of
from cato.serve.ingress.fill import Fill, call_slo_of, start_fill, with_sentinels_read
from cato.serve.ingress.hints import tier_of
from cato.serve.ingress.limits import ESTIMATED, EXACT, limited, max_tokens_of, stops_of
from cato.serve.ingress.naming import COMPLETION, Target, pool_of, resolve, with_model
from cato.serve.ingress.parameters import sampling_of
from cato.serve.ingress.relay import relay_choices, wants_receipt
from cato.serve.nodes.languages import language_named
from cato.serve.pools import PoolInfo
from cato.serve.prompts import fim_stops
from cato.serve.service import PRIOR_OUTPUT_TOKENS, ModelCall
from cato.wire.completions import CompletionsWriter
from cato.wire.endpoint import Endpoint
from cato.workflows.filters import commented
from cato.workflows.fim import parse_fim, render_fim
from cato.workflows.fim_families import fim_family


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", **document.COMPLETIONS)
    async def completions(request: Request) -> Response:
        """Complete a prompt, or with `suffix` fill in the middle; also accepts Tabby's bodies."""
        body = await read_object(request, ingress.max_body_bytes)
        if "segments" in body:
            return await tabby.complete(ingress, request, body)
        body = _with_twinnys_limit(_with_one_prompt(with_model(body)))
        return await _complete(ingress, request, body)

    return router


async def _complete(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    extra, is_streamed = cato_of(body), flag(body, "stream")
    target = resolve(
        ingress,
        request,
        body.get("model"),
        extra,
        COMPLETION,
        session=lambda: session_of(request, _buffer(request, body)),
    )
    model = str(body.get("model") or "")
    writer = CompletionsWriter(request_id(request), model, int(time.time()), usage_in_of(body))
    if target.task is None:
        return await _call(ingress, request, target, body, extra, writer)
    fill = Fill(
        virtual.prompt_of(body),
        text_field(body, "suffix"),
        max_tokens=max_tokens_of(body, "max_tokens"),
        stops=stops_of(body),
        sampling=sampling_of(body, target.task),
    )
    if any(i.name == "suffix" for i in ingress.service.workflow(target.task).inputs):
        fill = with_sentinels_read(fill)
    task = start_fill(ingress, request, target, fill, body, extra, tier=tier_of(body))
    return await serve_text(ingress, request, task, WrittenForm(writer), is_streamed=is_streamed)


def _with_one_prompt(body: dict[str, object]) -> dict[str, object]:
    """Unwrap a list of one text, which LangChain and others send as the prompt."""
    match body.get("prompt"):
        case [str(text)]:
            return {**body, "prompt": text}
    return body


def _with_twinnys_limit(body: dict[str, object]) -> dict[str, object]:
    """Use Ollama's `options.num_predict`, which Twinny sends here; vLLM's default is 16 tokens."""
    limit = options.get("num_predict") if isinstance(options := body.get("options"), dict) else None
    is_limit = isinstance(limit, int) and limit > 0
    return {**body, "max_tokens": limit} if is_limit and not body.get("max_tokens") else body


# Direct calls


async def _call(
    ingress: Ingress,
    request: Request,
    target: Target,
    body: dict[str, object],
    extra: dict[str, object],
    writer: CompletionsWriter,
) -> Response:
    is_streamed, has_receipt = flag(body, "stream"), wants_receipt(request, extra)
    pool = pool_of(ingress, target.model)
    passed = engine_body(_in_its_own_form(pool, body), is_streamed=is_streamed)
    called, salt = pool.model.called(target.model), ingress.salt_of(request)
    asked = passed.get("prompt")
    if isinstance(asked, list):  # before each prompt is read
        count_calls(passed, bounds_of(caller_of(request).bounds))
    prompt = text_prompt(asked, pool, called, salt)
    longest, is_exact = prompt.tokens, False
    if isinstance(asked, list):  # each has the context to itself
        longest, is_exact = longest_prompt(asked, pool)
    passed, limit = limited(
        passed,
        Endpoint.COMPLETIONS,
        longest,
        pool.profile.context_tokens,
        ingress.caps,
        factor=EXACT if is_exact else ESTIMATED,
    )
    expected_tokens = limit or PRIOR_OUTPUT_TOKENS
    call = ModelCall(
        target.model,
        Endpoint.COMPLETIONS,
        passed,
        prompt,
        is_streamed=is_streamed,
        expected_tokens=expected_tokens,
        max_tokens=limit,
        slo=call_slo_of(request, tier_of(body), extra, expected_tokens=expected_tokens),
        passed=target.why,
    )
    task = await start_call(ingress, request, call, _buffer(request, body))
    return await relay_choices(
        ingress,
        request,
        task,
        writer,
        is_streamed=is_streamed,
        has_receipt=has_receipt,
    )


def _buffer(request: Request, body: dict[str, object]) -> BufferId | None:
    """The buffer of a direct fill-in-the-middle call; None for any other."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        return None
    fill = with_sentinels_read(Fill(prompt, text_field(body, "suffix")))
    return completion_buffer(request, body, fill.path) if fill.suffix else None


def _in_its_own_form(pool: PoolInfo, body: dict[str, object]) -> dict[str, object]:
    """The body; a fill-in-the-middle prompt is rendered in the form of the pool's model."""
    family, prompt, suffix = pool.model.family, body.get("prompt"), text_field(body, "suffix")
    if suffix:
        if not isinstance(prompt, str):
            raise InputError("with a suffix, prompt must be one string", "prompt")
        if not fim_family(family).has_suffix:
            raise InputError(f"model {pool.model.name!r} takes no suffix; leave it out", "suffix")
        return _rendered(body, family, prompt, suffix)
    parts = parse_fim(prompt) if isinstance(prompt, str) else None
    # A model of unknown family may know the sentinels that the client wrote.
    if parts is None or family in parts.families or not fim_family(family).has_suffix:
        return body
    language = language_named(PurePosixPath(parts.path).suffix.removeprefix(".")) or ""
    context = commented(parts.context, language)
    return _rendered(body, family, parts.prefix, parts.suffix, context)


def _rendered(
    body: dict[str, object], family: str, prefix: str, suffix: str, context: str = ""
) -> dict[str, object]:
    stops = fim_stops(body.get("stop"), family)
    return {**body, "prompt": render_fim(family, prefix, suffix, context), **stops}
