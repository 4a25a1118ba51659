"""Fill-in-the-middle (FIM) prompts: writing and parsing the format of each model family. Pure.

Context from other files goes to the start of the prefix, as comments (see the `comment` filter).
Some families have separators for whole files, but only together with paths and a repository name;
comments work for all of them, and for a model not trained on repositories, such as the demo model.

Clients that know only a model's name write the prompt themselves, often in another family's
format: `parse_fim` takes it apart, so that it can be rewritten for the model that answers.
Sentinels inside the user's code are passed on unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cato.workflows.fim_families import FAMILIES, fim_family

PREFIX_SHARE = 3 / 4
"""The prefix's share of a budget that is too small: code before the cursor says more."""

LEFT_OUT = "\n...\n"
"""Marks the text that `fit_prompt` cut out."""


def render_fim(family: str, prefix: str, suffix: str, context: str = "") -> str:
    """The prompt after which the model writes the middle; raise `UnknownNameError`."""
    form = fim_family(family)
    if context and form.takes_context:
        prefix = f"{context}{'' if context.endswith(chr(10)) else chr(10)}{prefix}"
    if not form.has_suffix:
        return prefix
    first, second = (suffix, prefix) if form.suffix_first else (prefix, suffix)
    return f"{form.begin}{first}{form.hole}{second}{form.end}"


@dataclass(frozen=True, slots=True)
class FimParts:
    """A parsed prompt; `context` is text of other files, `path` that of its own file.

    `families` are the families with this format.
    """

    prefix: str
    suffix: str
    context: str
    path: str
    families: frozenset[str]


_FORMS: dict[tuple[str, str, str], set[str]] = {}
for _family in FAMILIES.values():
    if _family.has_suffix:
        _FORMS.setdefault((_family.begin, _family.hole, _family.end), set()).add(_family.name)

_BEGIN_OF_TEXT = re.compile(r"\A\s*(?:<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>)")
_REPOSITORY = re.compile(r"(?:<\|repo_name\|>|<repo_name>|<reponame>)[^\n<]*\n?")
# These mark files in the prompts of their families only; elsewhere they are code.
_FILE_MARKS = {
    "qwen": r"<\|file_sep\|>",
    "demo": r"<\|file_sep\|>",
    "starcoder": r"<file_sep>|<filename>",
    "codegemma": r"<\|file_separator\|>",
    "codestral": r"^\+{5} ",
    "glm": r"(?:###REFERENCE:\s*)?###PATH:",
}
_GLM_SETTINGS = re.compile(r"^(?:<\|user\|>|###LANGUAGE:[^\n]*|###MODE:[^\n]*)\n", re.MULTILINE)
# Texts that may stand before the first sentinel of a family without an end mark, and after an end
# mark; both without the white space around them.
_BEFORE_BEGIN = ("", "<s>")
_AFTER_END = ("", "<|assistant|>")


def parse_fim(prompt: str) -> FimParts | None:
    """The parts of a fill-in-the-middle prompt of any known family; None for other text.

    The last sentinel must end the prompt: elsewhere it is part of the code. In families without an
    end mark, the first sentinel must begin the prompt instead.
    """
    for (begin, hole, end), families in _FORMS.items():
        start = prompt.find(begin)
        middle = prompt.find(hole, start + len(begin)) if start >= 0 else -1
        if middle < 0:
            continue
        before, stop = prompt[:start], prompt.rfind(end) if end else len(prompt)
        if stop < middle + len(hole) or not _is_bounded(before, end, prompt[stop + len(end) :]):
            continue
        first, second = prompt[start + len(begin) : middle], prompt[middle + len(hole) : stop]
        is_swapped = any(FAMILIES[name].suffix_first for name in families)
        prefix, suffix = (second, first) if is_swapped else (first, second)
        context, path, prefix = _files(before, prefix, families)
        return FimParts(prefix, suffix, context, path, frozenset(families))
    return None


def _is_bounded(before: str, end: str, after: str) -> bool:
    """Whether the sentinels between these texts form a prompt, and are no code about sentinels."""
    # Not a regular expression: `\s*` before `\Z` takes quadratic time, and clients write this text.
    return after.strip() in _AFTER_END and (bool(end) or before.strip() in _BEFORE_BEGIN)


def _files(before: str, prefix: str, families: set[str]) -> tuple[str, str, str]:
    """Other files' text, the path of the prompt's own file, and the prefix without either.

    A mark in the prefix counts only if the prefix starts with one, and stands at a line's start:
    the rest is the user's code.
    """
    marks = sorted({_FILE_MARKS[name] for name in families if name in _FILE_MARKS})
    before = _GLM_SETTINGS.sub("", before) if "glm" in families else before
    others = _split(_REPOSITORY.sub("", _BEGIN_OF_TEXT.sub("", before)), marks)
    path = ""
    repository = _REPOSITORY.match(prefix)
    files = prefix[repository.end() :] if repository else prefix
    if marks and re.match("|".join(marks), files):  # the files follow the first sentinel
        *more, own = _split(files, [f"^(?:{mark})" for mark in marks])
        path, _, prefix = own.partition("\n")
        others += more
    elif len(others) > 1 and "\n" not in others[-1].strip():
        path = others.pop()
    context = "\n\n".join(text.strip("\n") for text in others if text.strip())
    return context, path.strip(), prefix


def _split(text: str, marks: list[str]) -> list[str]:
    return re.split("|".join(marks), text, flags=re.MULTILINE) if marks else [text]


def fit_fim(prefix: str, suffix: str, context: str, budget_chars: int) -> tuple[str, str, str]:
    """Prefix, suffix and context cut to `budget_chars` together, including the newline between.

    The context is cut first, from its end. Then the suffix keeps its start and the prefix its end
    in a ratio of 1 : 3; what one does not need goes to the other. Cuts are between lines where a
    whole line fits.
    """
    budget_chars = max(0, budget_chars)
    spare = budget_chars - len(prefix) - len(suffix)
    if spare >= 0:
        return prefix, suffix, _head(context, spare - 1)
    suffix_share = budget_chars - int(budget_chars * PREFIX_SHARE)
    suffix_chars = min(len(suffix), max(suffix_share, budget_chars - len(prefix)))
    suffix = _head(suffix, suffix_chars)
    return _tail(prefix, budget_chars - len(suffix)), suffix, ""


def fit_prompt(text: str, budget_chars: int) -> str:
    """Any text cut to `budget_chars`: its head and tail with `LEFT_OUT` between.

    In code and logs the middle says least: the head has imports and signatures, the tail the
    latest text.
    """
    budget_chars = max(0, budget_chars)
    if len(text) <= budget_chars:
        return text
    room = budget_chars - len(LEFT_OUT)
    if room < 2:
        return text[:budget_chars]
    head = _head(text, room // 2).removesuffix("\n")
    return head + LEFT_OUT + _tail(text, room - len(head))


def _head(text: str, chars: int) -> str:
    """At most `chars` from the start, in whole lines if one fits."""
    if len(text) <= chars:
        return text
    if chars <= 0:
        return ""
    end = text.rfind("\n", 0, chars) + 1
    return text[: end or chars]


def _tail(text: str, chars: int) -> str:
    """At most `chars` from the end, in whole lines if one fits."""
    if len(text) <= chars:
        return text
    if chars <= 0:
        return ""
    start = len(text) - chars
    line = text.find("\n", start - 1) + 1
    return text[line if 0 < line < len(text) else start :]
