"""Extracts code from Markdown fences in a model's answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

# CommonMark: at most three spaces, then three or more of one mark; an info string after
# backticks has no backtick. Deeper indented fences are text, for example in a docstring.
_FENCE = re.compile(r"^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)$")


@dataclass(frozen=True, slots=True)
class Unfenced:
    """Code without its fences; `language` is the first word after the fence, or empty."""

    code: str
    language: str = ""


def unfenced(text: str) -> Unfenced:
    """The first fenced block of `text`; the rest if it is never closed; all if none is opened.

    A single fence with only blanks after it closes a block that the prompt had opened; the code is
    the text before it.
    """
    lines = text.split("\n")
    opened = next(((i, m) for i, line in enumerate(lines) if (m := _fence(line))), None)
    if opened is None:
        return Unfenced(text)
    at, fence = opened
    indent, mark, info = len(fence[1]), fence[2], fence[3].strip()
    body: list[str] = []
    for line in lines[at + 1 :]:
        closing = _fence(line)
        if closing and not closing[3].strip() and closing[2].startswith(mark):
            break
        body.append(line[min(indent, len(line) - len(line.lstrip(" "))) :])
    else:
        if not info and not "".join(body).strip():
            return Unfenced("\n".join(lines[:at]))
    return Unfenced("\n".join(body), info.split(maxsplit=1)[0].lower() if info else "")


def _fence(line: str) -> re.Match[str] | None:
    return _FENCE.match(line.removesuffix("\r")) if "```" in line or "~~~" in line else None
