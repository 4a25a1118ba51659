"""Prompts that make the simulated engine answer at a wanted length.

The length of an answer must be unknown to CATO, as with a real model. A limit per request would
reveal it, because CATO knows limits, and would teach the Profiler that no answer ends by itself.
So the end is in the text: an answer ends when two given words appear, and the text is a function of
the prompt. Prompts with different first words are tried until one's answer ends at the wanted
token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from cato.core.errors import CatoError
from cato.engines.simulated import PromptStart, simulated_tokens

# Words of the simulated engine's vocabulary that no other of its words begins or ends with.
STOP_WORDS = (" value", " result", " total", " count", " index", " name", " key", " node")
# One in this many tokens is a given word. Only the search time depends on it.
VOCABULARY = 52
MAX_STOPS = 32
# Exact below 50 tokens; above within 2 %, because the search would take minutes. The simulator
# uses the length that was found.
TOLERANCE = 0.02
MAX_TRIES = 2_000_000

_FILLER = (
    "def load(path, items): value = parse(path) for index in items: result = value.get(index) "
    "if result is None: continue total = total + result.size return total "
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`output_tokens`: where the simulated engine ends its answer."""

    text: str
    output_tokens: int


def stops_for(mean_tokens: float) -> tuple[str, ...]:
    """Stop texts, one of which appears about every `mean_tokens` tokens: single words, or pairs."""
    singles = round(VOCABULARY / mean_tokens)
    if singles >= 1:
        return STOP_WORDS[: min(singles, len(STOP_WORDS))]
    pairs = [first + second for first in STOP_WORDS for second in STOP_WORDS]
    return tuple(pairs[: max(1, min(MAX_STOPS, round(VOCABULARY**2 / mean_tokens)))])


def prompt_for(
    characters: int, output_tokens: int, stops: Sequence[str], engine_seed: int, draw: random.Random
) -> Prompt:
    """A prompt of `chars` characters whose answer has about `output_tokens` tokens.

    Raise `CatoError` when none is found, as for an answer far longer than its class.
    """
    ends = frozenset(stops)
    slack = int(output_tokens * TOLERANCE)
    least, most = output_tokens - slack, output_tokens + slack
    filler = (_FILLER * (characters // len(_FILLER) + 1))[:characters]
    for _ in range(MAX_TRIES):
        # Short prompts must differ too; the number may be their only text.
        text = f"{draw.randrange(36**5):x} {filler}"[:characters]
        found = _end(simulated_tokens(engine_seed, text), ends, most)
        if least <= found <= most:
            return Prompt(text, found)
    raise CatoError(f"found no prompt whose simulated answer has {output_tokens} tokens")


def answer_end(
    head: str,
    end: str,
    choice_chars: int,
    output_tokens: int,
    stops: Sequence[str],
    engine_seed: int,
    draw: random.Random,
) -> tuple[str, int]:
    """Text between `head` and `end` that makes the answer about `output_tokens` tokens long, and
    the actual length. For prompts that share their beginnings."""
    ends = frozenset(stops)
    slack = int(output_tokens * TOLERANCE)
    least, most = output_tokens - slack, output_tokens + slack
    start = PromptStart(engine_seed, head)
    for _ in range(MAX_TRIES):
        choice = f"{draw.randrange(36**5):x}".rjust(choice_chars)
        found = _end(start.tokens(choice + end), ends, most)
        if least <= found <= most:
            return choice, found
    raise CatoError(f"found no prompt whose simulated answer has {output_tokens} tokens")


def _end(tokens: Iterator[str], stops: frozenset[str], most: int) -> int:
    """Index of the token that completes the first of `stops`; more than `most` if later."""
    last = ""
    for count, token in enumerate(islice(tokens, most), start=1):
        if token in stops or last + token in stops:
            return count
        last = token
    return most + 1
