"""The call of an LLM node in virtual time, with the facts for its receipt."""

from __future__ import annotations

from dataclasses import dataclass, field

from cato.core.commands import Dispatch
from cato.core.ids import NodeId
from cato.core.receipt import LlmFacts
from cato.core.runs import StartNode
from cato.sim.calls import Call
from cato.sim.steps import Sequence as EngineSequence

ExecutionKey = tuple[NodeId, int, int | None]


@dataclass(slots=True, eq=False)
class Execution:
    """One started execution of a node."""

    command: StartNode
    alarms: list[int] = field(default_factory=list)
    call: NodeCall | None = None

    @property
    def key(self) -> ExecutionKey:
        return (self.command.node.id, self.command.round, self.command.item)


@dataclass(slots=True, eq=False, kw_only=True)
class NodeCall(Call):
    """The call of an LLM node, with the facts for its receipt."""

    execution: Execution
    draw: float
    max_tokens: int
    lease: Dispatch | None = None
    is_leased: bool = False
    first_token_s: float | None = None  # since it was sent
    first_after_s: float | None = None  # with what it had waited and been served before
    queue_s: float = 0.0
    service_s: float = 0.0

    def sent(self, command: Dispatch, now_s: float) -> EngineSequence:
        self.queue_s += now_s - self.waits_since_s
        self.lease, self.is_leased = command, True
        return Call.sent(self, command, now_s)

    def taken_back(self, now_s: float) -> None:
        self.end_lease(now_s)
        Call.taken_back(self, now_s)

    def ended(self, cached_tokens: int, now_s: float) -> None:
        self.run.outcome.cached_tokens += cached_tokens
        self.end_lease(now_s)

    def end_lease(self, now_s: float) -> None:
        """No-op when it has no lease."""
        if self.is_leased:
            self.is_leased = False
            served_s = now_s - self.sent_at_s
            self.service_s += served_s
            self.run.served_s += served_s

    def facts(self) -> LlmFacts:
        lease = self.lease
        has_ended = self.tokens == self.node.output_tokens
        reason = "length" if self.tokens >= self.max_tokens else "stop" if has_ended else ""
        return LlmFacts(
            model="",
            pool=self.pool.setup.name,
            replica=lease.replica_id if lease else "",
            deployment=lease.deployment if lease else "",
            queue_s=self.queue_s,
            priority=lease.priority if lease else 0,
            slack_s=lease.slack_s if lease else 0.0,
            predicted_s=lease.remaining_s if lease else 0.0,
            engine_ttft_s=self.first_token_s,
            first_token_s=self.first_after_s,
            prompt_tokens=self.node.prompt_tokens,
            cached_prompt_tokens=0,
            output_tokens=max(self.tokens, self.generated),
            finish_reason=reason,
            attempts=self.attempt,
            simulated=True,
            reasons=(lease.reason,) if lease else (),
            expected_tokens=self.node.expected_tokens,
            predicted_queue_s=lease.predicted_queue_s if lease else 0.0,
            service_s=self.service_s,
            predicted_service_s=lease.service_s if lease else 0.0,
        )
