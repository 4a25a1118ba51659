"""What a fleet runs: tasks and their LLM calls.

A task runs as a `TaskRun`: either a DAG of calls (`CallsRun`) or a run of a workflow file
(`cato.sim.workflow_runs`). Pools see only its calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf, isnan
from typing import TYPE_CHECKING

from cato.core.commands import Dispatch
from cato.core.ids import InvocationId
from cato.core.pool.prefill import NOTHING_DUE
from cato.core.snapshot import Invocation
from cato.sim.steps import Sequence
from cato.sim.tasks import Outcome, SimNode, SimTask

if TYPE_CHECKING:
    from cato.sim.fleet import Fleet
    from cato.sim.pool import SimPool


@dataclass(slots=True, eq=False)
class Call:
    """An LLM call from its offer to its end. `index`: its node's, in a task of calls; `is_paced`:
    whether the pace of its stream is judged."""

    id: InvocationId
    run: TaskRun
    pool: SimPool
    node: SimNode
    offered_at_s: float
    waits_since_s: float
    index: int = 0
    is_paced: bool = False
    generated: int = 0  # in earlier attempts
    tokens: int = 0  # in all attempts, as last reported
    attempt: int = 1
    sent_at_s: float = 0.0
    began_at_s: float | None = None  # when its first token came

    def sent(self, command: Dispatch, now_s: float) -> Sequence:
        """Record the lease; returns the request for the engine."""
        node, run = self.node, self.run
        self.attempt, self.sent_at_s = command.attempt, now_s
        run.outcome.queue_s += now_s - self.waits_since_s
        target = NOTHING_DUE
        if self.pool.setup.prefill_step_s:
            asked = self.continued() if self.generated else run.invocation(self)
            target = asked.engine_target(now_s)
        return Sequence(
            self.id,
            node.prompt_tokens,
            node.output_tokens,
            command.priority,
            self.generated,
            node.blocks,
            run.outcome.task.session,
            self.pool.setup.policies.retain_s if node.calls_tool else 0.0,
            target,
        )

    def continued(self) -> Invocation:
        """The current attempt, after the tokens of earlier ones."""
        asked = self.run.invocation(self)
        return asked.continued(self.attempt, self.generated, self.began_at_s)

    def taken_back(self, now_s: float) -> None:
        """Back to the queue; tokens already sent count as generated."""
        self.generated = max(self.generated, self.tokens)
        self.waits_since_s = now_s

    def first_token(self) -> None:
        """First token of this attempt; the user keeps the time of the first one ever."""
        self.tokens = max(self.tokens, self.generated + 1)
        if self.began_at_s is None:
            self.began_at_s = self.run.fleet.kernel.now_s
        self.run.first_token(self)

    def ended(self, cached_tokens: int, now_s: float) -> None:
        """The last token has come."""
        self.run.outcome.cached_tokens += cached_tokens
        self.run.served_s += now_s - self.sent_at_s


class TaskRun(ABC):
    """A task in progress; `served_s`: time that its calls spent on replicas."""

    __slots__ = ("fleet", "outcome", "served_s")

    def __init__(self, fleet: Fleet, outcome: Outcome) -> None:
        self.fleet = fleet
        self.outcome = outcome
        self.served_s = 0.0

    @abstractmethod
    def begin(self) -> None:
        """The task arrives now."""

    @abstractmethod
    def leave(self) -> None:
        """The client gives up: the task ends unfinished."""

    # Callbacks of pools

    @abstractmethod
    def invocation(self, call: Call) -> Invocation:
        """The call as first offered."""

    @abstractmethod
    def first_token(self, call: Call) -> None:
        """First token of the current attempt."""

    @abstractmethod
    def progressed(self, call: Call, tokens: int) -> None:
        """Tokens of the call so far; reported for paced calls only."""

    @abstractmethod
    def go_on(self, call: Call) -> None:
        """The call has ended and its pool has been told."""

    @abstractmethod
    def refused(self, call: Call, retry_after_s: float) -> None:
        """The pool refused the call; its client may ask again after that time."""


class CallsRun(TaskRun):
    """Calls that start when the calls they need have ended; one refusal fails the task."""

    __slots__ = ("_left", "_missing", "_open")

    def __init__(self, fleet: Fleet, task: SimTask) -> None:
        super().__init__(fleet, Outcome(task))
        self._missing = [len(n.needs) for n in task.nodes]
        self._left = len(task.nodes)
        self._open: dict[InvocationId, Call] = {}

    def begin(self) -> None:
        task, kernel = self.outcome.task, self.fleet.kernel
        if task.patience_s < inf:
            kernel.at(task.arrived_at_s + task.patience_s, self._lose_patience)
        for index, node in enumerate(task.nodes):
            if not node.needs:
                self._start(index)

    def _start(self, index: int) -> None:
        before_s = self.outcome.task.nodes[index].before_s
        if before_s > 0:
            kernel = self.fleet.kernel
            kernel.at(kernel.now_s + before_s, self._offer, index)
        else:
            self._offer(index)

    def _offer(self, index: int) -> None:
        task, fleet = self.outcome.task, self.fleet
        if task.id not in fleet.runs:
            return  # refused or cancelled meanwhile
        node, now_s = task.nodes[index], fleet.kernel.now_s
        invocation = task.invocation(index, now_s, self.served_s)
        id = invocation.id
        is_paced = self.outcome.is_streaming(index)
        call = Call(id, self, fleet.pools[node.pool], node, now_s, now_s, index, is_paced)
        self._open[id] = call
        fleet.offer(call, invocation)

    def invocation(self, call: Call) -> Invocation:
        return self.outcome.task.invocation(call.index, call.offered_at_s, self.served_s)

    def first_token(self, call: Call) -> None:
        outcome = self.outcome
        is_streamed = call.index == len(outcome.task.nodes) - 1
        if is_streamed and isnan(outcome.first_token_at_s):
            outcome.first_token_at_s = self.fleet.kernel.now_s
        elif call.is_paced:
            self.progressed(call, call.tokens)

    def progressed(self, call: Call, tokens: int) -> None:
        self.outcome.sent.append((self.fleet.kernel.now_s, tokens))

    def go_on(self, call: Call) -> None:
        del self._open[call.id]
        self._left -= 1
        if self._left == 0:
            self.outcome.ended_at_s = self.fleet.kernel.now_s
            self.fleet.end(self)
            return
        for index, node in enumerate(self.outcome.task.nodes):
            if call.index in node.needs:
                self._missing[index] -= 1
                if self._missing[index] == 0:
                    self._start(index)

    def refused(self, call: Call, retry_after_s: float) -> None:
        del self._open[call.id]
        self.outcome.refused, self.outcome.retry_after_s = True, retry_after_s
        self.outcome.lost_tokens = call.generated
        self._withdraw("its task failed")
        self.fleet.end(self)

    def _lose_patience(self) -> None:
        fleet = self.fleet
        if self.outcome.task.id in fleet.runs and isnan(self.outcome.first_token_at_s):
            self.leave()
            fleet.end(self)

    def leave(self) -> None:
        self._withdraw("the client left")

    def _withdraw(self, reason: str) -> None:
        """Withdraw its calls, waiting ones first, so that these do not take the batch slots freed
        by the running ones."""
        fleet = self.fleet
        fleet.runs.pop(self.outcome.task.id, None)
        calls, self._open = list(self._open.values()), {}
        for call in calls:
            fleet.calls.pop(call.id, None)
        for call in sorted(calls, key=lambda c: c.id in c.pool.leased):
            call.pool.cancel(call.id, call.attempt, reason)
