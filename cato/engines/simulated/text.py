"""Text of the simulated engine's answers."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Iterator

from cato.engines.simulated.asked import Asked

# Chance that an answer ends after a line: with the words below, ~100 tokens on average.
_END_CHANCE = 1 / 10
_HASH_RANGE = 1 << 32
_DIGEST_BYTES = 8
_WORDS = (
    *(" value", " item", " result", " total", " count", " index", " name", " key", " node"),
    *(" self", " return", " if", " else", " for", " in", " not", " and", " None", " True"),
    *(" =", " =", " ==", " +", " -", " *", "(", "(", ")", ")", "[", "]", ".", ".", ",", ",", ":"),
    *(" 0", " 1", " 2", ' "text"', "append", "get", "items", "size", "load", "parse", "check"),
    *("\n    ", "\n    ", "\n        ", "\n", "\n"),
)


def simulated_tokens(seed: int, prompt: str) -> Iterator[str]:
    """The endless continuation of `prompt`, token by token, as if answers never ended."""
    for token, _ in _tokens(seed, prompt):
        yield token


def simulated_seed(seed: int, model: str) -> int:
    """The seed of one of several models that share engines: differs by model, same on any host."""
    return seed + zlib.crc32(model.encode())


def simulated_text(seed: int, prompt: str, n: int) -> str:
    """The first `n` tokens after `prompt`.

    `simulated_text(s, p, n + m)` is `simulated_text(s, p, n)` followed by the first `m` tokens
    after `p` plus that.
    """
    return "".join(itertools.islice(simulated_tokens(seed, prompt), n))


def simulated_answer(seed: int, asked: Asked) -> tuple[list[str], str, str]:
    """All tokens of the answer, its finish reason, and the stop string at which it ended, if any.

    At least one token, perhaps an empty one.

    As in vLLM, a stop string cuts the text where it begins, so the tokens that spell it are
    empty or shortened.
    """
    pieces: list[str] = []
    text = ""
    longest_stop = max(map(len, asked.stop), default=0)
    for token, ends in _tokens(seed, asked.prompt.text):
        if ends and not asked.ignore_eos and len(pieces) >= asked.min_tokens:
            return pieces or [""], "stop", ""
        if len(pieces) == asked.max_tokens:
            return pieces, "length", ""
        pieces.append(token)
        text += token
        if longest_stop and len(pieces) > asked.min_tokens:
            window = max(0, len(text) - len(token) - longest_stop + 1)
            starts = [(text.find(stop, window), len(stop), stop) for stop in asked.stop]
            if found := [start for start in starts if start[0] >= 0]:
                at, length, stop = min(found)
                return _cut(pieces, at + (length if asked.include_stop else 0)), "stop", stop
    raise AssertionError("the token stream never ends")


class PromptStart:
    """A prefix of many prompts, hashed once."""

    def __init__(self, seed: int, text: str) -> None:
        self._context = hashlib.blake2b(
            f"{seed}:{text}".encode("utf-8", "replace"), digest_size=_DIGEST_BYTES
        )

    def tokens(self, rest: str) -> Iterator[str]:
        """`simulated_tokens` for the prompt that continues with `rest`, which is not empty."""
        context = self._context.copy()
        context.update(rest.encode("utf-8", "replace"))
        for token, _ in _tokens_after(context, rest):
            yield token


def _tokens(seed: int, prompt: str) -> Iterator[tuple[str, bool]]:
    data = f"{seed}:{prompt}".encode("utf-8", "replace")
    yield from _tokens_after(hashlib.blake2b(data, digest_size=_DIGEST_BYTES), prompt)


def _tokens_after(context: hashlib.blake2b, last: str) -> Iterator[tuple[str, bool]]:
    """Each token, and whether the model would have ended the answer before it."""
    while True:
        digest = context.copy().digest()
        word = _WORDS[int.from_bytes(digest[:4]) % len(_WORDS)]
        # Ends of answers depend on the text alone, so that a continuation ends at the same place.
        may_end = last.rstrip(" ").endswith("\n")
        ends = may_end and int.from_bytes(digest[4:]) < _END_CHANCE * _HASH_RANGE
        yield word, ends
        context.update(word.encode())
        last = word


def _cut(pieces: list[str], end: int) -> list[str]:
    """The same number of pieces, with the text cut after `end` characters."""
    starts = itertools.accumulate(map(len, pieces), initial=0)
    return [piece[: max(0, end - start)] for piece, start in zip(pieces, starts, strict=False)]
