"""Template filters, Jinja's and our own; each counts its work against the limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import jinja2
from jinja2 import Undefined, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.runtime import Context

from cato.workflows.fim import fit_prompt
from cato.workflows.work import MAX_STEPS, work_of

MAX_INDENT = 80
# Comparing this many characters of text takes as long as reading one.
COMPARED_AT_ONCE = 16
# The time of `strip` grows with the number of characters in its argument.
_MAX_STRIPPED = 100


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _text(value: object) -> str:
    return "" if value is None else str(value)


_LINE_COMMENTS = {
    "#": "python ruby perl r shell bash sh zsh yaml toml make makefile dockerfile elixir julia "
    "powershell nim crystal",
    "//": "c cpp c++ csharp c# java javascript typescript jsx tsx go rust kotlin swift scala dart "
    "php zig groovy objective-c fsharp f# solidity",
    "--": "sql lua haskell ada elm vhdl",
    ";": "lisp clojure scheme racket asm assembly",
    "%": "latex tex matlab erlang prolog",
    "/*": "css",
    "<!--": "html xml markdown vue svelte",
}
_MARKER = {name: marker for marker, names in _LINE_COMMENTS.items() for name in names.split()}
_MARKER |= {"py": "#", "js": "//", "ts": "//", "rb": "#", "rs": "//", "cs": "//", "golang": "//"}
_CLOSING = {"/*": " */", "<!--": " -->"}


def commented(text: str, language: str) -> str:
    """Every line of `text` as a comment in `language`; `#` for an unknown language."""
    marker = _MARKER.get(language.strip().lower(), "#")
    closing = _CLOSING.get(marker, "")
    return "\n".join(f"{marker} {line}".rstrip() + closing for line in text.splitlines())


@pass_context
def _comment(context: Context, text: object, language: object = "python") -> str:
    """Every line of `text` as a comment in `language`; `#` for an unknown language."""
    return _written(context, commented(_text(text), _text(language)))


@pass_context
def _indent(context: Context, text: object, width: int = 4, first: bool = False) -> str:
    """All lines but the first (`first`: all) indented by `width` blanks; empty lines stay empty."""
    margin = " " * max(0, min(width, MAX_INDENT))
    lines = _text(text).split("\n")
    work_of(context).write(len(lines) * len(margin))
    moved = [margin + line if line and (i or first) else line for i, line in enumerate(lines)]
    return _written(context, "\n".join(moved))


def _truncate_lines(text: object, count: int = 20) -> str:
    """The first `count` lines."""
    return "\n".join(_text(text).split("\n", max(0, count))[: max(0, count)])


def _last_lines(text: object, count: int = 20) -> str:
    """The last `count` lines."""
    return "\n".join(_text(text).rsplit("\n", max(0, count))[-count:]) if count > 0 else ""


def _fit(text: object, chars: int) -> str:
    """`text` cut to `chars`: its head and tail with `...` between."""
    return fit_prompt(_text(text), chars)


@pass_context
def _tojson(context: Context, value: object, indent: int | None = None) -> str:
    """`value` as JSON, not escaped for HTML; an absent value is null."""
    width = None if indent is None else max(0, min(indent, 8))

    def plain(inner: object) -> object:
        found = _plain(inner)
        work_of(context).read_all(found)
        return found

    text = json.dumps(value, ensure_ascii=False, indent=width, default=plain)
    return _written(context, text)


@pass_context
def _string(context: Context, value: object) -> str:
    """`value` as text; an absent one is the empty text."""
    return _written(context, _text(value))


def _trim(value: object, chars: str | None = None) -> str:
    """`value` without white space, or without `chars`, at both ends."""
    check_stripped(chars)
    return _text(value).strip(chars)


def check_stripped(chars: object) -> None:
    if isinstance(chars, str) and len(chars) > _MAX_STRIPPED:
        raise SecurityError(f"more than {_MAX_STRIPPED} characters to strip")


@pass_environment
def _sum(
    environment: jinja2.Environment, values: Any, attribute: Any = None, start: float = 0
) -> Any:
    """Jinja's `sum` for numbers only: summing lists takes quadratic time."""
    if not isinstance(start, int | float):
        raise SecurityError("sum adds numbers")
    return JINJA_FILTERS["sum"](environment, values, attribute, start)


@pass_context
def _join(context: Context, value: Any, between: object = "", attribute: Any = None) -> str:
    """Jinja's `join`; an absent item is an empty text."""
    work, separator, texts = work_of(context), _text(between), []
    for item in () if value is None else value:
        part = item if attribute is None else context.environment.getitem(item, attribute)
        texts.append(_text(part))
        work.write(len(texts[-1]) + len(separator))
    return separator.join(texts)


@pass_context
def _replace(context: Context, text: object, old: object, new: object) -> str:
    """`text` with every `old` replaced by `new`."""
    whole, before, after = _text(text), _text(old), _text(new)
    work_of(context).write(len(whole) + whole.count(before) * len(after))
    return whole.replace(before, after)


def _round(value: float, precision: int = 0) -> float:
    """`value` rounded to `precision` (at most 15) decimals."""
    return round(value, max(0, min(precision, 15)))


@pass_context
def counted(context: Context, value: object, nodes: int = 1) -> Sequence[object]:
    """The items of a `for` loop with `nodes` parts, charged before it runs; every loop is rewritten
    to use this."""
    items = _items(value)
    work_of(context).loop(len(items), nodes)
    return items


@pass_context
def compared(context: Context, value: object) -> object:
    """An operand of a comparison, charged with all nested values."""
    if isinstance(value, str):
        work_of(context).read(len(value) // COMPARED_AT_ONCE)
    else:
        work_of(context).read_all(value)
    return value


@pass_context
def searched(context: Context, value: object) -> object:
    """The container of an `in` test, charged with all nested values; not for mappings, which look
    up keys by hash."""
    if not isinstance(value, Mapping):
        work_of(context).read_all(value)
    return value


@pass_context
def copied(context: Context, value: object) -> object:
    """A slice, charged by its length."""
    if isinstance(value, str | list | tuple):
        work_of(context).write(len(value))
    return value


@pass_context
def put_out(context: Context, value: object) -> object:
    """A value to output, charged before it is converted to text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        work_of(context).read_all(value)
    return value


def charged(name: str, function: Callable[..., Any], cheap: frozenset[str]) -> Callable[..., Any]:
    """`function` with its arguments charged: all nested values, or if `name` is in `cheap` only
    their items. What it would give out one by one becomes a list, whose length can be charged."""
    passed = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def charged(context: Context, *args: Any, **kwargs: Any) -> Any:
        work = work_of(context)
        charge = work.read_items if name in cheap else work.read_all
        for value in (*args, *kwargs.values()):
            charge(value)
        if name in _CALLING_PER_ITEM and args:
            # Each part of an attribute such as `a.b,c` is looked up for every item.
            texts = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]
            work.visit(args[0], 1 + sum(text.count(".") + text.count(",") for text in texts))
        if passed is not None:
            first: dict[str, object] = {
                "context": context,
                "eval_context": context.eval_ctx,
                "environment": context.environment,
            }
            args = (first[passed.name], *args)
        result = function(*args, **kwargs)
        return list(result) if isinstance(result, Iterator) else result

    return charged


def _items(value: object) -> Sequence[object]:
    if value is None:
        return ()
    if isinstance(value, Sequence):
        return value
    if isinstance(value, Iterable):
        if isinstance(value, Sized | Undefined):
            return list(value)
        return [item for item, _ in zip(value, range(MAX_STEPS + 1), strict=False)]
    raise TypeError(f"cannot loop over a value of type {type(value).__name__}")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Undefined):
        return None
    return list(_items(value))


def _written(context: Context, text: str) -> str:
    work_of(context).write(len(text))
    return text


# Filters that do not look into items; work on each item is counted separately.
_LOOKING_AT_ITEMS = words(
    "abs count d default first items last length list map reject rejectattr reverse round select "
    "selectattr"
)
# Filters that call a Python function for every item: a hundred times as slow as reading it.
_CALLING_PER_ITEM = words(
    "dictsort groupby join map max min reject rejectattr select selectattr sort sum title unique"
)
LOOKING_AT_KIND = words(
    "boolean callable defined divisibleby escaped even false filter float integer iterable mapping "
    "none number odd sameas sequence string test true undefined"
)

FILTERS: Mapping[str, Callable[..., Any]] = {
    name: charged(name, function, _LOOKING_AT_ITEMS)
    for name, function in {
        **{
            name: JINJA_FILTERS[name]
            for name in words(
                "abs capitalize count d default dictsort first float groupby int items last length "
                "list lower map max min reject rejectattr reverse select selectattr sort title "
                "truncate unique upper wordcount"
            )
        },
        "comment": _comment,
        "indent": _indent,
        "truncate_lines": _truncate_lines,
        "last_lines": _last_lines,
        "fit": _fit,
        "tojson": _tojson,
        "join": _join,
        "replace": _replace,
        "round": _round,
        "string": _string,
        "sum": _sum,
        "trim": _trim,
    }.items()
}
"""The filters that templates may use: some of Jinja's, and our own (see their docstrings)."""
