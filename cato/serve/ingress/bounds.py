"""Limits on one direct call, since a small body can keep an engine busy for all its users.

Each of several answers to one prompt counts as a call. A grammar, schema or regular expression is
compiled before the first token. The time grows with its size and repetitions, and the engine's
other requests wait for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from cato.core.errors import InputError
from cato.wire.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one call. `calls` counts prompts times answers; `nodes` counts the keys and items
    of all grammars of a body together, `chars` their text, `grammar_ms` the CPU time to compile
    them (`grammars.py`)."""

    answers: int = 16
    calls: int = 128
    logprobs: int = 20
    depth: int = 32
    nodes: int = 4000
    chars: int = 64_000
    regex_chars: int = 1000
    repeats: int = 2000
    grammar_ms: int = 8000


DEFAULT = Bounds()
NAMES = tuple(field.name for field in fields(Bounds))


@lru_cache(maxsize=256)
def bounds_of(own: tuple[tuple[str, int], ...]) -> Bounds:
    """The default bounds, overridden by those of an API key."""
    return replace(DEFAULT, **dict(own))


_ANSWERS = ("n", "best_of")
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
# Fields of vLLM and OpenAI that become a grammar; the last two belong to Responses and Messages.
_GRAMMARS = (
    "response_format", "structured_outputs", "structural_tag", "guided_json", "guided_regex",
    "guided_grammar", "guided_choice", "text", "output_config",
)  # fmt: skip
_REGEXES = ("pattern", "regex", "guided_regex")
# A schema may also be given as text.
_JSON_TEXTS = ("json", "guided_json", "schema", "structural_tag")
# Texts of one request to an endpoint that generates nothing; OpenAI's own limit of `input`.
MAX_TEXTS = 2048
_TEXTS = {
    Endpoint.EMBEDDINGS: ("input",),
    Endpoint.SCORE: ("text_1", "text_2", "data_1", "data_2", "queries", "documents"),
    Endpoint.RERANK: ("documents",),
}
_REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Possessive: spaces without a closing brace are looked at once.
_COUNTED = re.compile(r"\{\s*+(\d++)?\s*+(?:,\s*+(\d++)?\s*+)?\}")


def check_call(body: Mapping[str, object], bounds: Bounds = DEFAULT) -> int:
    """How many calls `body` counts as; raise `InputError` naming a field that is too large."""
    calls = count_calls(body, bounds)
    _check_grammars(body, bounds)
    return calls


def check_texts(body: Mapping[str, object], endpoint: Endpoint) -> None:
    """Raise `InputError` if `body` has too many texts for an endpoint that generates nothing."""
    for field in _TEXTS.get(endpoint, ()):
        value = body.get(field)
        if isinstance(value, list) and len(value) > MAX_TEXTS:
            if all(type(token) is int for token in value):
                continue  # one text, as tokens
            raise InputError(f"{field} must have at most {MAX_TEXTS} texts", field)


def count_calls(body: Mapping[str, object], bounds: Bounds = DEFAULT) -> int:
    """Like `check_call`, without a look at grammars."""
    answers = max(_count(body, field, bounds.answers) for field in _ANSWERS)
    for field in _LOGPROBS:
        _count(body, field, bounds.logprobs)
    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list) and any(isinstance(p, str | list) for p in prompt)
    prompts = len(prompt) if is_batch and isinstance(prompt, list) else 1
    calls = max(1, answers) * max(1, prompts)
    if calls > bounds.calls:
        rule = (
            f"at most {bounds.calls} answers in one request (prompts times n), not {calls}; "
            "send several requests"
        )
        raise InputError(rule, "prompt" if prompts > 1 else "n")
    return calls


def _count(body: Mapping[str, object], field: str, most: int) -> int:
    value = body.get(field)
    if value is None or isinstance(value, bool):
        return 0
    # An engine also takes "4096" for a number, and -1 for the whole vocabulary.
    if not isinstance(value, int | float) or not 0 <= value <= most:
        raise InputError(f"{field} must be a number from 0 to {most}", field)
    return int(value)


def _check_grammars(body: Mapping[str, object], bounds: Bounds) -> None:
    chars = 0
    for nodes, (field, key, value, depth) in enumerate(_values(body), 1):
        if depth > bounds.depth:
            raise InputError(f"{field} must be nested at most {bounds.depth} levels deep", field)
        if isinstance(value, str):
            chars += len(value)
            if key in _REGEXES:
                _check_regex(value, field, bounds)
        chars += len(key)
        is_count = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _REPEATS and is_count and value > bounds.repeats:  # type: ignore[operator]
            raise InputError(f"{field}: {key} must be at most {bounds.repeats}", field)
        if nodes > bounds.nodes:
            raise InputError(f"{field} must have at most {bounds.nodes} keys and items", field)
        if chars > bounds.chars:
            raise InputError(f"{field} must be at most {bounds.chars} characters", field)


def _check_regex(regex: str, field: str, bounds: Bounds) -> None:
    if len(regex) > bounds.regex_chars:
        most = bounds.regex_chars
        rule = f"a regular expression must have at most {most} characters"
        raise InputError(f"{field}: {rule}", field)
    product = 1
    for found in _COUNTED.finditer(regex):
        product *= max(1, *(int(n) for n in found.groups("0")))
        if product > bounds.repeats:  # repetitions may be nested
            rule = f"nested repetitions of a regular expression exceed {bounds.repeats} in total"
            raise InputError(f"{field}: {rule}", field)


def _values(body: Mapping[str, object]) -> Iterator[tuple[str, str, object, int]]:
    """Every value in the grammars of `body`, as (field, key, value, depth)."""
    waiting = [(field, field, value, 0) for field, value in grammar_fields(body)]
    while waiting:
        field, key, value, depth = waiting.pop()
        if key in _JSON_TEXTS and isinstance(value, str) and len(value) <= DEFAULT.chars:
            value = parsed_json(value, field)
        yield field, key, value, depth
        if isinstance(value, Mapping):
            waiting += [(field, str(k), v, depth + 1) for k, v in value.items()]
        elif isinstance(value, list):
            waiting += [(field, key if key in _REGEXES else "", v, depth + 1) for v in value]


def grammar_fields(body: Mapping[str, object]) -> list[tuple[str, object]]:
    """The fields of `body` that become grammars."""
    found = [(field, body[field]) for field in _GRAMMARS if body.get(field) is not None]
    tools = body.get("tools")
    if body.get("tool_choice") not in (None, "auto", "none"):  # the schema constrains the call
        found.append(("tools", tools))
    elif isinstance(tools, list) and (strict := [t for t in tools if _is_strict(t)]):
        found.append(("tools", strict))
    return found


def _is_strict(tool: object) -> bool:
    """Whether an engine holds the model to the tool's schema, also where it need not be called."""
    if not isinstance(tool, Mapping):
        return False
    function = tool.get("function")
    return bool(tool.get("strict") or (isinstance(function, Mapping) and function.get("strict")))


def parsed_json(text: str, field: str) -> object:
    """Raise `InputError` if `text` is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{field} is not valid JSON", field) from None
