"""Makes the LLM calls of one run: shared answers, leases, streams, retries and fallbacks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from cato.core.errors import (
    CapacityError,
    CatoError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    NodeError,
    ReplicaLostError,
    SupersededError,
    UnknownNameError,
    WorkLimitError,
)
from cato.core.ids import InvocationId
from cato.core.record import record
from cato.core.retries import RetryBudget
from cato.core.runs import Run, StartNode
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.core.workflow import CallSettings, LlmSettings
from cato.engines.base import PREEMPTED, EngineChunk, EngineRequest
from cato.serve.attempts import Attempts, is_refusal, why_it_waits
from cato.serve.continuation import can_continue
from cato.serve.lengths import Lengths
from cato.serve.pools import PoolInfo, Pools
from cato.serve.prompts import (
    MOST_CUTS,
    EngineCall,
    engine_call,
    fewer_chars,
    tokenizing,
    with_room,
)
from cato.serve.reuse import Flight, Reuse
from cato.telemetry.tracing import TRACEPARENT
from cato.wire.endpoint import Endpoint
from cato.workflows.work import little_work

log = logging.getLogger("cato.executor")

# Fields of an engine's request that a node renders from its inputs.
_OF_INPUTS = frozenset({"prompt", "messages"})
_TOO_MANY = 429


@record
class Piece:
    """A piece of the answer: text, and the engine's own bytes of a passed-through request."""

    text: str
    raw: bytes = b""


@record
class ModelUse:
    """Tokens used by a run's calls of one model.

    Includes cancelled calls, with estimates for what their engines had not reported yet. Excludes
    calls that an engine refused, and those that only use its tokenizer.
    """

    model: str
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class CallRules:
    """How pools treat the calls of a run.

    Pools share capacity by `tenant` and `weight`, and serve only the latest run of a `buffer`.
    `head_start_s` backdates the run in their queues. `user` names the caller. The client is
    expected to leave after `patience_s` without a token. Prompts with the same `salt` share prefix
    caches. `instead` maps a model to its fallback.
    """

    tenant: str = ""
    weight: float = 1.0
    head_start_s: float = 0.0
    buffer: str = ""
    user: str = ""
    salt: str = ""
    patience_s: float = inf
    instead: Mapping[str, str] = field(default_factory=dict)


NO_RULES = CallRules()


class Invoker:
    """All LLM calls of a run; `emit` gets their text, in order."""

    def __init__(
        self,
        run: Run,
        pools: Pools,
        draw: Callable[[], float],
        lengths: Lengths,
        retries: RetryBudget,
        rules: CallRules,
        reuse: Reuse | None,
        emit: Callable[[StartNode, Piece], None],
    ) -> None:
        # Clients may choose and repeat request ids; routers and engines need unique ones.
        self._key = f"{run.id}.{secrets.token_hex(4)}"
        self._run = run
        self._pools = pools
        self._draw = draw
        self._lengths = lengths
        self._retries = retries
        self._rules = rules
        self._reuse = reuse
        self._emit = emit
        self._served_s = 0.0  # engine time of all nodes so far
        self._calls: list[tuple[str, Attempts]] = []
        self.queued = 0  # calls that wait for a lease
        self.fell_back = False
        self.leading: set[Flight] = set()

    @property
    def calls(self) -> list[Attempts]:
        """In order of their start, those of fallbacks by the start of the last."""
        return [attempts for _, attempts in self._calls]

    def used(self) -> list[ModelUse]:
        used = []
        for model in dict.fromkeys(model for model, _ in self._calls):
            calls = [a for name, a in self._calls if name == model and a.is_charged]
            used.append(
                ModelUse(
                    model,
                    sum(a.prompt_tokens for a in calls),
                    sum(max(0, a.answer.cached_tokens) for a in calls),
                    sum(a.output_tokens for a in calls),
                )
            )
        return used

    def begin(self, command: StartNode) -> Attempts:
        """The state of a new invocation; `invoke` makes it."""
        suffix = "" if command.item is None else f".{command.item}"
        id = InvocationId(f"{self._key}.{command.node.id}.{command.round}{suffix}")
        return Attempts(command, id)

    async def invoke(self, settings: LlmSettings | CallSettings, attempts: Attempts) -> None:
        """One LLM call. Raise `NodeError` if the engine refuses what the workflow itself asks."""
        try:
            await self._with_fallback(settings, attempts)
        except EngineError as error:
            call = attempts.call
            if isinstance(settings, LlmSettings) and call and _asks_wrongly(settings, call, error):
                problem = f"its engine refuses what it asks: {error}"
                raise NodeError(attempts.command.node.id, problem) from error
            raise

    async def _with_fallback(
        self, settings: LlmSettings | CallSettings, attempts: Attempts
    ) -> None:
        """Another model is asked if its own fails without output."""
        try:
            await self._invoke_model(settings, attempts)
        except SupersededError:
            raise
        except CatoError as error:
            other = self._rules.instead.get(settings.model)
            if other is None or attempts.answer.has_output:
                raise
            log.warning("%s failed (%s); falling back to %s", settings.model, error, other)
            attempts.reasons.append(f"{settings.model} failed: {error}; fell back to {other}")
            self.fell_back = True
            attempts.falls_back()
            await self._invoke_model(replace(settings, model=other), attempts)

    async def _invoke_model(self, settings: LlmSettings | CallSettings, attempts: Attempts) -> None:
        """One LLM call to one model, over as many leases as it needs."""
        command = attempts.command
        pool = attempts.pool = self._pool_of(settings, attempts)
        self._calls = [call for call in self._calls if call[1] is not attempts]
        self._calls.append((pool.model.called(settings.model), attempts))
        attempts.started_s = time.monotonic()
        self._retries.begin()
        try:
            call = key = None
            if self._reuse is not None:
                call = await self._engine_call(settings, command, pool)
                key = self._reuse.key(self._rules.tenant, call)
            if call is None or key is None or not await self._shared(call, key, attempts):
                await self._lead(settings, pool, attempts)
        finally:
            self._retries.end(time.monotonic())
            if self._reuse is not None and call and key and attempts.flight is not None:
                self._reuse.done(self._rules.tenant, key, call, attempts.flight)

    def _pool_of(self, settings: LlmSettings | CallSettings, attempts: Attempts) -> PoolInfo:
        try:
            return self._pools.pool_of(settings.model)
        except UnknownNameError as error:
            if isinstance(settings, CallSettings):
                raise
            # The workflow named the model, not the client, who has no error to mend.
            raise NodeError(attempts.command.node.id, str(error)) from error

    async def _shared(self, call: EngineCall, key: bytes, attempts: Attempts) -> bool:
        """Read the answer of an identical call; False when this call must lead, continuing
        after the text that was read."""
        assert self._reuse is not None, "answers are not shared"
        due_s = attempts.command.deadline_s
        flight, how = self._reuse.find(self._rules.tenant, key, call, due_s)
        answer, read, began_s = attempts.answer, 0, time.monotonic()
        attempts.flight, attempts.asked_tokens = flight, call.prompt_tokens
        answer.next_call(call)
        flight.readers += 1
        try:
            while True:
                for chunk in flight.chunks[read:]:
                    read += 1
                    attempts.reused = how
                    if chunk.text:
                        attempts.has_text(began_s)
                    self._emit_chunks(answer.add(chunk), attempts)
                if flight.is_whole and read == len(flight.chunks):
                    attempts.reasons.append(f"the answer of an identical call ({how})")
                    return True
                if not flight.has_leader:
                    break
                if read == len(flight.chunks):
                    await flight.more()
        finally:
            flight.leave()
        if read:
            attempts.reasons.append(f"an identical call ended after {answer.extent}")
            if not answer.can_go_on(call):
                raise ReplicaLostError("", "the call whose answer it shared ended")
        return False

    async def _lead(
        self, settings: LlmSettings | CallSettings, pool: PoolInfo, attempts: Attempts
    ) -> None:
        """Get the answer from an engine; identical calls may read it meanwhile."""
        flight, is_whole = attempts.flight, False
        if flight is not None:
            flight.has_leader = attempts.leads = True
            self.leading.add(flight)
        try:
            await self._invoke_to_its_end(settings, pool, attempts)
            is_whole = attempts.answer.is_whole
        finally:
            attempts.leads = False
            if flight is not None:
                self.leading.discard(flight)
                flight.end(is_whole=is_whole)

    async def _invoke_to_its_end(
        self, settings: LlmSettings | CallSettings, pool: PoolInfo, attempts: Attempts
    ) -> None:
        cuts, most_chars, answer, id = 0, inf, attempts.answer, attempts.id
        lost: ReplicaLostError | EngineDeadError | None = None
        uncounted: ContextLengthError | None = None
        while True:
            call = await self._engine_call(settings, attempts.command, pool, most_chars)
            try:
                while not await self._attempt(pool, answer.next_call(call), attempts):
                    if not answer.can_go_on(call):
                        # Routers preempt only calls that can continue or that were superseded.
                        raise SupersededError("a newer run of the same buffer replaced it")
                    attempts.reasons[-1] += f"; preempted after {answer.extent}"
                    log.info("invocation %s was preempted; it continues from its text", id)
                return
            except ContextLengthError as error:
                # Token counts are estimates: lower the output limit to fit the prompt, or cut a
                # prompt that can be cut further. vLLM counts only conversations that fit, but its
                # tokenizer takes all.
                if isinstance(settings, CallSettings):
                    if settings.endpoint == Endpoint.COUNT_TOKENS:
                        other, uncounted = tokenizing(settings), error
                    else:
                        other = with_room(settings, error)
                    if other is None or answer.has_output:
                        raise
                    settings = other
                elif settings.fim is None or cuts == MOST_CUTS:
                    raise
                else:
                    cuts, most_chars = cuts + 1, fewer_chars(call, error, cuts)
            except (ReplicaLostError, EngineDeadError) as error:
                if answer.is_whole:
                    return
                attempts.reasons[-1] += f"; lost after {answer.extent}: {error}"
                if rest := answer.rest(call):
                    self._emit_chunks(rest, attempts)
                    return
                if not answer.can_go_on(call) or not attempts.may_retry(error, self._retries):
                    raise
                log.warning("invocation %s: %s; asking for another lease", id, error)
                lost = error
            except EngineError as error:
                # The requests for a continuation and to the tokenizer are CATO's own; if one is
                # refused, report why it was made.
                if uncounted is not None:
                    raise uncounted from error
                if lost is None or not answer.has_output:
                    raise
                attempts.reasons[-1] += f"; could not continue: {error}"
                raise lost from error

    async def _engine_call(
        self,
        settings: LlmSettings | CallSettings,
        command: StartNode,
        pool: PoolInfo,
        most_chars: float = inf,
    ) -> EngineCall:
        """Render the prompt here if that takes milliseconds, else in a thread."""
        make = partial(engine_call, settings, command, pool, most_chars, self._rules.salt)
        try:
            with little_work():
                return make()
        except WorkLimitError:
            return await asyncio.to_thread(make)

    async def _attempt(self, pool: PoolInfo, call: EngineCall, attempts: Attempts) -> bool:
        """One lease and its stream; False when the pool preempted the call."""
        attempts.count += 1
        now_s = time.monotonic()
        invocation = self._invocation(call, attempts, now_s)
        self.queued += 1
        attempts.waits_since_s = now_s
        try:
            lease = await self._pools.lease(pool.name, invocation)
        except CapacityError as error:
            attempts.reasons.append(f"refused: {error.problem}")
            raise
        except asyncio.CancelledError:
            attempts.reasons.append(why_it_waits(pool, attempts.waited_s))
            raise
        finally:
            self.queued -= 1
            attempts.queue_s = attempts.waited_s
            attempts.waits_since_s = None
        attempts.is_leased(lease, call)
        request = EngineRequest(
            id=f"{attempts.id}.{attempts.count}",
            endpoint=call.endpoint,
            body=call.body,
            priority=lease.priority,
            stream=call.stream,
            raw=call.raw,
            traceparent=TRACEPARENT.get(),
            adapter=pool.model.adapter(call.model),
            prompt_tokens=call.prompt_tokens,
            begun=call.begun,
            begun_tokens=call.begun_tokens,
            target=invocation.engine_target(time.monotonic() - now_s),
            prefix=invocation.prefix,
        )
        attempts.served_since_s = sent_s = time.monotonic()
        try:
            stream = self._pools.stream(pool.name, lease, request)
            async with contextlib.aclosing(stream) as chunks:
                return await self._read(chunks, attempts, sent_s)
        except asyncio.CancelledError:
            attempts.cut_s = time.monotonic() - sent_s
            raise
        except CatoError as error:
            attempts.fails(error)
            raise
        finally:
            served_s = time.monotonic() - sent_s
            attempts.service_s += served_s
            attempts.served_since_s = None
            self._served_s += served_s

    async def _read(
        self, chunks: AsyncGenerator[EngineChunk, None], attempts: Attempts, sent_s: float
    ) -> bool:
        async for chunk in chunks:
            new = attempts.answer.add(chunk)
            if any(chunk.text for chunk in new):
                attempts.has_text(sent_s)
            self._emit_chunks(new, attempts)
            if chunk.finish_reason == PREEMPTED:
                return False
        return True

    def _emit_chunks(self, chunks: list[EngineChunk], attempts: Attempts) -> None:
        answer = attempts.answer
        for chunk in chunks:
            if attempts.leads and attempts.flight is not None:
                counts = (answer.output_tokens, answer.prompt_tokens, answer.cached_tokens)
                attempts.flight.add(chunk, counts)
            if chunk.text or chunk.raw:
                self._emit(attempts.command, Piece(chunk.text, chunk.raw))

    def _invocation(self, call: EngineCall, attempts: Attempts, now_s: float) -> Invocation:
        """The call as its pool sees it; text generated so far counts as prompt."""
        run, command, rules = self._run, attempts.command, self._rules
        node = command.node
        if attempts.count == 1:
            attempts.asked_tokens = call.prompt_tokens
            attempts.predicted = self._lengths(run.workflow.name, node.id, call)
        length = attempts.predicted.length
        attempts.expected_tokens = call.expected_tokens if length is None else round(length.mean)
        # A TPOT target applies from the first token on, however late that is.
        is_streamed = node.id in run.workflow.stream
        is_paced = run.slo.metric is SloMetric.TPOT and is_streamed
        pace_s = run.slo.target_s if is_paced else run.slo.tpot_target_s
        invocation = Invocation(
            id=attempts.id,
            run_id=run.id,
            task=run.workflow.name,
            node=node.id,
            prompt_tokens=call.prompt_tokens,
            expected_tokens=max(1, attempts.expected_tokens),
            arrived_at_s=attempts.started_s - now_s - rules.head_start_s,
            deadline_s=command.deadline_s - time.monotonic(),
            downstream_s=command.downstream_s,
            until_first_token=command.until_first_token or is_paced,
            draw=self._draw(),
            tpot_target_s=pace_s if is_streamed else inf,
            length=length,
            served_s=self._served_s,
            resumable=call.is_resumable and can_continue(call),
            prefix=call.prefix,
            session=call.session,
            shared_blocks=call.shared_blocks,
            calls=call.calls,
            tenant=rules.tenant,
            weight=rules.weight,
            buffer=rules.buffer,
            user=rules.user,
            began_at_s=run.arrived_at_s - time.monotonic(),
            leaves_at_s=run.arrived_at_s + rules.patience_s - time.monotonic(),
        )
        if attempts.count == 1:
            return invocation
        began_s = attempts.began_at_s
        if began_s is not None:
            began_s -= time.monotonic()
        return invocation.continued(attempts.count, attempts.answer.output_tokens, began_s)


def _asks_wrongly(settings: LlmSettings, call: EngineCall, error: EngineError) -> bool:
    """Whether the workflow's own settings are to blame for `error`, not what its client sent.

    Engines do not always name the field that they refuse. Then a client that sent sampling
    parameters or an empty prompt is to blame.
    """
    if not is_refusal(error) or error.status == _TOO_MANY:
        return False
    if error.param is not None:
        return error.param not in settings.of_client | _OF_INPUTS
    prompt = call.body.get("prompt")
    is_empty = isinstance(prompt, str) and not prompt.strip()
    return not settings.of_client and not is_empty
