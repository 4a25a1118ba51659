"""An upper bound on the tasks that any scheduler can serve in time: a linear program.

A search with hindsight shows only what some schedule reaches; no schedule can exceed this bound.
The program knows every arrival and length, may preempt, move and interrupt work at any instant at
no cost, and may serve fractions of tasks. A part of a task begins after the parts before it, each
as fast as alone, and ends early enough for those after it. Time is cut into pieces; in each of them

- a part advances no faster than alone, for as long as its span overlaps the piece;
- the work of all parts fits into the replicas' time: where batches run, each prompt token and each
  output token costs its increment of a step, and each step its own time, shared by its batch.
  Context is assumed to be the prompt alone, and a prompt's step to cost only its tokens;
- no part gets more tokens than there are steps, and a step has `max_running` tokens at most.

Omitted constraints (TPOT objectives, KV memory, refused work) can only make the bound higher.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.sim.tasks import SimTask

UPPER_BOUND = "upper bound"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Equal replicas of one pool."""

    profile: Profile
    replicas: int

    @property
    def has_batches(self) -> bool:
        return self.profile.max_running > 1

    @property
    def step_s(self) -> float:
        """Fixed cost of a decode step, without its tokens."""
        return 2 * self.profile.decode_step_s(1) - self.profile.decode_step_s(2)


@dataclass(frozen=True, slots=True)
class Part:
    """Work of a task on a pool: at least `alone_s`, `cost_s` of a replica's time, and `tokens` in
    steps that others may share. Possible from `begin_s` to `end_s`.
    """

    task: int
    pool: PoolName
    alone_s: float
    cost_s: float
    tokens: int
    begin_s: float
    end_s: float


# Length of time pieces where batches run. Cutting at every beginning and end, as without batches,
# gives 100,000 unknowns and takes minutes; longer pieces can only make the bound higher.
PIECE_S = 0.25


def attainable(tasks: Sequence[SimTask], pools: Mapping[PoolName, Capacity]) -> float:
    """Upper bound on the attained share of `tasks` on these pools, whose profiles are linear."""
    assert all(c.profile.is_linear for c in pools.values()), "the bound needs linear profiles"
    parts: list[Part] = []
    hopeless = 0
    for i, task in enumerate(tasks):
        of_task = parts_of(i, task, pools)
        if any(p.end_s - p.begin_s < p.alone_s * (1 - 1e-9) for p in of_task):
            hopeless += 1
        else:
            parts += of_task
    if not parts:
        return 0.0
    return _solve(parts, pools) / len(tasks)


def parts_of(index: int, task: SimTask, pools: Mapping[PoolName, Capacity]) -> list[Part]:
    """The work needed for the task to be in time, each part with its span; without batches one part
    for each call."""
    works: list[list[tuple[float, float, int]]] = []
    for i, node in enumerate(task.nodes):
        is_stream = task.is_stream(i)
        works.append(_work(node.prompt_tokens, node.output_tokens, is_stream, pools[node.pool]))
    took_s = [sum(alone for alone, _, _ in work) for work in works]
    begins_s: list[float] = []
    for node in task.nodes:
        ready_s = max((begins_s[n] + took_s[n] for n in node.needs), default=task.arrived_at_s)
        begins_s.append(ready_s + node.before_s)
    ends_s = [task.deadline_s] * len(task.nodes)
    for i in reversed(range(len(task.nodes))):
        for n in task.nodes[i].needs:
            ends_s[n] = min(ends_s[n], ends_s[i] - took_s[i] - task.nodes[i].before_s)
    parts = []
    for i, node in enumerate(task.nodes):
        before_s, after_s = 0.0, took_s[i]
        for alone_s, cost_s, tokens in works[i]:
            after_s -= alone_s
            begin_s, end_s = begins_s[i] + before_s, ends_s[i] - after_s
            parts.append(Part(index, node.pool, alone_s, cost_s, tokens, begin_s, end_s))
            before_s += alone_s
    return parts


def _work(
    prompt: int, output: int, is_stream: bool, capacity: Capacity
) -> list[tuple[float, float, int]]:
    """Time alone, cost, and step tokens of each part of a call, up to its event."""
    profile = capacity.profile
    if not capacity.has_batches:
        alone_s = profile.first_token_s(prompt) if is_stream else profile.service_s(prompt, output)
        return [(alone_s, alone_s, 0)]
    token_s = profile.prefill_s(2) - profile.prefill_s(1)
    parts = [(profile.prefill_s(prompt), prompt * token_s, 0)]
    if not is_stream and output > 1:
        own_s = profile.decode_step_s(2, prompt) - profile.decode_step_s(1, prompt)
        alone_s = (output - 1) * profile.decode_step_s(1, prompt)
        parts.append((alone_s, (output - 1) * own_s, output - 1))
    return parts


class _Rows:
    """Rows of a sparse matrix, with their upper bounds."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.limits: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], limit: float) -> None:
        row = len(self.limits)
        self.limits.append(limit)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)

    def matrix(self, columns: int) -> Any:
        """Sparse; scipy's stubs want a dense one of `linprog`."""
        shape = (len(self.limits), columns)
        return coo_array((self.values, (self.rows, self.columns)), shape=shape).tocsr()


def _cuts(parts: Sequence[Part], capacity: Capacity) -> list[float]:
    """The instants that separate the pieces of time."""
    if not capacity.has_batches:
        return sorted({t for p in parts for t in (p.begin_s, p.end_s)})
    begin_s, end_s = min(p.begin_s for p in parts), max(p.end_s for p in parts)
    pieces = max(1, ceil((end_s - begin_s) / PIECE_S))
    return [*(begin_s + (end_s - begin_s) * k / pieces for k in range(pieces)), end_s]


def _solve(parts: Sequence[Part], pools: Mapping[PoolName, Capacity]) -> float:
    """The largest sum of served fractions of tasks."""
    chosen = {t: i for i, t in enumerate(dict.fromkeys(p.task for p in parts))}
    at_most, equal = _Rows(), _Rows()
    upper = [1.0] * len(chosen)
    for name, capacity in pools.items():
        here = [p for p in parts if p.pool == name]
        cuts = _cuts(here, capacity)
        running: list[list[tuple[int, Part]]] = [[] for _ in cuts[1:]]
        for part in here:
            shares = []
            first = max(0, bisect_right(cuts, part.begin_s) - 1)
            for k in range(first, bisect_left(cuts, part.end_s)):
                column = len(upper)
                length_s = min(cuts[k + 1], part.end_s) - max(cuts[k], part.begin_s)
                upper.append(min(1.0, length_s / part.alone_s) if part.alone_s > 0 else 1.0)
                running[k].append((column, part))
                shares.append((column, 1.0))
            equal.add([*shares, (chosen[part.task], -1.0)], 0.0)
        for (begin_s, end_s), those in zip(pairwise(cuts), running, strict=True):
            costs = [(column, part.cost_s) for column, part in those]
            decoding = [(column, float(part.tokens)) for column, part in those if part.tokens]
            if decoding:
                steps = len(upper)
                upper.append(inf)
                costs.append((steps, capacity.step_s))
                for term in decoding:
                    at_most.add([term, (steps, -1.0)], 0.0)
                at_most.add([*decoding, (steps, -float(capacity.profile.max_running))], 0.0)
            at_most.add(costs, capacity.replicas * (end_s - begin_s))
    gain = np.zeros(len(upper))
    gain[: len(chosen)] = -1.0
    solved = linprog(
        gain,
        A_ub=at_most.matrix(len(upper)),
        b_ub=np.array(at_most.limits),
        A_eq=equal.matrix(len(upper)),
        b_eq=np.array(equal.limits),
        bounds=[(0.0, u) for u in upper],
        method="highs",
    )
    assert solved.status == 0, f"the program must have a solution: {solved.message}"
    assert solved.fun is not None, "solved above"
    return -solved.fun
