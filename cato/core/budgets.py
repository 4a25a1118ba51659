"""Splitting an SLO over the nodes of a DAG in proportion to their expected latency.

CATO (2025), Profiler: with baseline latencies 5, 15, 5 s and an SLA of 50 s the nodes get 10, 30,
10 s. For a DAG each node's factor is set by the longest path through it: the budgets of any path
then sum to at most the target, and to exactly the target on the critical path. Slack that a node
leaves unused is carried forward because the split is made again from what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=str)


def longest_before(
    order: Sequence[K], needs: Mapping[K, Sequence[K]], weight_s: Mapping[K, float]
) -> dict[K, float]:
    """Longest path, in seconds, that ends just before each node. `order` is topological."""
    before: dict[K, float] = {}
    for node in order:
        before[node] = max(
            (before[n] + weight_s[n] for n in needs[node] if n in before), default=0.0
        )
    return before


def longest_after(
    order: Sequence[K], needs: Mapping[K, Sequence[K]], weight_s: Mapping[K, float]
) -> dict[K, float]:
    """Longest path, in seconds, from just after each node to the end."""
    after: dict[K, float] = dict.fromkeys(order, 0.0)
    for node in reversed(order):
        for need in needs[node]:
            if need in after:
                after[need] = max(after[need], after[node] + weight_s[node])
    return after


def split_slack(
    order: Sequence[K],
    needs: Mapping[K, Sequence[K]],
    weight_s: Mapping[K, float],
    total_s: float,
) -> dict[K, float]:
    """Budget of each node, in seconds, out of `total_s`.

    Nodes of `needs` that are not in `order` (finished ones) count 0. If the longest path through a
    node has weight 0, because nothing is known, its nodes share evenly.
    """
    before = longest_before(order, needs, weight_s)
    after = longest_after(order, needs, weight_s)
    path_s = {n: before[n] + weight_s[n] + after[n] for n in order}
    unknown = [n for n in order if path_s[n] <= 0]
    budgets = {n: weight_s[n] * total_s / path_s[n] for n in order if path_s[n] > 0}
    if unknown:
        budgets |= split_slack(unknown, needs, dict.fromkeys(unknown, 1.0), total_s)
    return budgets
