"""The state of one invocation over all its attempts, and how the receipt tells it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cato.core.commands import Dispatch
from cato.core.errors import (
    CatoError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    ReplicaLostError,
)
from cato.core.ids import InvocationId, ReplicaId
from cato.core.receipt import LlmFacts, Placement
from cato.core.retries import RetryBudget
from cato.core.runs import StartNode
from cato.core.workflow import CallSettings, LlmSettings
from cato.serve.continuation import Answer
from cato.serve.lengths import Predicted
from cato.serve.pools import PoolInfo
from cato.serve.prompts import EngineCall, most_output_tokens
from cato.serve.reuse import Flight
from cato.wire.endpoint import Endpoint

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
    first_token_s: float | None = None  # at the engine
    first_after_s: float = 0.0  # what it had waited and been served then
    began_at_s: float | None = None  # when its first token came
    queue_s: float = 0.0  # total wait for leases so far
    waits_since_s: float | None = None
    served_since_s: float | None = None
    count: int = 0  # leases asked for in the pool that is asked now
    before: int = 0  # and in others
    losses: int = 0  # engines lost since the last new token
    all_losses: int = 0
    tokens_when_lost: int = 0
    missed: int = 0  # replicas that were gone before the call reached them
    service_s: float = 0.0
    predicted: Predicted = field(default_factory=Predicted)
    expected_tokens: int = 0
    reasons: list[str] = field(default_factory=list)
    lease: Dispatch | None = None
    call: EngineCall | None = None  # the call of that lease
    is_refused: bool = False  # its engine refused it before any output
    cut_s: float = 0.0  # engine time of an attempt that was cancelled
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

    @property
    def output_tokens(self) -> int:
        """The engine's count; an estimate for a whole (not streamed) call that was cut off.

        Engines count a whole answer only at its end. The estimate is the number of tokens that the
        call would generate alone, by the pool's profile, in the time after its prompt, and at most
        its token limit. Engines that were lost return nothing, so their time does not count.
        """
        call, settings = self.call, self.command.node.settings
        served_s = self.cut_s or _since(self.served_since_s)
        counted = self.answer.output_tokens
        if counted or not served_s or call is None or call.stream or not call.endpoint.generates:
            return counted
        assert isinstance(settings, CallSettings), "only a direct call is not streamed"
        assert self.pool is not None, "a call that was made has its pool"
        assert self.lease is not None, "a call at an engine has its lease"
        profile = self.pool.profile
        limit = min(call.max_tokens, most_output_tokens(settings, profile.context_tokens))
        first_s = profile.first_token_s(call.prompt_tokens, 1, self.lease.cached_tokens)
        if served_s < first_s:
            return 0
        step_s = profile.decode_step_s(call.calls, call.prompt_tokens / call.calls)
        tokens = 1 + int((served_s - first_s) / step_s) if step_s > 0.0 else limit
        return call.calls * min(limit, tokens)

    @property
    def is_charged(self) -> bool:
        """Whether its tokens count as used.

        Every leased call counts, since engines may report a prompt's length only at the end; but
        not a call that its engine refused, and not one that uses the tokenizer only.
        """
        settings = self.command.node.settings
        is_free = isinstance(settings, CallSettings) and not Endpoint(settings.endpoint).computes
        return self.lease is not None and not self.is_refused and not is_free

    def has_text(self, since_s: float) -> None:
        """Text arrived from what began at `since_s`; the first is noted."""
        if self.first_token_s is None:
            self.began_at_s = time.monotonic()
            self.first_token_s = self.began_at_s - since_s
            self.first_after_s = self.queue_s + self.service_s + self.first_token_s

    def is_leased(self, lease: Dispatch, call: EngineCall) -> None:
        self.lease, self.call, self.is_refused = lease, call, False
        if self.home is None:
            self.home = lease.home
        self.reasons.append(lease.reason)

    def fails(self, error: CatoError) -> None:
        """The engine of the latest lease answered with `error`."""
        self.is_refused = is_refusal(error) and not self.answer.has_output

    def falls_back(self) -> None:
        """Another model is asked, in whose pool this is a new call."""
        self.before += self.count
        self.id = InvocationId(f"{self.id}-fallback")
        self.flight, self.count = None, 0
        self.losses = self.all_losses = self.missed = 0

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
        count = self.before + self.count
        was_called = count > 0 or bool(self.reused)
        if not isinstance(settings, LlmSettings | CallSettings) or not was_called:
            return None
        assert pool is not None, "an invocation that was made has its pool"
        answer = self.answer
        reasons = tuple(self.reasons)
        if self.waits_since_s is not None:
            reasons += (why_it_waits(pool, self.waited_s),)
        bound_tokens = 0
        # The text of a whole answer comes at its end, which says nothing of its first token.
        is_whole = isinstance(settings, CallSettings) and not settings.stream
        first_s = None if is_whole else self.first_token_s
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
            engine_ttft_s=first_s,
            first_token_s=None if first_s is None else self.first_after_s,
            prompt_tokens=max(0, answer.prompt_tokens),
            cached_prompt_tokens=max(0, answer.cached_tokens),
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            attempts=count,
            simulated=pool.simulated,
            reasons=reasons,
            uncached_prompt_tokens=max(0, answer.prompt_tokens - max(0, answer.cached_tokens)),
            placement=self._placement(settings),
            home=self.home or "",
            reused=self.reused if count == 0 else "",
            features=self.predicted.features,
            calls=self.call.calls if self.call else 1,
        )

    def _placement(self, settings: LlmSettings | CallSettings) -> Placement:
        """Where its latest lease placed it, relative to its session's home replica."""
        session = settings.prompt.session if isinstance(settings, CallSettings) else ""
        if not session or self.lease is None or not self.lease.replica_id:
            return Placement.NONE
        if not self.home:
            return Placement.NEW
        return Placement.HOME if self.lease.replica_id == self.home else Placement.MOVED


def is_refusal(error: CatoError) -> bool:
    """Whether the request was at fault or asked too much, and the engine computed nothing."""
    if isinstance(error, EngineError) and not isinstance(error, EngineDeadError):
        return 400 <= error.status < 500 or error.status == 501  # 501: it lacks the endpoint
    return isinstance(error, ContextLengthError)


def _since(at_s: float | None) -> float:
    return 0.0 if at_s is None else time.monotonic() - at_s


def why_it_waits(pool: PoolInfo, waited_s: float) -> str:
    """The reason for a call that ended while queued."""
    if pool.ready_replicas == 0:
        return f"queued {waited_s:.2f} s: no replica of {pool.name} was ready"
    queued = pool.queued_per_place
    return f"queued {waited_s:.2f} s in {pool.name}: {queued:.1f} waiting calls per batch slot"
