"""One replica's estimated cache: runs of nodes that the same prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cato.core.block_runs import matching

# A cache of which the engine tells has as many nodes as the engine says; this bounds the memory. A
# node has 64 tokens only where text is as dense as its model's profile expects.
TOLD_CAPACITY = 1.5


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive nodes shared by the same prompts; `last` is the number of the latest of these."""

    nodes: list[int]
    last: int


@dataclass(slots=True, eq=False)
class ReplicaCache:
    """One replica's cache.

    `touched` maps a prompt's number to its runs; numbers count up within the pool. Along a prompt
    the runs' numbers never rise.
    """

    bit: int
    capacity_nodes: int
    runs: dict[int, Run] = field(default_factory=dict)  # by node
    touched: dict[int, list[Run]] = field(default_factory=dict)
    by_session: dict[str, int] = field(default_factory=dict)
    # The engine tells what is gone.
    is_told: bool = False

    @property
    def limit_nodes(self) -> int:
        return int(TOLD_CAPACITY * self.capacity_nodes) if self.is_told else self.capacity_nodes

    def path(self, prefix: Sequence[int], number: int) -> tuple[list[Run], list[int]]:
        """The runs of a prompt, which becomes the most recently used, and its new nodes."""
        path: list[Run] = []
        new: list[int] = []
        i = 0
        while i < len(prefix):
            run = self.runs.get(prefix[i])
            if run is None:
                end = i + 1
                # Deeper nodes may be known still: news of what is gone crosses with new prompts.
                while end < len(prefix) and prefix[end] not in self.runs:
                    end += 1
                self._extend(path, prefix[i:end], number)
                new += prefix[i:end]
                i = end
                continue
            shared = matching(run.nodes, prefix, i, len(prefix))
            if shared < len(run.nodes):
                run = self._beginning(run, shared)
            run.last = number
            path.append(run)
            i += shared
        return path, new

    def _extend(self, path: list[Run], nodes: Sequence[int], number: int) -> None:
        """Add new nodes to the run before them, if there is one."""
        if path:
            run = path[-1]
            run.nodes += nodes
        else:
            run = Run(list(nodes), number)
            path.append(run)
        self.runs.update(dict.fromkeys(nodes, run))

    def _beginning(self, run: Run, size: int) -> Run:
        """Split a run in two and return the first part; the shorter part becomes the new object."""
        nodes = run.nodes
        if 2 * size <= len(nodes):
            first = Run(nodes[:size], run.last)
            self.runs.update(dict.fromkeys(first.nodes, first))
            del nodes[:size]
            return first
        rest = Run(nodes[size:], run.last)
        self.runs.update(dict.fromkeys(rest.nodes, rest))
        del nodes[size:]
        own = self.touched.get(run.last)
        if own is not None and run in own:
            own[own.index(run)] = rest
        return run
