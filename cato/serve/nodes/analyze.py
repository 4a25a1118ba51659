"""The analyze node: definitions, imports, identifiers and chunks of code, and the cursor's scope.

Code from an editor is often incomplete. Definitions come from the syntax tree, which recovers from
small errors. The scope at the cursor, where code is incomplete, also uses indentation (Python) or
open braces (other languages).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping

from cato.core.errors import NodeError
from cato.core.workflow import AnalyzeSettings
from cato.serve.nodes import parsing
from cato.serve.nodes.chunks import chunks_of
from cato.serve.nodes.definitions import MAX_NESTING, Definition, by_role, definitions_of
from cato.serve.nodes.languages import MAX_PARSED_CHARS, WORD, Parsed, language_named, parse
from cato.serve.nodes.rendering import render
from cato.serve.nodes.scope import brace_scope, python_scope

MAX_IDENTIFIERS = 32
MAX_DEFINITIONS = 512


async def run(
    node: str, settings: AnalyzeSettings, names: Mapping[str, object]
) -> dict[str, object]:
    """`{"ok", "language", "definitions", "imports", "scope", "chunks", "identifiers"}`.

    `ok` means that the language is known and the source was parsed in time (`parsing.parsed`), not
    that the code is valid. Otherwise chunks are cut at lines and all words count as identifiers.
    """
    source, wanted, cursor = await asyncio.to_thread(_rendered, node, settings, names)
    language = language_named(wanted)
    if language is not None and len(source) <= MAX_PARSED_CHARS:
        found = await parsing.parsed("analyze", source, language=language, cursor=cursor)
        if found is not None:
            return found
    return await asyncio.to_thread(unparsed, source, language or wanted)


def _rendered(
    node: str, settings: AnalyzeSettings, names: Mapping[str, object]
) -> tuple[str, str, int]:
    source = render(node, settings.source, names)
    wanted = render(node, settings.language, names).strip().lower()
    return source, wanted, _cursor(node, settings, names, len(source))


def unparsed(source: str, language: str) -> dict[str, object]:
    """The result for text that was not parsed, in time linear in its length."""
    return {
        "ok": False,
        "language": language,
        "definitions": [],
        "imports": [],
        "scope": [],
        "chunks": chunks_of(source, []),
        "identifiers": _most_frequent(m[0] for m in WORD.finditer(source)),
    }


def analyzed(source: str, language: str, cursor: int) -> dict[str, object]:
    """The result from the syntax tree; `language` is one of `LANGUAGES`. Not limited in time."""
    parsed = parse(language, source)
    found = by_role(parsed.root)
    definitions = list(definitions_of(parsed, found["definition"]))
    public = [d for d in definitions if not d.is_local and d.depth < MAX_NESTING]
    scope_at = python_scope if language == "python" else brace_scope
    return {
        "ok": True,
        "language": language,
        "definitions": [_described(d, parsed) for d in public[:MAX_DEFINITIONS]],
        "imports": [parsed.text(n).strip() for n in found["import"]],
        "scope": scope_at(source, cursor, parsed, definitions),
        "chunks": chunks_of(source, public),
        "identifiers": _most_frequent(parsed.text(n) for n in found["identifier"]),
    }


def _cursor(node: str, settings: AnalyzeSettings, names: Mapping[str, object], end: int) -> int:
    text = render(node, settings.cursor, names).strip() if settings.cursor else ""
    if not text:
        return end
    try:
        return min(max(int(text), 0), end)
    except ValueError as exc:
        problem = f"cursor must be a character offset or empty, not {text[:40]!r}"
        raise NodeError(node, problem) from exc


def _described(definition: Definition, parsed: Parsed) -> dict[str, object]:
    return {
        "kind": definition.kind,
        "name": definition.name,
        "start_line": definition.start_row + 1,
        "end_line": definition.end_row + 1,
        "text": parsed.data[definition.start : definition.end].decode("utf-8", "replace"),
    }


def _most_frequent(words: Iterator[str]) -> list[str]:
    """Most frequent first, ties in order of appearance."""
    return [word for word, _ in Counter(words).most_common(MAX_IDENTIFIERS)]
