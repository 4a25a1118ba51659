"""The sandbox of templates, stricter than Jinja's own.

It says which members of values templates may use, and charges operations for the data they touch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import ChainableUndefined, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

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
from cato.workflows.work import MAX_STEPS, Work, work_of

MAX_NUMBER_BITS = 256
"""Largest product of whole numbers; stops repeated squaring from filling the memory."""

# The blanks keep templates from using these names.
_COUNTED = "counted items"
_COMPARED = "compared value"
_SEARCHED = "searched value"
_COPIED = "copied part"

# Members of values that templates may use: none changes a value or makes it longer.
MAPPING_MEMBERS = frozenset({"get", "items", "keys", "values"})
MEMBERS: tuple[tuple[type[Any], frozenset[str]], ...] = (
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


def members_of(type_: type[Any]) -> frozenset[str]:
    """The members of such values that templates may use."""
    return frozenset().union(*(members for t, members in MEMBERS if issubclass(type_, t)))


def _range(*args: int) -> range:
    """Python's `range`, of at most `MAX_STEPS` numbers."""
    numbers = range(*args)
    if len(numbers) > MAX_STEPS:
        raise SecurityError(f"range of more than {MAX_STEPS:,} numbers")
    return numbers


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which an attribute is a mapping's key or listed in `MEMBERS`."""

    intercepted_binops = frozenset({"+", "*", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        if attribute.startswith("_"):
            raise SecurityError(f"access to {attribute!r} is not allowed")
        if isinstance(obj, Undefined):
            return obj
        for type_, members in MEMBERS:
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


class Bounded(NodeTransformer):
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


ENVIRONMENT = _new_environment()
