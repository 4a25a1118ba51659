"""Prefix hashes of prompts: a chain of block hashes. The text itself is never kept.

A prompt is cut into blocks of equal length in characters. The hash of a block covers everything
before it, so equal hashes mean equal prefixes. The first one covers the model and a salt, so that
prompts of different models, adapters or salted tenants share no hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b

from cato.core.snapshot import PREFIX_BLOCK_TOKENS

# 48 bits: a million blocks collide with a chance of 1 in 600. A collision costs time, not
# correctness.
HASH_BYTES = 6
_hash = partial(blake2b, digest_size=HASH_BYTES)


def block_chars(chars_per_token: float) -> int:
    """Characters of a block of about `PREFIX_BLOCK_TOKENS` tokens."""
    return max(1, int(PREFIX_BLOCK_TOKENS * chars_per_token))


def chain(
    text: str, size: int, model: str, salt: str = "", known: Sequence[int] = ()
) -> tuple[int, ...]:
    """The hashes of the full blocks of `text`, each of `size` characters.

    `known` are the hashes of the blocks before `text`; the result continues them.
    """
    if known:
        last = known[-1].to_bytes(HASH_BYTES)
    else:
        last = _hash(f"{model}\0{salt}".encode("utf-8", "replace")).digest()
    data = text.encode("utf-8", "replace")
    if len(data) == len(text):  # a slice of ASCII is a slice of its bytes
        blocks = [data[i : i + size] for i in range(0, len(data) - size + 1, size)]
    else:
        ends = range(0, len(text) - size + 1, size)
        blocks = [text[i : i + size].encode("utf-8", "replace") for i in ends]
    found = []
    for block in blocks:
        last = _hash(last + block).digest()
        found.append(last)
    return tuple(map(int.from_bytes, found))
