"""Direct calls: a body passed to a model's engine in the engine's own dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.core.record import changed
from cato.core.runs import FinishRun
from cato.core.session import Prompt
from cato.serve.access.buffers import BufferId
from cato.serve.executor import RunningTask
from cato.serve.ingress.bounds import bounds_of, check_call, check_texts
from cato.serve.ingress.buffers import named_buffer
from cato.serve.ingress.clients import UNKNOWN, Client
from cato.serve.ingress.context import Ingress, caller_of, finish_of, request_id
from cato.serve.ingress.exchange import Exchange, whole
from cato.serve.pools import PoolInfo
from cato.serve.service import ModelCall
from cato.wire.counting import estimated_tokens
from cato.wire.prefix import block_chars, chain

# Fields that are not passed to an engine: CATO's own, and those that CATO sets.
OWN_FIELDS = frozenset(
    {"model", "stream", "suffix", "cato", "user", "priority", "request_id", "service_tier"}
)
# Of a completion, null lets vLLM go on to the context's end; without the field it ends after 16.
_NULL_SAYS = frozenset({"max_tokens"})
# Lists of messages, or of a response's items.
_MESSAGES = ("messages", "input")
_NO_CHOICE = ("auto", "none", {"type": "auto"}, {"type": "none"})


def engine_body(body: Mapping[str, object], *, is_streamed: bool) -> dict[str, object]:
    """`body` without CATO's fields, and without those that say nothing but that an engine refuses:
    null, also in messages, no tools, a choice without tools, and `stream_options` without
    `stream`."""
    passed = {
        key: value
        for key, value in body.items()
        if key not in OWN_FIELDS and (value is not None or key in _NULL_SAYS)
    }
    for key in _MESSAGES:
        if isinstance(said := passed.get(key), list) and any(map(_has_nulls, said)):
            passed[key] = [_without_nulls(one) if _has_nulls(one) else one for one in said]
    if not is_streamed:
        passed.pop("stream_options", None)
    if passed.get("tools") == []:
        del passed["tools"]
    if "tools" not in passed and passed.get("tool_choice") in _NO_CHOICE:
        del passed["tool_choice"]
    return passed


def _has_nulls(message: object) -> bool:
    return isinstance(message, Mapping) and None in message.values()


def _without_nulls(message: Mapping[str, object]) -> dict[str, object]:
    """A message as its client means it: serializers write absent fields as null, which vLLM refuses
    for `name`, and for `tool_calls` of an answer without text. `content` may be null."""
    return {k: value for k, value in message.items() if value is not None or k == "content"}


def text_prompt(prompt: object, pool: PoolInfo, model: str, salt: str) -> Prompt:
    """A completion's prompt: text, tokens, or a list of either; for `salt` see `Ingress.salt_of`.
    Raise `InputError` for anything else."""
    match prompt:
        case str():
            tokens = pool.profile.count_tokens(prompt)
            size = block_chars(pool.profile.chars_per_token)
            return Prompt(tokens, tokens, chain(prompt, size, model, salt))
        case list() if _is_tokens(prompt):
            return Prompt(len(prompt), len(prompt))
        case list() if prompt and all(isinstance(one, str) or _is_tokens(one) for one in prompt):
            counts = (
                pool.profile.count_tokens(one) if isinstance(one, str) else len(one)
                for one in prompt
            )
            tokens = sum(counts)
            return Prompt(tokens, tokens)
        case None:
            return Prompt(1, 1)  # an embedded prompt, or none: left to the engine
    raise InputError("prompt must be a string, a list of tokens, or a list of these", "prompt")


def longest_prompt(prompts: list[object], pool: PoolInfo) -> tuple[int, bool]:
    """Tokens of a list's longest prompt, and whether that is no estimate; `text_prompt` has checked
    the list."""
    if _is_tokens(prompts):
        return len(prompts), True
    counts = [
        len(one) if isinstance(one, list) else pool.profile.count_tokens(str(one))
        for one in prompts
    ]
    return max(counts), all(isinstance(one, list) for one in prompts)


def _is_tokens(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(t) is int for t in prompt)


def other_prompt(body: Mapping[str, object]) -> Prompt:
    """The prompt of an endpoint that generates nothing, such as embeddings."""
    tokens = max(1, round(estimated_tokens(json.dumps(body, ensure_ascii=False))))
    return Prompt(tokens, tokens)


async def start_call(
    ingress: Ingress,
    request: Request,
    call: ModelCall,
    buffer: BufferId | None = None,
    client: Client = UNKNOWN,
) -> RunningTask:
    """Start `call` for `client`. It supersedes the latest run of `buffer`, or of the buffer that
    the request names. Raise `InputError` if the call exceeds its bounds."""
    caller = caller_of(request)
    bounds = bounds_of(caller.bounds)
    calls = check_call(call.body, bounds)
    check_texts(call.body, call.endpoint)
    await ingress.grammars.check(call.body, caller.tenant, bounds.grammar_ms / 1000)
    call = changed(call, calls=calls)
    return ingress.started(
        request,
        buffer or named_buffer(request),
        lambda origin: ingress.service.run_model(
            call, request_id=request_id(request), origin=origin
        ),
        calls=calls,
        client=client,
    )


async def whole_call(
    ingress: Ingress,
    request: Request,
    task: RunningTask,
    finished: Callable[[dict[str, object], FinishRun], dict[str, object]] | None = None,
) -> Response:
    """The engine's JSON answer; `finished` adds fields known only at its end."""

    def value(raw: bytes) -> dict[str, object]:
        answer: dict[str, object] = json.loads(raw)
        return answer if finished is None else finished(answer, finish_of(task))

    exchange = Exchange(request, task, ingress.has_replicas)
    return await whole(
        request, exchange, lambda pieces: value(b"".join(piece.raw for piece in pieces))
    )
