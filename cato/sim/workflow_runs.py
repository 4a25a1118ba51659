"""Runs of workflow files in virtual time: `cato.core.runs.Run`, driven as the ingress drives it.

`WorkflowRun` performs the commands of a run as `cato.serve.executor` does. Abandoned and late calls
are withdrawn from their pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, assert_never

from cato.core.errors import ExpressionError
from cato.core.ids import InvocationId, NodeId, RunId
from cato.core.receipt import DEADLINE_EXCEEDED, LlmFacts
from cato.core.runs import (
    AbandonNode,
    FinishRun,
    NodeDone,
    NodeFailed,
    Run,
    RunCancelled,
    RunCommand,
    RunEvent,
    StartNode,
    StreamNode,
    TextSent,
)
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.core.workflow import TransformSettings
from cato.sim.calls import Call, TaskRun
from cato.sim.tasks import SimNode
from cato.sim.workflow_calls import Execution, ExecutionKey, NodeCall
from cato.sim.workflow_tasks import (
    TEXT,
    LlmWork,
    WorkflowOutcome,
    WorkflowTask,
    known_length,
    llm_settings,
    local_result,
)

if TYPE_CHECKING:
    from cato.sim.fleet import Fleet


class WorkflowRun(TaskRun):
    """A run of a workflow file in progress."""

    __slots__ = ("_deadline", "_open", "_run", "_streamed", "_task", "_with_text")

    outcome: WorkflowOutcome

    def __init__(self, fleet: Fleet, task: WorkflowTask) -> None:
        super().__init__(fleet, WorkflowOutcome(task))
        kind = task.kind
        self._task = task
        self._run = Run(
            RunId(task.id),
            kind.workflow,
            kind.slo,
            kind.inputs,
            kind.estimates,
            fleet.kernel.now_s,
            kind.next_share,
        )
        self._open: dict[ExecutionKey, Execution] = {}
        self._with_text: set[tuple[NodeId, int]] = set()
        self._streamed: tuple[NodeId, int] | None = None
        self._deadline = 0  # alarm id

    @property
    def _now_s(self) -> float:
        return self.fleet.kernel.now_s

    def begin(self) -> None:
        deadline_s = self._run.hard_deadline_s
        self._deadline = self.fleet.alarms.at(deadline_s, self._pass_deadline)
        self._perform(self._run.start(self._now_s))

    def leave(self) -> None:
        self._tell(RunCancelled(self._now_s, "the client left"))

    def _pass_deadline(self) -> None:
        reason = "the hard deadline passed"
        self._tell(RunCancelled(self._now_s, reason, DEADLINE_EXCEEDED))

    def _tell(self, event: RunEvent) -> None:
        self._perform(self._run.handle(event))

    def _perform(self, commands: Sequence[RunCommand]) -> None:
        left = {c.node for c in commands if isinstance(c, AbandonNode)}
        self._abandon([x for x in self._open.values() if x.command.node.id in left])
        for command in commands:
            match command:
                case StartNode():
                    if command.node.id not in left:  # else it ends before it begins
                        self._start_node(command)
                case StreamNode(node, round):
                    self._streamed = (node, round)
                    if self._streamed in self._with_text:
                        self._tell(TextSent(self._now_s))
                case AbandonNode():
                    pass  # handled above, all at once: see `_abandon`
                case FinishRun():
                    self._finish(command)
                case _:
                    assert_never(command)

    def _finish(self, finish: FinishRun) -> None:
        assert not self._open, f"{self._task.id} leaves {list(self._open)}"
        outcome, receipt = self.outcome, finish.receipt
        self.fleet.alarms.call_off(self._deadline)
        if receipt.ttft_s is not None:
            outcome.first_token_at_s = self._run.arrived_at_s + receipt.ttft_s
        if finish.status == "done":
            outcome.ended_at_s = self._now_s
            outcome.streamed_tokens = max(1, receipt.output_tokens)
        else:
            outcome.lost_tokens += sum(n.output_tokens for n in outcome.served)
        outcome.finish = finish
        self.fleet.end(self)

    # Nodes

    def _start_node(self, command: StartNode) -> None:
        execution, alarms, now_s = Execution(command), self.fleet.alarms, self._now_s
        self._open[execution.key] = execution
        if command.limit_s is not None:
            limit = alarms.at(now_s + command.limit_s, self._time_out, execution)
            execution.alarms.append(limit)
        work = self._task.kind.work[command.node.id]
        if isinstance(work, LlmWork):
            self._call(execution, work)
        elif work.takes_s > 0:
            execution.alarms.append(alarms.at(now_s + work.takes_s, self._local_done, execution))
        else:
            self.fleet.kernel.at(now_s, self._local_done, execution)

    def _local_done(self, execution: Execution) -> None:
        command, node = execution.command, execution.command.node
        if not self._settle(execution):
            return
        work = self._task.kind.work[node.id]
        assert not isinstance(work, LlmWork), f"{node.id} calls a model"
        if isinstance(node.settings, TransformSettings):
            self._emit(execution)
        is_ok = self._task.execution(node, command.round, command.item).is_ok
        self._done(execution, local_result(node, work, is_ok), None)

    def _done(
        self, execution: Execution, result: Mapping[str, object], llm: LlmFacts | None
    ) -> None:
        self._tell(NodeDone(self._now_s, *execution.key, result, llm))

    def _failed(self, execution: Execution, problem: str) -> None:
        facts = None if execution.call is None else execution.call.facts()
        self._tell(NodeFailed(self._now_s, *execution.key, problem, facts))

    def _time_out(self, execution: Execution) -> None:
        self._abandon([execution])
        self._failed(execution, f"not ready within its {execution.command.limit_s:.3f} s")

    def _settle(self, execution: Execution) -> bool:
        """Mark it as finished; False when it already was."""
        if self._open.get(execution.key) is not execution:
            return False
        del self._open[execution.key]
        for alarm in execution.alarms:
            self.fleet.alarms.call_off(alarm)
        return True

    def _abandon(self, executions: Iterable[Execution]) -> None:
        """Withdraw their calls, waiting ones first, so that these do not take the batch slots of
        the running ones. Live calls leave together too, in one turn of the event loop."""
        calls = []
        for execution in executions:
            self._settle(execution)
            call = execution.call
            if call is not None and self.fleet.calls.pop(call.id, None) is not None:
                self.outcome.lost_tokens += max(call.tokens, call.generated)
                calls.append(call)
        for call in sorted(calls, key=lambda c: c.is_leased):
            call.end_lease(self._now_s)
            call.pool.cancel(call.id, call.attempt, "its run needs it no more")

    def _emit(self, execution: Execution) -> None:
        """Text of a node: sent at once when it is the streamed node, else kept."""
        if execution.command.item is None:
            self._with_text.add(execution.key[:2])
            if self._is_streamed(execution):
                self._tell(TextSent(self._now_s))

    def _is_streamed(self, execution: Execution) -> bool:
        return self._streamed == execution.key[:2] and execution.command.item is None

    # LLM calls

    def _call(self, execution: Execution, work: LlmWork) -> None:
        command, task, now_s = execution.command, self._task, self._now_s
        settings = llm_settings(command.node)
        try:
            max_tokens = settings.limit_of(command.names)
        except ExpressionError as error:
            self.fleet.kernel.at(now_s, self._broken, execution, str(error))
            return
        drawn = task.execution(command.node, command.round, command.item)
        length = known_length(work, max_tokens)
        node = SimNode(
            work.pool,
            drawn.prompt_tokens,
            min(drawn.output_tokens, max_tokens),
            max(1, round(length.mean)),
            length,
        )
        suffix = "" if command.item is None else f".{command.item}"
        call = execution.call = NodeCall(
            InvocationId(f"{task.id}/{command.node.id}.{command.round}{suffix}"),
            self,
            self.fleet.pools[work.pool],
            node,
            now_s,
            now_s,
            is_paced=task.tpot_target_s < inf or task.metric is SloMetric.TPOT,
            execution=execution,
            draw=drawn.draw,
            max_tokens=max_tokens,
        )
        self.fleet.offer(call, self.invocation(call))

    def invocation(self, call: Call) -> Invocation:
        assert isinstance(call, NodeCall), f"{call.id} is not a workflow's call"
        command, run, task = call.execution.command, self._run, self._task
        is_streamed = command.node.id in run.workflow.stream
        is_paced = is_streamed and run.slo.metric is SloMetric.TPOT
        tpot_target_s = run.slo.target_s if is_paced else task.tpot_target_s
        return Invocation(
            call.id,
            run.id,
            run.workflow.name,
            command.node.id,
            call.node.prompt_tokens,
            call.node.expected_tokens,
            call.offered_at_s,
            command.deadline_s,
            command.downstream_s,
            command.until_first_token or is_paced,
            call.draw,
            tpot_target_s=tpot_target_s if is_streamed else inf,
            length=call.node.length,
            served_s=self.served_s,
            tenant=task.tenant,
            buffer=task.buffer,
            began_at_s=run.arrived_at_s,
        )

    def _broken(self, execution: Execution, problem: str) -> None:
        """The call could not be made."""
        if self._settle(execution):
            self._failed(execution, problem)

    def first_token(self, call: Call) -> None:
        assert isinstance(call, NodeCall), f"{call.id} is not a workflow's call"
        if call.first_token_s is None:
            call.first_token_s = self._now_s - call.sent_at_s
            call.first_after_s = call.queue_s + call.service_s + call.first_token_s
            self._emit(call.execution)
        elif call.is_paced:
            self.progressed(call, call.tokens)

    def progressed(self, call: Call, tokens: int) -> None:
        assert isinstance(call, NodeCall), f"{call.id} is not a workflow's call"
        if self._is_streamed(call.execution):
            self.outcome.sent.append((self._now_s, tokens))

    def go_on(self, call: Call) -> None:
        assert isinstance(call, NodeCall), f"{call.id} is not a workflow's call"
        call.tokens = call.node.output_tokens
        self._settle(call.execution)
        self.outcome.served.append(call.node)
        facts = call.facts()
        result = {"text": TEXT, "tokens": call.tokens, "finish_reason": facts.finish_reason}
        self._done(call.execution, result, facts)

    def refused(self, call: Call, retry_after_s: float) -> None:
        assert isinstance(call, NodeCall), f"{call.id} is not a workflow's call"
        self.outcome.lost_tokens += max(call.tokens, call.generated)
        # The pool is executing its commands: tell the run afterwards.
        self.fleet.kernel.at(self._now_s, self._turned_away, call.execution)

    def _turned_away(self, execution: Execution) -> None:
        if self._settle(execution):
            self._failed(execution, "refused: its pool has no room for it in time")
            outcome = self.outcome
            outcome.refused = self._run.is_finished and not outcome.is_finished
