"""Reading YAML files that people write, and saying in plain words what is wrong with them.

`read_yaml` parses, `validate` turns the data into a pydantic model; both raise one `ConfigError`
with every problem found, and nothing else. `Duration` and `ByteSize` are field types with units.
Deployments, profiles and workflows are all read with it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from cato.core.errors import ConfigError, Problem

MAX_FILE_BYTES = 256_000
"""Longest YAML file read: far above what people write, and PyYAML reads only ~100 kB a second."""

MAX_VALUES = 50_000
"""Most values in a file after its aliases are expanded; stops "billion laughs" files."""

MAX_DEPTH = 50
"""Deepest nesting; far below where PyYAML's recursion would end in RecursionError."""

_TEXT_TAG = "tag:yaml.org,2002:str"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_SHOWN_CHARS = 60

M = TypeVar("M", bound=BaseModel)


class StrictModel(BaseModel):
    """Base of all file schemas: unknown keys are errors, and no type is guessed from another."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


NonEmpty = Annotated[str, Field(min_length=1)]


def matching(pattern: str, rule: str) -> AfterValidator:
    """A check that a text is all of `pattern`; `rule` tells people what that means."""
    expression = re.compile(pattern)

    def check(value: str) -> str:
        if not expression.fullmatch(value):
            raise ValueError(rule)
        return value

    return AfterValidator(check)


# --- parsing ----------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML's safe types, with `1e-5` a number (as in YAML 1.2) and a date text.

    An alias that is not allowed, too deep a nesting and a value that does not fit its tag are
    marked errors.
    """

    def __init__(self, text: bytes, aliases: bool) -> None:
        super().__init__(text)
        self._aliases = aliases
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if not self._aliases and self.check_event(yaml.AliasEvent):
            rule = "an alias (*name) is not allowed; write it out"
            raise yaml.composer.ComposerError(None, None, rule, mark)
        if self._depth == MAX_DEPTH:
            rule = f"nested deeper than {MAX_DEPTH} levels"
            raise yaml.composer.ComposerError(None, None, rule, mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as exc:
            # PyYAML lets e.g. `!!int ''` (IndexError) and 5,000-digit integers (ValueError) out.
            raise yaml.constructor.ConstructorError(
                None, None, "a value does not fit its type", node.start_mark
            ) from exc


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def read_yaml(path: Path, *, aliases: bool = True) -> object:
    """The data in the file at `path`; raise `ConfigError`. `aliases`: whether it may have any."""
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        raise ConfigError((Problem(str(path), "", "", f"cannot be read: {reason}"),)) from exc
    return parse_yaml(text, str(path), aliases=aliases)


def parse_yaml(text: bytes, file: str, *, aliases: bool = True) -> object:
    """The data in `text`; `file` is its name in problems. Raise `ConfigError`."""
    if len(text) > MAX_FILE_BYTES:
        rule = f"longer than {MAX_FILE_BYTES:,} bytes, the most that is read"
        raise ConfigError((Problem(file, "", "", rule),))
    problems: list[Problem] = []
    try:
        loader = _Loader(text, aliases)
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError((Problem(file, "", "", "the file is empty"),))
            problems = _node_problems(root, file, aliases)
            if not problems:
                return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        words = ", ".join(w for w in (exc.problem, exc.context) if w)
        problems = [Problem(_at(file, exc.problem_mark), "", "", f"not valid YAML: {words}")]
    except yaml.YAMLError as exc:  # a character that YAML forbids, or bytes that are not UTF-8
        words = str(exc).split("\n")[0]
        problems = [Problem(file, "", "", f"not valid YAML: {words}")]
    except UnicodeError as exc:
        problems = [Problem(file, "", "", f"not UTF-8 text: {exc}")]
    raise ConfigError(tuple(problems))


def parse_nodes(text: bytes) -> yaml.Node | None:
    """The syntax tree of `text`, whose nodes know their lines; raise `yaml.YAMLError`."""
    loader = _Loader(text, True)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _at(file: str, mark: yaml.Mark | None) -> str:
    return file if mark is None else f"{file}:{mark.line + 1}"


def _node_problems(root: yaml.Node, file: str, aliases: bool) -> list[Problem]:
    """Keys given twice (PyYAML keeps the last in silence), keys that are not text, and aliases
    that make the data huge or endless."""
    key_tags = (_TEXT_TAG, _MERGE_TAG) if aliases else (_TEXT_TAG,)
    problems: list[Problem] = []
    measured: dict[int, tuple[int, int]] = {}  # by identity: an alias is the same node again
    open_: set[int] = set()

    def measure(node: yaml.Node, path: str) -> tuple[int, int]:
        """Values and levels below `node`, aliases expanded."""
        if id(node) in open_:
            rule = "an alias that holds itself"
            raise ConfigError((Problem(_at(file, node.start_mark), path, "", rule),))
        if id(node) in measured:
            return measured[id(node)]
        open_.add(id(node))
        inner: list[tuple[int, int]] = []
        if isinstance(node, yaml.SequenceNode):
            inner = [measure(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                where = _at(file, key.start_mark)
                if not isinstance(key, yaml.ScalarNode) or key.tag not in key_tags:
                    found = key.value if isinstance(key, yaml.ScalarNode) else ""
                    rule = "a key must be text (quote it if it looks like something else)"
                    problems.append(Problem(where, path, found, rule))
                    continue
                below = f"{path}.{key.value}" if path else str(key.value)
                if key.value in seen:
                    problems.append(Problem(where, below, "", "this key is given twice"))
                seen.add(key.value)
                inner.append(measure(value, below))
        open_.discard(id(node))
        size = 1 + sum(s for s, _ in inner)
        depth = 1 + max((d for _, d in inner), default=0)
        measured[id(node)] = size, depth
        return size, depth

    size, depth = measure(root, "")
    if size > MAX_VALUES:
        rule = f"more than {MAX_VALUES:,} values once its aliases are expanded"
        problems.append(Problem(file, "", "", rule))
    if depth > MAX_DEPTH:
        rule = f"nested deeper than {MAX_DEPTH} levels once its aliases are expanded"
        problems.append(Problem(file, "", "", rule))
    return problems


# --- units ------------------------------------------------------------------------------------

_AMOUNT = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_QUANTITY = re.compile(f"({_AMOUNT})([A-Za-zµ]+)")
_SECONDS = {
    "us": Fraction(1, 1_000_000),
    "µs": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_BYTES = {
    "B": Fraction(1),
    **{f"{p}B": Fraction(1000**n) for n, p in enumerate(("k", "M", "G", "T"), start=1)},
    **{f"{p}iB": Fraction(1024**n) for n, p in enumerate(("K", "M", "G", "T"), start=1)},
}
_BYTES["KB"] = _BYTES["kB"]


def _quantity(value: object, units: Mapping[str, Fraction], rule: str) -> Fraction:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(rule)
    return Fraction(match[1]) * units[match[2]]


def parse_duration(value: object) -> float:
    """Seconds in `200ms`, `1.5s`, `2m`; raise ValueError. A bare number has no unit: refused."""
    rule = "must be a duration with its unit, such as 200ms, 1.5s or 2m"
    return float(_quantity(value, _SECONDS, rule))


def parse_size(value: object) -> int:
    """Bytes in `256MiB`, `4GB` or a whole number of bytes; raise ValueError."""
    rule = "must be a size, such as 256MiB or 4GB, or a whole number of bytes"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    amount = _quantity(value, _BYTES, rule)
    if amount.denominator != 1:
        raise ValueError(rule)
    return int(amount)


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{_AMOUNT}({'|'.join(_SECONDS)})$",
            "examples": ["200ms", "1.5s", "2m"],
        }
    ),
]
"""A field that reads `200ms`, `1.5s`, `2m` and holds seconds."""

ByteSize = Annotated[int, BeforeValidator(parse_size)]
"""A field that reads `256MiB`, `4GB` or a number and holds bytes."""


# --- problems ---------------------------------------------------------------------------------


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'parse'?)"`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def validate(model: type[M], data: object, file: str, path: str = "") -> M:
    """`data` as a `model`; raise `ConfigError`. `path` is where in `file` the data stands."""
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(problems_of(exc, model, file, path)) from exc


def problems_of(
    error: ValidationError, model: type[BaseModel], file: str, path: str = ""
) -> tuple[Problem, ...]:
    """What pydantic found, in the words of someone who writes the file, in the file's order."""
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
                rule += did_you_mean(str(detail["input"]), _quoted(context["expected"]))
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
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "value_error": "{error}",
    "cato_rule": "{rule}",  # a check of ours that names several problems
}


def _rule(kind: str, context: Mapping[str, object], message: str) -> str:
    if kind in _RULES:
        words = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
        return _RULES[kind].format(**words)
    return message[:1].lower() + message[1:]


def _quoted(words: str) -> list[str]:
    """The names in pydantic's `'a', 'b' or 'c'`."""
    return re.findall(r"'([^']*)'", words)


def shown(value: object) -> str:
    """`value` for a problem: short, and without the inside of a mapping or list."""
    if isinstance(value, Mapping | list | tuple):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        return f"a {kind} of {len(value)}" if value else f"an empty {kind}"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _joined(path: str, loc: Iterable[int | str]) -> str:
    """`nodes.lint.needs[0]`."""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _place(model: type[BaseModel], loc: Iterable[int | str]) -> tuple[list[int | str], list[str]]:
    """`loc` as in the file, and the keys that the schema knows beside its last one.

    Pydantic's own entries are left out: the tag of a union's member, the mark of a mapping's key.
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
            known = list(option.model_fields)
            field = option.model_fields.get(str(part))
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
    """By which values of its `Literal` fields pydantic may pick this member of a union."""
    if not (isinstance(option, type) and issubclass(option, BaseModel)):
        return set()
    types = (field.annotation for field in option.model_fields.values())
    return {value for t in types if get_origin(t) is Literal for value in get_args(t)}
