"""Supported programming languages and their tree-sitter grammars."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from tree_sitter import Language, Node, Parser

# About 60k tokens, more than a model writes in one answer. Ordinary code of this size is parsed
# in 20-30 ms, text of another language in 150 ms.
MAX_PARSED_CHARS = 256 * 1024
WORD = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class _Grammar:
    """Where a grammar is packaged, and the aliases of its language."""

    module: str
    aliases: tuple[str, ...]
    function: str = "language"


_GRAMMARS = {
    "python": _Grammar("tree_sitter_python", ("py", "python3")),
    "java": _Grammar("tree_sitter_java", ()),
    "javascript": _Grammar("tree_sitter_javascript", ("js", "jsx", "node")),
    "typescript": _Grammar("tree_sitter_typescript", ("ts",), "language_typescript"),
    "tsx": _Grammar("tree_sitter_typescript", ("typescriptreact",), "language_tsx"),
    "c": _Grammar("tree_sitter_c", ()),
    "cpp": _Grammar("tree_sitter_cpp", ("c++", "cxx", "cc")),
    "csharp": _Grammar("tree_sitter_c_sharp", ("c#", "cs", "c_sharp")),
    "go": _Grammar("tree_sitter_go", ("golang",)),
    "rust": _Grammar("tree_sitter_rust", ("rs",)),
}
LANGUAGES = tuple(_GRAMMARS)
_NAMES = {alias: name for name, g in _GRAMMARS.items() for alias in (name, *g.aliases)}


def language_named(name: str) -> str | None:
    """The language that `name` or one of its aliases means, in any case; None if unknown."""
    return _NAMES.get(name.strip().lower())


@cache
def grammar(language: str) -> Language:
    """The grammar of one of `LANGUAGES`, loaded on first use. Safe to share among threads."""
    where = _GRAMMARS[language]
    return Language(getattr(import_module(where.module), where.function)())


def as_bytes(text: str) -> bytes:
    """UTF-8 of any string; a lone surrogate becomes '?', so characters keep their count."""
    return text.encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A syntax tree and its UTF-8 source, which its byte offsets refer to."""

    root: Node
    data: bytes

    def text(self, node: Node) -> str:
        return self.data[node.start_byte : node.end_byte].decode("utf-8", "replace")


def parse(language: str, text: str) -> Parsed:
    """The syntax tree of `text`. May take minutes and cannot be interrupted: see `parsing.parsed`.

    Each call creates a parser, since parsers are not thread-safe. A newline is appended: the Go
    grammar reports its absence as an error.
    """
    data = as_bytes(text)
    data = data if data.endswith(b"\n") else data + b"\n"
    return Parsed(Parser(grammar(language)).parse(data).root_node, data)
