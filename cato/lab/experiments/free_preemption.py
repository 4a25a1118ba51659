"""What schedulers could gain by preemption if it cost nothing, on replicas that run one call.

The upper bound (`bounds.py`) also knows all lengths and arrivals. Here every replica may change its
call at any instant, at no cost. With believed lengths it runs the call whose chance falls most by
waiting for `WAIT_S`; with known lengths the one with the least headroom (Dertouzos and Mok,
"Multiprocessor online scheduling of hard-real-time tasks", 1989). Both are rules, not bounds. A
stream needs nothing after its first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from itertools import chain

from cato.core.ids import PoolName
from cato.core.length import LengthBelief, around
from cato.core.profile import Profile
from cato.lab.experiments.bounds import Capacity, Part, parts_of
from cato.sim.tasks import SimTask

FREE, FREE_KNOWN = "free preemption", "free preemption, known lengths"
WAIT_S = 0.5
# Replicas choose again that often, and whenever a call comes or ends.
QUANTUM_S = 0.01


@dataclass(slots=True, eq=False)
class _Call:
    """A call that can run. From `due_s` on, later calls of its task take their believed time."""

    part: Part
    node: int
    left_s: float
    due_s: float
    prompt_s: float
    token_s: float
    length: LengthBelief
    is_stream: bool

    def headroom_s(self, now_s: float) -> float:
        return self.part.end_s - now_s - self.left_s

    def chance(self, now_s: float) -> float:
        """That it is in time if it runs from `now_s` on."""
        done_s = self.part.alone_s - self.left_s
        slack_s = self.due_s - now_s - max(0.0, self.prompt_s - done_s)
        if self.is_stream:
            return float(slack_s >= 0)
        generated = max(0, int((done_s - self.prompt_s) / self.token_s))
        return self.length.chance_within(slack_s / self.token_s, generated)


def attained(
    tasks: Sequence[SimTask], pools: Mapping[PoolName, Capacity], *, knows_lengths: bool
) -> float:
    """The share of `tasks` in time on these pools."""
    assert not any(c.has_batches for c in pools.values()), "a replica runs one call"
    parts = [parts_of(i, task, pools) for i, task in enumerate(tasks)]
    missing = [[set(node.needs) for node in task.nodes] for task in tasks]
    ready: list[tuple[float, int, int]] = []
    for i, task in enumerate(tasks):
        for k, node in enumerate(task.nodes):
            if not node.needs:
                heappush(ready, (task.arrived_at_s + node.before_s, i, k))
    active: dict[PoolName, list[_Call]] = {name: [] for name in pools}
    now_s, met = 0.0, 0
    while ready or any(active.values()):
        if not any(active.values()):
            now_s = ready[0][0]
        while ready and ready[0][0] <= now_s:
            _, i, k = heappop(ready)
            part = parts[i][k]
            active[part.pool].append(_call(tasks[i], k, part, pools[part.pool].profile))
        running = list(
            chain.from_iterable(
                _chosen(active[name], pools[name].replicas, now_s, knows_lengths) for name in pools
            )
        )
        until_s = now_s + min(QUANTUM_S, min(call.left_s for call in running))
        if ready:
            until_s = min(until_s, ready[0][0])
        step_s, now_s = until_s - now_s, until_s
        for call in running:
            call.left_s -= step_s
            if call.left_s > 1e-9:
                continue
            i = call.part.task
            active[call.part.pool].remove(call)
            met += call.node == len(tasks[i].nodes) - 1 and now_s <= tasks[i].deadline_s + 1e-6
            for k, needs in enumerate(missing[i]):
                if call.node in needs:
                    needs.remove(call.node)
                    if not needs:
                        heappush(ready, (now_s + tasks[i].nodes[k].before_s, i, k))
    return met / len(tasks)


def _call(task: SimTask, index: int, part: Part, profile: Profile) -> _Call:
    node = task.nodes[index]
    return _Call(
        part,
        index,
        part.alone_s,
        task.deadline_s - node.downstream_s,
        profile.first_token_s(node.prompt_tokens),
        profile.decode_step_s(1, node.prompt_tokens + node.expected_tokens / 2),
        node.length or around(node.expected_tokens),
        task.is_stream(index),
    )


def _chosen(calls: list[_Call], replicas: int, now_s: float, knows_lengths: bool) -> list[_Call]:
    """Those that run next; calls that cannot be in time come last."""
    if len(calls) <= replicas:
        return calls

    def urgency(call: _Call) -> tuple[bool, float, float]:
        if knows_lengths:
            headroom_s = call.headroom_s(now_s)
            return headroom_s < -1e-9, headroom_s, call.due_s
        chance = call.chance(now_s)
        return chance <= 0, call.chance(now_s + WAIT_S) - chance, call.due_s

    return nsmallest(replicas, calls, key=urgency)
