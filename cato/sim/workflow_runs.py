"""Runs of workflow files in virtual time: `cato.core.runs.Run`, driven as the ingress drives it.

`WorkflowFleet` performs the commands of runs as `cato.serve.executor` does, on the pools that serve
the tasks of calls beside them. A call that is abandoned or late is withdrawn from its pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import TypeVarTuple, assert_never

import numpy as np

from cato.core.commands import Dispatch
from cato.core.errors import ExpressionError
from cato.core.events import InvocationOffered
from cato.core.ids import InvocationId, NodeId, PoolName, RunId
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.receipt import DEADLINE_EXCEEDED, LlmFacts, SlaReceipt
from cato.core.runs import (
    CONDITIONAL_RUNS,
    AbandonNode,
    FinishRun,
    NodeDone,
    NodeEstimate,
    NodeFailed,
    NodeStatus,
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
from cato.core.workflow import Node, TransformSettings, Workflow
from cato.estimators.stages import KEPT_RUNS, finished_stages, past_runs
from cato.policies import schedulers
from cato.sim.fleet import Fleet, PoolSetup, Recorder, SimPool
from cato.sim.kernel import Kernel
from cato.sim.replica import Sequence as EngineSequence
from cato.sim.replica import SimReplica
from cato.sim.tasks import Outcome, SimNode, SimTask
from cato.sim.workflow_tasks import (
    TEXT,
    LlmWork,
    WorkflowClass,
    WorkflowOutcome,
    WorkflowTask,
    drawn_task,
    known_length,
    llm_settings,
    local_result,
)

Args = TypeVarTuple("Args")
OnFinish = Callable[[WorkflowOutcome, FinishRun], None]
_Key = tuple[NodeId, int, int | None]

# As many as a growing run is compared with; how often a node runs is off by 0.04 then.
LEARNT_RUNS = KEPT_RUNS
_LEARN_SEED = 20_240_601


class _Alarms:
    """What is to happen unless it is called off, which then does not prolong the run."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._heap: list[tuple[float, int]] = []
        self._waiting: dict[int, Callable[[], None]] = {}
        self._count = 0
        self._armed_s = inf
        self._version = 0

    def at(self, time_s: float, action: Callable[[*Args], None], *args: *Args) -> int:
        """Run `action` with `args` at `time_s`; returns what calls it off."""
        self._count += 1
        self._waiting[self._count] = lambda: action(*args)
        heappush(self._heap, (time_s, self._count))
        self._arm()
        return self._count

    def call_off(self, alarm: int) -> None:
        """Harmless when it has rung."""
        if self._waiting.pop(alarm, None) is not None and not self._waiting:
            self._kernel.withdraw(self._ring)
            self._heap.clear()
            self._armed_s = inf

    def _arm(self) -> None:
        if self._heap and self._heap[0][0] < self._armed_s:
            self._armed_s = self._heap[0][0]
            self._version += 1
            self._kernel.at(self._armed_s, self._ring, self._version)

    def _ring(self, version: int) -> None:
        if version != self._version:
            return
        self._armed_s = inf
        while self._heap and self._heap[0][0] <= self._kernel.now_s:
            action = self._waiting.pop(heappop(self._heap)[1], None)
            if action is not None:
                action()
        self._arm()


@dataclass(slots=True, eq=False)
class _Flow:
    """A run under way."""

    task: WorkflowTask
    outcome: WorkflowOutcome
    run: Run
    open: dict[_Key, _Execution] = field(default_factory=dict)
    with_text: set[tuple[NodeId, int]] = field(default_factory=set)
    streamed: tuple[NodeId, int] | None = None
    served_s: float = 0.0
    deadline: int = 0  # the alarm


@dataclass(slots=True, eq=False)
class _Call:
    """An LLM execution as its pool knows it; see `_Call` of `cato.sim.fleet`."""

    id: InvocationId
    pool: PoolName
    node: SimNode
    draw: float
    offered_at_s: float
    waits_since_s: float
    max_tokens: int
    generated: int = 0
    tokens: int = 0
    attempt: int = 1
    lease: Dispatch | None = None
    is_leased: bool = False
    sent_at_s: float = 0.0
    first_token_s: float | None = None  # since it was sent
    queue_s: float = 0.0
    service_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Execution:
    """One execution of a node that has started."""

    flow: _Flow
    command: StartNode
    alarms: list[int] = field(default_factory=list)
    call: _Call | None = None

    @property
    def key(self) -> _Key:
        return (self.command.node.id, self.command.round, self.command.item)

    @property
    def is_streamed(self) -> bool:
        return self.flow.streamed == self.key[:2] and self.command.item is None


class WorkflowFleet(Fleet):
    """A fleet that runs workflows beside tasks of calls; `on_finish` is told of each run's end."""

    def __init__(
        self,
        setups: Sequence[PoolSetup],
        recorder: Recorder | None = None,
        on_finish: OnFinish | None = None,
    ) -> None:
        self._flows: dict[str, _Flow] = {}
        self._called: dict[InvocationId, _Execution] = {}
        super().__init__(setups, recorder)
        self._alarms = _Alarms(self.kernel)
        self._on_finish = on_finish

    @property
    def unfinished(self) -> int:
        return super().unfinished + len(self._flows)

    def leave(self, task_id: str) -> None:
        if task_id in self._flows:
            self._cancel(self._flows[task_id], "the client left")
        else:
            super().leave(task_id)

    # Runs

    def begin(self, task: SimTask) -> Outcome:
        if not isinstance(task, WorkflowTask):
            return super().begin(task)
        kind, outcome, now_s = task.kind, WorkflowOutcome(task), self.kernel.now_s
        self.outcomes.append(outcome)
        run = Run(
            RunId(task.id),
            kind.workflow,
            kind.slo,
            kind.inputs,
            kind.estimates,
            now_s,
            kind.next_share,
        )
        flow = self._flows[task.id] = _Flow(task, outcome, run)
        flow.deadline = self._alarms.at(run.hard_deadline_s, self._pass_deadline, flow)
        self._perform(flow, run.start(now_s))
        return outcome

    def _pass_deadline(self, flow: _Flow) -> None:
        reason = "the hard deadline passed"
        self._tell(flow, RunCancelled(self.kernel.now_s, reason, DEADLINE_EXCEEDED))

    def _cancel(self, flow: _Flow, reason: str) -> None:
        self._tell(flow, RunCancelled(self.kernel.now_s, reason))

    def _tell(self, flow: _Flow, event: RunEvent) -> None:
        self._perform(flow, flow.run.handle(event))

    def _perform(self, flow: _Flow, commands: Sequence[RunCommand]) -> None:
        left = {c.node for c in commands if isinstance(c, AbandonNode)}
        self._abandon([x for x in flow.open.values() if x.command.node.id in left])
        for command in commands:
            match command:
                case StartNode():
                    if command.node.id not in left:  # else it is over before it begins
                        self._start_node(flow, command)
                case StreamNode(node, round):
                    flow.streamed = (node, round)
                    if flow.streamed in flow.with_text:
                        self._tell(flow, TextSent(self.kernel.now_s))
                case AbandonNode():
                    pass  # above, all at once: see `_abandon`
                case FinishRun():
                    self._finish(flow, command)
                case _:
                    assert_never(command)

    def _finish(self, flow: _Flow, finish: FinishRun) -> None:
        assert not flow.open, f"{flow.task.id} leaves {list(flow.open)}"
        outcome, receipt = flow.outcome, finish.receipt
        del self._flows[flow.task.id]
        self._alarms.call_off(flow.deadline)
        if receipt.ttft_s is not None:
            outcome.first_token_at_s = flow.run.arrived_at_s + receipt.ttft_s
        if finish.status == "done":
            outcome.ended_at_s = self.kernel.now_s
            outcome.streamed_tokens = max(1, receipt.output_tokens)
        else:
            outcome.lost_tokens += sum(n.output_tokens for n in outcome.served)
        if self._on_finish is not None:
            self._on_finish(outcome, finish)

    # Nodes

    def _start_node(self, flow: _Flow, command: StartNode) -> None:
        execution, now_s = _Execution(flow, command), self.kernel.now_s
        flow.open[execution.key] = execution
        if command.limit_s is not None:
            limit = self._alarms.at(now_s + command.limit_s, self._time_out, execution)
            execution.alarms.append(limit)
        work = flow.task.kind.work[command.node.id]
        if isinstance(work, LlmWork):
            self._call(execution, work)
        elif work.takes_s > 0:
            end = self._alarms.at(now_s + work.takes_s, self._local_done, execution)
            execution.alarms.append(end)
        else:
            self.kernel.at(now_s, self._local_done, execution)

    def _local_done(self, execution: _Execution) -> None:
        flow, node = execution.flow, execution.command.node
        if not self._settle(execution):
            return
        work = flow.task.kind.work[node.id]
        assert not isinstance(work, LlmWork), f"{node.id} calls a model"
        if isinstance(node.settings, TransformSettings):
            self._emit(execution)
        is_ok = flow.task.execution(node, execution.command.round, execution.command.item).is_ok
        self._done(execution, local_result(node, work, is_ok), None)

    def _done(
        self, execution: _Execution, result: Mapping[str, object], llm: LlmFacts | None
    ) -> None:
        self._tell(execution.flow, NodeDone(self.kernel.now_s, *execution.key, result, llm))

    def _failed(self, execution: _Execution, problem: str, timed_out: bool = False) -> None:
        facts = None if execution.call is None else _facts(execution.call)
        event = NodeFailed(self.kernel.now_s, *execution.key, problem, timed_out, facts)
        self._tell(execution.flow, event)

    def _time_out(self, execution: _Execution) -> None:
        self._abandon([execution])
        self._failed(execution, f"not ready within its {execution.command.limit_s:.3f} s", True)

    def _settle(self, execution: _Execution) -> bool:
        """Nothing more is expected of it; False when it was settled before."""
        if execution.flow.open.get(execution.key) is not execution:
            return False
        del execution.flow.open[execution.key]
        for alarm in execution.alarms:
            self._alarms.call_off(alarm)
        return True

    def _abandon(self, executions: Iterable[_Execution]) -> None:
        """Withdraw their calls: first those that wait, or they would take the places of others.

        So they leave the pools together, as live ones do within one turn of the event loop.
        """
        calls = []
        for execution in executions:
            self._settle(execution)
            call = execution.call
            if call is not None and self._called.pop(call.id, None) is not None:
                execution.flow.outcome.lost_tokens += max(call.tokens, call.generated)
                calls.append((execution.flow, call))
        for flow, call in sorted(calls, key=lambda c: c[1].is_leased):
            self._end_lease(flow, call)
            self.pools[call.pool].cancel(call.id, call.attempt, "its run needs it no more")

    def _emit(self, execution: _Execution) -> None:
        """Text of a node: out at once when it is the streamed one, else kept."""
        if execution.command.item is None:
            execution.flow.with_text.add(execution.key[:2])
            if execution.is_streamed:
                self._tell(execution.flow, TextSent(self.kernel.now_s))

    # LLM calls

    def _call(self, execution: _Execution, work: LlmWork) -> None:
        flow, command, now_s = execution.flow, execution.command, self.kernel.now_s
        settings = llm_settings(command.node)
        try:
            max_tokens = settings.limit_of(command.names)
        except ExpressionError as error:
            self.kernel.at(now_s, self._broken, execution, str(error))
            return
        drawn = flow.task.execution(command.node, command.round, command.item)
        length = known_length(work, max_tokens)
        node = SimNode(
            work.pool,
            drawn.prompt_tokens,
            min(drawn.output_tokens, max_tokens),
            max(1, round(length.mean)),
            length,
        )
        suffix = "" if command.item is None else f".{command.item}"
        id = InvocationId(f"{flow.task.id}/{command.node.id}.{command.round}{suffix}")
        execution.call = _Call(id, work.pool, node, drawn.draw, now_s, now_s, max_tokens)
        self._called[id] = execution
        self._offer_call(execution, execution.call)

    def _offer_call(self, execution: _Execution, call: _Call) -> None:
        invocation = self._invocation(execution, call)
        self.pools[call.pool].handle(InvocationOffered(self.kernel.now_s, invocation))

    def _invocation(self, execution: _Execution, call: _Call) -> Invocation:
        flow, command = execution.flow, execution.command
        run, task = flow.run, flow.task
        is_streamed = command.node.id in run.workflow.stream
        is_paced = is_streamed and run.slo.metric is SloMetric.TPOT
        tpot_target_s = run.slo.target_s if is_paced else task.tpot_target_s
        invocation = Invocation(
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
            served_s=flow.served_s,
            tenant=task.tenant,
            buffer=task.buffer,
            began_at_s=run.arrived_at_s,
        )
        if call.attempt == 1:
            return invocation
        return invocation.continued(call.attempt, call.generated)

    def _broken(self, execution: _Execution, problem: str) -> None:
        """The call could not be made, or was refused: told once its command is performed."""
        if self._settle(execution):
            self._failed(execution, problem)

    def _turned_away(self, execution: _Execution) -> None:
        if self._settle(execution):
            self._failed(execution, "refused: its pool has no room for it in time")
            flow = execution.flow
            flow.outcome.refused = flow.run.is_finished and not flow.outcome.is_finished

    def _end_lease(self, flow: _Flow, call: _Call) -> None:
        if call.is_leased:
            call.is_leased = False
            served_s = self.kernel.now_s - call.sent_at_s
            call.service_s += served_s
            flow.served_s += served_s

    # What pools tell

    def wants(self, id: InvocationId) -> bool:
        return id in self._called or super().wants(id)

    def sequence(self, id: InvocationId, command: Dispatch) -> EngineSequence:
        execution = self._called.get(id)
        if execution is None:
            return super().sequence(id, command)
        call, now_s = _call_of(execution), self.kernel.now_s
        waited_s = now_s - call.waits_since_s
        call.attempt, call.lease, call.is_leased = command.attempt, command, True
        call.sent_at_s = now_s
        call.queue_s += waited_s
        execution.flow.outcome.queue_s += waited_s
        node = call.node
        return EngineSequence(
            id, node.prompt_tokens, node.output_tokens, command.priority, call.generated
        )

    def progress(self, engine: SimReplica) -> tuple[tuple[InvocationId, int], ...]:
        report = super().progress(engine)
        if not self._called:
            return report
        more = []
        for id, tokens in engine.tokens(self.kernel.now_s):
            execution = self._called.get(id)
            if execution is not None:
                call = _call_of(execution)
                call.tokens = tokens
                self._note_sent(execution, tokens)
                more.append((id, tokens - call.generated))
        return (*report, *more)

    def _note_sent(self, execution: _Execution, tokens: int) -> None:
        task = execution.flow.task
        is_paced = task.tpot_target_s < inf or task.metric is SloMetric.TPOT
        if is_paced and execution.is_streamed:
            execution.flow.outcome.sent.append((self.kernel.now_s, tokens))

    def note_taken_back(self, id: InvocationId) -> None:
        execution = self._called.get(id)
        if execution is None:
            super().note_taken_back(id)
            return
        call = _call_of(execution)
        self._end_lease(execution.flow, call)
        call.generated = max(call.generated, call.tokens)
        call.waits_since_s = self.kernel.now_s

    def offer_again(self, pool: SimPool, id: InvocationId) -> None:
        execution = self._called.get(id)
        if execution is None:
            super().offer_again(pool, id)
            return
        call = _call_of(execution)
        call.attempt += 1
        self._offer_call(execution, call)

    def first_token(self, id: InvocationId) -> None:
        execution = self._called.get(id)
        if execution is None:
            super().first_token(id)
            return
        call = _call_of(execution)
        call.tokens = max(call.tokens, call.generated + 1)
        if call.first_token_s is None:
            call.first_token_s = self.kernel.now_s - call.sent_at_s
            self._emit(execution)
        else:
            self._note_sent(execution, call.tokens)

    def call_ended(self, id: InvocationId, cached_tokens: int) -> int:
        execution = self._called.get(id)
        if execution is None:
            return super().call_ended(id, cached_tokens)
        call = _call_of(execution)
        self._end_lease(execution.flow, call)
        return call.generated

    def go_on(self, id: InvocationId) -> None:
        execution = self._called.pop(id, None)
        if execution is None:
            super().go_on(id)
            return
        call = _call_of(execution)
        call.tokens = call.node.output_tokens
        self._settle(execution)
        execution.flow.outcome.served.append(call.node)
        facts = _facts(call)
        result = {"text": TEXT, "tokens": call.tokens, "finish_reason": facts.finish_reason}
        self._done(execution, result, facts)

    def refused(self, id: InvocationId) -> None:
        execution = self._called.pop(id, None)
        if execution is None:
            super().refused(id)
            return
        call = _call_of(execution)
        execution.flow.outcome.lost_tokens += max(call.tokens, call.generated)
        # The pool is in the middle of its commands: the run hears of it after them.
        self.kernel.at(self.kernel.now_s, self._turned_away, execution)


def _call_of(execution: _Execution) -> _Call:
    assert execution.call is not None, f"{execution.key} calls no model"
    return execution.call


def _facts(call: _Call) -> LlmFacts:
    lease = call.lease
    has_ended = call.tokens == call.node.output_tokens
    reason = "length" if call.tokens >= call.max_tokens else "stop" if has_ended else ""
    return LlmFacts(
        model="",
        pool=call.pool,
        replica=lease.replica_id if lease else "",
        deployment=lease.deployment if lease else "",
        queue_s=call.queue_s,
        priority=lease.priority if lease else 0,
        slack_s=lease.slack_s if lease else 0.0,
        predicted_s=lease.remaining_s if lease else 0.0,
        engine_ttft_s=call.first_token_s,
        prompt_tokens=call.node.prompt_tokens,
        cached_prompt_tokens=0,
        output_tokens=max(call.tokens, call.generated),
        finish_reason=reason,
        attempts=call.attempt,
        simulated=True,
        reasons=(lease.reason,) if lease else (),
        expected_tokens=call.node.expected_tokens,
        predicted_queue_s=lease.predicted_queue_s if lease else 0.0,
        service_s=call.service_s,
        predicted_service_s=lease.service_s if lease else 0.0,
    )


# Estimates


def with_estimates(kind: WorkflowClass, profiles: Mapping[PoolName, Profile]) -> WorkflowClass:
    """`kind` with what a profiler learns of runs that share their replicas with none.

    Times of nodes are those of mean lengths. Where conditions and loops decide the path, runs that
    have the pools to themselves tell how often a node runs, and how the time of a run is divided.
    """
    nodes = kind.workflow.nodes
    prior = {n.id: _estimate(n, kind, profiles) for n in nodes}
    if not _has_open_path(kind.workflow):
        return replace(kind, estimates=prior)
    receipts = _alone(replace(kind, estimates=prior), profiles)
    runs = _mean_rounds(receipts)
    learnt = {id: replace(e, runs=runs.get(id, e.runs)) for id, e in prior.items()}
    stages = [found.graph for r in receipts if (found := finished_stages(r)) is not None]
    past = past_runs({kind.name: stages} if stages else {}, 1)
    return replace(kind, estimates=learnt, past=past)


def _has_open_path(workflow: Workflow) -> bool:
    return any(n.when is not None or n.repeat is not None for n in workflow.nodes)


def _estimate(
    node: Node, kind: WorkflowClass, profiles: Mapping[PoolName, Profile]
) -> NodeEstimate:
    runs = 1.0 if node.when is None else CONDITIONAL_RUNS
    work = kind.work[node.id]
    if not isinstance(work, LlmWork):
        return NodeEstimate(work.takes_s, work.takes_s, runs)
    profile, prompt_tokens = profiles[work.pool], round(work.prompt_tokens)
    known: LengthBelief = known_length(work, llm_settings(node).max_tokens)
    return NodeEstimate(
        profile.service_s(prompt_tokens, max(1, round(known.mean))),
        profile.first_token_s(prompt_tokens),
        runs,
    )


def _alone(kind: WorkflowClass, profiles: Mapping[PoolName, Profile]) -> list[SlaReceipt]:
    """Receipts of runs that follow each other."""
    receipts: list[SlaReceipt] = []
    rule = schedulers.early("round-robin")
    # Nobody reads how far the calls are: reports would only take time.
    setups = [PoolSetup(p, (f,), rule, report_steps=1_000_000) for p, f in profiles.items()]
    fleet = WorkflowFleet(setups, on_finish=lambda _, finish: receipts.append(finish.receipt))
    rng = np.random.default_rng(_LEARN_SEED)
    gap_s = kind.workflow.hard_deadline_s + 1
    fleet.run([drawn_task(f"r{i}", kind, i * gap_s, rng) for i in range(LEARNT_RUNS)])
    return receipts


def _mean_rounds(receipts: Sequence[SlaReceipt]) -> Mapping[NodeId, float]:
    """Of each node in runs that end well, as the profiler counts them; empty without any."""
    done = [r for r in receipts if r.status == "done"]
    ended = Counter(
        node
        for r in done
        for node, _ in {(x.node, x.round) for x in r.nodes if x.status == NodeStatus.DONE.value}
    )
    return {node: n / len(done) for node, n in ended.items()}
