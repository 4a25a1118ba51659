"""Turns source text into training samples; pure, torch-free, every choice from the given `Random`.

The mix of cuts imitates where an editor asks: mostly from the cursor to the end of its line or
block. A random-span mix (Bavarian et al. 2022, arXiv:2207.14255) spends most of a small model's
capacity on middles of many lines that it cannot learn to write anyway.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

END_OF_TEXT = "<|endoftext|>"
FIM_PREFIX = "<|fim_prefix|>"
FIM_SUFFIX = "<|fim_suffix|>"
FIM_MIDDLE = "<|fim_middle|>"
FIM_PAD = "<|fim_pad|>"
REPO_NAME = "<|repo_name|>"
FILE_SEP = "<|file_sep|>"
CHAT_START = "<|im_start|>"
CHAT_END = "<|im_end|>"

# Names and roles as in Qwen2.5-Coder (arXiv:2409.12186), so that its FIM template works here too.
SPECIAL_TOKENS = (
    END_OF_TEXT,
    FIM_PREFIX,
    FIM_SUFFIX,
    FIM_MIDDLE,
    FIM_PAD,
    REPO_NAME,
    FILE_SEP,
    CHAT_START,
    CHAT_END,
)

MAX_BLOCK_LINES = 12
MAX_LINES_AFTER_CURSOR = 4
MAX_REQUEST_CHARS = 240
MAX_REPLY_CHARS = 1_400

# A place where a person pauses and wants help: behind a word, bracket or operator.
_CURSOR = re.compile(r"(?<=[\w\])}])(?=[^\w])|(?<=[\s(\[{.,=:])(?=\S)|(?<=\w_)(?=\w)")


@dataclass(frozen=True, slots=True)
class FimSample:
    """A document cut in three; the model sees prefix and suffix and writes the middle."""

    prefix: str
    middle: str
    suffix: str

    @property
    def document(self) -> str:
        return self.prefix + self.middle + self.suffix

    @property
    def prompt(self) -> str:
        return f"{FIM_PREFIX}{self.prefix}{FIM_SUFFIX}{self.suffix}{FIM_MIDDLE}"


@dataclass(frozen=True, slots=True)
class ChatPair:
    """A request and its answer, both taken from one documented function."""

    request: str
    reply: str


@dataclass(frozen=True, slots=True)
class _Line:
    """Offsets of one non-blank line: line start, first non-space character, end without newline."""

    start: int
    text_start: int
    end: int

    @property
    def indent_chars(self) -> int:
        return self.text_start - self.start


def cut_like_an_editor(document: str, rng: Random) -> FimSample:
    """One FIM sample of `document`; the three parts always join to it again.

    The middle is empty only if the document is blank. It ends at the end of a line (the newline
    belongs to the suffix) unless the cut lies within a line, so the end-of-text token that
    follows it teaches the model to stop where an editor wants a completion to stop.
    """
    lines = _non_blank_lines(document)
    if not lines:
        return FimSample(document, "", "")
    index = rng.randrange(len(lines))
    line = lines[index]
    kind = rng.random()
    if kind < 0.35:
        start, end = _cursor_in(document, line, rng), line.end
    elif kind < 0.50:
        start, end = line.text_start, line.end
    elif kind < 0.55:  # the cursor stands in column 0: the middle brings its own indentation
        start, end = line.start, line.end
    elif kind < 0.75:
        start, end = _block(lines, index, rng)
    elif kind < 0.90:
        last = min(len(lines) - 1, index + rng.randint(1, MAX_LINES_AFTER_CURSOR))
        start = line.text_start if rng.random() < 0.6 else _cursor_in(document, line, rng)
        end = lines[last].end
    elif kind < 0.97:
        start = _cursor_in(document, line, rng)
        end = rng.randint(start + 1, line.end)
    else:
        start = rng.randrange(len(document))
        end = rng.randint(start + 1, min(len(document), start + 400))
    return FimSample(document[:start], document[start:end], document[end:])


def without_suffix(sample: FimSample) -> FimSample:
    """The same cut with the cursor at the end of the file."""
    return replace(sample, suffix="")


def chat_pairs(source: str, rng: Random) -> Iterator[ChatPair]:
    """Requests made from docstrings: the only instructions in a standard library.

    Functions without a docstring, or too long for the window, give nothing. Unparsable source
    gives nothing either.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2:
            continue
        summary = " ".join(docstring.split("\n\n")[0].split())
        code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
        if not code.startswith("def ") or len(code) > MAX_REPLY_CHARS:
            continue
        if not 0 < len(summary) <= MAX_REQUEST_CHARS:
            continue
        text = node.body[0]
        bare = textwrap.dedent(
            "".join(
                lines[node.lineno - 1 : text.lineno - 1]
                + lines[text.end_lineno or text.lineno : node.end_lineno]
            )
        ).rstrip()
        if rng.random() < 0.15:
            yield ChatPair(f"Explain this code.\n\n```python\n{bare}\n```", summary)
            continue
        yield ChatPair(_phrased(summary, node.name, rng), code if rng.random() < 0.5 else bare)


def _phrased(summary: str, name: str, rng: Random) -> str:
    lowered = summary[0].lower() + summary[1:]
    return rng.choice(
        (
            summary,
            f"Write a Python function. {summary}",
            f"Write a function `{name}`. {summary}",
            f"Write a function `{name}` to {lowered}",
            f"Implement {name}: {lowered}",
            f"# {summary}",
        )
    )


def _non_blank_lines(document: str) -> list[_Line]:
    lines = []
    start = 0
    for text in document.split("\n"):
        stripped = text.lstrip(" \t")
        if stripped.strip():
            end = start + len(text)
            lines.append(_Line(start, end - len(stripped), end))
        start += len(text) + 1
    return lines


def _cursor_in(document: str, line: _Line, rng: Random) -> int:
    """An offset from the first character to the last, usually where a word ends or begins."""
    if rng.random() < 0.25:
        return rng.randrange(line.text_start, line.end)
    places = [m.start() for m in _CURSOR.finditer(document, line.text_start, line.end)]
    return rng.choice(places or [line.text_start])


def _block(lines: list[_Line], index: int, rng: Random) -> tuple[int, int]:
    """The rest of the indented block around a line, if short: a function body, a loop body."""
    first = lines[index]
    last = index
    while last + 1 < len(lines) and lines[last + 1].indent_chars >= first.indent_chars:
        last += 1
    if last - index >= MAX_BLOCK_LINES:
        last = index + rng.randint(0, MAX_LINES_AFTER_CURSOR)
    return first.text_start, lines[last].end
