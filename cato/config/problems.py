"""Problems in a file in its author's terms: key paths, values and rules instead of pydantic errors.

`validate` turns data into a pydantic model, or raises one `ConfigError` with every problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from cato.core.errors import ConfigError, Problem
from cato.core.words import counted, did_you_mean

M = TypeVar("M", bound=BaseModel)
_SHOWN_CHARS = 60

Found = list[tuple[tuple[str | int, ...], object, str]]
"""Problems as (where, value, rule)."""


def errors_of(model: str, found: Found) -> ValidationError:
    """Several problems as one pydantic error."""
    return ValidationError.from_exception_data(
        model,
        [
            InitErrorDetails(
                type=PydanticCustomError("cato_rule", "{rule}", {"rule": rule}),
                loc=loc,
                input=value,
            )
            for loc, value, rule in found
        ],
    )


def detail_of(error: Any) -> InitErrorDetails:
    """A reported error as input for a new one, with its message."""
    kind = PydanticCustomError(
        error["type"], "{rule}", {"rule": error["msg"], **error.get("ctx", {})}
    )
    return InitErrorDetails(type=kind, loc=error["loc"], input=error["input"])


def one_of(value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"must be one of {names}{did_you_mean(value, known)}")
    return value


def known_name(names: Callable[[], tuple[str, ...]]) -> AfterValidator:
    return AfterValidator(lambda value: value if value is None else one_of(value, names()))


def validate(model: type[M], data: object, file: str, path: str = "") -> M:
    """`data` as a `model`; raise `ConfigError`. `path` is the position of the data in `file`."""
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(problems_of(exc, model, file, path)) from exc


def problems_of(
    error: ValidationError, model: type[BaseModel], file: str, path: str = ""
) -> tuple[Problem, ...]:
    """Pydantic's errors as problems, in the file's order."""
    problems = []
    for detail in error.errors(include_url=False):
        loc, known = _place(model, detail["loc"])
        kind, context, value = detail["type"], detail.get("ctx", {}), shown(detail["input"])
        rule = _rule(kind, context, detail["msg"])
        match kind:
            case "extra_forbidden":
                hint = did_you_mean(str(loc[-1]), known) or f"; known: {', '.join(known)}"
                rule, value = f"unknown key{hint}", ""
            case "missing":
                value = ""
            case "literal_error":
                found = detail["input"] if isinstance(detail["input"], str) else ""
                rule += did_you_mean(found, _quoted(context["expected"]))
            case "union_tag_not_found":
                loc, value = [*loc, *_quoted(context["discriminator"])], ""
            case "union_tag_invalid":
                loc, value = [*loc, *_quoted(context["discriminator"])], repr(context["tag"])
                rule += did_you_mean(context["tag"], _quoted(context["expected_tags"]))
            case "value_error" if isinstance(detail["input"], Mapping):
                value = ""  # the rule names the keys
        problems.append(Problem(file, _joined(path, loc), value, rule))
    return tuple(problems)


_RULES = {
    "missing": "this key is required",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text (quote it if it looks like a number)",
    "string_unicode": "must be text of valid Unicode characters",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
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
    "too_short": "must have at least {entries}",
    "too_long": "must have at most {entries}",
    "value_error": "{error}",
    "cato_rule": "{rule}",  # one of our checks that reports several problems
}


def _rule(kind: str, context: Mapping[str, object], message: str) -> str:
    if kind in _RULES:
        words = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
        bound = context.get("min_length" if kind == "too_short" else "max_length")
        if isinstance(bound, int):
            words["entries"] = counted(bound, "entry", "entries")
        return _RULES[kind].format(**words)
    return message[:1].lower() + message[1:]


def _quoted(words: str) -> list[str]:
    """The names in pydantic's `'a', 'b' or 'c'`."""
    return re.findall(r"'([^']*)'", words)


def shown(value: object) -> str:
    """`value` for a message: short, and without the content of a mapping or list."""
    if isinstance(value, Mapping | list | tuple):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        return f"a {kind} of {len(value)}" if value else f"an empty {kind}"
    try:
        text = repr(value)
    except ValueError:  # more than 4,300 digits, which Python refuses to write
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _joined(path: str, loc: Iterable[int | str]) -> str:
    """`nodes.lint.needs[0]`."""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _place(model: type[BaseModel], loc: Iterable[int | str]) -> tuple[list[int | str], list[str]]:
    """`loc` as in the file, and the keys that the schema has at its last part.

    Drops pydantic's own entries: the tag of a union's member, and `[key]` of a mapping's key.
    """
    path: list[int | str] = []
    known: list[str] = []
    annotation: Any = model
    for part in loc:
        if part == "[key]":
            continue
        options = _options(annotation)
        tagged = [o for o in options if part in _tags(o)] if len(options) > 1 else []
        if tagged:
            annotation = tagged[0]
            continue
        path.append(part)
        option = options[0]
        if isinstance(option, type) and issubclass(option, BaseModel):
            keys = {field.alias or name: field for name, field in option.model_fields.items()}
            known, field = list(keys), keys.get(str(part))
            annotation = field.annotation if field else None
        else:  # a mapping or a list: its last argument is the type of an entry
            known = []
            inner = [a for a in get_args(option) if a is not Ellipsis]
            annotation = inner[-1] if inner else None
    return path, known


def _options(annotation: Any) -> list[Any]:
    """X and Y out of `X | Y | None` and `Annotated[X | Y, ...]`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _options(inner[0])
    if origin in (Union, UnionType):
        return [option for a in inner if a is not NoneType for option in _options(a)]
    return [annotation]


def _tags(option: Any) -> set[object]:
    """The values of `Literal` fields by which pydantic may pick this member of a union."""
    if not (isinstance(option, type) and issubclass(option, BaseModel)):
        return set()
    types = (field.annotation for field in option.model_fields.values())
    return {value for t in types if get_origin(t) is Literal for value in get_args(t)}
