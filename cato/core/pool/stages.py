"""Stages: the calls of one run that a pool has at the same time.

What follows a stage waits for its longest call, so policies may rank all of them by that one
(`Policies.stages`). Only the pool's router knows all of them: each is offered by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import ceil

from cato.core.ids import InvocationId, RunId
from cato.core.policies import StagePolicy
from cato.core.pool.queue import Waiting
from cato.core.record import changed
from cato.core.snapshot import Invocation, Running

Call = Waiting | Running


class Stages:
    """Keeps `Invocation.stage_tokens` of all queued and leased calls, while a policy asks for it.

    A change counts from the next `settle` on.
    """

    __slots__ = ("_changed", "_policy", "_runs")

    def __init__(self, policy: StagePolicy | None) -> None:
        self._policy = policy
        self._runs: dict[RunId, dict[InvocationId, Call]] = {}
        self._changed: dict[RunId, None] = {}

    def change_policy(self, policy: StagePolicy | None, calls: Iterable[Call]) -> None:
        """`calls`: all that are queued or leased."""
        self._policy = policy
        self._runs.clear()
        self._changed.clear()
        for call in calls:
            self.came(call)

    def came(self, call: Call) -> None:
        """The call was queued, leased or offered again."""
        if self._policy is not None:
            invocation = call.invocation
            calls = self._runs.setdefault(invocation.run_id, {})
            calls[invocation.id] = call
            if len(calls) > 1 or invocation.stage_tokens:
                self._changed[invocation.run_id] = None

    def went(self, invocation: Invocation) -> None:
        """The call is not queued any more, or not leased."""
        if self._policy is not None:
            run_id = invocation.run_id
            calls = self._runs[run_id]
            del calls[invocation.id]
            if calls:
                self._changed[run_id] = None
            else:  # a pool without a queue ranks nothing, so it may never settle
                del self._runs[run_id]
                self._changed.pop(run_id, None)

    def progressed(self, call: Running) -> None:
        """The call has more tokens than before."""
        if self._policy is not None and len(self._runs[call.invocation.run_id]) > 1:
            self._changed[call.invocation.run_id] = None

    def settle(self) -> None:
        """Tell the calls of runs that have changed; those that wait get a new rank."""
        if not self._changed:
            return
        runs, self._changed = self._changed, {}
        for run_id in runs:
            calls = self._runs[run_id].values()
            tokens = self._longest(calls)
            for call in calls:
                if call.invocation.stage_tokens != tokens:
                    call.invocation = changed(call.invocation, stage_tokens=tokens)
                    if isinstance(call, Waiting):
                        call.queue.forget_rank(call)

    def _longest(self, calls: Collection[Call]) -> int:
        policy = self._policy
        if policy is None or len(calls) < 2:
            return 0
        tokens = ((c.invocation, c.tokens if isinstance(c, Running) else 0) for c in calls)
        return ceil(max(policy.left_tokens(*call) for call in tokens))

    def check_invariants(self, calls: Collection[Call]) -> None:
        """Assert that it knows exactly these, the queued and leased ones, and that they know it."""
        if self._policy is None:
            assert not self._runs
            assert not self._changed
            return
        assert all(self._runs.values()), "a run without calls is kept"
        assert self._changed.keys() <= self._runs.keys()
        known = {id: call for run in self._runs.values() for id, call in run.items()}
        assert known == {call.invocation.id: call for call in calls}
        for run_id, run in self._runs.items():
            if run_id not in self._changed:
                assert {c.invocation.stage_tokens for c in run.values()} == {
                    self._longest(run.values())
                }
