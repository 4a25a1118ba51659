"""What has happened in a run, and the receipt of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from cato.core.ids import NodeId, RunId, TaskName
from cato.core.receipt import DEADLINE_EXCEEDED, LlmFacts, NodeReceipt, NodeStatus, SlaReceipt
from cato.core.session import Turn
from cato.core.session_slo import SessionShare
from cato.core.slo import Slo, SloMetric, tpot_s
from cato.core.workflow import CallSettings, Node

Execution = tuple[NodeId, int, int | None]
"""One execution of a node: its round, and its item or None."""


@dataclass(slots=True)
class _Span:
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

    @property
    def key(self) -> Execution:
        return self.node.id, self.round, self.item


@dataclass(slots=True)
class RunRecord:
    """Executions of one run, in order of their start. Instants in seconds.

    `passed` and `notes` say how the run was started; see `SlaReceipt`.
    """

    id: RunId
    task: TaskName
    slo: Slo
    arrived_at_s: float
    passed: str
    notes: list[str]
    turn: Turn | None
    share: SessionShare | None
    text_sent_at_s: float | None = None
    _spans: list[_Span] = field(default_factory=list)

    def started(
        self,
        node: Node,
        round: int,
        item: int | None,
        now_s: float,
        budget_s: float | None,
        limit_s: float | None,
    ) -> None:
        self._spans.append(_Span(node, round, item, now_s, budget_s, limit_s))

    def left_out(
        self, node: Node, round: int, now_s: float, budget_s: float | None, problem: str
    ) -> None:
        """The node was not started, for that reason."""
        status = NodeStatus.ABSENT
        self._spans.append(_Span(node, round, None, now_s, budget_s, 0.0, status, now_s, problem))
        self.notes.append(f"{node.id} left out: {problem}")

    def ended(
        self,
        execution: Execution,
        now_s: float,
        status: NodeStatus,
        llm: LlmFacts | None,
        problem: str = "",
    ) -> Node | None:
        """Close an execution and return its node; None for a late or repeated report."""
        for span in reversed(self._spans):
            if span.ended_s is None and span.key == execution:
                span.status, span.ended_s, span.llm, span.problem = status, now_s, llm, problem
                return span.node
        return None

    def note_open(self, llm: Mapping[Execution, LlmFacts]) -> None:
        """How the open calls have been served so far."""
        for span in self._spans:
            if span.ended_s is None:
                span.llm = llm.get(span.key)

    def cancel_open(self, now_s: float) -> tuple[NodeId, ...]:
        """Close what is open; returns its nodes."""
        open_ = [x for x in self._spans if x.ended_s is None]
        for span in open_:
            span.status, span.ended_s = NodeStatus.CANCELLED, now_s
        return tuple(dict.fromkeys(x.node.id for x in open_))

    def nodes(self, now_s: float) -> tuple[NodeReceipt, ...]:
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
            for x in self._spans
        )

    def receipt(
        self,
        now_s: float,
        status: str,
        problem: str,
        answer: tuple[NodeId, int] | None,
        streamed: tuple[NodeId, int] | None,
    ) -> SlaReceipt:
        """The receipt of the finished run.

        `answer` is the node and round of its output, or of what was sent before it ended early;
        `streamed` those of the text that was streamed.
        """
        e2e_s = now_s - self.arrived_at_s
        ttft_s = None
        if self.text_sent_at_s is not None:
            ttft_s = self.text_sent_at_s - self.arrived_at_s
        elif status == "done":
            ttft_s = e2e_s  # nothing was streamed: the first token came with the last
        nodes = self.nodes(now_s)
        pace_s = None
        if ttft_s is not None and self.text_sent_at_s is not None and not self._is_whole(streamed):
            # Other nodes may run after the streamed one, and have tokens of their own.
            ends_s = [x.started_s + x.spent_s for x in nodes if (x.node, x.round) == streamed]
            last_s = max((ttft_s, *ends_s)) if streamed != answer else e2e_s
            pace_s = tpot_s(ttft_s, last_s, _steps_of(nodes, streamed))
        # An answer at once keeps every pace, as one of a single token does (`tpot_s`).
        kept_s = pace_s or 0.0
        achieved_s = {SloMetric.TTFT: ttft_s, SloMetric.TPOT: kept_s, SloMetric.E2E: e2e_s}[
            self.slo.metric
        ]
        if status != "done":
            achieved_s = None
        path = _longest_chain(nodes, with_cancelled=status in ("cancelled", DEADLINE_EXCEEDED))
        receipt = SlaReceipt(
            request_id=self.id,
            task=self.task,
            status=status,
            metric=self.slo.metric.value,
            target_s=self.slo.target_s,
            tpot_target_s=None if self.slo.tpot_target_s == inf else self.slo.tpot_target_s,
            achieved_s=achieved_s,
            met=self.slo.is_met_by(achieved_s, pace_s),
            ttft_s=ttft_s,
            tpot_s=pace_s,
            e2e_s=e2e_s,
            output_tokens=_tokens_of(nodes, answer),
            queue_s=sum(x.llm.queue_s for x in (nodes[i] for i in path) if x.llm is not None),
            overhead_s=e2e_s - sum(nodes[i].spent_s for i in path),
            simulated=any(x.llm.simulated for x in nodes if x.llm),
            nodes=nodes,
            path=path,
            problem=problem,
            notes=tuple(self.notes),
            passed=self.passed,
        )
        return receipt if self.turn is None else _of_turn(receipt, self.turn, self.share)

    def _is_whole(self, streamed: tuple[NodeId, int] | None) -> bool:
        """Whether `streamed` is a direct call whose client did not ask for a stream: its text is
        sent at the end."""
        settings = [x.node.settings for x in self._spans if (x.node.id, x.round) == streamed]
        return any(isinstance(s, CallSettings) and not s.stream for s in settings)


def _tokens_of(nodes: Sequence[NodeReceipt], execution: tuple[NodeId, int] | None) -> int:
    """The output tokens of a node's round, of all its items."""
    return sum(
        x.llm.output_tokens for x in nodes if x.llm is not None and (x.node, x.round) == execution
    )


def _steps_of(nodes: Sequence[NodeReceipt], execution: tuple[NodeId, int] | None) -> int:
    """As `_tokens_of`, but several answers to one request are written at the same time."""
    return sum(
        x.llm.tokens_of_each for x in nodes if x.llm is not None and (x.node, x.round) == execution
    )


def _of_turn(receipt: SlaReceipt, turn: Turn, share: SessionShare | None) -> SlaReceipt:
    """The receipt with the place of its call in a session."""
    return replace(
        receipt,
        session=turn.session,
        turn=turn.number,
        parent=turn.parent,
        client=turn.client,
        turn_kind=turn.kind.value,
        changes=turn.changes,
        think_s=turn.think_s,
        session_target_s=None if share is None else share.target_s,
        session_slack_s=None if share is None else share.slack_s(receipt.e2e_s),
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
