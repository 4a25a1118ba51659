"""Code cut into chunks at its definitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from cato.serve.nodes.definitions import Definition

# About 1,000 tokens: several definitions fit in one prompt, and one usually fits in a chunk.
MAX_CHUNK_CHARS = 4000
# A line that belongs to the definition below it: a comment, a decorator, an attribute.
_LEADING = ("#", "//", "/*", "*", "@", "[")


def chunks_of(source: str, definitions: Sequence[Definition]) -> list[str]:
    """`source` cut before and after its definitions; joined, the chunks are the source.

    Neighbours that fit in `MAX_CHUNK_CHARS` are merged. A longer piece is cut at its inner
    definitions, then at lines; a longer line is cut within.
    """
    lines = [f"{line}\n" for line in source.split("\n")]
    lines[-1] = lines[-1][:-1]
    pieces = _pieces(lines, 0, len(lines), _cuts(lines, definitions), 0)
    chunks: list[str] = []
    for piece in pieces:
        if chunks and len(chunks[-1]) + len(piece) <= MAX_CHUNK_CHARS:
            chunks[-1] += piece
        elif piece:
            chunks.append(piece)
    return chunks


def _cuts(lines: Sequence[str], definitions: Sequence[Definition]) -> list[list[int]]:
    """Rows to cut before, by nesting depth."""
    cuts: list[set[int]] = []
    leads = [0]  # from a definition's row to the first row that belongs to it
    for row, before in enumerate(lines, 1):
        leads.append(leads[-1] if before.lstrip().startswith(_LEADING) else row)
    for d in definitions:
        while len(cuts) <= d.depth:
            cuts.append(set())
        cuts[d.depth] |= {leads[d.start_row], d.end_row + 1}
    return [sorted(rows) for rows in cuts]


def _pieces(
    lines: Sequence[str], start: int, end: int, cuts: Sequence[Sequence[int]], depth: int
) -> Iterator[str]:
    whole = "".join(lines[start:end])
    if depth and len(whole) <= MAX_CHUNK_CHARS:
        yield whole
    elif depth < len(cuts):
        inside = [row for row in cuts[depth] if start < row < end]
        for a, b in pairwise([start, *inside, end]):
            yield from _pieces(lines, a, b, cuts, depth + 1)
    else:
        for line in lines[start:end]:
            for at in range(0, len(line), MAX_CHUNK_CHARS):
                yield line[at : at + MAX_CHUNK_CHARS]
