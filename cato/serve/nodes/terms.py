"""How code and prose become terms that a search can find."""

from __future__ import annotations

import re
from functools import lru_cache

_MAX_TERM_CHARS = 64
_WORD = re.compile(r"\w+")
_PARTS = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Written without spaces: Chinese, Japanese, Korean.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]+")


def terms_of(text: str) -> list[str]:
    """The searchable terms of code or prose, in lower case.

    An identifier yields itself and its parts: `parseHTTPHeader` and `parse_http_header` share
    `parse`, `http` and `header`. Scripts without spaces yield pairs of characters.
    """
    return [term for word in _WORD.findall(text) for term in _terms_of_word(word)]


@lru_cache(maxsize=65_536)
def _terms_of_word(word: str) -> tuple[str, ...]:
    if not word.isascii() and _UNSPACED.search(word):
        pairs = [
            run[i : i + 2] for run in _UNSPACED.findall(word) for i in range(max(len(run) - 1, 1))
        ]
        rest = [t for w in _UNSPACED.sub(" ", word).split() for t in _terms_of_word(w)]
        return (*pairs, *rest)
    parts = [part for part in _PARTS.split(word) if part]
    if len(parts) != 1:
        parts = [word, *parts]
    return tuple(
        part.lower() for part in parts if 1 < len(part) <= _MAX_TERM_CHARS and part.strip("_")
    )
