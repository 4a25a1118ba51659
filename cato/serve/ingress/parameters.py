"""Parameters of requests that a task serves: each is honoured or refused, none is ignored.

A task's nodes define how they call their models; the nodes that write the answer take over the
client's sampling parameters. Parameters that would change the form of the answer are refused: the
client should name a model, which accepts everything its engine supports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from cato.core.errors import InputError
from cato.core.workflow import LlmSettings, Node, Workflow

# Smallest and largest value, and whether it must be an integer, as in OpenAI's and vLLM's APIs.
_SAMPLING: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 2.0, False),
    "top_p": (0.0, 1.0, False),
    "top_k": (-1, inf, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, inf, False),
    "min_tokens": (0, inf, True),
    "seed": (-(2**63), 2**63 - 1, True),
}


def _is_plain_format(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type", "text") == "text"


def _is_plain_text(value: object) -> bool:
    """Responses' `text`: a format, and a verbosity, which no engine supports."""
    return isinstance(value, Mapping) and _is_plain_format(value.get("format") or {})


# Fields that a task cannot honour, and their values that have no effect.
_REFUSED: dict[str, Callable[[object], bool]] = {
    "n": lambda value: value == 1,
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "logit_bias": lambda value: value == {},
    "response_format": _is_plain_format,
    "text": _is_plain_text,
    "modalities": lambda value: value == ["text"],
    "audio": lambda _: False,
    "prediction": lambda _: False,
    "structured_outputs": lambda _: False,
    "output_config": lambda value: isinstance(value, Mapping) and not value.get("format"),
    "prompt_logprobs": lambda _: False,
    "use_beam_search": lambda value: value is False,
}


def sampling_of(body: Mapping[str, object], task: str) -> dict[str, object]:
    """The sampling parameters in `body` for the answering nodes of `task`.

    Raise `InputError` for a value out of range, and for a field that a task cannot honour.
    """
    for field, asks_nothing in _REFUSED.items():
        value = body.get(field)
        if value is not None and not asks_nothing(value):
            raise InputError(
                f"task {task!r} does not support {field}; to use it, name a model instead "
                "(see GET /v1/models)",
                field,
            )
    return {f: checked(f, body[f]) for f in _SAMPLING if body.get(f) is not None}


def checked(field: str, value: object) -> object:
    """A sampling field's value; raise `InputError` if it is out of range."""
    least, most, is_whole = _SAMPLING[field]
    kinds = int if is_whole else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        number = "a whole number" if is_whole else "a number"
        upper = "" if most == inf else f" and at most {most:g}"
        raise InputError(f"{field} must be {number} of at least {least:g}{upper}", field)
    return value


def adapted(
    workflow: Workflow,
    max_tokens: int | None,
    stops: tuple[str, ...],
    sampling: Mapping[str, object],
) -> Workflow:
    """`workflow` with answers of at most `max_tokens` that also end at `stops`, and `sampling`.

    Changes only the nodes that write the answer.
    """
    if max_tokens is None and not stops and not sampling:
        return workflow
    answering = {*workflow.stream, *workflow.output}

    def changed(node: Node) -> Node:
        settings = node.settings
        if node.id not in answering or not isinstance(settings, LlmSettings):
            return node
        limit = min(settings.max_tokens, max_tokens or settings.max_tokens)
        extra = {**(settings.extra or {}), **sampling}
        if isinstance(least := extra.get("min_tokens"), int):
            extra["min_tokens"] = min(least, limit)
        if stops:
            extra["stop"] = [*_stops(extra.get("stop")), *stops]
        of_client = frozenset(sampling).union(["stop"] if stops else [])
        settings = replace(settings, max_tokens=limit, extra=extra, of_client=of_client)
        return replace(node, settings=settings)

    return replace(workflow, nodes=tuple(map(changed, workflow.nodes)))


def _stops(value: object) -> list[object]:
    return [value] if isinstance(value, str) else value if isinstance(value, list) else []
