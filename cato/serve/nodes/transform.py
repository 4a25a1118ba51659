"""The transform node: renders a template to text and, with `as_json`, parses it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from cato.core.errors import NodeError
from cato.core.workflow import TransformSettings
from cato.serve.nodes.fences import unfenced
from cato.serve.nodes.rendering import render


def run(node: str, settings: TransformSettings, names: Mapping[str, object]) -> dict[str, object]:
    """`{"text", "value"}`: `value` is the text itself unless `as_json` is set.

    A Markdown fence around the JSON is removed, since models like to add one. No valid JSON has a
    line that starts with a fence, so nothing is lost.
    """
    text = render(node, settings.text, names)
    if not settings.as_json:
        return {"text": text, "value": text}
    try:
        code = unfenced(text).code
        value = json.loads(code, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as exc:
        problem = f"not JSON: {exc.msg} at line {exc.lineno} column {exc.colno}"
        raise NodeError(node, problem) from exc
    except RecursionError as exc:
        raise NodeError(node, "not JSON: nested too deeply") from exc
    except ValueError as exc:  # NaN, or excessive numbers
        raise NodeError(node, f"not JSON: {exc}") from exc
    return {"text": text, "value": value}


def _finite(number: str) -> float:
    """The number; raise ValueError if it is too large to be written as JSON again."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON value")
