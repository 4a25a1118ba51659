"""How many tokens a text has, estimated from the kinds of its characters.

English has 4 to 5 characters a token, code 3, digits less than one: the tokenizers of today's code
models write every digit as a token of its own. One figure of characters a token is wrong by a third
for what agents send.
"""

from __future__ import annotations

import string

# Tokens a character of each kind, and tokens more for each run of letters, digits and punctuation.
# Fitted by non-negative least squares of the relative error to Qwen's vocabulary (152,000 tokens)
# and Mistral's Tekken (131,000) on 657 pieces of up to 20,000 characters: Python, C++, JavaScript,
# JSON, YAML, Markdown, tables, logs, `grep -n` and `cat -n` (2026-11-23). Mean error by kind of
# text and vocabulary: -6 % to +5 %; 80 % of the pieces of any kind lie within -16 % and +12 %.
_LETTER = 0.114
_CAPITAL = 0.049  # beside that of a letter
_WORD = 0.353
_DIGIT = 0.965
_NUMBER = 0.624
_PUNCTUATION = 0.421
_PUNCTUATION_RUN = 0.181
_SPACE = 0.202
_TWO_SPACES = 0.22  # for both: indentation becomes few tokens
_TAB = 1.176
_NEWLINE = 0.64
_HIGH_BYTE = 0.437  # of UTF-8, beyond ASCII
# What a chat template adds to each message: marks, role and line break.
SECTION_TOKENS = 4.0

_LETTERS = string.ascii_letters.encode()
_CAPITALS = string.ascii_uppercase.encode()
_DIGITS = string.digits.encode()
_MARKS = string.punctuation.encode()
_ASCII = bytes(range(128))


def _only(kept: bytes) -> bytes:
    """A table that makes a space of every other byte: what is left are runs between spaces."""
    return bytes(byte if byte in kept else 32 for byte in range(256))


_ONLY_LETTERS, _ONLY_DIGITS, _ONLY_MARKS = map(_only, (_LETTERS, _DIGITS, _MARKS))

# A longer text is looked at in so many windows of so many bytes.
_WINDOWS = 32
_WINDOW_BYTES = 4096
SAMPLED_CHARS = _WINDOWS * _WINDOW_BYTES


def estimated_tokens(text: str) -> float:
    """Tokens of `text` in the vocabulary of a current code model; 0 for an empty one.

    Of more than 128 KiB a sample is counted: evenly spread windows.
    """
    data = text.encode("utf-8", "replace")
    size = _WINDOWS * _WINDOW_BYTES
    if len(data) <= size:
        return _tokens(data)
    stride = (len(data) - _WINDOW_BYTES) / (_WINDOWS - 1)
    starts = (int(i * stride) for i in range(_WINDOWS))
    sample = b"".join(data[start : start + _WINDOW_BYTES] for start in starts)
    return _tokens(sample) * len(data) / size


def _tokens(data: bytes) -> float:
    size = len(data)
    pairs = data.count(b"  ")
    tokens = (
        _LETTER * (size - len(data.translate(None, _LETTERS)))
        + _CAPITAL * (size - len(data.translate(None, _CAPITALS)))
        + _WORD * len(data.translate(_ONLY_LETTERS).split())
        + _DIGIT * (size - len(data.translate(None, _DIGITS)))
        + _NUMBER * len(data.translate(_ONLY_DIGITS).split())
        + _PUNCTUATION * (size - len(data.translate(None, _MARKS)))
        + _PUNCTUATION_RUN * len(data.translate(_ONLY_MARKS).split())
        + _SPACE * (data.count(b" ") - 2 * pairs)
        + _TWO_SPACES * pairs
        + _TAB * data.count(b"\t")
        + _NEWLINE * data.count(b"\n")
        + _HIGH_BYTE * len(data.translate(None, _ASCII))
    )
    return min(tokens, size)  # no token is shorter than a byte
