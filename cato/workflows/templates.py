"""Jinja2 templates and expressions of workflows, in a sandbox that is narrower than Jinja's own.

Templates see plain data: the inputs and the results of nodes. What they render is never read as
a template again. A name that has no value (a node that has not run) is falsy and renders as "",
as do its attributes: `refine.text`, `check.ok`.

Allowed are output, `if`, `for`, `set`, operators but `**`, `range`, and what `FILTERS` and
`_MEMBERS` list. The work of one rendering is counted before it is done, and bounded: see `Bounds`.
A count is of what an operation may touch, all that is inside of a value included, so that no single
one takes long either.
Blocks (`{% ... %}`) take their line with them when they stand alone on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import (
    ChainableUndefined,
    TemplateSyntaxError,
    Undefined,
    meta,
    nodes,
    pass_context,
    pass_environment,
)
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from cato.config.yaml_file import did_you_mean
from cato.core.errors import ExpressionError, WorkLimitError
from cato.workflows.fim import fit_prompt

MAX_SOURCE_CHARS = 64_000
"""Longest template: a prompt's fixed part is a page or two."""

MAX_STEPS = 10_000
"""Loop iterations of one rendering, over all loops; a prompt lists tens of snippets or errors."""

MAX_OUTPUT_CHARS = 1_000_000
"""Longest text rendered: some 250,000 tokens, more than most models' context."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one rendering may do at most.

    `nodes` are parts of the source, those in a loop once for each iteration. Characters are written
    into intermediate texts by operators and filters, read by filters, methods, tests and
    comparisons, and put out.
    """

    steps: int = MAX_STEPS
    nodes: int = 3_000_000
    chars: int = 4 * MAX_OUTPUT_CHARS
    read_chars: int = 50 * MAX_OUTPUT_CHARS
    output_chars: int = MAX_OUTPUT_CHARS


WHOLE = Bounds()
"""About a second of a core at worst: for a thread of its own."""

LITTLE = Bounds(nodes=30_000, chars=400_000, read_chars=4_000_000, output_chars=400_000)
"""Some milliseconds at worst, which others may wait for. Expressions never do more."""

MAX_NUMBER_BITS = 256
"""Largest product of whole numbers; keeps repeated squaring from filling the memory."""

MAX_INDENT = 80
_MAX_PROBLEM_CHARS = 200
_MAX_SOURCE_SHOWN_CHARS = 80

# A blank in the name: no template can spell it.
_WORK = "work of this rendering"
_COUNTED = "counted items"
_COMPARED = "compared value"
_SEARCHED = "searched value"
_COPIED = "copied part"
_RESULT = "_result"

# An item of a list or mapping counts for as many characters as are read in its time.
_ITEM_CHARS = 100
# Texts are compared this many characters at a time.
_COMPARED_AT_ONCE = 16
# The time to strip a text grows with the number of characters to strip.
_MAX_STRIPPED = 100

_bounds: ContextVar[Bounds] = ContextVar("bounds of a rendering", default=WHOLE)


@contextmanager
def little_work() -> Generator[None, None, None]:
    """Within it templates do no more than `LITTLE`, and raise `WorkLimitError` beyond."""
    token = _bounds.set(LITTLE)
    try:
        yield
    finally:
        _bounds.reset(token)


class _TooMuch(SecurityError):
    """The work of a rendering is beyond its bounds."""


class _Work:
    """What one rendering may still do."""

    __slots__ = ("_bounds", "_chars", "_nodes", "_output_chars", "_read_chars", "_steps")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._steps, self._nodes, self._chars = bounds.steps, bounds.nodes, bounds.chars
        self._read_chars, self._output_chars = bounds.read_chars, bounds.output_chars

    def loop(self, iterations: int, nodes: int) -> None:
        """So many iterations of a loop whose body has `nodes` parts."""
        self._steps -= iterations
        self._nodes -= iterations * nodes
        if self._steps < 0:
            raise _TooMuch(f"more than {self._bounds.steps:,} loop iterations")
        if self._nodes < 0:
            raise _TooMuch(f"more than {self._bounds.nodes:,} steps in loops")

    def write(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise _TooMuch(f"more than {self._bounds.chars:,} characters of intermediate text")

    def read(self, chars: int) -> None:
        self._read_chars -= chars
        if self._read_chars < 0:
            raise _TooMuch(f"more than {self._bounds.read_chars:,} characters gone through")

    def read_all(self, value: object) -> None:
        """All of `value`, with what is inside of what it holds."""
        self.read(len(value) if isinstance(value, str) else _weight(value, self._read_chars))

    def read_items(self, value: object) -> None:
        """The items of `value`, but not what they hold."""
        if isinstance(value, str | list | tuple):
            self.read(len(value))

    def output(self, chars: int) -> None:
        self._output_chars -= chars
        if self._output_chars < 0:
            raise _TooMuch(f"more than {self._bounds.output_chars:,} characters of output")


def _weight(value: object, most: int) -> int:
    """Characters to be gone through for all of `value`, counted until they are more than `most`.

    What is held twice counts twice, as it would be written twice.
    """
    total, waiting = 0, [value]
    while waiting and total <= most:
        part = waiting.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, list | tuple | dict | set | frozenset):
            total += len(part) * _ITEM_CHARS
            if total <= most:
                waiting.extend(part)
                if isinstance(part, dict):
                    waiting.extend(part.values())
        elif isinstance(part, Mapping):
            waiting.append(dict(part))
    return total


def _work(context: Context) -> _Work:
    work = context.get(_WORK)
    assert isinstance(work, _Work), "templates are rendered by JinjaTemplate or JinjaExpression"
    return work


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _text(value: object) -> str:
    return "" if value is None else str(value)


# --- filters ------------------------------------------------------------------------------------

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


@pass_context
def _comment(context: Context, text: object, language: object = "python") -> str:
    """Every line of `text` as a comment of `language`; `#` for a language not known here."""
    marker = _MARKER.get(_text(language).strip().lower(), "#")
    closing = _CLOSING.get(marker, "")
    lines = [f"{marker} {line}".rstrip() + closing for line in _text(text).splitlines()]
    return _written(context, "\n".join(lines))


@pass_context
def _indent(context: Context, text: object, width: int = 4, first: bool = False) -> str:
    """Lines but the first (with `first` all) moved right by `width` blanks; empty lines stay."""
    margin = " " * max(0, min(width, MAX_INDENT))
    lines = _text(text).split("\n")
    _work(context).write(len(lines) * len(margin))
    moved = [margin + line if line and (i or first) else line for i, line in enumerate(lines)]
    return _written(context, "\n".join(moved))


def _truncate_lines(text: object, count: int = 20) -> str:
    """The first `count` lines."""
    return "\n".join(_text(text).split("\n", max(0, count))[: max(0, count)])


def _last_lines(text: object, count: int = 20) -> str:
    """The last `count` lines."""
    return "\n".join(_text(text).rsplit("\n", max(0, count))[-count:]) if count > 0 else ""


def _fit(text: object, chars: int) -> str:
    """Head and tail of a text longer than `chars`, with `...` for what is left out between."""
    return fit_prompt(_text(text), chars)


@pass_context
def _tojson(context: Context, value: object, indent: int | None = None) -> str:
    """`value` as JSON, not escaped for HTML; an absent value is null."""
    width = None if indent is None else max(0, min(indent, 8))

    def plain(inner: object) -> object:
        found = _plain(inner)
        _work(context).read_all(found)
        return found

    text = json.dumps(value, ensure_ascii=False, indent=width, default=plain)
    return _written(context, text)


@pass_context
def _string(context: Context, value: object) -> str:
    """`value` as text; an absent one is the empty text."""
    return _written(context, _text(value))


def _trim(value: object, chars: str | None = None) -> str:
    """`value` without white space, or `chars`, at its ends."""
    _check_stripped(chars)
    return _text(value).strip(chars)


def _check_stripped(chars: object) -> None:
    if isinstance(chars, str) and len(chars) > _MAX_STRIPPED:
        raise SecurityError(f"more than {_MAX_STRIPPED} characters to strip")


@pass_environment
def _sum(
    environment: jinja2.Environment, values: Any, attribute: Any = None, start: float = 0
) -> Any:
    """Jinja's `sum`, of numbers alone: adding up lists copies them again and again."""
    if not isinstance(start, int | float):
        raise SecurityError("sum adds numbers")
    return JINJA_FILTERS["sum"](environment, values, attribute, start)


@pass_context
def _join(context: Context, value: Any, between: object = "", attribute: Any = None) -> str:
    """Jinja's `join`; an absent item is an empty text."""
    work, separator, texts = _work(context), _text(between), []
    for item in () if value is None else value:
        part = item if attribute is None else context.environment.getitem(item, attribute)
        texts.append(_text(part))
        work.write(len(texts[-1]) + len(separator))
    return separator.join(texts)


@pass_context
def _replace(context: Context, text: object, old: object, new: object) -> str:
    """Every `old` in `text` as `new`."""
    whole, before, after = _text(text), _text(old), _text(new)
    _work(context).write(len(whole) + whole.count(before) * len(after))
    return whole.replace(before, after)


def _round(value: float, precision: int = 0) -> float:
    """`value` to `precision` (at most 15) digits after the point."""
    return round(value, max(0, min(precision, 15)))


@pass_context
def _counted(context: Context, value: object, nodes: int = 1) -> Sequence[object]:
    """What a `for` with `nodes` parts loops over, its work charged beforehand: every loop is
    rewritten to this."""
    items = _items(value)
    _work(context).loop(len(items), nodes)
    return items


@pass_context
def _compared(context: Context, value: object) -> object:
    """An operand of a comparison, all of it charged."""
    if isinstance(value, str):
        _work(context).read(len(value) // _COMPARED_AT_ONCE)
    else:
        _work(context).read_all(value)
    return value


@pass_context
def _searched(context: Context, value: object) -> object:
    """What `in` looks into, all of it charged; a mapping finds its keys by their hashes."""
    if not isinstance(value, Mapping):
        _work(context).read_all(value)
    return value


@pass_context
def _copied(context: Context, value: object) -> object:
    """A slice, its length charged."""
    if isinstance(value, str | list | tuple):
        _work(context).write(len(value))
    return value


@pass_context
def _put_out(context: Context, value: object) -> object:
    """What becomes output, charged before it is turned into text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        _work(context).read_all(value)
    return value


def _charged(name: str, function: Callable[..., Any], cheap: frozenset[str]) -> Callable[..., Any]:
    """A filter or test that charges all that it is given; of those that are `cheap` the items."""
    passed = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def charged(context: Context, *args: Any, **kwargs: Any) -> Any:
        work = _work(context)
        charge = work.read_items if name in cheap else work.read_all
        for value in (*args, *kwargs.values()):
            charge(value)
        if passed is None:
            return function(*args, **kwargs)
        first: dict[str, object] = {
            "context": context,
            "eval_context": context.eval_ctx,
            "environment": context.environment,
        }
        return function(first[passed.name], *args, **kwargs)

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
    _work(context).write(len(text))
    return text


# Filters that look at items and not into them; what is done to each item is charged by itself.
_LOOKING_AT_ITEMS = _words(
    "abs count d default first items last length list map reject rejectattr reverse round select "
    "selectattr"
)
_LOOKING_AT_KIND = _words(
    "boolean callable defined divisibleby escaped even false filter float integer iterable mapping "
    "none number odd sameas sequence string test true undefined"
)

FILTERS: Mapping[str, Callable[..., Any]] = {
    name: _charged(name, function, _LOOKING_AT_ITEMS)
    for name, function in {
        **{
            name: JINJA_FILTERS[name]
            for name in _words(
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
"""The filters a template may use: some of Jinja's own, and ours (see their docstrings)."""


# --- the sandbox --------------------------------------------------------------------------------

# Members of data that a template may use: none of them changes it or makes it longer.
MAPPING_MEMBERS = frozenset({"get", "items", "keys", "values"})
_MEMBERS: tuple[tuple[type[Any], frozenset[str]], ...] = (
    (
        str,
        _words(
            "capitalize count endswith find isalnum isalpha isdigit isidentifier islower isspace "
            "isupper lower lstrip partition removeprefix removesuffix rfind rpartition rsplit "
            "rstrip split splitlines startswith strip title upper"
        ),
    ),
    (Mapping, MAPPING_MEMBERS),
    (Sequence, frozenset({"count", "index"})),
    (
        LoopContext,
        _words(
            "changed cycle depth depth0 first index index0 last length nextitem previtem "
            "revindex revindex0"
        ),
    ),
)

_STATEMENTS = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "import",
    nodes.Extends: "extends",
    nodes.Block: "block",
    nodes.Macro: "macro",
    nodes.CallBlock: "call",
    nodes.FilterBlock: "filter",
    nodes.AssignBlock: "set without '='",
    nodes.With: "with",
    nodes.Pow: "**",
}
_ALLOWED = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Assign),
    *(nodes.Name, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword),
    *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr),
    *(nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.Not, nodes.And, nodes.Or),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos),
)


def _range(*args: int) -> range:
    """Python's `range`, of at most `MAX_STEPS` numbers."""
    numbers = range(*args)
    if len(numbers) > MAX_STEPS:
        raise SecurityError(f"range of more than {MAX_STEPS:,} numbers")
    return numbers


class _Environment(ImmutableSandboxedEnvironment):
    """Data in, text out: an attribute is a key of a mapping or listed in `_MEMBERS`."""

    intercepted_binops = frozenset({"+", "*", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        if attribute.startswith("_"):
            raise SecurityError(f"access to {attribute!r} is not allowed")
        if isinstance(obj, Undefined):
            return obj
        for type_, members in _MEMBERS:
            if isinstance(obj, type_) and attribute in members:
                return getattr(obj, attribute)
        if hasattr(type(obj), attribute):
            raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is not allowed")
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, Undefined):
            return obj
        try:
            return obj[argument]
        except (TypeError, LookupError):
            if isinstance(argument, str):
                return self.getattr(obj, argument)
        return self.undefined(obj=obj, name=argument)

    def is_safe_callable(self, obj: Any) -> bool:
        owner = getattr(obj, "__self__", None)
        return (
            obj is _range
            or isinstance(obj, Undefined)
            or isinstance(owner, (str, Mapping, Sequence, LoopContext))
        )

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        work, owner = _work(context), getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        if isinstance(owner, str):
            work.read(len(owner))
            if name.endswith("strip"):
                _check_stripped(next(iter(args), None))
            elif name.startswith(("split", "rsplit")):
                work.write(len(owner))
        elif isinstance(owner, Sequence):
            work.read_all(owner)
        for value in (*args, *kwargs.values()):
            work.read_all(value)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("% formats no text here; use ~")
        if operator in "+*":
            _charge(_work(context), operator, left, right)
        return self.binop_table[operator](left, right)


def _charge(work: _Work, sign: str, left: Any, right: Any) -> None:
    """Bound the size of `left + right` or `left * right` before it is computed."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_NUMBER_BITS:
            raise SecurityError("a number is too large")
    elif sign == "+":
        work.write(sum(len(x) for x in (left, right) if isinstance(x, str | list | tuple)))
    else:
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int):
                work.write(len(text) * max(0, times))


class _Bounded(NodeTransformer):
    """Puts filters that count where loops, comparisons, slices and `~` take their values."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(parts, "join")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _COMPARED)
        for operand in node.ops:
            is_search = operand.op in ("in", "notin")
            operand.expr = _filtered(operand.expr, _SEARCHED if is_search else _COMPARED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _COPIED) if isinstance(node.arg, nodes.Slice) else node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        inside = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED, nodes.Const(inside, lineno=node.lineno))
        return node


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _new_environment() -> _Environment:
    environment = _Environment(
        autoescape=False,
        undefined=ChainableUndefined,
        finalize=_put_out,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals = {"range": _range}
    environment.filters = {
        **FILTERS,
        _COUNTED: _counted,
        _COMPARED: _compared,
        _SEARCHED: _searched,
        _COPIED: _copied,
    }
    tests: dict[str, Any] = environment.tests
    environment.tests = {n: _charged(n, test, _LOOKING_AT_KIND) for n, test in tests.items()}
    return environment


_ENVIRONMENT = _new_environment()


# --- compiling ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JinjaTemplate:
    """A `cato.core.workflow.Template`; `names` are those it looks up, `attributes` what it looks up
    in them: `("draft", "text")`. Made by `compile_template`.

    Pickles as its source, since compiled templates cannot travel.
    """

    source: str
    names: frozenset[str] = field(compare=False, repr=False)
    attributes: frozenset[tuple[str, str]] = field(compare=False, repr=False)
    _compiled: jinja2.Template = field(compare=False, repr=False)

    def render(self, names: Mapping[str, object]) -> str:
        work, pieces = _Work(_bounds.get()), []
        try:
            for piece in self._compiled.generate({**names, _WORK: work}):
                work.output(len(piece))
                pieces.append(piece)
        except Exception as exc:  # a sandbox runs anything: whatever it raises is the template's
            raise _error(self.source, exc) from exc
        return "".join(pieces)

    def __reduce__(self) -> tuple[object, ...]:
        return compile_template, (self.source,)


@dataclass(frozen=True, slots=True)
class JinjaExpression:
    """A `cato.core.workflow.Expression`; like `JinjaTemplate`. Made by `compile_expression`."""

    source: str
    names: frozenset[str] = field(compare=False, repr=False)
    attributes: frozenset[tuple[str, str]] = field(compare=False, repr=False)
    _compiled: jinja2.Template = field(compare=False, repr=False)

    def evaluate(self, names: Mapping[str, object]) -> object:
        """The value as plain data: a missing one is None, anything that counts up is a list."""
        work = _Work(LITTLE)
        try:
            context = self._compiled.new_context({**names, _WORK: work})
            for _ in self._compiled.root_render_func(context):
                pass
            value = context.vars[_RESULT]
            if isinstance(value, Undefined):
                return None
            if isinstance(value, Iterator) or (
                isinstance(value, Iterable)
                and not isinstance(value, str | bytes | Mapping | list | tuple)
            ):
                value = list(_counted(context, value))
            work.read_all(value)
        except Exception as exc:  # as in `render`
            raise _error(self.source, exc) from exc
        return value

    def __reduce__(self) -> tuple[object, ...]:
        return compile_expression, (self.source,)


@lru_cache(maxsize=1024)
def compile_template(source: str) -> JinjaTemplate:
    """Raise `ExpressionError` when `source` is not a template or uses what is not allowed."""
    try:
        _check_size(source)
        return JinjaTemplate(source, *_compile(_ENVIRONMENT.parse(source)))
    except Exception as exc:  # deep nesting ends in RecursionError, MemoryError or SyntaxError
        raise _error(source, exc) from exc


@lru_cache(maxsize=1024)
def compile_expression(source: str) -> JinjaExpression:
    """Raise `ExpressionError` when `source` is not an expression or uses what is not allowed."""
    try:
        _check_size(source)
        if source.lstrip().startswith(("{{", "{%")):
            raise TemplateSyntaxError("an expression is written without {{ }}", 1)
        parser = Parser(_ENVIRONMENT, source, state="variable")
        expression = parser.parse_expression()
        if not parser.stream.eos:
            line = parser.stream.current.lineno
            raise TemplateSyntaxError(f"unexpected {str(parser.stream.current)!r}", line)
        assign = nodes.Assign(nodes.Name(_RESULT, "store"), expression, lineno=1)
        template = nodes.Template([assign], lineno=1)
        return JinjaExpression(source, *_compile(template.set_environment(_ENVIRONMENT)))
    except Exception as exc:  # as above
        raise _error(source, exc) from exc


def _check_size(source: str) -> None:
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"longer than {MAX_SOURCE_CHARS:,} characters")


def _compile(
    tree: nodes.Node,
) -> tuple[frozenset[str], frozenset[tuple[str, str]], jinja2.Template]:
    for node in tree.find_all(nodes.Node):
        _check(node)
    assert isinstance(tree, nodes.Template)
    attributes = frozenset(_attributes(tree))
    _Bounded().visit(tree)  # in place
    tree.set_environment(_ENVIRONMENT)
    names = frozenset(meta.find_undeclared_variables(tree))
    return names, attributes, _ENVIRONMENT.from_string(tree)


def _attributes(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    """Names with what is looked up in them; not of names that the template sets itself."""
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    for dot in tree.find_all(nodes.Getattr):
        if isinstance(dot.node, nodes.Name) and dot.node.name not in own:
            yield dot.node.name, dot.attr
    for item in tree.find_all(nodes.Getitem):
        if not isinstance(item.node, nodes.Name) or item.node.name in own:
            continue
        if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str):
            yield item.node.name, item.arg.value


def _check(node: nodes.Node) -> None:
    if not isinstance(node, _ALLOWED) or (isinstance(node, nodes.For) and node.recursive):
        word = _STATEMENTS.get(type(node), type(node).__name__.lower())
        raise TemplateSyntaxError(f"{word!r} is not allowed", node.lineno)
    if isinstance(node, nodes.Getattr) and node.attr.startswith("__"):
        raise TemplateSyntaxError(f"access to {node.attr!r} is not allowed", node.lineno)
    if isinstance(node, nodes.Filter):
        _check_known("filter", node.name, FILTERS, node.lineno)
    elif isinstance(node, nodes.Test):
        _check_known("test", node.name, _ENVIRONMENT.tests, node.lineno)


def _check_known(kind: str, name: str, known: Iterable[str], line: int) -> None:
    names = sorted(known)
    if name not in names:
        hint = did_you_mean(name, names) or f" (known: {', '.join(names)})"
        raise TemplateSyntaxError(f"unknown {kind} {name!r}{hint}", line)


def _error(source: str, exc: Exception) -> ExpressionError:
    if isinstance(exc, TemplateSyntaxError):
        words = f"line {exc.lineno}: {exc.message}" if "\n" in source else str(exc.message)
    elif isinstance(exc, TemplateError):
        words = str(exc.message)
    elif isinstance(exc, RecursionError | MemoryError):
        words = "nested too deeply"
    else:
        words = f"{type(exc).__name__}: {exc}"
    kind = WorkLimitError if isinstance(exc, _TooMuch) else ExpressionError
    if len(words) > _MAX_PROBLEM_CHARS and not isinstance(exc, TemplateSyntaxError):
        words = words[: _MAX_PROBLEM_CHARS - 1] + "…"
    first, *more = source.strip().split("\n", 1)
    if more or len(first) > _MAX_SOURCE_SHOWN_CHARS:
        first = first[: _MAX_SOURCE_SHOWN_CHARS - 1] + "…"
    return kind(first, words)
