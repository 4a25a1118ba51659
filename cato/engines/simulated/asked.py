"""Parse and check a request body for the simulated engine, in any dialect."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from cato.core.errors import ContextLengthError, EngineError, InputError
from cato.core.prefix_cache import block_hashes
from cato.core.profile import Profile
from cato.wire.endpoint import Endpoint
from cato.wire.reading import conversation_of

# vLLM's default: output tokens of a completion without a limit.
DEFAULT_MAX_TOKENS = 16
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_ID_RANGE = 1 << 17
_ID_CHARS = 8  # characters per token id in a prompt of ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt; its tokens are pieces of `token_chars` characters."""

    text: str
    tokens: int
    token_chars: float

    def ids(self) -> list[int]:
        """A number for each token, equal for equal pieces of text."""
        cuts = [round(i * self.token_chars) for i in range(self.tokens)]
        ends = [*cuts[1:], len(self.text)]
        pieces = (self.text[a:b] for a, b in zip(cuts, ends, strict=True))
        return [zlib.crc32(p.encode("utf-8", "replace")) % _ID_RANGE for p in pieces]

    def tokens_with(self, answer_chars: int) -> int:
        """Whole tokens of the prompt plus `answer_chars` of the answer."""
        return int((len(self.text) + answer_chars) / self.token_chars + 1e-9)

    def hashes(self, answer: str, root: str, block_tokens: int) -> list[int]:
        """The hashes of the whole blocks of the prompt and its answer."""
        data = self.text + answer
        blocks = int(len(data) / self.token_chars + 1e-9) // block_tokens
        cuts = [round(i * block_tokens * self.token_chars) for i in range(blocks + 1)]
        pieces = (data[a:b] for a, b in itertools.pairwise(cuts))
        return block_hashes(root, (piece.encode("utf-8", "replace") for piece in pieces))


@dataclass(frozen=True, slots=True)
class Asked:
    """The checked parameters of a body.

    `has_echo`: a completion begins with its prompt; `only_echo`: there is nothing else in it, and
    its one token is left out.
    """

    prompt: Prompt
    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    has_echo: bool = False
    only_echo: bool = False
    ignore_eos: bool = False
    continuous_usage: bool = False
    # Prompts share cached blocks only if their salt is the same.
    cache_salt: str = ""


def read_prompt(endpoint: Endpoint, body: Mapping[str, object], profile: Profile) -> Prompt:
    """The whole prompt of a body in the engine's order; raise `EngineError` if it has none."""
    if endpoint is Endpoint.COMPLETIONS or (endpoint is Endpoint.TOKENIZE and "prompt" in body):
        return _completion_prompt(body.get("prompt"), profile)
    dialect = Endpoint.CHAT if endpoint is Endpoint.TOKENIZE else endpoint
    try:
        conversation = conversation_of(dialect, body)
    except InputError as exc:
        raise EngineError(str(exc), 400) from exc
    return _text_prompt(conversation.prompt(is_begun=_is_begun(body)), profile)


def read_asked(
    endpoint: Endpoint, body: Mapping[str, object], profile: Profile, context_tokens: int
) -> Asked:
    """Raise `EngineError` for an invalid body, `ContextLengthError` for one over the limit."""
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise EngineError(f"the simulated engine gives one answer; {name} must be 1", 400, name)
    prompt = read_prompt(endpoint, body, profile)
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    if limit is None and endpoint is Endpoint.COMPLETIONS:
        limit = DEFAULT_MAX_TOKENS
    has_echo = endpoint is Endpoint.COMPLETIONS and body.get("echo") is True
    only_echo = has_echo and type(limit) is int and limit == 0
    if only_echo:
        limit = 1
    max_tokens = _whole_number("max_tokens", limit, least=1, default=context_tokens)
    asked_tokens = 1 if limit is None else max_tokens
    if prompt.tokens + asked_tokens > context_tokens:
        raise ContextLengthError(
            f"This model's maximum context length is {context_tokens} tokens. However, the prompt "
            f"has {prompt.tokens} tokens and {max_tokens} output tokens are asked for.",
            prompt_tokens=prompt.tokens,
            max_tokens=None if limit is None else max_tokens,
            context_tokens=context_tokens,
        )
    max_tokens = min(max_tokens, context_tokens - prompt.tokens)
    min_tokens = _whole_number("min_tokens", body.get("min_tokens"), least=0, default=0)
    if min_tokens > max_tokens:
        problem = f"min_tokens must be less than or equal to max_tokens={max_tokens}"
        raise EngineError(f"{problem}, got {min_tokens}.", 400, "min_tokens")
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        problem = f"temperature must be non-negative, got {temperature}"
        raise EngineError(problem, 400, "temperature")
    stop = body.get("stop") or body.get("stop_sequences") or ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) for s in stops):
        raise EngineError("stop must be a string or a list of strings", 400, "stop")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise EngineError("cache_salt must be a non-empty string", 400, "cache_salt")
    stream_options = body.get("stream_options")
    return Asked(
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(s for s in stops if s),
        include_stop=bool(body.get("include_stop_str_in_output")),
        has_echo=has_echo,
        only_echo=only_echo,
        ignore_eos=bool(body.get("ignore_eos")),
        continuous_usage=isinstance(stream_options, Mapping)
        and bool(stream_options.get("continuous_usage_stats")),
        cache_salt=salt or "",
    )


def _is_begun(body: Mapping[str, object]) -> bool:
    """Whether the last message is an answer to continue, in chat's or Responses' notation."""
    said = body.get("input")
    last = said[-1] if isinstance(said, list) and said else {}
    is_item_begun = last.get("status") in ("in_progress", "incomplete")
    return bool(body.get("continue_final_message")) or is_item_begun


def _text_prompt(text: str, profile: Profile) -> Prompt:
    return Prompt(text, profile.count_tokens(text), profile.chars_per_token)


def _completion_prompt(value: object, profile: Profile) -> Prompt:
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str):
        return _text_prompt(value, profile)
    if isinstance(value, list) and value and all(isinstance(t, int) for t in value):
        return Prompt("".join(f"{t:{_ID_CHARS}d}" for t in value), len(value), _ID_CHARS)
    raise EngineError("prompt must be one string or one list of token ids", 400, "prompt")


def _whole_number(name: str, value: object, *, least: int, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        problem = f"{name} must be a whole number of at least {least}, got {value!r}"
        raise EngineError(problem, 400, name)
    return value
