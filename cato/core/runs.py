"""One execution of a workflow, as a state machine: facts in, commands out.

The ingress drives it in real time, the simulator in virtual time. Both carry out the commands and
report what happened. Budgets are split again at every start of a node (see `cato.core.budgets`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import assert_never

from cato.core.budgets import longest_after, split_slack
from cato.core.errors import ExpressionError
from cato.core.ids import NodeId, RunId
from cato.core.receipt import DEADLINE_EXCEEDED, LlmFacts, NodeReceipt, SlaReceipt
from cato.core.session import Turn
from cato.core.session_slo import SessionShare
from cato.core.slo import Slo, SloMetric, tpot_s
from cato.core.workflow import Node, NodeKind, Workflow

# Expected executions of a node with a condition, until the profiler has seen runs.
CONDITIONAL_RUNS = 0.5


@dataclass(frozen=True, slots=True)
class NodeEstimate:
    """A node's baseline: seconds per execution, seconds to first token, executions per run."""

    mean_s: float
    first_token_s: float
    runs: float = 1.0


class NodeStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    SKIPPED = "skipped"
    ABSENT = "absent"
    FAILED = "failed"
    CANCELLED = "cancelled"


# Events


@dataclass(frozen=True, slots=True)
class NodeDone:
    """An execution succeeded. `llm` is set for an LLM node."""

    now_s: float
    node: NodeId
    round: int
    item: int | None
    result: Mapping[str, object]
    llm: LlmFacts | None = None


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """An execution failed; `timed_out` if it exceeded its limit."""

    now_s: float
    node: NodeId
    round: int
    item: int | None
    problem: str
    timed_out: bool = False
    llm: LlmFacts | None = None


@dataclass(frozen=True, slots=True)
class TextSent:
    """The first text of the answer was sent to the client."""

    now_s: float


@dataclass(frozen=True, slots=True)
class RunCancelled:
    """The run was cancelled; `status` says why.

    Reasons: the client disconnected, a newer task replaced this one, or the hard deadline passed.
    `llm` holds the outcome of the open calls by node, round and item.
    """

    now_s: float
    reason: str
    status: str = "cancelled"
    llm: Mapping[tuple[NodeId, int, int | None], LlmFacts] = field(default_factory=dict)


RunEvent = NodeDone | NodeFailed | TextSent | RunCancelled


# Commands


@dataclass(frozen=True, slots=True)
class StartNode:
    """Execute `node` for at most `limit_s`; `budget_s` is its share of the SLO.

    `deadline_s` and the fields after it go into the invocation of an LLM node, for its pool.
    """

    node: Node
    round: int
    item: int | None
    names: Mapping[str, object]
    budget_s: float | None
    limit_s: float | None
    deadline_s: float
    downstream_s: float
    until_first_token: bool


@dataclass(frozen=True, slots=True)
class StreamNode:
    """Stream this node's text to the client: what exists already and what follows."""

    node: NodeId
    round: int


@dataclass(frozen=True, slots=True)
class AbandonNode:
    """Cancel this node's open executions; their results are not needed."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class FinishRun:
    """The run is over. `output` is the result of the output node; None unless `status` is done."""

    status: str
    output: object
    output_node: NodeId | None
    receipt: SlaReceipt


RunCommand = StartNode | StreamNode | AbandonNode | FinishRun


NextShare = Callable[[Sequence[NodeReceipt]], float | None]
"""The share of the remaining time that the next LLM node took in the most similar past run."""


@dataclass(slots=True)
class _Execution:
    node: Node
    round: int
    item: int | None
    started_s: float
    budget_s: float | None
    limit_s: float | None
    status: NodeStatus = NodeStatus.RUNNING
    ended_s: float | None = None
    problem: str = ""
    llm: LlmFacts | None = None


@dataclass(slots=True)
class _State:
    status: NodeStatus = NodeStatus.PENDING
    round: int = 0
    result_round: int = 0  # the round whose result counts; a later round may have failed
    open_items: int = 0
    items: list[Mapping[str, object] | None] = field(default_factory=list)
    redoing: list[NodeId] = field(default_factory=list)
    loop_of: NodeId | None = None  # set while a repeating node redoes this one


_SETTLED = frozenset(
    {
        NodeStatus.DONE,
        NodeStatus.SKIPPED,
        NodeStatus.ABSENT,
        NodeStatus.FAILED,
        NodeStatus.CANCELLED,
    }
)


class Run:
    """The state of one run. `handle` is deterministic; call `start` once, first."""

    def __init__(
        self,
        id: RunId,
        workflow: Workflow,
        slo: Slo,
        inputs: Mapping[str, object],
        estimates: Mapping[NodeId, NodeEstimate],
        arrived_at_s: float,
        next_share: NextShare | None = None,
        notes: Sequence[str] = (),
        passed: str = "",
        turn: Turn | None = None,
        share: SessionShare | None = None,
    ) -> None:
        """Set up a run; nothing starts before `start`.

        `estimates` are baselines by node, `next_share` predicts from similar runs. For the receipt:
        `notes` on how the run was started, and `passed`, why no workflow runs. `turn` is the call's
        place in its session and `share` its share of the session's time.
        """
        self.id = id
        self.workflow = workflow
        self.slo = slo
        self.arrived_at_s = arrived_at_s
        self.hard_deadline_s = arrived_at_s + workflow.hard_deadline_s
        self._nodes = {n.id: n for n in workflow.nodes}
        self._states = {n.id: _State() for n in workflow.nodes}
        self._names: dict[str, object] = dict(inputs)
        self._executions: list[_Execution] = []
        self._streaming: tuple[NodeId, int] | None = None
        self._text_sent_at_s: float | None = None
        self._finished = False
        self._notes: list[str] = list(notes)
        self._passed = passed
        self.turn = turn
        self._share = share
        self._next_share = next_share if self._has_dynamic_path() else None
        self._estimates = {n.id: self._estimate(n, estimates) for n in workflow.nodes}
        self._event_nodes = self._nodes_before_the_event()
        self._redone_by = {
            id: n.id for n in workflow.nodes if n.repeat is not None for id in n.repeat.redo
        }

    # Public interface

    def start(self, now_s: float) -> tuple[RunCommand, ...]:
        return self._advance(now_s)

    def handle(self, event: RunEvent) -> tuple[RunCommand, ...]:
        if self._finished:
            return ()
        match event:
            case NodeDone():
                return self._node_done(event)
            case NodeFailed():
                return self._node_failed(event)
            case TextSent():
                if self._text_sent_at_s is None:
                    self._text_sent_at_s = event.now_s
                return ()
            case RunCancelled():
                for x in self._executions:
                    if x.ended_s is None:
                        x.llm = event.llm.get((x.node.id, x.round, x.item))
                return self._finish(event.now_s, event.status, event.reason)
            case _:
                assert_never(event)

    @property
    def is_finished(self) -> bool:
        return self._finished

    def expected_s(self) -> float:
        """Seconds from start to the SLO's event without queueing.

        The longest path by the nodes' baselines.
        """
        order = [n.id for n in self.workflow.nodes if n.id in self._event_nodes]
        weight_s = {id: self._weight_s(self._nodes[id]) for id in order}
        after_s = longest_after(order, self._needs(), weight_s)
        return max(weight_s[id] + after_s[id] for id in order)

    # Events

    def _node_done(self, event: NodeDone) -> tuple[RunCommand, ...]:
        execution = self._close(event, NodeStatus.DONE)
        if execution is None:
            return ()
        return self._item_done(execution, event.result, event.now_s)

    def _node_failed(self, event: NodeFailed) -> tuple[RunCommand, ...]:
        status = NodeStatus.ABSENT if self._nodes[event.node].optional else NodeStatus.FAILED
        execution = self._close(event, status)
        if execution is None:
            return ()
        execution.problem = event.problem
        if status is NodeStatus.FAILED:
            return self._finish(event.now_s, "failed", f"node {event.node!r}: {event.problem}")
        self._notes.append(f"{event.node} left out: {event.problem}")
        return self._item_done(execution, None, event.now_s)

    def _close(self, event: NodeDone | NodeFailed, status: NodeStatus) -> _Execution | None:
        """Close and return the execution that `event` ends; None for a late or repeated report."""
        for execution in reversed(self._executions):
            key = (execution.node.id, execution.round, execution.item)
            if key == (event.node, event.round, event.item) and execution.ended_s is None:
                execution.status, execution.ended_s = status, event.now_s
                execution.llm = event.llm
                return execution
        return None

    def _item_done(
        self, execution: _Execution, result: Mapping[str, object] | None, now_s: float
    ) -> tuple[RunCommand, ...]:
        node, state = execution.node, self._states[execution.node.id]
        if execution.item is not None:
            state.items[execution.item] = result
        state.open_items -= 1
        if state.open_items > 0:
            return ()
        if execution.item is not None:
            self._settle(node, [i for i in state.items if i is not None])
        elif result is not None:
            self._settle(node, result)
        elif node.repeat is not None and state.result_round > 0 and state.loop_of is None:
            # A later round of an optional node failed: keep the earlier round's result.
            state.status, state.redoing = NodeStatus.DONE, []
            return self._advance(now_s)
        else:
            self._names.pop(node.id, None)
            state.status = NodeStatus.ABSENT
        if state.loop_of is not None:
            owner, state.loop_of = state.loop_of, None
            return self._redo_next(owner, now_s)
        if node.repeat is not None and state.status is NodeStatus.DONE:
            state.status = NodeStatus.RUNNING
            state.redoing = list(node.repeat.redo)
            return self._redo_next(node.id, now_s)
        return self._advance(now_s)

    def _settle(self, node: Node, value: object) -> None:
        state = self._states[node.id]
        self._names[node.id] = value
        state.status, state.result_round = NodeStatus.DONE, state.round

    def _redo_next(self, owner: NodeId, now_s: float) -> tuple[RunCommand, ...]:
        """Continue the loop of `owner`: redo the next node, or decide on another round."""
        state, node = self._states[owner], self._nodes[owner]
        assert node.repeat is not None, f"{owner} does not repeat"
        while state.redoing:
            at = self._nodes[state.redoing.pop(0)]
            commands = self._begin(at, now_s)
            if self._finished:
                return commands
            if self._states[at.id].status is NodeStatus.RUNNING:
                self._states[at.id].loop_of = owner
                return commands + self._advance(now_s)
        best_so_far = self._names.get(owner)
        try:
            is_enough = bool(node.repeat.until.evaluate(self._names))
            if not is_enough and state.round < node.repeat.max_rounds:
                if why_not := self._why_no_round(node, now_s):
                    self._notes.append(f"{owner} stopped after {state.round} rounds: {why_not}")
                    state.status = NodeStatus.DONE
                    return self._advance(now_s)
                started = tuple(self._start(node, now_s))
                if started:
                    return started + self._advance(now_s)
                self._names[owner] = best_so_far
            if not is_enough:
                self._notes.append(f"{owner} gave up after {state.round} rounds")
        except ExpressionError as error:
            if not node.optional:
                return self._finish(now_s, "failed", f"node {owner!r}: {error}")
            self._notes.append(f"{owner} stopped after {state.round} rounds: {error}")
        state.status = NodeStatus.DONE
        return self._advance(now_s)

    def _why_no_round(self, node: Node, now_s: float) -> str:
        """Why another round of a repeating node would miss the SLO; empty if it would not.

        If it would, the current result is the answer: an on-time answer beats a better one that is
        late.
        """
        assert node.repeat is not None, f"{node.id} does not repeat"
        if node.id not in self._event_nodes:
            return ""
        again = (node.id, *node.repeat.redo)
        round_s = sum(self._estimates[id].mean_s for id in again)
        slack_s = self._deadline_s(node) - now_s - self._downstream_s(node)
        if round_s <= slack_s:
            return ""
        return f"another takes {round_s:.2f} s, {max(0.0, slack_s):.2f} s are left"

    # Progress

    def _advance(self, now_s: float) -> tuple[RunCommand, ...]:
        commands: tuple[RunCommand, ...] = ()
        progressing = True
        while progressing:
            progressing = False
            for node in self.workflow.nodes:
                state = self._states[node.id]
                if state.status is not NodeStatus.PENDING or not self._is_ready(node):
                    continue
                commands += self._begin(node, now_s)
                if self._finished:
                    return commands
                # Skipping or leaving out a node may unblock others.
                progressing = progressing or state.status in _SETTLED
        streamed = self._next_to_stream()
        if streamed is not None:
            self._streaming = streamed
            commands += (StreamNode(*streamed),)
        is_known, output = self._choice(self.workflow.output)
        if is_known and output is None:
            problem = "no output node has a result: " + "; ".join(self._notes or ["all skipped"])
            commands += self._finish(now_s, "failed", problem)
        elif is_known and self._choice(self.workflow.stream)[0]:
            commands += self._finish(now_s, "done", "", output)
        return commands

    def _begin(self, node: Node, now_s: float) -> tuple[RunCommand, ...]:
        """Start `node`, or settle it if it need not or cannot run; may finish the run."""
        try:
            if node.when is not None and not node.when.evaluate(self._names):
                self._names.pop(node.id, None)
                self._states[node.id].status = NodeStatus.SKIPPED
                return ()
            return tuple(self._start(node, now_s))
        except ExpressionError as error:
            if not node.optional:
                return self._finish(now_s, "failed", f"node {node.id!r}: {error}")
            self._leave_out(node, now_s, self._budget_s(node, now_s), str(error))
            return ()

    def _is_ready(self, node: Node) -> bool:
        return all(self._states[n].status in _SETTLED for n in node.needs)

    def _start(self, node: Node, now_s: float) -> list[RunCommand]:
        state = self._states[node.id]
        budget_s, downstream_s = self._split(node, now_s)
        limit_s = self._limit_s(node, now_s)
        items: Sequence[object] | None = None
        if node.each is not None:
            items = self._fan_out(node)
        if node.optional and limit_s is not None and limit_s <= 0:
            self._leave_out(node, now_s, budget_s, "no time left for it")
            return []
        if items is not None and not items:
            self._settle(node, [])
            return []
        state.status = NodeStatus.RUNNING
        state.round += 1
        state.open_items = 1 if items is None else len(items)
        state.items = [None] * state.open_items
        deadline_s = self._deadline_s(node)
        commands: list[RunCommand] = []
        for i, item in enumerate([None] if items is None else items):
            names = dict(self._names)
            index = None if items is None else i
            if items is not None:
                names.update(item=item, index=i)
            self._executions.append(_Execution(node, state.round, index, now_s, budget_s, limit_s))
            commands.append(
                StartNode(
                    node=node,
                    round=state.round,
                    item=index,
                    names=names,
                    budget_s=budget_s,
                    limit_s=limit_s,
                    deadline_s=deadline_s,
                    downstream_s=downstream_s,
                    until_first_token=self._is_first_token_the_event(node),
                )
            )
        return commands

    def _fan_out(self, node: Node) -> Sequence[object]:
        assert node.each is not None
        value = node.each.evaluate(self._names)
        if not value:
            return ()
        if not isinstance(value, list | tuple):
            raise ExpressionError(node.each.source, f"is not a list but {type(value).__name__}")
        if len(value) > node.max_items:
            self._notes.append(f"{node.id}: only the first {node.max_items} of {len(value)} items")
        return value[: node.max_items]

    def _leave_out(self, node: Node, now_s: float, budget_s: float | None, problem: str) -> None:
        state = self._states[node.id]
        state.status = NodeStatus.ABSENT
        self._names.pop(node.id, None)
        self._executions.append(
            _Execution(
                node, state.round + 1, None, now_s, budget_s, 0.0, state.status, now_s, problem
            )
        )
        self._notes.append(f"{node.id} left out: {problem}")

    def _next_to_stream(self) -> tuple[NodeId, int] | None:
        """The node to stream to the client, once that is decided; None if nothing changed."""
        if self._streaming is not None:
            return None
        for id in self.workflow.stream:
            state = self._states[id]
            if self._may_be_redone(id):
                return None
            if state.status in (NodeStatus.SKIPPED, NodeStatus.ABSENT):
                continue
            if state.status is NodeStatus.DONE:
                return id, state.result_round
            if state.status is NodeStatus.RUNNING and self._is_final(id):
                return id, state.round
            return None
        return None

    def _is_final(self, id: NodeId) -> bool:
        """Whether the text that `id` is writing will be the answer, unless the run fails.

        An optional node may still be left out. The next node in the list, or its own earlier round,
        would then provide the answer, but text that was sent cannot be taken back.
        """
        state, node = self._states[id], self._nodes[id]
        if node.repeat is not None and state.round < node.repeat.max_rounds:
            return False
        if not node.optional:
            return True
        after = self.workflow.stream[self.workflow.stream.index(id) + 1 :]
        return state.round == 1 and all(
            self._states[n].status in (NodeStatus.SKIPPED, NodeStatus.ABSENT) for n in after
        )

    def _may_be_redone(self, id: NodeId) -> bool:
        owner = self._redone_by.get(id)
        return owner is not None and self._states[owner].status not in _SETTLED

    def _choice(self, preferences: Sequence[NodeId]) -> tuple[bool, NodeId | None]:
        """Whether the first of `preferences` with a result is decided, and which one it is."""
        for id in preferences:
            status = self._states[id].status
            if status not in _SETTLED or self._may_be_redone(id):
                return False, None
            if status is NodeStatus.DONE:
                return True, id
        return True, None

    def _finish(
        self, now_s: float, status: str, problem: str, output: NodeId | None = None
    ) -> tuple[RunCommand, ...]:
        self._finished = True
        open_ = [x for x in self._executions if x.ended_s is None]
        abandoned = dict.fromkeys(x.node.id for x in open_)
        commands: list[RunCommand] = [AbandonNode(id) for id in abandoned]
        for execution in open_:
            execution.status, execution.ended_s = NodeStatus.CANCELLED, now_s
        result = self._names.get(output) if output is not None else None
        receipt = self._receipt(now_s, status, problem, output)
        commands.append(FinishRun(status, result, output, receipt))
        return tuple(commands)

    # Time

    def _estimate(self, node: Node, known: Mapping[NodeId, NodeEstimate]) -> NodeEstimate:
        if node.id in known:
            return known[node.id]
        runs = CONDITIONAL_RUNS if node.when is not None else 1.0
        guess_s = node.budget_s or 0.0
        return NodeEstimate(guess_s, guess_s, runs)

    def _nodes_before_the_event(self) -> frozenset[NodeId]:
        """Nodes on the path to the SLO's event: for TTFT up to the streamed node, else all."""
        goals = self.workflow.output
        if self.slo.metric is SloMetric.TTFT and self.workflow.stream:
            goals = self.workflow.stream
        seen: set[NodeId] = set()
        todo = list(goals)
        while todo:
            id = todo.pop()
            if id not in seen:
                seen.add(id)
                todo += self._nodes[id].needs
        return frozenset(seen)

    def _is_first_token_the_event(self, node: Node) -> bool:
        """Whether the node streams as it is written and no other node can replace it."""
        stream = self.workflow.stream
        if self.slo.metric is not SloMetric.TTFT or node.id not in stream:
            return False
        if node.kind is not NodeKind.LLM or node.each is not None:
            return False
        if node.repeat is not None or node.id in self._redone_by:
            return False
        if node.optional and node.id != stream[-1]:
            return False
        return not any(node.id in self._ancestors(other) for other in stream if other != node.id)

    def _ancestors(self, id: NodeId) -> set[NodeId]:
        seen: set[NodeId] = set()
        todo = list(self._nodes[id].needs)
        while todo:
            need = todo.pop()
            if need not in seen:
                seen.add(need)
                todo += self._nodes[need].needs
        return seen

    def _open_graph(self, starting: Node) -> tuple[list[NodeId], dict[NodeId, float]]:
        """Unfinished nodes before the SLO's event, with the expected seconds of each."""
        order, weight_s = [], {}
        for node in self.workflow.nodes:
            if node.id not in self._event_nodes:
                continue
            if self._states[node.id].status in _SETTLED and node.id != starting.id:
                continue
            order.append(node.id)
            weight_s[node.id] = self._weight_s(node, once=node.id == starting.id)
        return order, weight_s

    def _weight_s(self, node: Node, *, once: bool = False) -> float:
        """Expected seconds of the node before the SLO's event; `once`: for a single execution."""
        estimate = self._estimates[node.id]
        is_event = self._is_first_token_the_event(node)
        mean_s = estimate.first_token_s if is_event else estimate.mean_s
        return mean_s * (1.0 if once else estimate.runs)

    def _has_dynamic_path(self) -> bool:
        """Whether conditions or repeats decide at run time which nodes execute."""
        return any(n.when is not None or n.repeat is not None for n in self.workflow.nodes)

    def _split(self, node: Node, now_s: float) -> tuple[float | None, float]:
        """The node's share of the slack, and the expected time of the nodes after it.

        Both come from the nodes' baselines. If the path is decided at run time and the deadline is
        for the whole run, the most similar past run predicts the remaining time better (Tempo, "DAG
        matching"). Time that earlier nodes did not use is split among all following nodes.
        """
        budget_s, downstream_s = self._budget_s(node, now_s), self._downstream_s(node)
        is_whole = self.slo.metric is SloMetric.E2E and node.id in self._event_nodes
        if self._next_share is None or node.kind is not NodeKind.LLM or not is_whole:
            return budget_s, downstream_s
        share = self._next_share(self._node_receipts(now_s))
        if not share:
            return budget_s, downstream_s
        left_s = max(0.0, self.arrived_at_s + self.slo.target_s - now_s)
        return share * left_s, self._estimates[node.id].mean_s * (1 / share - 1)

    def _needs(self) -> dict[NodeId, tuple[NodeId, ...]]:
        return {n.id: n.needs for n in self.workflow.nodes}

    def _budget_s(self, node: Node, now_s: float) -> float | None:
        if node.id not in self._event_nodes or self.slo.metric is SloMetric.TPOT:
            return None
        order, weight_s = self._open_graph(node)
        left_s = max(0.0, self.arrived_at_s + self.slo.target_s - now_s)
        return split_slack(order, self._needs(), weight_s, left_s)[node.id]

    def _downstream_s(self, node: Node) -> float:
        if node.id not in self._event_nodes or self._is_first_token_the_event(node):
            return 0.0
        order, weight_s = self._open_graph(node)
        return longest_after(order, self._needs(), weight_s)[node.id]

    def _deadline_s(self, node: Node) -> float:
        deadline_s = self.slo.deadline_s(self.arrived_at_s)
        if deadline_s is None or node.id not in self._event_nodes:
            return self.hard_deadline_s
        return min(deadline_s, self.hard_deadline_s)

    def _limit_s(self, node: Node, now_s: float) -> float | None:
        """The longest time `node` may take; an optional node must not cost the others their SLO."""
        if not node.optional:
            return node.budget_s
        deadline_s = self._deadline_s(node)
        if self._is_first_token_the_event(node):
            deadline_s = self.hard_deadline_s  # once it streams, the SLO's event has passed
        spare_s = deadline_s - now_s - self._downstream_s(node)
        return spare_s if node.budget_s is None else min(node.budget_s, spare_s)

    # Receipt

    def _node_receipts(self, now_s: float) -> tuple[NodeReceipt, ...]:
        return tuple(
            NodeReceipt(
                node=x.node.id,
                kind=x.node.kind.value,
                round=x.round,
                item=x.item,
                status=x.status.value,
                started_s=x.started_s - self.arrived_at_s,
                spent_s=(x.ended_s if x.ended_s is not None else now_s) - x.started_s,
                budget_s=x.budget_s,
                limit_s=x.limit_s,
                problem=x.problem,
                llm=x.llm,
            )
            for x in self._executions
        )

    def _receipt(
        self, now_s: float, status: str, problem: str, output: NodeId | None
    ) -> SlaReceipt:
        e2e_s = now_s - self.arrived_at_s
        ttft_s = None
        if self._text_sent_at_s is not None:
            ttft_s = self._text_sent_at_s - self.arrived_at_s
        elif status == "done":
            ttft_s = e2e_s  # nothing was streamed: the first token came with the last
        nodes = self._node_receipts(now_s)
        answer = (output, self._states[output].result_round) if output is not None else None
        tokens = sum(
            x.llm.output_tokens for x in nodes if x.llm is not None and (x.node, x.round) == answer
        )
        pace_s = tpot_s(ttft_s, e2e_s, tokens) if ttft_s is not None else None
        achieved_s = {
            SloMetric.TTFT: ttft_s,
            SloMetric.TPOT: pace_s,
            SloMetric.E2E: e2e_s,
        }[self.slo.metric]
        if status != "done":
            achieved_s = None
        path = _longest_chain(nodes, with_cancelled=status in ("cancelled", DEADLINE_EXCEEDED))
        receipt = SlaReceipt(
            request_id=self.id,
            task=self.workflow.name,
            status=status,
            metric=self.slo.metric.value,
            target_s=self.slo.target_s,
            tpot_target_s=None if self.slo.tpot_target_s == inf else self.slo.tpot_target_s,
            achieved_s=achieved_s,
            met=self.slo.is_met_by(achieved_s, pace_s),
            ttft_s=ttft_s,
            tpot_s=pace_s,
            e2e_s=e2e_s,
            output_tokens=tokens,
            queue_s=sum(x.llm.queue_s for x in (nodes[i] for i in path) if x.llm is not None),
            overhead_s=e2e_s - sum(nodes[i].spent_s for i in path),
            simulated=any(x.llm.simulated for x in nodes if x.llm),
            nodes=nodes,
            path=path,
            problem=problem,
            notes=tuple(self._notes),
            passed=self._passed,
        )
        turn = self.turn
        if turn is None:
            return receipt
        return replace(
            receipt,
            session=turn.session,
            turn=turn.number,
            parent=turn.parent,
            client=turn.client,
            turn_kind=turn.kind.value,
            changes=turn.changes,
            think_s=turn.think_s,
            session_target_s=None if self._share is None else self._share.target_s,
            session_slack_s=None if self._share is None else self._share.slack_s(e2e_s),
        )


def _longest_chain(nodes: Sequence[NodeReceipt], with_cancelled: bool) -> tuple[int, ...]:
    """The chain of executions, by index, that covers the most time up to the last end.

    Walks back from the execution that ended last to the one that ended latest before its start.
    Abandoned executions delayed nothing, unless the run itself was cancelled.
    """
    chain: list[int] = []
    eligible = [
        i for i, x in enumerate(nodes) if with_cancelled or x.status != NodeStatus.CANCELLED.value
    ]
    while eligible:
        last = max(eligible, key=lambda i: (nodes[i].started_s + nodes[i].spent_s, i))
        chain.append(last)
        limit_s = nodes[last].started_s
        eligible = [
            i
            for i in eligible
            if i != last and nodes[i].started_s + nodes[i].spent_s <= limit_s + 1e-9
        ]
    return tuple(reversed(chain))
