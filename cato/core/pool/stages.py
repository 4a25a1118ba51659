"""Stages: the calls of one run that a pool has at the same time.

What follows a stage waits for its longest call, so policies may rank its calls together
(`Policies.knows_stages`). Only the pool's router knows all of them: each is offered by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cato.core.ids import InvocationId, RunId
from cato.core.pool.queue import Waiting
from cato.core.record import changed
from cato.core.snapshot import Invocation, Running, StageCall

Call = Waiting | Running


class Stages:
    """Keeps `Invocation.stage` of all queued and leased calls, if policies ask for it.

    A change counts from the next `settle` on.
    """

    __slots__ = ("_changed", "_is_on", "_runs")

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._runs: dict[RunId, dict[InvocationId, Call]] = {}
        self._changed: dict[RunId, None] = {}

    def turn(self, is_on: bool, calls: Iterable[Call]) -> None:
        """Policies have changed. `calls`: all that are queued or leased."""
        self._is_on = is_on
        self._runs.clear()
        self._changed.clear()
        for call in calls:
            if call.invocation.stage:
                call.invocation = changed(call.invocation, stage=())
            self.came(call)

    def came(self, call: Call) -> None:
        """The call was queued, leased or offered again."""
        if self._is_on:
            invocation = call.invocation
            calls = self._runs.setdefault(invocation.run_id, {})
            calls[invocation.id] = call
            if len(calls) > 1 or invocation.stage:
                self._changed[invocation.run_id] = None

    def went(self, invocation: Invocation) -> None:
        """The call is not queued any more, or not leased."""
        if self._is_on:
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
        if self._is_on and len(self._runs[call.invocation.run_id]) > 1:
            self._changed[call.invocation.run_id] = None

    def settle(self) -> None:
        """Tell the calls of runs that have changed; those that wait get a new rank."""
        if not self._changed:
            return
        runs, self._changed = self._changed, {}
        for run_id in runs:
            calls = self._runs[run_id].values()
            waited_for = _waited_for(calls)
            stage = _stage_of(waited_for)
            for call in waited_for:
                if call.invocation.stage != stage:
                    call.invocation = changed(call.invocation, stage=stage)
                    if isinstance(call, Waiting):
                        call.queue.forget_rank(call)

    def check_invariants(self, calls: Collection[Call]) -> None:
        """Assert that it knows exactly these, the queued and leased ones, and that they know it."""
        if not self._is_on:
            assert not self._runs
            assert not self._changed
            return
        assert all(self._runs.values()), "a run without calls is kept"
        assert self._changed.keys() <= self._runs.keys()
        known = {id: call for run in self._runs.values() for id, call in run.items()}
        assert known == {call.invocation.id: call for call in calls}
        for run_id, run in self._runs.items():
            if run_id not in self._changed:
                waited_for = _waited_for(run.values())
                stage = _stage_of(waited_for)
                assert all(c.invocation.stage == stage for c in waited_for)


def _waited_for(calls: Iterable[Call]) -> list[Call]:
    """Those whose last token something waits for: a stream's run is in time once it has begun."""
    invocations = ((c, c.invocation) for c in calls)
    return [c for c, i in invocations if not (i.until_first_token or i.begun_in_time)]


def _stage_of(calls: Collection[Call]) -> tuple[StageCall, ...]:
    if len(calls) < 2:
        return ()
    return tuple(
        c.invocation.as_stage_call(c.tokens if isinstance(c, Running) else 0) for c in calls
    )
