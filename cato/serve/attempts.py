"""The state of one invocation over all its attempts, and how the receipt tells it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cato.core.commands import Dispatch
from cato.core.errors import EngineDeadError, ReplicaLostError
from cato.core.ids import InvocationId, ReplicaId
from cato.core.receipt import LlmFacts, Placement
from cato.core.retries import RetryBudget
from cato.core.runs import StartNode
from cato.core.workflow import CallSettings, LlmSettings
from cato.serve.continuation import Answer
from cato.serve.lengths import Predicted
from cato.serve.pools import PoolInfo
from cato.serve.reuse import Flight

# Calls of a lost engine continue elsewhere. A call that loses several engines in a row without a
# new token probably crashes them; one that has produced tokens is less suspect and may lose more.
MAX_LOSSES = 4
MAX_LOSSES_BEGUN = 6
# The limit for a stream that makes progress between its losses.
MAX_ALL_LOSSES = 20
# Leases on replicas that turn out to be gone cost only time; the router is told of each.
MAX_MISSED = 20
# Probability that an output stays below the length bound in its receipt.
BOUND_LEVEL = 0.9


@dataclass(slots=True)
class Attempts:
    """The invocation of one execution of a node; other nodes than LLM nodes make no attempt."""

    command: StartNode
    id: InvocationId
    answer: Answer = field(default_factory=Answer)
    started_s: float = 0.0
    asked_tokens: int = 0  # prompt tokens, estimated until an engine reports its count
    first_token_s: float | None = None
    began_at_s: float | None = None  # when its first token came
    queue_s: float = 0.0  # total wait for leases so far
    waits_since_s: float | None = None
    served_since_s: float | None = None
    count: int = 0
    losses: int = 0  # engines lost since the last new token
    all_losses: int = 0
    tokens_when_lost: int = 0
    missed: int = 0  # replicas that were gone before the call reached them
    service_s: float = 0.0
    predicted: Predicted = field(default_factory=Predicted)
    expected_tokens: int = 0
    reasons: list[str] = field(default_factory=list)
    lease: Dispatch | None = None
    home: ReplicaId | None = None  # home replica of its session at the first lease
    flight: Flight | None = None  # the answer that it reads or, as leader, produces
    leads: bool = False
    reused: str = ""  # how it came to share another call's answer
    pool: PoolInfo | None = None

    @property
    def waited_s(self) -> float:
        """Total wait for leases, the current one included."""
        return self.queue_s + _since(self.waits_since_s)

    @property
    def engine_s(self) -> float:
        """Total time at engines, the current attempt included."""
        return self.service_s + _since(self.served_since_s)

    @property
    def prompt_tokens(self) -> int:
        """The engine's count, or the estimate before that."""
        told = self.answer.prompt_tokens
        return self.asked_tokens if told < 0 else told

    def has_text(self, since_s: float) -> None:
        """Text arrived from what began at `since_s`; the first is noted."""
        if self.first_token_s is None:
            self.began_at_s = time.monotonic()
            self.first_token_s = self.began_at_s - since_s

    def is_leased(self, lease: Dispatch) -> None:
        self.lease = lease
        if self.home is None:
            self.home = lease.home
        self.reasons.append(lease.reason)

    def may_retry(self, error: ReplicaLostError | EngineDeadError, budget: RetryBudget) -> bool:
        """Count a lost attempt; return whether another may follow."""
        if isinstance(error, ReplicaLostError) and not error.was_reached:
            self.missed += 1
            return self.missed <= MAX_MISSED
        tokens = self.answer.output_tokens
        self.losses = 1 if tokens > self.tokens_when_lost else self.losses + 1
        self.all_losses += 1
        self.tokens_when_lost = tokens
        in_a_row = MAX_LOSSES_BEGUN if tokens else MAX_LOSSES
        is_too_often = self.losses >= in_a_row or self.all_losses >= MAX_ALL_LOSSES
        return not is_too_often and budget.take(time.monotonic())

    def facts(self) -> LlmFacts | None:
        """How it was served so far; None if it is no LLM call or was not made."""
        settings, lease, pool = self.command.node.settings, self.lease, self.pool
        was_called = self.count > 0 or bool(self.reused)
        if not isinstance(settings, LlmSettings | CallSettings) or not was_called:
            return None
        assert pool is not None, "an invocation that was made has its pool"
        answer = self.answer
        reasons = tuple(self.reasons)
        if self.waits_since_s is not None:
            reasons += (why_it_waits(pool, self.waited_s),)
        bound_tokens = 0
        length = self.predicted.length
        if length is not None:
            bound_tokens = round(length.left_quantile(BOUND_LEVEL, 0))
        return LlmFacts(
            model=pool.model.called(settings.model),
            pool=pool.name,
            replica=lease.replica_id if lease else "",
            deployment=lease.deployment if lease else "",
            queue_s=self.waited_s,
            priority=lease.priority if lease else 0,
            slack_s=lease.slack_s if lease else 0.0,
            predicted_s=lease.remaining_s if lease else 0.0,
            expected_prompt_tokens=self.asked_tokens,
            expected_cached_tokens=lease.cached_tokens if lease else 0,
            expected_tokens=self.expected_tokens,
            length_bound_tokens=bound_tokens,
            service_s=self.engine_s,
            predicted_service_s=lease.service_s if lease else 0.0,
            predicted_queue_s=lease.predicted_queue_s if lease else 0.0,
            engine_ttft_s=self.first_token_s,
            prompt_tokens=max(0, answer.prompt_tokens),
            cached_prompt_tokens=max(0, answer.cached_tokens),
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            attempts=self.count,
            simulated=pool.simulated,
            reasons=reasons,
            uncached_prompt_tokens=max(0, answer.prompt_tokens - max(0, answer.cached_tokens)),
            placement=self._placement(settings),
            home=self.home or "",
            reused=self.reused if self.count == 0 else "",
            features=self.predicted.features,
        )

    def _placement(self, settings: LlmSettings | CallSettings) -> Placement:
        """Where its latest lease placed it, relative to its session's home replica."""
        session = settings.prompt.session if isinstance(settings, CallSettings) else ""
        if not session or self.lease is None or not self.lease.replica_id:
            return Placement.NONE
        if not self.home:
            return Placement.NEW
        return Placement.HOME if self.lease.replica_id == self.home else Placement.MOVED


def _since(at_s: float | None) -> float:
    return 0.0 if at_s is None else time.monotonic() - at_s


def why_it_waits(pool: PoolInfo, waited_s: float) -> str:
    """The reason for a call that ended while queued."""
    if pool.ready_replicas == 0:
        return f"queued {waited_s:.2f} s: no replica of {pool.name} was ready"
    queued = pool.queued_per_place
    return f"queued {waited_s:.2f} s in {pool.name}: {queued:.1f} waiting calls per batch slot"
