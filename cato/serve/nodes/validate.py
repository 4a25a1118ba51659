"""The validate node: checks code for syntax errors and, if configured, with compilers or linters.

The code is parsed, and compiled or linted as the workflow and the deployment say; never executed.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from tree_sitter import Node

from cato.core.workflow import ValidateSettings
from cato.serve.nodes import parsing
from cato.serve.nodes.checkers import Checkers
from cato.serve.nodes.fences import unfenced
from cato.serve.nodes.languages import MAX_PARSED_CHARS, Parsed, language_named, parse
from cato.serve.nodes.rendering import render

_log = logging.getLogger(__name__)

# Enough for a model to fix its answer; one mistake makes a grammar report many.
MAX_ERRORS = 20
_MAX_QUOTED_CHARS = 40
_FILE = "<validate>"
_NO_CHECKERS = Checkers({})
_CLOSER = {"(": ")", "[": "]", "{": "}"}

# CPython's parser warns about invalid escapes in the code that it checks: ignore them. Unlike
# `catch_warnings`, a filter by file name that is set once is thread-safe.
warnings.filterwarnings("ignore", module=re.escape(_FILE))


async def run(
    node: str,
    settings: ValidateSettings,
    names: Mapping[str, object],
    checkers: Checkers = _NO_CHECKERS,
) -> dict[str, object]:
    """`{"ok", "errors", "code", "checked"}`: lines and columns count from 1, in characters.

    `code` is the source without Markdown fences. Code in an unknown language, or that could not be
    parsed in time (`parsing.parsed`), is `ok` but not `checked`. An empty `language` means the
    fence's. Code with valid syntax goes to the checkers of its language; if one has no verdict, the
    code is not `checked`.
    """
    code, wanted = await asyncio.to_thread(_rendered, node, settings, names)
    language = language_named(wanted)
    if not code.strip():
        return _result(code, [_error(1, 1, "no code")])
    if language is not None and len(code) <= MAX_PARSED_CHARS:
        found = await parsing.parsed("validate", code, language=language)
        if found is not None:
            return await _also_by(checkers, settings.checkers, language, found)
    _log.info("not checked: %d characters of %r", len(code), wanted)
    return _result(code, [], checked=False)


async def _also_by(
    checkers: Checkers, names: Sequence[str], language: str, found: dict[str, object]
) -> dict[str, object]:
    """`found`, the syntax result, with the checkers' errors if the syntax is valid."""
    if not names or not found["ok"]:
        return found
    code, errors, is_checked = str(found["code"]), list[dict[str, object]](), True
    if not all(map(checkers.has, names)):
        _log.warning("a validate node names a checker that the deployment does not have")
        is_checked = False
    for name in checkers.of(names, language):
        said = await checkers.errors(name, code)
        is_checked = is_checked and said is not None
        errors += said or []
    return _result(code, errors[:MAX_ERRORS], checked=is_checked)


def _rendered(
    node: str, settings: ValidateSettings, names: Mapping[str, object]
) -> tuple[str, str]:
    block = unfenced(render(node, settings.source, names))
    return block.code, render(node, settings.language, names).strip() or block.language


def validated(code: str, language: str) -> dict[str, object]:
    """The result for code in one of `LANGUAGES`. Its time is not limited here."""
    return _result(code, syntax_errors(language, code))


def syntax_errors(language: str, code: str) -> list[dict[str, object]]:
    """Up to `MAX_ERRORS` syntax errors of `code`; `language` is one of `LANGUAGES`.

    For Python, CPython decides and its one error comes first. The grammar, which is stricter in
    some cases and laxer in others, only adds further places.
    """
    first = _python_error(code) if language == "python" else None
    if language == "python" and first is None:
        return []
    found = _grammar_errors(parse(language, code))
    if first is None:
        return list(islice(found, MAX_ERRORS))
    more = (e for e in found if e["line"] != first["line"])
    return [first, *islice(more, MAX_ERRORS - 1)]


def _result(
    code: str, errors: list[dict[str, object]], *, checked: bool = True
) -> dict[str, object]:
    return {"ok": not errors, "errors": errors, "code": code, "checked": checked}


def _error(line: int, column: int, message: str) -> dict[str, object]:
    return {"line": line, "column": column, "message": message}


def _python_error(code: str) -> dict[str, object] | None:
    try:
        compile(code, _FILE, "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as exc:
        return _error(max(exc.lineno or 1, 1), max(exc.offset or 1, 1), exc.msg)
    except (RecursionError, MemoryError):
        return _error(1, 1, "nested too deeply")
    except (ValueError, OverflowError) as exc:  # a null byte, a lone surrogate
        return _error(1, 1, str(exc))
    return None


def _grammar_errors(parsed: Parsed) -> Iterator[dict[str, object]]:
    rows = parsed.data.split(b"\n")
    pending = [parsed.root]
    while pending:
        node = pending.pop()
        if node.is_missing:
            yield _error_at(node, rows, f"missing {_quoted_kind(node)}")
        elif node.is_error and (found := _explained(parsed, node)):
            place, message = found
            yield _error_at(place, rows, message)
        elif node.has_error:
            pending.extend(c for c in reversed(node.children) if c.has_error or c.is_missing)


def _explained(parsed: Parsed, error: Node) -> tuple[Node, str] | None:
    """Place and message of an ERROR node; None if the errors inside it are more precise."""
    opened: list[Node] = []
    has_inner_errors = False
    first: Node | None = None
    pending = [error]
    while pending:
        node = pending.pop()
        has_inner_errors = has_inner_errors or (node != error and node.is_error)
        if node.child_count:
            pending.extend(reversed(node.children))
            continue
        first = first or node
        if node.type in _CLOSER and not node.is_missing:
            opened.append(node)
        elif node.type in _CLOSER.values():
            if not opened or _CLOSER[opened[-1].type] != node.type:
                return node, f"unexpected '{node.type}'"
            opened.pop()
    if opened:
        left = opened[-1]
        return left, f"missing '{_CLOSER[left.type]}' to close this '{left.type}'"
    if has_inner_errors:
        return None
    place = first or error
    words = parsed.text(place).split(maxsplit=1)
    return place, f"unexpected '{words[0][:_MAX_QUOTED_CHARS] if words else 'end of code'}'"


def _quoted_kind(missing: Node) -> str:
    """`')'` for a token; a word such as `identifier` for a named node."""
    if not missing.is_named and "token" not in missing.type:
        return f"'{missing.type}'"
    return "identifier" if "identifier" in missing.type else missing.type.strip("_")


def _error_at(node: Node, rows: list[bytes], message: str) -> dict[str, object]:
    row, column = node.start_point
    before = rows[row][:column] if row < len(rows) else b""
    return _error(row + 1, len(before.decode("utf-8", "replace")) + 1, message)
