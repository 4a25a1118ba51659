"""Words of messages: a number with its noun, and the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 seed`, `2 seeds`; `plural` where adding an s is wrong."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'parse'?)"`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
