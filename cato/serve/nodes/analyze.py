"""The analyze node: definitions, imports, identifiers and chunks of code, and the cursor's scope.

Code from an editor is often incomplete. Definitions come from the syntax tree, which recovers from
small errors. The scope at the cursor, where code is incomplete, also uses indentation (Python) or
open braces (other languages).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from tree_sitter import Node

from cato.core.errors import NodeError
from cato.core.workflow import AnalyzeSettings
from cato.serve.nodes import parsing
from cato.serve.nodes.languages import (
    MAX_PARSED_CHARS,
    Parsed,
    as_bytes,
    language_named,
    parse,
)
from cato.serve.nodes.rendering import render

# About 1,000 tokens: several definitions fit in one prompt, and one usually fits in a chunk.
MAX_CHUNK_CHARS = 4000
MAX_IDENTIFIERS = 32
MAX_DEFINITIONS = 512
# A definition's text includes its members: this bounds the result to a multiple of the source,
# however deeply namespaces nest.
_MAX_NESTING = 8

# Node types of all grammars in one table: a name shared by two grammars means the same in both.
_KINDS = {
    "function_definition": "function",
    "function_declaration": "function",
    "generator_function_declaration": "function",
    "function_item": "function",
    "function_signature": "function",
    "function_signature_item": "function",
    "local_function_statement": "function",
    "macro_definition": "macro",
    "method_declaration": "method",
    "method_definition": "method",
    "method_signature": "method",
    "abstract_method_signature": "method",
    "constructor_declaration": "method",
    "compact_constructor_declaration": "method",
    "destructor_declaration": "method",
    "class_definition": "class",
    "class_declaration": "class",
    "abstract_class_declaration": "class",
    "class_specifier": "class",
    "record_declaration": "class",
    "interface_declaration": "interface",
    "annotation_type_declaration": "interface",
    "trait_item": "interface",
    "struct_specifier": "struct",
    "struct_declaration": "struct",
    "struct_item": "struct",
    "union_specifier": "struct",
    "union_item": "struct",
    "impl_item": "impl",
    "enum_specifier": "enum",
    "enum_declaration": "enum",
    "enum_item": "enum",
    "type_definition": "type",
    "type_alias_declaration": "type",
    "alias_declaration": "type",
    "type_alias": "type",
    "type_spec": "type",
    "type_item": "type",
    "delegate_declaration": "type",
    "namespace_definition": "namespace",
    "namespace_declaration": "namespace",
    "file_scoped_namespace_declaration": "namespace",
    "internal_module": "namespace",
    "mod_item": "namespace",
    # Functions only if their value is one; see `_has_function_value`.
    "variable_declarator": "function",
    "field_definition": "function",
    "public_field_definition": "function",
}
_VALUE_HOLDERS = {"variable_declarator", "field_definition", "public_field_definition"}
_FUNCTION_VALUES = {"arrow_function", "function_expression", "generator_function"}
# `struct stat s;` mentions a type, `struct stat {...}` defines it.
_NEED_BODY = {"class_specifier", "struct_specifier", "union_specifier", "enum_specifier"}
_CLASS_LIKE = {"class", "interface", "struct", "impl", "enum"}
_CALLABLE = {"function", "method", "macro"}
# Nodes around a definition that belong to its text.
_WRAPPERS = {
    "decorated_definition",
    "export_statement",
    "template_declaration",
    "ambient_declaration",
    "lexical_declaration",
    "variable_declaration",
    "type_declaration",
}
_IMPORTS = {
    "import_statement",
    "import_from_statement",
    "future_import_statement",
    "import_declaration",
    "preproc_include",
    "using_directive",
    "using_declaration",
    "use_declaration",
    "extern_crate_declaration",
}
_WORD = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class _Definition:
    """A definition found in a tree. `start`, `end` and `name_at` are byte offsets.

    `depth` counts the enclosing definitions; `is_local`: one of them is a function.
    """

    kind: str
    name: str
    name_at: int
    start: int
    end: int
    start_row: int
    end_row: int
    depth: int = 0
    is_local: bool = False


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
        "identifiers": _most_frequent(m[0] for m in _WORD.finditer(source)),
    }


def analyzed(source: str, language: str, cursor: int) -> dict[str, object]:
    """The result from the syntax tree; `language` is one of `LANGUAGES`. Not limited in time."""
    parsed = parse(language, source)
    found = _by_role(parsed.root)
    definitions = list(_definitions(parsed, found["definition"]))
    public = [d for d in definitions if not d.is_local and d.depth < _MAX_NESTING]
    scope_at = _python_scope if language == "python" else _brace_scope
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


# Definitions


@cache
def _role(kind: str) -> str | None:
    """The role of a node type: a definition or its wrapper, an import, an identifier, or None.

    A compound name is not an identifier; its parts are.
    """
    if kind in _KINDS or kind in _WRAPPERS:
        return "definition"
    if kind in _IMPORTS:
        return "import"
    composed = ("qualified", "scoped", "nested", "dotted", "_")
    return "identifier" if kind.endswith("identifier") and not kind.startswith(composed) else None


def _by_role(root: Node) -> dict[str, list[Node]]:
    """The nodes of each role in source order, outer before inner.

    Walks the tree, about 1 us per node. tree-sitter's query would take time quadratic in the depth
    of the tree (20,000 nested brackets: 0.4 s, 200,000: 40 s) and hold the GIL.
    """
    found: dict[str, list[Node]] = {"definition": [], "import": [], "identifier": []}
    pending = [root]
    while pending:
        node = pending.pop()
        if (role := _role(node.type)) and node.end_byte > node.start_byte:
            found[role].append(node)
        if node.child_count:
            pending += reversed(node.children)
    return found


def _definitions(parsed: Parsed, nodes: Sequence[Node]) -> Iterator[_Definition]:
    """Definitions in source order, outer before inner; `nodes` include their wrappers."""
    around: list[_Definition] = []
    wrapped: dict[int, Node] = {}  # the outermost wrapper of a node, by the node's id
    for node in nodes:
        whole = wrapped.get(node.id, node)
        if node.type in _WRAPPERS:
            inside = node.named_children
            if sum(c.type in ("variable_declarator", "type_spec") for c in inside) <= 1:
                wrapped.update((c.id, whole) for c in inside)
            continue
        found = _definition(parsed, node, whole)
        if found is None:
            continue
        while around and around[-1].end <= node.start_byte:
            around.pop()
        outer = around[-1] if around else None
        if outer is not None:
            # A typedef of a struct is one definition, not two.
            if outer.kind == "type" and found.kind != "type":
                continue
            is_member = found.kind == "function" and outer.kind in _CLASS_LIKE
            found = replace(
                found,
                kind="method" if is_member else found.kind,
                depth=outer.depth + 1,
                is_local=outer.is_local or outer.kind in _CALLABLE,
            )
        around.append(found)
        yield found


def _definition(parsed: Parsed, node: Node, whole: Node) -> _Definition | None:
    """The definition at `node`, or None; `whole` is the node with its wrappers."""
    if node.type in _VALUE_HOLDERS and not _has_function_value(node):
        return None
    if node.type in _NEED_BODY and node.child_by_field_name("body") is None:
        return None
    name = _name_node(node)
    if name is None or name.start_byte == name.end_byte:
        return None
    end_row, end_column = whole.end_point
    return _Definition(
        kind=_KINDS[node.type],
        name=" ".join(parsed.text(name).split()),
        name_at=name.start_byte,
        start=whole.start_byte,
        end=whole.end_byte,
        start_row=whole.start_point.row,
        # A node that includes its newline ends in the previous row.
        end_row=end_row - 1 if end_column == 0 and end_row else end_row,
    )


def _has_function_value(node: Node) -> bool:
    value = node.child_by_field_name("value")
    return value is not None and value.type in _FUNCTION_VALUES


def _name_node(node: Node) -> Node | None:
    """The name node of a definition; in C and C++ it is inside nested declarators."""
    if node.type == "impl_item":
        return node.child_by_field_name("type")
    found = node.child_by_field_name("name") or node.child_by_field_name("property")
    inner = node.child_by_field_name("declarator")
    while found is None and inner is not None:
        deeper = inner.child_by_field_name("declarator")
        if deeper is None and inner.type == "reference_declarator":  # the one without a field
            deeper = inner.named_child(0) if inner.named_child_count else None
        if deeper is None:
            return inner
        inner = deeper
    return found


def _described(definition: _Definition, parsed: Parsed) -> dict[str, object]:
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


# Chunks

# A line that belongs to the definition below it: a comment, a decorator, an attribute.
_LEADING = ("#", "//", "/*", "*", "@", "[")


def chunks_of(source: str, definitions: Sequence[_Definition]) -> list[str]:
    """`source` cut before and after its definitions; joined, the chunks are the source.

    Neighbours that fit in `MAX_CHUNK_CHARS` are merged. A longer piece is cut at its inner
    definitions, then at lines; a longer line is cut within.
    """
    lines = [f"{line}\n" for line in source.split("\n")]
    lines[-1] = lines[-1][:-1]
    pieces = _pieces(lines, 0, len(lines), _cuts(lines, definitions), 0)
    chunks: list[str] = []
    for piece in pieces:
        if chunks and len(chunks[-1]) + len(piece) <= MAX_CHUNK_CHARS:
            chunks[-1] += piece
        elif piece:
            chunks.append(piece)
    return chunks


def _cuts(lines: Sequence[str], definitions: Sequence[_Definition]) -> list[list[int]]:
    """Rows to cut before, by nesting depth."""
    cuts: list[set[int]] = []
    leads = [0]  # from a definition's row to the first row that belongs to it
    for row, before in enumerate(lines, 1):
        leads.append(leads[-1] if before.lstrip().startswith(_LEADING) else row)
    for d in definitions:
        while len(cuts) <= d.depth:
            cuts.append(set())
        cuts[d.depth] |= {leads[d.start_row], d.end_row + 1}
    return [sorted(rows) for rows in cuts]


def _pieces(
    lines: Sequence[str], start: int, end: int, cuts: Sequence[Sequence[int]], depth: int
) -> Iterator[str]:
    whole = "".join(lines[start:end])
    if depth and len(whole) <= MAX_CHUNK_CHARS:
        yield whole
    elif depth < len(cuts):
        inside = [row for row in cuts[depth] if start < row < end]
        for a, b in pairwise([start, *inside, end]):
            yield from _pieces(lines, a, b, cuts, depth + 1)
    else:
        for line in lines[start:end]:
            for at in range(0, len(line), MAX_CHUNK_CHARS):
                yield line[at : at + MAX_CHUNK_CHARS]


# Scope

_PYTHON_HEAD = re.compile(r"\s*(?:(?:async\s+)?def|class)\s+(\w+)(?!\w)")


def _python_scope(
    source: str, cursor: int, parsed: Parsed, definitions: Sequence[_Definition]
) -> list[str]:
    """By indentation, upwards from the cursor, since only the next line tells where a body ends.

    The tree only tells whether a line begins in code or in a string.
    """
    before = source[:cursor].split("\n")
    rest, *after = source[cursor:].split("\n")
    here = before.pop()
    names: list[str] = []
    indent = _indent(here + rest)
    if not (here + rest).strip():
        following = next((line for line in after if line.strip()), "")
        indent = max(_indent(here), _indent(following))
    head = _PYTHON_HEAD.match(here)
    if head and _begins_in_code(parsed.root, len(before), here):
        names.append(head[1])
    for row in reversed(range(len(before))):
        line = before[row]
        text = line.lstrip()
        if indent == 0:
            break
        # A closing bracket or a comment may stand further left than the block it is in.
        if not text or text[0] in "#)]}" or _indent(line) >= indent:
            continue
        if not _begins_in_code(parsed.root, row, line):
            continue
        indent = _indent(line)
        if head := _PYTHON_HEAD.match(line):
            names.append(head[1])
    return names[::-1]


def _indent(line: str) -> int:
    wide = line.expandtabs(8)
    return len(wide) - len(wide.lstrip())


def _begins_in_code(root: Node, row: int, line: str) -> bool:
    column = len(as_bytes(line)) - len(as_bytes(line.lstrip()))
    leaf = root.descendant_for_point_range((row, column), (row, column))
    return leaf is None or "string" not in leaf.type or leaf.type == "string_start"


def _brace_scope(
    source: str, cursor: int, parsed: Parsed, definitions: Sequence[_Definition]
) -> list[str]:
    """Definitions around the cursor and, in invalid code, open braces before it."""
    at = len(as_bytes(source[:cursor]))
    is_closed = parsed.data[:at].endswith((b"}", b";"))
    found = {
        d.name_at: d.name
        for d in definitions
        if d.start < at and (at < d.end or (at == d.end and not is_closed))
    }
    if parsed.root.has_error:
        chars = offset = 0
        for start, name in _open_braces(source[:cursor]):
            offset += len(as_bytes(source[chars:start]))
            chars = start
            found.setdefault(offset, name)
    return [found[offset] for offset in sorted(found)]


# More than any real head has; bounds the work for text that is not code.
_MAX_HEAD_TOKENS = 200
# Strings and comments are one token each, so that braces inside them do not count.
_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)
    |"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])'|'(?=\w+\b(?!'))|'(?:\\.|[^'\\\n])*'?
    |`(?:\\.|[^`\\])*`?|[=-]>|[^\W\d]\w*|[{}();=:<>,]""",
    re.VERBOSE | re.DOTALL,
)
_TYPE_WORDS = {
    *("class", "interface", "struct", "enum", "union", "namespace", "module", "mod"),
    *("trait", "record", "impl"),
}
_NOT_A_NAME = {
    *("if", "for", "foreach", "while", "switch", "catch", "return", "new", "synchronized", "lock"),
    *("using", "fixed", "match", "else", "do", "try", "func", "function", "fn", "sizeof", "await"),
}


def _open_braces(text: str) -> list[tuple[int, str]]:
    """Offset and name of each definition with an open brace at the end of `text`."""
    opened: list[tuple[int, str] | None] = []
    head: deque[tuple[int, str]] = deque(maxlen=_MAX_HEAD_TOKENS)
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "{":
            opened.append(_name_in_head(_without_generics(head)))
            head.clear()
        elif token in ("}", ";"):
            if token == "}" and opened:
                opened.pop()
            head.clear()
        elif token[0] not in "/\"'`":
            head.append((match.start(), token))
    return [name for name in opened if name is not None]


def _without_generics(head: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """`head` without matching angle brackets and their content; a lone `<` is a comparison."""
    kept: list[tuple[int, str]] = []
    angles: list[int] = []
    for offset, token in head:
        if token == "<":
            angles.append(len(kept))
        elif token == ">" and angles:
            del kept[angles.pop() :]
            continue
        kept.append((offset, token))
    return kept


def _name_in_head(head: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
    """The name defined by the tokens before a brace; None for `if (x)` and the like."""
    words = [word for _, word in head]
    makes_function = "=>" in words or "function" in words
    depth, best = 0, None
    for i, (word, following) in enumerate(pairwise([*words, ""])):
        if depth == 0 and word in _TYPE_WORDS and _is_name(following):
            if word == "impl" and "for" in words[i:-1]:
                i = words.index("for", i)
            return head[i + 1] if _is_name(words[i + 1]) else None
        if depth == 0 and best is not None and word in (":", "->"):
            break  # constructor initialisers or a result type
        if depth == 0 and _is_name(word):
            if following == "=" and makes_function:
                return head[i]
            if following == "(":
                best = head[i]
        depth += (word == "(") - (word == ")")
    return best if depth == 0 else None  # a brace within parentheses belongs to an argument


def _is_name(word: str) -> bool:
    return bool(_WORD.fullmatch(word)) and word not in _NOT_A_NAME
