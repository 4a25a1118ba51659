"""Parses seed arguments."""

from __future__ import annotations

import re

MAX_SEEDS = 100_000


def parse_seeds(text: str) -> tuple[int, ...]:
    """`5`: seeds 0 to 4; `100-129`: inclusive. Raise `ValueError`."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
    if match is None:
        raise ValueError("must be a number of seeds, or a range such as 100-129")
    first, last = (0, int(match[1]) - 1) if match[2] is None else (int(match[1]), int(match[2]))
    if not 0 < last - first + 1 <= MAX_SEEDS:
        raise ValueError(f"must name 1 to {MAX_SEEDS:,} seeds")
    return tuple(range(first, last + 1))
