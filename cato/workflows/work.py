"""Limits on the work of rendering a template, counted before the work is done."""

from __future__ import annotations

from collections.abc import Generator, ItemsView, KeysView, Mapping, Sized, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

MAX_STEPS = 10_000
"""Most loop iterations of one rendering, over all loops; prompts list tens of snippets."""

MAX_OUTPUT_CHARS = 1_000_000
"""Longest text rendered: some 250,000 tokens, more than most models' context."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one rendering.

    `nodes` are evaluated parts of the source, in a loop counted per iteration. `chars` are written
    to intermediate texts by operators and filters, `read_chars` read by filters, methods, tests and
    comparisons, `output_chars` written to the result.
    """

    steps: int = MAX_STEPS
    nodes: int = 3_000_000
    chars: int = 4 * MAX_OUTPUT_CHARS
    read_chars: int = 50 * MAX_OUTPUT_CHARS
    output_chars: int = MAX_OUTPUT_CHARS


WHOLE = Bounds()
"""At most about a second of CPU time: for a separate thread."""

LITTLE = Bounds(nodes=30_000, chars=400_000, read_chars=4_000_000, output_chars=400_000)
"""At most some milliseconds, so that it can run in the event loop. Expressions never do more."""

# The blanks keep templates from using this name.
WORK = "work of this rendering"
# Visiting an item of a list or mapping takes as long as reading this many characters.
_ITEM_CHARS = 100

_bounds: ContextVar[Bounds] = ContextVar("bounds of a rendering", default=WHOLE)


def present_bounds() -> Bounds:
    return _bounds.get()


@contextmanager
def little_work() -> Generator[None, None, None]:
    """Inside it templates are limited to `LITTLE` and raise `WorkLimitError` beyond."""
    token = _bounds.set(LITTLE)
    try:
        yield
    finally:
        _bounds.reset(token)


class TooMuch(SecurityError):
    """A rendering exceeds its limits."""


class Work:
    """The remaining budget of one rendering."""

    __slots__ = ("_bounds", "_chars", "_nodes", "_output_chars", "_read_chars", "_steps")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._steps, self._nodes, self._chars = bounds.steps, bounds.nodes, bounds.chars
        self._read_chars, self._output_chars = bounds.read_chars, bounds.output_chars

    def loop(self, iterations: int, nodes: int) -> None:
        """Count iterations of a loop whose body has `nodes` parts."""
        self._steps -= iterations
        self._nodes -= iterations * nodes
        if self._steps < 0:
            raise TooMuch(f"more than {self._bounds.steps:,} loop iterations")
        if self._nodes < 0:
            raise TooMuch(f"more than {self._bounds.nodes:,} steps in loops")

    def write(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise TooMuch(f"more than {self._bounds.chars:,} characters of intermediate text")

    def read(self, chars: int) -> None:
        self._read_chars -= chars
        if self._read_chars < 0:
            raise TooMuch(f"more than {self._bounds.read_chars:,} characters read")

    def read_all(self, value: object) -> None:
        """Count all of `value`, nested values included."""
        self.read(len(value) if isinstance(value, str) else _weight(value, self._read_chars))

    def read_items(self, value: object) -> None:
        """Count the items of `value`, not their contents."""
        if isinstance(value, Sized):
            self.read(len(value))

    def visit(self, value: object, calls: int = 1) -> None:
        """Count some Python calls for every item of `value`; a text's items are its characters."""
        if isinstance(value, Sized):
            self.read(len(value) * _ITEM_CHARS * calls)

    def output(self, chars: int) -> None:
        self._output_chars -= chars
        if self._output_chars < 0:
            raise TooMuch(f"more than {self._bounds.output_chars:,} characters of output")


def _weight(value: object, most: int) -> int:
    """Characters to read for `value` with all nested values; stops counting above `most`.

    A value that occurs twice counts twice, because it would also be written twice.
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
        elif isinstance(part, range):
            total += len(part)
        elif isinstance(part, KeysView | ItemsView | ValuesView):
            waiting.append(list(part))
    return total


def work_of(context: Context) -> Work:
    work = context.get(WORK)
    assert isinstance(work, Work), "templates are rendered by JinjaTemplate or JinjaExpression"
    return work
