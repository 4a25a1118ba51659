"""Graph algorithms on a workflow's DAG, given as `needs`: node -> nodes it depends on. Pure.

Unknown names in `needs` are ignored; the loader reports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Needs = Mapping[str, Sequence[str]]


def topological_order(needs: Needs) -> list[str]:
    """The nodes in an order that respects `needs`, else as given; without nodes behind a cycle.

    Quadratic, which is fast enough for the at most 64 nodes of a workflow.
    """
    order: list[str] = []
    waiting = list(needs)
    while True:
        waits = set(waiting)
        ready = next((n for n in waiting if not waits.intersection(needs[n])), None)
        if ready is None:
            return order
        order.append(ready)
        waiting.remove(ready)


def cycles(needs: Needs) -> list[list[str]]:
    """Disjoint cycles, each as a path `[a, b, c]` in which a needs b, b needs c, c needs a."""
    found: list[list[str]] = []
    left = {n: list(below) for n, below in needs.items()}
    while True:
        settled = set(topological_order(left))
        left = {n: [m for m in below if m in left] for n, below in left.items() if n not in settled}
        if not left:
            return found
        # Each remaining node needs another remaining one, so this walk must return to itself.
        path = [next(iter(left))]
        while True:
            after = next(m for m in left[path[-1]] if m in left)
            if after in path:
                break
            path.append(after)
        cycle = path[path.index(after) :]
        found.append(cycle)
        left = {n: below for n, below in left.items() if n not in cycle}


def ancestors(needs: Needs) -> dict[str, frozenset[str]]:
    """For each node all nodes it depends on, directly or not; in a cycle also itself."""

    def above(id: str) -> frozenset[str]:
        seen: set[str] = set()
        todo = [n for n in needs[id] if n in needs]
        while todo:
            need = todo.pop()
            if need not in seen:
                seen.add(need)
                todo += [n for n in needs[need] if n in needs]
        return frozenset(seen)

    return {id: above(id) for id in needs}


def depth(needs: Needs) -> int:
    """Nodes on the longest chain; nodes behind a cycle do not count."""
    levels: dict[str, int] = {}
    for id in topological_order(needs):
        levels[id] = 1 + max((levels.get(n, 0) for n in needs[id]), default=0)
    return max(levels.values(), default=0)
