"""Compiled searches over mappings.

All in one file on purpose: numba's disk cache notices changes to the file that contains a function,
but not to the functions that it calls.

Shared shapes: n requests, batches of at most `cap`; `execution_s[i, b - 1]` is the execution time
of request i in a batch of b, `latest_s[i, b - 1]` the latest start of its batch at which it still
meets its targets. `order` lists the requests, `sizes` cuts it into batches; entries of `sizes`
after the last batch are 0. `waited_s` is the sum over all requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
State: TypeAlias = NDArray[np.uint64]
F = TypeVar("F", bound=Callable[..., object])

# A 64-bit linear congruential generator: Knuth, MMIX. Numba's own generator is thread state, which
# a pure policy must not touch.
_MULTIPLIER = np.uint64(6364136223846793005)
_INCREMENT = np.uint64(1442695040888963407)
_SHIFT = np.uint64(11)
_UNIT = 2.0**-53

# Sums in a different order differ by rounding; a move must gain more than this, or moves could
# cycle.
_GAIN = 1e-12

# How `anneal` accepts a worse neighbour; see `SimulatedAnnealing`.
NEVER, SCALED, UNSCALED = 0, 1, 2


def compiled(function: F) -> F:
    """numba's `njit`, with a type; machine code is kept on disk between processes."""
    return cast(F, njit(cache=True)(function))


@compiled
def uniform(state: State) -> float:
    """The next draw from [0, 1)."""
    state[0] = state[0] * _MULTIPLIER + _INCREMENT
    return float(state[0] >> _SHIFT) * _UNIT


@compiled
def tables(facts: Floats, prefill: Floats, decode: Floats, cap: int) -> tuple[Floats, Floats]:
    """`execution_s` and `latest_s` from a row of facts for each request.

    A row: prompt tokens, expected tokens, waited, targets of E2E, TTFT and TPOT (seconds).
    """
    n = facts.shape[0]
    execution_s = np.empty((n, cap))
    latest_s = np.empty((n, cap))
    for i in range(n):
        prompt, output, waited, e2e, ttft, tpot = facts[i]
        steps = max(0.0, output - 1.0)
        context = prompt + output / 2
        for b in range(1, cap + 1):
            first = prefill[0] * b * prompt + prefill[1] * b + prefill[2] * prompt + prefill[3]
            step = decode[0] * b * context + decode[1] * b + decode[2] * context + decode[3]
            execution_s[i, b - 1] = first + steps * step
            latest_s[i, b - 1] = min(e2e - waited - (first + steps * step), ttft - waited - first)
            if (step if steps > 0 else 0.0) > tpot:
                latest_s[i, b - 1] = -np.inf
    return execution_s, latest_s


@compiled
def rated(met: int, latency_s: float) -> float:
    """G; if no request meets its targets, a negative number that grows as latencies shrink."""
    return met / latency_s if met > 0 else -latency_s


@compiled
def score(
    execution_s: Floats, latest_s: Floats, waited_s: float, order: Ints, sizes: Ints
) -> float:
    """`rated` of a mapping."""
    met, total_s, now_s, k = 0, waited_s, 0.0, 0
    for b in sizes:
        if b == 0:
            break
        longest_s = 0.0
        for _ in range(b):
            i = order[k]
            k += 1
            total_s += now_s + execution_s[i, b - 1]
            met += now_s <= latest_s[i, b - 1]
            longest_s = max(longest_s, execution_s[i, b - 1])
        now_s += longest_s
    return rated(met, total_s)


@compiled
def copy(source: Ints, target: Ints) -> None:
    """Replaces slice assignment, which numba takes seconds to compile (it checks shapes)."""
    for i in range(source.size):
        target[i] = source[i]


@compiled
def cut_evenly(n: int, size: int, sizes: Ints) -> None:
    """Full batches of `size`; the last one takes the rest."""
    sizes[:] = 0
    for j in range((n + size - 1) // size):
        sizes[j] = min(size, n - j * size)


@compiled
def ascending(values: Floats) -> Ints:
    """Indices by value, equals by index. Insertion sort: numba takes seconds to compile a sort."""
    order = np.empty(values.size, np.int64)
    for i in range(values.size):
        k = i
        while k > 0 and values[order[k - 1]] > values[i]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = i
    return order


@compiled
def exhaust(
    execution_s: Floats, latest_s: Floats, waited_s: float, cap: int
) -> tuple[float, Ints, Ints]:
    """The best of all mappings; the first one found of equals.

    Walks all sequences of batches; a batch is a bit set. Not recursive: numba 0.65 crashes when it
    calls a recursive function loaded from its cache.
    """
    n = execution_s.shape[0]
    batches, best = np.zeros(n, np.int64), np.zeros(n, np.int64)
    # By depth: remaining requests, and the totals of the batches ahead.
    left, met = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    now_s, total_s = np.zeros(n + 1), np.zeros(n + 1)
    left[0], total_s[0] = (1 << n) - 1, waited_s
    batches[0] = left[0]
    value = -np.inf
    depth = 0
    while depth >= 0:
        chosen = batches[depth]
        if chosen == 0:  # all subsets visited: back to the previous batch
            depth -= 1
            if depth >= 0:
                batches[depth] = (batches[depth] - 1) & left[depth]
            continue
        size, rest = 0, chosen
        while rest > 0:
            rest &= rest - 1
            size += 1
        if size > cap:
            batches[depth] = (chosen - 1) & left[depth]
            continue
        longest_s, sum_s, kept = 0.0, total_s[depth], met[depth]
        for i in range(n):
            if chosen >> i & 1:
                sum_s += now_s[depth] + execution_s[i, size - 1]
                kept += now_s[depth] <= latest_s[i, size - 1]
                longest_s = max(longest_s, execution_s[i, size - 1])
        remaining = left[depth] & ~chosen
        if remaining == 0:
            found = rated(kept, sum_s)
            if found > value:
                value = found
                for j in range(n):
                    best[j] = batches[j] if j <= depth else 0
            batches[depth] = (chosen - 1) & left[depth]
            continue
        depth += 1
        left[depth], met[depth] = remaining, kept
        now_s[depth], total_s[depth] = now_s[depth - 1] + longest_s, sum_s
        batches[depth] = remaining
    order, sizes = np.empty(n, np.int64), np.zeros(n, np.int64)
    k = 0
    for j in range(n):
        for i in range(n):
            if best[j] >> i & 1:
                order[k] = i
                k += 1
                sizes[j] += 1
    return value, order, sizes


@compiled
def anneal(
    execution_s: Floats, latest_s: Floats, waited_s: float, cap: int, seed: int, start: float,
    end: float, decay: float, iterations: int, heat: float, acceptance: int, keep_best: bool,
    reset_counter: bool, count_waits: bool,
) -> tuple[float, Ints, Ints]:  # fmt: skip
    """Simulated annealing of SLO-SA; the settings are those of `SimulatedAnnealing`."""
    n = execution_s.shape[0]
    state = np.full(1, np.uint64(seed))
    order = np.arange(n)
    sizes = np.zeros(n, np.int64)
    cut_evenly(n, cap, sizes)
    value = score(execution_s, latest_s, waited_s, order, sizes)
    shortest = ascending(execution_s[:, cap - 1].copy())
    other = score(execution_s, latest_s, waited_s, shortest, sizes)
    if other > value:
        order, value = shortest.copy(), other
    if not count_waits:
        value = _score_without_waits(execution_s, latest_s, waited_s, order, sizes)
    best, best_order, best_sizes = value, order.copy(), sizes.copy()
    next_order, next_sizes = order.copy(), sizes.copy()
    temperature, done = start, 0
    while temperature >= end:
        while done < iterations:
            done += 1
            copy(order, next_order)
            copy(sizes, next_sizes)
            if not _step(next_order, next_sizes, cap, state):
                continue
            if count_waits:
                found = score(execution_s, latest_s, waited_s, next_order, next_sizes)
            else:
                found = _score_without_waits(
                    execution_s, latest_s, waited_s, next_order, next_sizes
                )
            taken = found > value
            if not taken and acceptance == SCALED:
                unit = heat * abs(value) * temperature / start
                taken = uniform(state) < np.exp((found - value) / unit)
            elif not taken and acceptance == UNSCALED:
                taken = uniform(state) < np.exp((found - value) / temperature)
            if taken:
                copy(next_order, order)
                copy(next_sizes, sizes)
                value = found
                if value > best:
                    best = value
                    copy(order, best_order)
                    copy(sizes, best_sizes)
        if reset_counter:
            done = 0
        temperature *= decay
    if keep_best:
        order, sizes = best_order, best_sizes
    return score(execution_s, latest_s, waited_s, order, sizes), order, sizes


@compiled
def _score_without_waits(
    execution_s: Floats, latest_s: Floats, waited_s: float, order: Ints, sizes: Ints
) -> float:
    met, total_s, k = 0, waited_s, 0
    for b in sizes:
        for _ in range(b):
            total_s += execution_s[order[k], b - 1]
            met += latest_s[order[k], b - 1] >= 0
            k += 1
    return rated(met, total_s)


@compiled
def _step(order: Ints, sizes: Ints, cap: int, state: State) -> bool:
    """One random move of the paper, in place; False if the drawn move is not possible."""
    n = order.size
    kind = int(uniform(state) * 3)
    p = int(uniform(state) * n)
    if kind == 2:
        q = int(uniform(state) * n)
        order[p], order[q] = order[q], order[p]
        return p != q
    j, first = 0, 0  # the batch of p and its first position
    while first + sizes[j] <= p:
        first += sizes[j]
        j += 1
    if kind == 0:  # squeeze into the previous batch
        if j == 0 or sizes[j - 1] == cap:
            return False
        order[p], order[first] = order[first], order[p]
        sizes[j - 1] += 1
    else:  # delay to the next batch; from the last one to a new one
        last = first + sizes[j] - 1
        if j == n - 1 or sizes[j + 1] == cap or (sizes[j] == 1 and sizes[j + 1] == 0):
            return False
        order[p], order[last] = order[last], order[p]
        sizes[j + 1] += 1
    sizes[j] -= 1
    if sizes[j] == 0:  # close the gap
        for k in range(j, n - 1):
            sizes[k] = sizes[k + 1]
        sizes[n - 1] = 0
    return True


@compiled
def moore_hodgson(work_s: Floats, due_s: Floats) -> NDArray[np.bool_]:
    """Which jobs to keep on time so that their number is maximal (Moore 1968).

    In order of due time; whenever one would be late, the longest of those kept is dropped.
    """
    kept = np.zeros(work_s.size, np.bool_)
    now_s = 0.0
    for i in ascending(due_s):
        kept[i] = True
        now_s += work_s[i]
        if now_s > due_s[i]:
            longest = i
            for k in range(work_s.size):
                if kept[k] and work_s[k] > work_s[longest]:
                    longest = k
            kept[longest] = False
            now_s -= work_s[longest]
    return kept


@compiled
def smith(work_s: Floats, due_s: Floats, kept: NDArray[np.bool_]) -> Ints:
    """The order of least summed completion in which the kept jobs stay on time (Smith 1956).

    Built from the back: of the jobs that may end last, the longest does. Dropped jobs always may,
    so they run shortest first, each as early as the kept ones allow.
    """
    n = work_s.size
    order = np.empty(n, np.int64)
    placed = np.zeros(n, np.bool_)
    end_s = work_s.sum()
    for place in range(n - 1, -1, -1):
        chosen, latest = -1, -1
        for i in range(n):
            if placed[i]:
                continue
            if (not kept[i] or due_s[i] >= end_s) and (chosen < 0 or work_s[i] > work_s[chosen]):
                chosen = i
            if latest < 0 or due_s[i] > due_s[latest]:
                latest = i
        if chosen < 0:  # only through rounding: all kept jobs can be on time
            chosen = latest
        order[place] = chosen
        placed[chosen] = True
        end_s -= work_s[chosen]
    return order


@compiled
def moore_smith(
    execution_s: Floats, latest_s: Floats, waited_s: float, cap: int, seed: int, max_visits: int,
) -> tuple[float, Ints, Ints]:  # fmt: skip
    """Local search from the best of the constructed starts, with restarts after random kicks.

    `max_visits` bounds the work: requests visited while moves are evaluated, two for each
    evaluation, and the positions by which batches are shifted.
    """
    n = execution_s.shape[0]
    sizes = np.zeros(n, np.int64)
    cut_evenly(n, cap, sizes)
    order = np.arange(n)
    value = score(execution_s, latest_s, waited_s, order, sizes)
    trial = np.zeros(n, np.int64)
    for b in range(1, min(n, cap) + 1):
        work_s = execution_s[:, b - 1] / b
        due_s = latest_s[:, b - 1] + work_s
        cut_evenly(n, b, trial)
        for start in (smith(work_s, due_s, moore_hodgson(work_s, due_s)), ascending(work_s)):
            found = score(execution_s, latest_s, waited_s, start, trial)
            if found > value:
                value, order = found, start
                copy(trial, sizes)

    # Batches are rows of `rows`, of which `filled` counts; `places` lists the rows in execution
    # order.
    rows = np.zeros((n, cap), np.int64)
    filled = sizes.copy()
    places = np.arange(n)
    k = 0
    for j in range(n):
        for x in range(sizes[j]):
            rows[j, x] = order[k]
            k += 1
    state = np.full(1, np.uint64(seed))
    visits = np.zeros(1, np.int64)
    value = _descend(execution_s, latest_s, waited_s, cap, rows, filled, places, visits, max_visits)
    best_rows, best_filled, best_places = rows.copy(), filled.copy(), places.copy()
    best = value
    while n > 2 and visits[0] < max_visits:
        _kick(rows, filled, places, cap, state)
        value = _descend(
            execution_s, latest_s, waited_s, cap, rows, filled, places, visits, max_visits
        )
        if value > best:
            best = value
            copy(rows.ravel(), best_rows.ravel())
            copy(filled, best_filled)
            copy(places, best_places)
        else:
            copy(best_rows.ravel(), rows.ravel())
            copy(best_filled, filled)
            copy(best_places, places)

    result = np.empty(n, np.int64)
    sizes[:] = 0
    k = 0
    for j in range(_count(best_filled, best_places)):
        row = best_places[j]
        sizes[j] = best_filled[row]
        for x in range(best_filled[row]):
            result[k] = best_rows[row, x]
            k += 1
    return best, result, sizes


@compiled
def _count(filled: Ints, places: Ints) -> int:
    """The number of non-empty rows; empty rows stand last in `places`."""
    m = places.size
    while m > 0 and filled[places[m - 1]] == 0:
        m -= 1
    return m


@compiled
def _to_end(places: Ints, j: int) -> None:
    """Move the row at j behind all others."""
    row = places[j]
    for k in range(j, places.size - 1):
        places[k] = places[k + 1]
    places[places.size - 1] = row


@compiled
def _shift(places: Ints, source: int, target: int) -> None:
    """Move the row at `source` so that it stands at `target`."""
    row = places[source]
    if source < target:
        for k in range(source, target):
            places[k] = places[k + 1]
    else:
        for k in range(source, target, -1):
            places[k] = places[k - 1]
    places[target] = row


@compiled
def _from(
    execution_s: Floats, latest_s: Floats, rows: Ints, filled: Ints, places: Ints, before: Floats,
    first: int, last: int, visits: Ints,
) -> float:  # fmt: skip
    """`rated` of all batches; those before place `first` are taken from `before`."""
    now_s, met, total_s = before[first, 0], int(before[first, 1]), before[first, 2]
    for j in range(first, last):
        row = places[j]
        b = filled[row]
        longest_s = 0.0
        for x in range(b):
            i = rows[row, x]
            time_s = execution_s[i, b - 1]
            total_s += now_s + time_s
            met += now_s <= latest_s[i, b - 1]
            longest_s = max(longest_s, time_s)
        now_s += longest_s
        visits[0] += b
    visits[0] += 2
    return rated(met, total_s)


@compiled
def _remember(
    execution_s: Floats, latest_s: Floats, rows: Ints, filled: Ints, places: Ints, before: Floats,
    first: int, last: int,
) -> None:  # fmt: skip
    """Update `before`: start, requests met and summed latency ahead of each place."""
    for j in range(first, last):
        row = places[j]
        b = filled[row]
        longest_s = 0.0
        met = before[j, 1]
        total_s = before[j, 2]
        for x in range(b):
            i = rows[row, x]
            total_s += before[j, 0] + execution_s[i, b - 1]
            met += before[j, 0] <= latest_s[i, b - 1]
            longest_s = max(longest_s, execution_s[i, b - 1])
        before[j + 1, 0] = before[j, 0] + longest_s
        before[j + 1, 1] = met
        before[j + 1, 2] = total_s


@compiled
def _better(found: float, value: float) -> bool:
    return found > value + _GAIN * abs(value)


@compiled
def _take_out(rows: Ints, filled: Ints, row: int, x: int) -> int:
    """Take request x out of a batch; its last request gets that place."""
    i = rows[row, x]
    filled[row] -= 1
    rows[row, x] = rows[row, filled[row]]
    return int(i)


@compiled
def _put_back(rows: Ints, filled: Ints, row: int, x: int, i: int) -> None:
    """Undo `_take_out`."""
    rows[row, filled[row]] = rows[row, x]
    rows[row, x] = i
    filled[row] += 1


@compiled
def _join(
    execution_s: Floats, latest_s: Floats, rows: Ints, filled: Ints, places: Ints, before: Floats,
    a: int, x: int, c: int, m: int, value: float, visits: Ints,
) -> float:  # fmt: skip
    """Move request x of the batch at a into that at c; undone unless the value rises."""
    row, other = places[a], places[c]
    i = _take_out(rows, filled, row, x)
    rows[other, filled[other]] = i
    filled[other] += 1
    found = _from(execution_s, latest_s, rows, filled, places, before, min(a, c), m, visits)
    if _better(found, value):
        return found
    filled[other] -= 1
    _put_back(rows, filled, row, x, i)
    return value


@compiled
def _swap(
    execution_s: Floats, latest_s: Floats, rows: Ints, filled: Ints, places: Ints, before: Floats,
    a: int, x: int, c: int, m: int, value: float, visits: Ints,
) -> float:  # fmt: skip
    """Swap request x of the batch at a with one of that at c, if the value rises."""
    row, other = places[a], places[c]
    for y in range(filled[other]):
        rows[row, x], rows[other, y] = rows[other, y], rows[row, x]
        found = _from(execution_s, latest_s, rows, filled, places, before, min(a, c), m, visits)
        if _better(found, value):
            return found
        rows[row, x], rows[other, y] = rows[other, y], rows[row, x]
    return value


@compiled
def _stand_alone(
    execution_s: Floats, latest_s: Floats, rows: Ints, filled: Ints, places: Ints, before: Floats,
    a: int, x: int, m: int, value: float, visits: Ints,
) -> float:  # fmt: skip
    """Move request x of the batch at a into a new one at any place, if the value rises."""
    row, fresh = places[a], places[m]
    i = _take_out(rows, filled, row, x)
    filled[fresh] = 1
    rows[fresh, 0] = i
    for c in range(m, -1, -1):
        places[m if c == m else c + 1] = places[c]
        places[c] = fresh
        first = min(a, c)
        found = _from(execution_s, latest_s, rows, filled, places, before, first, m + 1, visits)
        if _better(found, value):
            _remember(execution_s, latest_s, rows, filled, places, before, first, m + 1)
            return found
    _shift(places, 0, m)
    filled[fresh] = 0
    _put_back(rows, filled, row, x, i)
    return value


@compiled
def _move_request(
    execution_s: Floats, latest_s: Floats, rows: Ints, filled: Ints, places: Ints, before: Floats,
    a: int, x: int, m: int, cap: int, value: float, visits: Ints,
) -> tuple[float, int]:  # fmt: skip
    """The first better move of request x of the batch at a: value and number of batches then."""
    row = places[a]
    for c in range(m):
        if c == a:
            continue
        found = value
        if filled[places[c]] < cap:
            found = _join(
                execution_s, latest_s, rows, filled, places, before, a, x, c, m, value, visits
            )
        if found == value and c > a:
            found = _swap(
                execution_s, latest_s, rows, filled, places, before, a, x, c, m, value, visits
            )
        if found != value:
            if filled[row] == 0:
                _to_end(places, a)
                m -= 1
            _remember(execution_s, latest_s, rows, filled, places, before, min(a, c), m)
            return found, m
    if filled[row] > 1:
        found = _stand_alone(
            execution_s, latest_s, rows, filled, places, before, a, x, m, value, visits
        )
        if found != value:
            return found, m + 1
    return value, m


@compiled
def _move_batches(
    execution_s: Floats, latest_s: Floats, rows: Ints, filled: Ints, places: Ints, before: Floats,
    m: int, value: float, visits: Ints, max_visits: int,
) -> float:  # fmt: skip
    """Move each batch to any place at which the value rises."""
    for a in range(m):
        for c in range(m):
            if c == a or visits[0] >= max_visits:
                continue
            _shift(places, a, c)
            visits[0] += abs(a - c)
            found = _from(execution_s, latest_s, rows, filled, places, before, min(a, c), m, visits)
            if _better(found, value):
                value = found
                _remember(execution_s, latest_s, rows, filled, places, before, min(a, c), m)
            else:
                _shift(places, c, a)
    return value


@compiled
def _descend(
    execution_s: Floats, latest_s: Floats, waited_s: float, cap: int, rows: Ints, filled: Ints,
    places: Ints, visits: Ints, max_visits: int,
) -> float:  # fmt: skip
    """Take the first better neighbour until there is none or `max_visits` is reached, in place.

    Neighbours: a request in another batch (squeeze and delay, over any distance), alone in a new
    batch, or swapped with one of another batch; a batch at another place.
    """
    before = np.zeros((places.size + 1, 3))
    before[0, 2] = waited_s
    m = _count(filled, places)
    _remember(execution_s, latest_s, rows, filled, places, before, 0, m)
    value = rated(int(before[m, 1]), before[m, 2])
    quiet = False
    while not quiet and visits[0] < max_visits:
        former = value
        a = 0
        while a < m and visits[0] < max_visits:
            row = places[a]
            x = 0
            while x < filled[row]:
                found, m = _move_request(
                    execution_s, latest_s, rows, filled, places, before, a, x, m, cap, value, visits
                )
                if found != value:
                    value = found
                    break
                x += 1
            a += 1
        value = _move_batches(
            execution_s, latest_s, rows, filled, places, before, m, value, visits, max_visits
        )
        quiet = value == former
    return value


@compiled
def _kick(rows: Ints, filled: Ints, places: Ints, cap: int, state: State) -> None:
    """Three random changes, so that the descent cannot undo them in one move.

    Each splits a batch, moves a request into another with room, or swaps two requests.
    """
    for _ in range(3):
        m = _count(filled, places)
        p = int(uniform(state) * m)
        a = places[p]
        c = places[int(uniform(state) * m)]
        x = int(uniform(state) * filled[a])
        kind = uniform(state)
        if kind < 0.3 and x > 0:  # requests from x on come after all others
            fresh = places[m]
            for y in range(x, filled[a]):
                rows[fresh, y - x] = rows[a, y]
            filled[fresh] = filled[a] - x
            filled[a] = x
        elif kind < 0.6 and a != c and filled[c] < cap:
            rows[c, filled[c]] = rows[a, x]
            filled[c] += 1
            filled[a] -= 1
            rows[a, x] = rows[a, filled[a]]
            if filled[a] == 0:
                _to_end(places, p)
        else:
            y = int(uniform(state) * filled[c])
            rows[a, x], rows[c, y] = rows[c, y], rows[a, x]
