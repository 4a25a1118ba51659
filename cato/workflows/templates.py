"""Jinja2 templates and expressions of workflows, compiled for a sandbox.

Templates see plain data: the inputs and the results of nodes. Rendered text is never rendered
again. A name without a value (a node that has not run) is falsy and renders as "", and so do its
attributes: `refine.text`, `check.ok`.

Allowed: output, `if`, `for`, `set`, all operators but `**`, `range`, and the names in `FILTERS` and
`MEMBERS`. The work of a rendering is limited (see `Bounds`) and counted before it is done: every
operation counts all values it may touch, nested ones included, so that none takes long.
A block (`{% ... %}`) alone on a line leaves no empty line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import jinja2
from jinja2 import TemplateSyntaxError, Undefined, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.parser import Parser

from cato.core.errors import ExpressionError, WorkLimitError
from cato.core.words import did_you_mean
from cato.workflows.filters import FILTERS, counted
from cato.workflows.sandbox import ENVIRONMENT, Bounded
from cato.workflows.work import LITTLE, WORK, TooMuch, Work, present_bounds

MAX_SOURCE_CHARS = 64_000
"""Longest template: a prompt's fixed part is a page or two."""

_MAX_PROBLEM_CHARS = 200
_MAX_SOURCE_SHOWN_CHARS = 80
_RESULT = "_result"

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
        return JinjaTemplate(source, *_compile(ENVIRONMENT.parse(source)))
    except Exception as exc:  # deep nesting ends in RecursionError, MemoryError or SyntaxError
        raise _error(source, exc) from exc


@lru_cache(maxsize=1024)
def compile_expression(source: str) -> JinjaExpression:
    """Raise `ExpressionError` when `source` is no expression or uses a forbidden construct."""
    try:
        _check_size(source)
        if source.lstrip().startswith(("{{", "{%")):
            raise TemplateSyntaxError("an expression is written without {{ }}", 1)
        parser = Parser(ENVIRONMENT, source, state="variable")
        expression = parser.parse_expression()
        if not parser.stream.eos:
            line = parser.stream.current.lineno
            raise TemplateSyntaxError(f"unexpected {str(parser.stream.current)!r}", line)
        assign = nodes.Assign(nodes.Name(_RESULT, "store"), expression, lineno=1)
        template = nodes.Template([assign], lineno=1)
        return JinjaExpression(source, *_compile(template.set_environment(ENVIRONMENT)))
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
    Bounded().visit(tree)  # in place
    tree.set_environment(ENVIRONMENT)
    names = frozenset(meta.find_undeclared_variables(tree))
    return names, attributes, ENVIRONMENT.from_string(tree)


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
        _check_known("test", node.name, ENVIRONMENT.tests, node.lineno)


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
