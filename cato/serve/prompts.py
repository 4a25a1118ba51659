"""Renders an LLM node's settings into the request body for its engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from cato.core.errors import ContextLengthError, InputError, NodeError
from cato.core.ids import ModelName
from cato.core.profile import REFERENCE_CHARS_PER_TOKEN
from cato.core.record import record
from cato.core.runs import StartNode
from cato.core.workflow import CallSettings, LlmSettings
from cato.engines.base import Endpoint
from cato.serve.pools import PoolInfo
from cato.wire.as_chat import messages_as_chat
from cato.wire.counting import estimated_tokens
from cato.wire.limits import COMPLETION_TOKENS, MOST_ERROR, limits_of, with_limits
from cato.wire.prefix import block_chars, chain
from cato.workflows.fim import fit_fim, render_fim
from cato.workflows.fim_families import stop_strings

# Prompt tokens kept free for sentinels, the chat template and errors of the token estimate.
MARGIN_TOKENS = 24
MARGIN_FRACTION = 0.1
# Most times that a prompt is cut by the estimate of its tokens.
_MOST_ESTIMATES = 3
# What is kept of a prompt each time that an engine refuses it without a count: 7 % in the end.
_KEPT_SHARES = (0.7, 0.4, 0.25)
MOST_CUTS = len(_KEPT_SHARES)


@record
class EngineCall:
    """A request body, its dialect, and its expected tokens. `model` is the pool's model or one of
    its adapters. `begun`: see `EngineRequest`."""

    endpoint: Endpoint
    body: Mapping[str, object]
    prompt_tokens: int
    expected_tokens: int
    max_tokens: int
    model: ModelName
    prefix: tuple[int, ...] = ()
    session: str = ""
    shared_blocks: int = 0
    calls: int = 1
    stream: bool = True
    raw: bool = False
    begun: str = ""
    begun_tokens: int = 0

    @property
    def is_resumable(self) -> bool:
        """Whether another replica can continue from the prompt and the text so far."""
        return self.stream and not self.raw and "prompt" in self.body


def prompt_room(max_tokens: int, context_tokens: int) -> int:
    """Estimated tokens that a workflow's prompt may have, below 1 if none fits."""
    return int((context_tokens - max_tokens - MARGIN_TOKENS) * (1 - MARGIN_FRACTION))


def engine_call(
    settings: LlmSettings | CallSettings,
    command: StartNode,
    pool: PoolInfo,
    most_chars: float = inf,
    salt: str = "",
) -> EngineCall:
    """The call for `settings` rendered with the names of `command`.

    A fill-in-the-middle prompt is cut to the context window, its `context` first; other prompts
    must fit. `most_chars` makes it shorter, after an engine found it too long (`fewer_chars`).
    Engines share their prefix cache among prompts with the same `salt`.
    Raise `NodeError` if the workflow's token limit leaves no room for any prompt.
    """
    if isinstance(settings, CallSettings):
        return _passthrough(settings, pool, salt)
    profile, names = pool.profile, command.names
    limit = settings.limit_of(names)
    room = prompt_room(limit, profile.context_tokens)
    if room < 1:
        raise NodeError(
            command.node.id,
            f"max_tokens {limit} leaves no room for a prompt in the "
            f"maximum context length of {profile.context_tokens} tokens of {pool.model.name!r}",
        )
    body: dict[str, object] = with_limits(settings.extra or {}, {"max_tokens": limit})
    endpoint = Endpoint.COMPLETIONS
    if settings.fim is not None:
        parts = (
            settings.fim.prefix.render(names),
            settings.fim.suffix.render(names),
            settings.fim.context.render(names) if settings.fim.context else "",
        )
        prefix, suffix, context = fitted(parts, room, profile.chars_per_token, most_chars)
        text = render_fim(pool.model.family, prefix, suffix, context)
        body["prompt"] = text
        body |= fim_stops(body.get("stop"), pool.model.family)
    elif settings.chat is not None:
        text = settings.chat.render(names)
        messages = [{"role": "user", "content": text}]
        if settings.system is not None:
            messages.insert(0, {"role": "system", "content": settings.system.render(names)})
        body["messages"] = messages
        endpoint = Endpoint.CHAT
    else:
        assert settings.prompt is not None, "an llm node has a prompt, a fim or a chat"
        text = settings.prompt.render(names)
        body["prompt"] = text
    model = pool.model.called(settings.model)
    return EngineCall(
        endpoint=endpoint,
        body=_salted(body, salt),
        prompt_tokens=profile.count_tokens(text),
        expected_tokens=min(settings.expected_tokens, limit),
        max_tokens=limit,
        model=model,
        prefix=chain(text, block_chars(profile.chars_per_token), model, salt),
    )


def fitted(
    parts: tuple[str, str, str], room_tokens: int, chars_per_token: float, most_chars: float = inf
) -> tuple[str, str, str]:
    """Prefix, suffix and context cut to `room_tokens`, and to `most_chars` characters.

    Code is cut by its characters per token. Tables of numbers, other dense text and most languages
    but English have fewer. Text that would not fit even without a margin is cut by the estimate of
    its tokens, with another margin: such estimates are off by up to 15 %.
    """
    budget_chars = int(min(most_chars, room_tokens * chars_per_token))
    scale = REFERENCE_CHARS_PER_TOKEN / chars_per_token
    kept = fit_fim(*parts, budget_chars)
    for _ in range(_MOST_ESTIMATES):
        text = "".join(kept)
        if 4 * len(text) * scale <= room_tokens:  # no character has more than four tokens
            break
        tokens = estimated_tokens(text) * scale
        if tokens <= room_tokens / (1 - MARGIN_FRACTION):
            break
        budget_chars = int(len(text) * room_tokens / tokens * (1 - MARGIN_FRACTION))
        kept = fit_fim(*parts, budget_chars)
    return kept


def fewer_chars(call: EngineCall, refused: ContextLengthError, cuts: int) -> int:
    """Characters that the fill-in-the-middle prompt of `call` may have, after an engine refused it.

    `cuts` is how often that happened before. vLLM often stops counting at its limit; then the
    prompt gets shorter by a fixed share.
    """
    prompt = call.body["prompt"]
    assert isinstance(prompt, str), "a fill-in-the-middle prompt is one text"
    share = _KEPT_SHARES[cuts]
    if refused.prompt_tokens and refused.context_tokens is not None:
        room = max(0, refused.context_tokens - call.max_tokens - MARGIN_TOKENS)
        share = min(1.0, room / refused.prompt_tokens) * (1 - MARGIN_FRACTION)
    return int(len(prompt) * share)


def fim_stops(stop: object, family: str) -> dict[str, object]:
    """Fields that end a fill-in-the-middle answer: the caller's `stop` and the family's own.

    A family's sentinels are special tokens. By default vLLM leaves them out of the text, where stop
    strings would then never match them.
    """
    return {"stop": [*_strings(stop), *stop_strings(family)], "skip_special_tokens": False}


def _salted(body: Mapping[str, object], salt: str) -> Mapping[str, object]:
    """`body` with `salt` in vLLM's field, combined with the body's own salt if it has one."""
    if not salt:
        return body
    own = body.get("cache_salt")
    if own is not None:
        salt = hashlib.blake2b(f"{salt}\0{own!r}".encode(), digest_size=16).hexdigest()
    return {**body, "cache_salt": salt}


def _passthrough(settings: CallSettings, pool: PoolInfo, salt: str) -> EngineCall:
    prompt, endpoint = settings.prompt, Endpoint(settings.endpoint)
    return EngineCall(
        endpoint=endpoint,
        body=_salted(settings.body, salt if endpoint.computes else ""),
        prompt_tokens=prompt.tokens,
        expected_tokens=settings.expected_tokens,
        max_tokens=settings.max_tokens or pool.profile.context_tokens,
        model=pool.model.called(settings.model),
        prefix=prompt.prefix,
        session=prompt.session,
        shared_blocks=prompt.shared_blocks,
        calls=settings.calls,
        stream=settings.stream,
        raw=True,
    )


def most_output_tokens(settings: CallSettings, context_tokens: int) -> int:
    """Most tokens of one of its answers, in a context of that many."""
    endpoint = Endpoint(settings.endpoint)
    if settings.max_tokens is not None:
        return settings.max_tokens
    if not endpoint.generates:
        return settings.expected_tokens
    if endpoint is Endpoint.COMPLETIONS:
        return COMPLETION_TOKENS
    return max(1, context_tokens - settings.prompt.tokens)


def with_room(settings: CallSettings, refused: ContextLengthError) -> CallSettings | None:
    """`settings` with a token limit that leaves room for the prompt, after an engine refused it.

    An engine that stopped counting the prompt gets a limit that its estimate leaves for certain.
    None if that cannot help: there is no limit, or the prompt alone is too long.
    """
    limit, prompt, context = settings.max_tokens, refused.prompt_tokens, refused.context_tokens
    if limit is None or context is None:
        return None
    if prompt is None:
        room = max(int(context - MOST_ERROR * settings.prompt.tokens), context // 4)
    else:
        room = context - prompt
    if not 0 < room < limit:
        return None
    body = with_limits(settings.body, dict.fromkeys(limits_of(settings.body), room))
    return replace(settings, body=body, max_tokens=room)


def tokenizing(settings: CallSettings) -> CallSettings | None:
    """The request to the tokenizer for the prompt that `settings` asks to count.

    None for content that has no counterpart in chat. vLLM passes the reasoning effort to the chat
    template; its tokenizer endpoint has no field for it but takes the template's arguments.
    """
    try:
        chat = messages_as_chat(settings.body)
    except (InputError, KeyError, TypeError, AttributeError):
        return None
    arguments = dict(chat.get("chat_template_kwargs") or {})
    effort = chat.get("reasoning_effort")
    if effort is not None:
        arguments.setdefault("enable_thinking", effort != "none")
        arguments["reasoning_effort"] = effort
    body: dict[str, object] = {"messages": chat["messages"]}
    if "tools" in chat:
        body["tools"] = chat["tools"]
    if arguments:
        body["chat_template_kwargs"] = arguments
    return replace(settings, endpoint=Endpoint.TOKENIZE.value, body=body)


def _strings(stop: object) -> list[str]:
    match stop:
        case str():
            return [stop]
        case list() | tuple():
            return [s for s in stop if isinstance(s, str)]
        case _:
            return []
