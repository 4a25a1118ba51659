"""Runs of consecutive KV blocks: a tree of equal prefixes, and lines in order of eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


def matching(run: Sequence[int], hashes: Sequence[int], start: int, end: int) -> int:
    """How many of `run` equal `hashes` from `start` to `end`; the first one does.

    Equal hashes mean equal prefixes, so only ends of `run` are compared.
    """
    most = min(len(run), end - start)
    if run[most - 1] == hashes[start + most - 1]:
        return most
    equal, unequal = 1, most
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        if run[middle - 1] == hashes[start + middle - 1]:
            equal = middle
        else:
            unequal = middle
    return equal


@dataclass(eq=False, slots=True)
class Run:
    """Consecutive whole blocks that are held by the same requests, or by none.

    Runs form a tree: the runs that follow this one in different sequences are its `children`, by
    their first block.
    """

    hashes: list[int]
    parent: Run | None = None
    children: dict[int, Run] = field(default_factory=dict)
    holders: int = 0

    def beginning(self, blocks: int) -> Run:
        """Split off its first `blocks` as a new run; this run keeps the rest and its place."""
        if blocks == len(self.hashes):
            return self
        assert self.parent is not None, "the root has no blocks"
        first = Run(self.hashes[:blocks], self.parent, {}, self.holders)
        self.parent.children[first.hashes[0]] = first
        del self.hashes[:blocks]
        self.parent = first
        first.children[self.hashes[0]] = self
        return first

    def ending(self, blocks: int) -> Run:
        """Split off its last `blocks` as a new run; this run keeps the rest and its place."""
        if blocks == len(self.hashes):
            return self
        last = Run(self.hashes[-blocks:], self, self.children)
        for child in last.children.values():
            child.parent = last
        del self.hashes[-blocks:]
        self.children = {last.hashes[0]: last}
        return last

    def forget(self) -> None:
        """Remove it from the tree; it has no children."""
        assert self.parent is not None, "the root is never forgotten"
        del self.parent.children[self.hashes[0]]


@dataclass(slots=True)
class Line:
    """Runs without a running request in order of eviction, and their number of blocks."""

    runs: OrderedDict[Run, None] = field(default_factory=OrderedDict)
    blocks: int = 0

    def add(self, run: Run) -> None:
        self.runs[run] = None
        self.blocks += len(run.hashes)

    def lost(self, most: int) -> Iterator[Run]:
        """Evict the ends of runs until at most `most` blocks are left, and yield them."""
        while self.blocks > most:
            first = next(iter(self.runs))
            blocks = min(len(first.hashes), self.blocks - most)
            self.blocks -= blocks
            if blocks == len(first.hashes):
                del self.runs[first]
            yield first.ending(blocks)
