"""The virtual-time fleet: pools with their orchestrators, replicas, and arriving tasks.

Decisions are made by the unchanged objects of `cato.core` and `cato.policies`; commands become
future events at the points where the live actors perform them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from cato.core.events import InvocationOffered
from cato.core.ids import InvocationId, PoolName
from cato.core.snapshot import Invocation
from cato.sim.calls import Call, CallsRun, TaskRun
from cato.sim.kernel import Alarms, Kernel
from cato.sim.pool import PoolSetup, Recorder, SimPool
from cato.sim.shared_pool import SharedPool, SharedSetup
from cato.sim.tasks import Outcome, SimTask
from cato.sim.workflow_runs import WorkflowRun
from cato.sim.workflow_tasks import WorkflowTask

__all__ = ["Fleet", "PoolSetup", "Recorder", "SimPool"]


class Fleet:
    """Pools and the tasks that run on them."""

    def __init__(
        self,
        setups: Sequence[PoolSetup | SharedSetup],
        recorder: Recorder | None = None,
        on_end: Callable[[Outcome], None] | None = None,
    ) -> None:
        """`on_end` is called for every task that ended, was refused, or lost its client.

        `pools` includes the lines of shared pools.
        """
        self.kernel = Kernel()
        self.alarms = Alarms(self.kernel)
        self.recorder = recorder
        self._on_end = on_end
        self.outcomes: list[Outcome] = []
        # In progress; `calls` are the waiting and running ones.
        self.runs: dict[str, TaskRun] = {}
        self.calls: dict[InvocationId, Call] = {}
        self.pools: dict[PoolName, SimPool] = {}
        self.shared: dict[PoolName, SharedPool] = {}
        alone = [s for s in setups if isinstance(s, PoolSetup)]
        for setup in alone:
            self.pools[setup.name] = SimPool(self, setup)
        for shared in (s for s in setups if isinstance(s, SharedSetup)):
            pool = self.shared[shared.name] = SharedPool(self, shared)
            self.pools |= {line.setup.name: line for line in pool.lines.values()}
        for setup in alone:
            for profile in setup.profiles:
                self.pools[setup.name].add_replica(profile)

    def run(self, tasks: Sequence[SimTask], until_s: float = inf) -> list[Outcome]:
        """Run `tasks` (in order of arrival); returns their outcomes, in order."""
        arrivals = iter(tasks)

        def arrive(task: SimTask) -> None:
            upcoming = next(arrivals, None)
            if upcoming is not None:
                self.kernel.at(upcoming.arrived_at_s, arrive, upcoming)
            self.begin(task)

        first = next(arrivals, None)
        if first is not None:
            self.kernel.at(first.arrived_at_s, arrive, first)
        self.kernel.run(until_s)
        return self.outcomes

    @property
    def unfinished(self) -> int:
        """Number of tasks that have arrived and neither ended nor failed."""
        return len(self.runs)

    def begin(self, task: SimTask) -> Outcome:
        """The task arrives now."""
        run: TaskRun = (
            WorkflowRun(self, task) if isinstance(task, WorkflowTask) else CallsRun(self, task)
        )
        self.outcomes.append(run.outcome)
        self.runs[task.id] = run
        run.begin()
        return run.outcome

    def leave(self, task_id: str) -> None:
        """The client of a task gives up: it ends unfinished. No-op when it has ended."""
        run = self.runs.get(task_id)
        if run is not None:
            run.leave()

    # Callbacks of runs and pools

    def offer(self, call: Call, invocation: Invocation) -> None:
        """A run makes a call."""
        self.calls[call.id] = call
        call.pool.handle(InvocationOffered(self.kernel.now_s, invocation))

    def offer_again(self, call: Call) -> None:
        """After the loss of a replica: a new attempt that continues where the stream broke off."""
        call.attempt += 1
        call.pool.handle(InvocationOffered(self.kernel.now_s, call.continued()))

    def refused(self, id: InvocationId, retry_after_s: float = 0.0) -> None:
        """No-op when the call has ended, or its task failed, before the router learned of it."""
        call = self.calls.pop(id, None)
        if call is not None:
            call.run.refused(call, retry_after_s)

    def end(self, run: TaskRun) -> None:
        """The task has ended, failed, or lost its client."""
        self.runs.pop(run.outcome.task.id, None)
        if self._on_end is not None:
            self._on_end(run.outcome)

    # Cost

    def utilization(self) -> float:
        """Busy replica time / provisioned replica time, over all pools."""
        now_s = self.kernel.now_s
        busy_s = provisioned_s = 0.0
        for pool in self.pools.values():
            busy, provisioned = pool.cost_s(now_s)
            busy_s += busy
            provisioned_s += provisioned
        return busy_s / provisioned_s if provisioned_s > 0 else 0.0
