"""The scope at a cursor: the definitions around it, also where the code is incomplete."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tree_sitter import Node

from cato.serve.nodes.definitions import Definition
from cato.serve.nodes.languages import WORD, Parsed, as_bytes

_PYTHON_HEAD = re.compile(r"\s*(?:(?:async\s+)?def|class)\s+(\w+)(?!\w)")


def python_scope(
    source: str, cursor: int, parsed: Parsed, definitions: Sequence[Definition]
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


def brace_scope(
    source: str, cursor: int, parsed: Parsed, definitions: Sequence[Definition]
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
    return bool(WORD.fullmatch(word)) and word not in _NOT_A_NAME
