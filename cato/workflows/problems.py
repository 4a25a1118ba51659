"""What pydantic found wrong, in the words of someone who writes the file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ValidationError

from cato.core.errors import Problem
from cato.workflows.schema import (
    NODE_PARTS,
    FimPart,
    InputPart,
    RepeatPart,
    SlaPart,
    WorkflowPart,
)

_SHOWN_CHARS = 60

_RULES = {
    "missing": "this key is required",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text (quote it if it looks like a number)",
    "string_unicode": "must be text of valid Unicode characters",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "model_attributes_type": "must be a mapping of names to values",
    "union_tag_not_found": "this key is required",
    "union_tag_invalid": "must be one of {expected_tags}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "value_error": "{error}",
}
_NAME_RULES = {
    "name": "must be small letters, digits and '-', with a letter first, at most 63",
    "[key]": "a name has letters, digits and '_', with a letter first, at most 64",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'parse'?)"`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: object) -> str:
    """`value` for a problem: short, and without the inside of a mapping or list."""
    if isinstance(value, Mapping | list):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        return f"a {kind} of {len(value)}" if value else f"an empty {kind}"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def problems_of(error: ValidationError, file: str) -> list[Problem]:
    """All problems of a `WorkflowPart`, in the file's order."""
    found = []
    for detail in error.errors(include_url=False):
        kind, value = detail["type"], shown(detail["input"])
        context = detail.get("ctx", {})
        loc = _without_tag(detail["loc"])
        if kind == "extra_forbidden":
            known = list(_part_at(detail["loc"][:-1]).model_fields)
            rule = "unknown key" + (
                did_you_mean(str(loc[-1]), known) or f"; known: {', '.join(known)}"
            )
            value = ""
        elif kind == "string_pattern_mismatch":
            rule = _NAME_RULES[str(detail["loc"][-1])]
        elif kind in _RULES:
            rule = _RULES[kind].format(**context)
        else:
            rule = detail["msg"][:1].lower() + detail["msg"][1:]
        if kind in ("union_tag_invalid", "union_tag_not_found"):
            loc, value = (*loc, "type"), shown(context.get("tag"))
            rule += did_you_mean(str(context.get("tag")), NODE_PARTS)
        if kind in ("missing", "union_tag_not_found"):
            value = ""
        elif kind == "value_error" and isinstance(detail["input"], Mapping):
            value = ""  # the rule names the keys
        found.append(Problem(file, joined(loc), value, rule))
    return found


def joined(loc: Iterable[int | str]) -> str:
    """`nodes.lint.needs[0]`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _without_tag(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Without pydantic's own entries: the type of a node, the mark of a mapping's key."""
    if loc[0] == "nodes" and len(loc) > 2 and loc[2] in NODE_PARTS:
        loc = (*loc[:2], *loc[3:])
    return tuple(part for part in loc if part != "[key]")


def _part_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The part of the schema whose keys stand at `loc`."""
    match loc:
        case ("sla",):
            return SlaPart
        case ("inputs", _):
            return InputPart
        case ("nodes", _, str(kind)):
            return NODE_PARTS[kind]
        case (*_, "repeat"):
            return RepeatPart
        case (*_, "fim"):
            return FimPart
        case _:
            return WorkflowPart
