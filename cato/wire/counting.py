"""Estimates the number of tokens of a text from its kinds of characters.

English has 4 to 5 characters per token, code 3, digits less than one, since tokenizers of current
code models make each digit a token. A single figure of characters per token is off by a third for
agents' prompts.
"""

from __future__ import annotations

import string

from cato.core.wide import wide_tokens

# Tokens per character of each kind, plus tokens per run of letters, digits and punctuation.
# Fitted to Qwen's vocabulary (152,000 tokens) and Mistral's Tekken (131,000) on 470 pieces of up to
# 20,000 characters: Python, C++, JavaScript, JSON, Markdown, definitions and arguments of tools,
# `cat -n`, `grep -n`, diffs, tables, logs, listings, generated rows of code (2026-11-23). The
# logarithm is fitted with a free scale for each vocabulary: a session's first usage corrects the
# scale, so only the ratios between kinds of text have to be right. Mean error by kind of text:
# Tekken -4 % to +1 %, Qwen +2 % to +6 %; generated rows of identifiers and digits -17 % to +10 %.
_LETTER = 0.082
_CAPITAL = 0.066  # in addition to that of a letter
_WORD = 0.505
_DIGIT = 1.214
_NUMBER = 0.137
_PUNCTUATION = 0.225
_PUNCTUATION_RUN = 0.522
_SPACE = 0.324
_TWO_SPACES = 0.348  # for both: indentation takes few tokens
_TAB = 1.057
_NEWLINE = 0.123
# Vocabularies have tokens for long runs of spaces and of the marks that draw lines: Tekken's have
# up to 64 characters. These are the tokens of a run, and its length.
_LONG_GAP, _GAP_SPACES = 0.6, 32
_LINE, _LINE_MARKS = 0.25, 8
_DRAWS_LINES = tuple(bytes([mark]) * _LINE_MARKS for mark in b"-=*#_~.+/")
# Capitals after a small letter, per letter: up to 0.13 in code of long names, 0.2 in Base64. More
# than usual marks letters that form no words; Base64 takes 0.75 tokens per character.
_USUAL_HUMPS = 0.13
_HUMP = 7.0
# Tokens that a chat template adds to each message: markers, role and line break.
SECTION_TOKENS = 4.0


def _ones(marked: str) -> bytes:
    """A translation table that maps the bytes of `marked` to 1, and all others to 0."""
    return bytes(chr(byte) in marked for byte in range(256))


_LETTERS, _CAPITALS = _ones(string.ascii_letters), _ones(string.ascii_uppercase)
_DIGITS, _MARKS = _ones(string.digits), _ones(string.punctuation)

# A longer text is sampled in this many windows of this many bytes.
_WINDOWS = 32
_WINDOW_BYTES = 2048
SAMPLED_CHARS = _WINDOWS * _WINDOW_BYTES


def estimated_tokens(text: str) -> float:
    """Tokens of `text` in the vocabulary of a current code model; 0 for an empty text.

    Texts of more than 64 KiB are sampled in evenly spread windows.
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
    size, pairs = len(data), data.count(b"  ")
    letter_bits, capital_bits = _bits(data, _LETTERS), _bits(data, _CAPITALS)
    letters, words = _count_and_runs(letter_bits)
    digits, numbers = _count_and_runs(_bits(data, _DIGITS))
    marks, runs_of_marks = _count_and_runs(_bits(data, _MARKS))
    capitals = capital_bits.bit_count()
    humps = ((letter_bits ^ capital_bits) << 8 & capital_bits).bit_count()
    tokens = (
        _LETTER * letters
        + _CAPITAL * capitals
        + _WORD * words
        + _DIGIT * digits
        + _NUMBER * numbers
        + _PUNCTUATION * marks
        + _PUNCTUATION_RUN * runs_of_marks
        + _SPACE * (data.count(b" ") - 2 * pairs)
        + _TWO_SPACES * pairs
        + _TAB * data.count(b"\t")
        + _NEWLINE * data.count(b"\n")
        + _HUMP * max(0.0, humps - _USUAL_HUMPS * letters)
        + wide_tokens(data)[1]
        - _saved_in_runs(data)
    )
    return min(tokens, size)  # no token is shorter than a byte


def _saved_in_runs(data: bytes) -> float:
    """Tokens that long runs of one character take less than as many characters elsewhere."""
    gaps = data.count(b" " * _GAP_SPACES)
    lines = sum(map(data.count, _DRAWS_LINES))
    return gaps * (_TWO_SPACES * _GAP_SPACES / 2 - _LONG_GAP) + lines * (
        _PUNCTUATION * _LINE_MARKS - _LINE
    )


def _bits(data: bytes, ones: bytes) -> int:
    """A bit for each byte of `data`, set if the table `ones` marks it.

    Bits of one large integer are counted several times as fast as bytes.
    """
    return int.from_bytes(data.translate(ones), "little")


def _count_and_runs(bits: int) -> tuple[int, int]:
    """How many bytes are marked in `bits`, and in how many runs."""
    count = bits.bit_count()
    return count, (bits | bits << 8).bit_count() - count  # one bit more behind each run
