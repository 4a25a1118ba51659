"""Reading YAML files that people write, and saying in plain words what is wrong with them.

`read_yaml` parses, `validate` turns the data into a pydantic model; both raise one `ConfigError`
with every problem found, and nothing else. `Duration` and `ByteSize` are field types with units.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from cato.core.errors import ConfigError, Problem

MAX_FILE_BYTES = 256_000
"""Longest YAML file read: far above what people write, and PyYAML reads only ~100 kB a second."""

MAX_VALUES = 50_000
"""Most values in a file after its aliases are expanded; stops "billion laughs" files."""

MAX_DEPTH = 50
"""Deepest nesting; far below where PyYAML's recursion would end in RecursionError."""

_SHOWN_CHARS = 60

M = TypeVar("M", bound=BaseModel)


class StrictModel(BaseModel):
    """Base of all file schemas: unknown keys are errors, and no type is guessed from another."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# --- parsing ----------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML's safe types, with `1e-5` a number (as in YAML 1.2) and a date text.

    A value that does not fit its tag is a marked error.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OverflowError,
        ) as exc:
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


def read_yaml(path: Path, max_bytes: int = MAX_FILE_BYTES) -> object:
    """The data in the file at `path`; raise `ConfigError`."""
    file = str(path)
    try:
        with path.open("rb") as stream:
            text = stream.read(max_bytes + 1)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        raise ConfigError((Problem(file, "", "", f"cannot be read: {reason}"),)) from exc
    return parse_yaml(text, file, max_bytes)


def parse_yaml(text: str | bytes, file: str, max_bytes: int = MAX_FILE_BYTES) -> object:
    """The data in `text`; `file` is its name in problems. Raise `ConfigError`."""
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        rule = f"longer than {max_bytes:,} bytes, the most that is read"
        raise ConfigError((Problem(file, "", "", rule),))
    problems: list[Problem] = []
    try:
        _check_depth(text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError((Problem(file, "", "", "the file is empty"),))
            problems = _node_problems(root, file)
            if not problems:
                return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        words = ", ".join(w for w in (exc.problem, exc.context) if w)
        problems = [Problem(_at(file, exc.problem_mark), "", "", f"not valid YAML: {words}")]
    except yaml.YAMLError as exc:
        words = str(exc).split("\n")[0]
        problems = [Problem(file, "", "", f"not valid YAML: {words}")]
    except UnicodeError as exc:
        problems = [Problem(file, "", "", f"not UTF-8 text: {exc}")]
    raise ConfigError(tuple(problems))


def _check_depth(text: str | bytes) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _at(file: str, mark: yaml.Mark | None) -> str:
    return file if mark is None else f"{file}:{mark.line + 1}"


def _node_problems(root: yaml.Node, file: str) -> list[Problem]:
    """Duplicate keys, keys that are not plain, and aliases that make the data huge or endless."""
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
            seen: set[tuple[str, str]] = set()
            for key, value in node.value:
                where = _at(file, key.start_mark)
                if not isinstance(key, yaml.ScalarNode):
                    problems.append(Problem(where, path, "", "a key must be a plain name"))
                    continue
                below = f"{path}.{key.value}" if path else str(key.value)
                if (key.tag, key.value) in seen:
                    problems.append(Problem(where, below, "", "this key is given twice"))
                seen.add((key.tag, key.value))
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
    if depth > MAX_DEPTH + 1:
        rule = f"nested deeper than {MAX_DEPTH} levels once its aliases are expanded"
        problems.append(Problem(file, "", "", rule))
    return problems


# --- units ------------------------------------------------------------------------------------

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]+)\s*")
_SECONDS = {
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
}
_BYTES = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate(("k", "M", "G", "T"), start=1)},
    **{f"{p}iB": 1024**n for n, p in enumerate(("K", "M", "G", "T"), start=1)},
}
_BYTES["KB"] = _BYTES["kB"]


def _quantity(value: object, units: Mapping[str, float], rule: str) -> float:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(rule)
    amount = float(match[1]) * units[match[2]]
    if not math.isfinite(amount):
        raise ValueError(rule)
    return amount


def parse_duration(value: object) -> float:
    """Seconds in `200ms`, `1.5s`, `2m`; raise ValueError. A bare number has no unit: refused."""
    return _quantity(value, _SECONDS, "must be a duration with its unit, such as 200ms, 1.5s or 2m")


def parse_size(value: object) -> int:
    """Bytes in `256MiB`, `4GB` or a whole number of bytes; raise ValueError."""
    rule = "must be a size, such as 256MiB or 4GB, or a whole number of bytes"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    amount = _quantity(value, _BYTES, rule)
    if amount != int(amount):
        raise ValueError(rule)
    return int(amount)


Duration = Annotated[float, BeforeValidator(parse_duration)]
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
        loc = tuple(part for part in detail["loc"] if part != "[key]")
        kind, value = detail["type"], _shown(detail["input"])
        rule = _rule(kind, detail.get("ctx", {}), detail["msg"])
        if kind == "extra_forbidden":
            known = _keys_at(model, loc[:-1])
            rule = "unknown key" + did_you_mean(str(loc[-1]), known)
            if known and "did you mean" not in rule:
                rule += f"; known: {', '.join(known)}"
            value = ""
        elif kind == "missing":
            value = ""
        elif kind == "literal_error":
            rule += did_you_mean(str(detail["input"]), _quoted(str(detail["ctx"]["expected"])))
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
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "model_attributes_type": "must be a mapping of names to values",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "value_error": "{error}",
    "cato_rule": "{rule}",  # a check of ours that names several problems
}


def _rule(kind: str, context: Mapping[str, object], message: str) -> str:
    if kind in _RULES:
        shown = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
        return _RULES[kind].format(**shown)
    return message[:1].lower() + message[1:]


def _quoted(expected: str) -> list[str]:
    return re.findall(r"'([^']*)'", expected)


def _shown(value: object) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return f"{type(value).__name__} of {len(value)}" if value else "nothing"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _joined(path: str, loc: Iterable[int | str]) -> str:
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _keys_at(model: type[BaseModel], loc: Iterable[int | str]) -> list[str]:
    """The keys that the schema knows at `loc`; none where it is not a model."""
    found: Any = model
    for part in loc:
        found = _plain(found)
        if isinstance(found, type) and issubclass(found, BaseModel):
            field = found.model_fields.get(str(part))
            found = field.annotation if field else None
        else:  # a mapping or a list: its last argument is the type of an entry
            inner = [a for a in get_args(found) if a is not Ellipsis]
            found = inner[-1] if inner else None
    found = _plain(found)
    is_model = isinstance(found, type) and issubclass(found, BaseModel)
    return list(found.model_fields) if is_model else []


def _plain(annotation: Any) -> Any:
    """`X` out of `X | None` and `Annotated[X, ...]`."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, UnionType):
            annotation = next(a for a in get_args(annotation) if a is not type(None))
        else:
            return annotation
