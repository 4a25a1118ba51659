"""One execution of a workflow, as a state machine: facts in, commands out.

The ingress drives it in real time, the simulator in virtual time. Both carry out the commands and
report what happened. Budgets are split again at every start of a node (see `cato.core.budgets`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from cato.core.budgets import NodeEstimate, RunBudgets
from cato.core.errors import CatoError, ExpressionError
from cato.core.ids import NodeId, RunId
from cato.core.receipt import LlmFacts, NodeReceipt, NodeStatus, SlaReceipt
from cato.core.record import record
from cato.core.run_record import Execution, RunRecord
from cato.core.session import Turn
from cato.core.session_slo import SessionShare
from cato.core.slo import Slo
from cato.core.words import counted
from cato.core.workflow import Node, NodeKind, Workflow, list_of

# Events


@record
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
    """An execution failed, or exceeded its limit."""

    now_s: float
    node: NodeId
    round: int
    item: int | None
    problem: str
    llm: LlmFacts | None = None


@record
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
    llm: Mapping[Execution, LlmFacts] = field(default_factory=dict)


RunEvent = NodeDone | NodeFailed | TextSent | RunCancelled


# Commands


@record
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


@record
class StreamNode:
    """Stream this node's text to the client: what exists already and what follows."""

    node: NodeId
    round: int


@dataclass(frozen=True, slots=True)
class AbandonNode:
    """Cancel this node's open executions; their results are not needed."""

    node: NodeId


@record
class FinishRun:
    """The run is over. `output` is the result of the output node; None unless `status` is done.

    `error`: a condition or a list of a node could not be evaluated, as `receipt.problem` says; an
    `InputError` if that is due to the inputs alone. `streamed` is the result of the streamed node,
    which may be another than the output node.
    """

    status: str
    output: object
    output_node: NodeId | None
    receipt: SlaReceipt
    error: CatoError | None = field(default=None, compare=False)
    streamed: object = None


RunCommand = StartNode | StreamNode | AbandonNode | FinishRun


NextShare = Callable[[Sequence[NodeReceipt]], float | None]
"""The share of the remaining time that the next LLM node took in the most similar past run."""


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
        self.turn = turn
        self._budgets = RunBudgets(workflow, slo, estimates, arrived_at_s)
        self._record = RunRecord(
            id, workflow.name, slo, arrived_at_s, passed, list(notes), turn, share
        )
        self._notes = self._record.notes
        self._nodes = {n.id: n for n in workflow.nodes}
        self._states = {n.id: _State() for n in workflow.nodes}
        self._names: dict[str, object] = dict(inputs)
        self._streaming: tuple[NodeId, int] | None = None
        self._finished = False
        self._next_share = next_share if workflow.is_dynamic else None
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
                if self._record.text_sent_at_s is None:
                    self._record.text_sent_at_s = event.now_s
                return ()
            case RunCancelled():
                self._record.note_open(event.llm)
                return self._finish(event.now_s, event.status, event.reason)
            case _:
                assert_never(event)

    @property
    def is_finished(self) -> bool:
        return self._finished

    @property
    def slo(self) -> Slo:
        return self._record.slo

    @property
    def arrived_at_s(self) -> float:
        return self._record.arrived_at_s

    @property
    def hard_deadline_s(self) -> float:
        return self._budgets.hard_deadline_s

    # Events

    def _node_done(self, event: NodeDone) -> tuple[RunCommand, ...]:
        execution = (event.node, event.round, event.item)
        node = self._record.ended(execution, event.now_s, NodeStatus.DONE, event.llm)
        return () if node is None else self._item_done(node, event.item, event.result, event.now_s)

    def _node_failed(self, event: NodeFailed) -> tuple[RunCommand, ...]:
        execution, problem = (event.node, event.round, event.item), event.problem
        status = NodeStatus.ABSENT if self._nodes[event.node].optional else NodeStatus.FAILED
        node = self._record.ended(execution, event.now_s, status, event.llm, problem)
        if node is None:
            return ()
        if status is NodeStatus.FAILED:
            return self._finish(event.now_s, "failed", f"node {event.node!r}: {problem}")
        self._notes.append(f"{event.node} left out: {problem}")
        return self._item_done(node, event.item, None, event.now_s)

    def _item_done(
        self, node: Node, item: int | None, result: Mapping[str, object] | None, now_s: float
    ) -> tuple[RunCommand, ...]:
        state = self._states[node.id]
        if item is not None:
            state.items[item] = result
        state.open_items -= 1
        if state.open_items > 0:
            return ()
        if item is not None:
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
        best_so_far, rounds = self._names.get(owner), counted(state.round, "round")
        try:
            is_enough = bool(node.repeat.until.evaluate(self._names))
            if not is_enough and state.round < node.repeat.max_rounds:
                if why_not := self._budgets.why_no_round(node, self._settled(), now_s):
                    self._notes.append(f"{owner} stopped after {rounds}: {why_not}")
                    state.status = NodeStatus.DONE
                    return self._advance(now_s)
                started = tuple(self._start(node, now_s))
                if started:
                    return started + self._advance(now_s)
                self._names[owner] = best_so_far
            if not is_enough:
                self._notes.append(f"{owner} gave up after {rounds}")
        except ExpressionError as error:
            if not node.optional:
                return self._finish(now_s, "failed", f"node {owner!r}: {error}", error=error)
            self._notes.append(f"{owner} stopped after {rounds}: {error}")
        state.status = NodeStatus.DONE
        return self._advance(now_s)

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
                blamed = self.workflow.blamed(node, error)
                return self._finish(now_s, "failed", f"node {node.id!r}: {error}", error=blamed)
            budget_s = self._budgets.budget_s(node, self._settled(), now_s)
            self._leave_out(node, now_s, budget_s, str(error))
            return ()

    def _is_ready(self, node: Node) -> bool:
        return all(self._states[n].status in _SETTLED for n in node.needs)

    def _start(self, node: Node, now_s: float) -> list[RunCommand]:
        state = self._states[node.id]
        settled = self._settled()
        budget_s, downstream_s = self._split(node, settled, now_s)
        limit_s = self._budgets.limit_s(node, settled, now_s)
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
        deadline_s = self._budgets.deadline_s(node)
        commands: list[RunCommand] = []
        for i, item in enumerate([None] if items is None else items):
            names = dict(self._names)
            index = None if items is None else i
            if items is not None:
                names.update(item=item, index=i)
            self._record.started(node, state.round, index, now_s, budget_s, limit_s)
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
                    until_first_token=self._budgets.is_first_token_the_event(node),
                )
            )
        return commands

    def _fan_out(self, node: Node) -> Sequence[object]:
        assert node.each is not None
        value = list_of(node.each, self._names)
        if len(value) > node.max_items:
            self._notes.append(f"{node.id}: only the first {node.max_items} of {len(value)} items")
        return value[: node.max_items]

    def _leave_out(self, node: Node, now_s: float, budget_s: float | None, problem: str) -> None:
        state = self._states[node.id]
        state.status = NodeStatus.ABSENT
        self._names.pop(node.id, None)
        self._record.left_out(node, state.round + 1, now_s, budget_s, problem)

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
        self,
        now_s: float,
        status: str,
        problem: str,
        output: NodeId | None = None,
        error: CatoError | None = None,
    ) -> tuple[RunCommand, ...]:
        self._finished = True
        abandoned = self._record.cancel_open(now_s)
        commands: list[RunCommand] = [AbandonNode(id) for id in abandoned]
        result = self._names.get(output) if output is not None else None
        answer = self._streaming
        if output is not None:
            answer = output, self._states[output].result_round
        receipt = self._record.receipt(now_s, status, problem, answer, self._streaming)
        streamed = None if self._streaming is None else self._names.get(self._streaming[0])
        commands.append(FinishRun(status, result, output, receipt, error, streamed))
        return tuple(commands)

    # Time

    def _settled(self) -> set[NodeId]:
        return {id for id, state in self._states.items() if state.status in _SETTLED}

    def _split(self, node: Node, settled: set[NodeId], now_s: float) -> tuple[float | None, float]:
        """The node's share of the slack, and the expected time of the nodes after it.

        If the path is decided at run time and the deadline is for the whole run, the most similar
        past run predicts the remaining time better than baselines. Time that earlier nodes did not
        use is split among all following nodes.
        """
        share = None
        is_llm = node.kind is NodeKind.LLM
        if self._next_share is not None and is_llm and self._budgets.is_for_the_run(node):
            share = self._next_share(self._record.nodes(now_s))
        return self._budgets.shared(node, share, settled, now_s)
