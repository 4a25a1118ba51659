"""Jinja2 templates and expressions of workflows, in a sandbox stricter than Jinja's own.

Templates see plain data: the inputs and the results of nodes. Rendered text is never rendered
again. A name without a value (a node that has not run) is falsy and renders as "", and so do its
attributes: `refine.text`, `check.ok`.

Allowed: output, `if`, `for`, `set`, all operators but `**`, `range`, and the names in `FILTERS` and
`_MEMBERS`. The work of a rendering is limited (see `Bounds`) and counted before it is done: every
operation counts all values it may touch, nested ones included, so that none takes long.
A block (`{% ... %}`) alone on a line leaves no empty line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import ChainableUndefined, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from cato.config.problems import did_you_mean
from cato.core.errors import ExpressionError, WorkLimitError
from cato.workflows.filters import (
    FILTERS,
    LOOKING_AT_KIND,
    charged,
    check_stripped,
    compared,
    copied,
    counted,
    put_out,
    searched,
    words,
)
from cato.workflows.work import LITTLE, MAX_STEPS, WORK, TooMuch, Work, present_bounds, work_of

MAX_SOURCE_CHARS = 64_000
"""Longest template: a prompt's fixed part is a page or two."""

MAX_NUMBER_BITS = 256
"""Largest product of whole numbers; stops repeated squaring from filling the memory."""

_MAX_PROBLEM_CHARS = 200
_MAX_SOURCE_SHOWN_CHARS = 80

# The blanks keep templates from using these names.
_COUNTED = "counted items"
_COMPARED = "compared value"
_SEARCHED = "searched value"
_COPIED = "copied part"
_RESULT = "_result"

# Members of values that templates may use: none changes a value or makes it longer.
MAPPING_MEMBERS = frozenset({"get", "items", "keys", "values"})
_MEMBERS: tuple[tuple[type[Any], frozenset[str]], ...] = (
    (
        str,
        words(
            "capitalize count endswith find isalnum isalpha isdigit isidentifier islower isspace "
            "isupper lower lstrip partition removeprefix removesuffix rfind rpartition rsplit "
            "rstrip split splitlines startswith strip title upper"
        ),
    ),
    (Mapping, MAPPING_MEMBERS),
    (Sequence, frozenset({"count", "index"})),
    (
        LoopContext,
        words(
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
    """A sandbox in which an attribute is a mapping's key or listed in `_MEMBERS`."""

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
        work, owner = work_of(context), getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        if isinstance(owner, str):
            work.read(len(owner))
            if name.endswith("strip"):
                check_stripped(next(iter(args), None))
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
            _charge(work_of(context), operator, left, right)
        return self.binop_table[operator](left, right)


def _charge(work: Work, sign: str, left: Any, right: Any) -> None:
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
    """Adds counting filters to the operands of loops, comparisons, slices and `~`."""

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
        finalize=put_out,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals = {"range": _range}
    environment.filters = {
        **FILTERS,
        _COUNTED: counted,
        _COMPARED: compared,
        _SEARCHED: searched,
        _COPIED: copied,
    }
    tests: dict[str, Any] = environment.tests
    environment.tests = {n: charged(n, test, LOOKING_AT_KIND) for n, test in tests.items()}
    return environment


_ENVIRONMENT = _new_environment()


# --- compiling ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JinjaTemplate:
    """A `cato.core.workflow.Template`, made by `compile_template`. `names` are the names it uses,
    `attributes` the attributes of them: `("draft", "text")`.

    Pickled as its source, since compiled templates cannot be pickled.
    """

    source: str
    names: frozenset[str] = field(compare=False, repr=False)
    attributes: frozenset[tuple[str, str]] = field(compare=False, repr=False)
    _compiled: jinja2.Template = field(compare=False, repr=False)

    def render(self, names: Mapping[str, object]) -> str:
        work, pieces = Work(present_bounds()), []
        try:
            for piece in self._compiled.generate({**names, WORK: work}):
                work.output(len(piece))
                pieces.append(piece)
        except Exception as exc:  # a template can raise anything: report it as its error
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
        """The value as plain data: a missing value is None, an iterable a list."""
        work = Work(LITTLE)
        try:
            context = self._compiled.new_context({**names, WORK: work})
            for _ in self._compiled.root_render_func(context):
                pass
            value = context.vars[_RESULT]
            if isinstance(value, Undefined):
                return None
            if isinstance(value, Iterator) or (
                isinstance(value, Iterable)
                and not isinstance(value, str | bytes | Mapping | list | tuple)
            ):
                value = list(counted(context, value))
            work.read_all(value)
        except Exception as exc:  # as in `render`
            raise _error(self.source, exc) from exc
        return value

    def __reduce__(self) -> tuple[object, ...]:
        return compile_expression, (self.source,)


@lru_cache(maxsize=1024)
def compile_template(source: str) -> JinjaTemplate:
    """Raise `ExpressionError` when `source` is no template or uses a forbidden construct."""
    try:
        _check_size(source)
        return JinjaTemplate(source, *_compile(_ENVIRONMENT.parse(source)))
    except Exception as exc:  # deep nesting ends in RecursionError, MemoryError or SyntaxError
        raise _error(source, exc) from exc


@lru_cache(maxsize=1024)
def compile_expression(source: str) -> JinjaExpression:
    """Raise `ExpressionError` when `source` is no expression or uses a forbidden construct."""
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
    """(name, attribute) pairs that are read, without names that the template sets itself."""
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
    kind = WorkLimitError if isinstance(exc, TooMuch) else ExpressionError
    if len(words) > _MAX_PROBLEM_CHARS and not isinstance(exc, TemplateSyntaxError):
        words = words[: _MAX_PROBLEM_CHARS - 1] + "…"
    first, *more = source.strip().split("\n", 1)
    if more or len(first) > _MAX_SOURCE_SHOWN_CHARS:
        first = first[: _MAX_SOURCE_SHOWN_CHARS - 1] + "…"
    return kind(first, words)
