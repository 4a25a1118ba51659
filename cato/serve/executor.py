"""Executes one workflow run in real time: carries out the commands of `cato.core.runs.Run`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import assert_never

from cato.core.commands import Dispatch
from cato.core.errors import (
    CapacityError,
    CatoError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    InputError,
    NodeError,
    ReplicaLostError,
    SupersededError,
    UnknownNameError,
    WorkLimitError,
)
from cato.core.ids import InvocationId, NodeId, ReplicaId
from cato.core.receipt import (
    CLIENT_LEFT,
    DEADLINE_EXCEEDED,
    SUPERSEDED,
    Excuse,
    LlmFacts,
    Placement,
)
from cato.core.retries import RetryBudget
from cato.core.runs import (
    AbandonNode,
    FinishRun,
    NodeDone,
    NodeFailed,
    Run,
    RunCancelled,
    RunCommand,
    StartNode,
    StreamNode,
    TextSent,
)
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.core.workflow import CallSettings, LlmSettings, TransformSettings
from cato.engines.base import PREEMPTED, EngineChunk, EngineRequest
from cato.serve.continuation import Answer, can_continue
from cato.serve.lengths import Lengths, Predicted
from cato.serve.nodes.runner import NodeRunner
from cato.serve.pools import PoolInfo, Pools
from cato.serve.prompts import EngineCall, engine_call, with_room
from cato.serve.reuse import Flight, Reuse
from cato.telemetry.tracing import TRACEPARENT
from cato.wire.answer import AnswerWriter
from cato.workflows.work import little_work

log = logging.getLogger("cato.executor")

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


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer: text, and the engine's own bytes of a passed-through request."""

    text: str
    raw: bytes = b""


@dataclass(slots=True)
class _Output:
    """Text of one node execution, buffered until the node is known to be the streamed one."""

    pieces: list[Piece] = field(default_factory=list)
    is_live: bool = False


@dataclass(slots=True)
class _Progress:
    """State of one invocation over all its attempts."""

    answer: Answer = field(default_factory=Answer)
    asked_tokens: int = 0  # prompt tokens, estimated until an engine reports its count
    first_token_s: float | None = None
    queue_s: float = 0.0  # total wait for leases so far
    waits_since_s: float | None = None
    served_since_s: float | None = None
    attempts: int = 0
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


def _since(at_s: float | None) -> float:
    return 0.0 if at_s is None else time.monotonic() - at_s


@dataclass(frozen=True, slots=True)
class ModelUse:
    """Tokens used by a run's calls of one model, cancelled calls included."""

    model: str
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


class RunningTask:
    """A running workflow. Iterate over its pieces; then `finish` holds the result.

    Closing the iteration early, or `cancel`, stops every node down to the engine.
    """

    def __init__(
        self,
        run: Run,
        pools: Pools,
        nodes: NodeRunner,
        draw: Callable[[], float],
        lengths: Lengths,
        on_finish: Callable[[FinishRun, Sequence[ModelUse]], None],
        retries: RetryBudget,
        *,
        tenant: str = "",
        weight: float = 1.0,
        head_start_s: float = 0.0,
        buffer: str = "",
        user: str = "",
        salt: str = "",
        patience_s: float = inf,
        reuse: Reuse | None = None,
        instead: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Pools share capacity by `tenant` and `weight`; all runs of the process share `retries`.

        `head_start_s` backdates the run in the pools' queues. Pools serve only the latest run of a
        `buffer`. `user` names the caller. The client is expected to leave after `patience_s`
        without a token. Prompts with the same `salt` share prefix caches; with `reuse`, identical
        calls share answers. `instead` maps a model to its fallback.
        """
        self.run = run
        self.head_start_s = head_start_s
        self._buffer = buffer
        self._user = user
        self._salt = salt
        self._patience_s = patience_s
        self._tenant = tenant
        self._weight = weight
        self.finish: FinishRun | None = None
        self.error: CatoError | None = None
        # Clients may choose and repeat request ids; routers and engines need unique ones.
        self._key = f"{run.id}.{secrets.token_hex(4)}"
        self._pools = pools
        self._nodes = nodes
        self._draw = draw
        self._lengths = lengths
        self._served_s = 0.0  # engine time of all nodes so far
        self._queued = 0
        self._reuse = reuse
        self._instead = instead
        self.fell_back = False
        self._leading: set[Flight] = set()
        self._left = ""  # why its client left, when the run continues for readers of its answer
        self._calls: list[tuple[str, _Progress]] = []
        self._on_finish = on_finish
        self._retries = retries
        self._out: list[Piece] = []  # pieces not read yet
        self._reader: asyncio.Future[None] | None = None
        self._has_sent = False
        self._outputs: dict[tuple[NodeId, int], _Output] = {}
        self._tasks: dict[asyncio.Task[None], NodeId] = {}
        self._watchdog: asyncio.TimerHandle | None = None
        self._under_way: dict[tuple[NodeId, int, int | None], tuple[StartNode, _Progress]] = {}

    def start(self) -> None:
        """Start the run; call once, inside the event loop."""
        now_s = time.monotonic()
        loop = asyncio.get_running_loop()
        self._watchdog = loop.call_later(self.run.hard_deadline_s - now_s, self._pass_deadline)
        self._perform(self.run.start(now_s))

    async def next(self) -> list[Piece]:
        """Wait for at least one piece and return all that are ready; empty after the last.

        There is one reader; it cancels the run when it leaves early.
        """
        if not self._out and self.finish is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        pieces, self._out = self._out, []
        return pieces

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Stream the answer until the run has finished."""
        try:
            while batch := await self.next():
                for piece in batch:
                    yield piece
        finally:
            self.cancel(CLIENT_LEFT)

    async def wait(self) -> FinishRun:
        """Drain the pieces and return the result; cancelling the wait cancels the run."""
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for _ in pieces:
                pass
        assert self.finish is not None
        return self.finish

    @property
    def asked_tokens(self) -> int:
        """Estimated tokens of the longest prompt among its calls."""
        return max((progress.asked_tokens for _, progress in self._calls), default=0)

    @property
    def writer(self) -> AnswerWriter | None:
        """Writer that can extend a direct call's stream; None until something was sent."""
        return self._calls[-1][1].answer.writer if self._calls else None

    @property
    def is_queued(self) -> bool:
        """Whether a call of the run is waiting for a lease."""
        return self._queued > 0

    def cancel(self, reason: str) -> None:
        """Cancel the run; a no-op when it has finished.

        If the client left but other calls read an answer that this run leads, it continues for
        them until the last reader leaves.
        """
        if reason in (CLIENT_LEFT, SUPERSEDED) and not self.run.is_finished:
            shared = [flight for flight in self._leading if flight.readers]
            if shared:
                self._left = reason
                for flight in shared:
                    flight.give_up = partial(self.cancel, reason)
                return
        self._perform(self._ended(reason, "cancelled"))

    # Commands

    def _perform(self, commands: tuple[RunCommand, ...]) -> None:
        for command in commands:
            match command:
                case StartNode():
                    task = asyncio.get_running_loop().create_task(self._execute(command))
                    self._tasks[task] = command.node.id
                    task.add_done_callback(self._forget)
                case StreamNode(node, round):
                    output = self._output(node, round)
                    output.is_live = True
                    for piece in output.pieces:
                        self._send(piece)
                    output.pieces.clear()
                case AbandonNode(node):
                    for task, id in self._tasks.items():
                        if id == node and task is not asyncio.current_task():
                            task.cancel()
                case FinishRun():
                    self._end(command)
                case _:
                    assert_never(command)

    def _end(self, finish: FinishRun) -> None:
        receipt = finish.receipt
        excuse = _excuse(receipt.status, receipt.problem, self.error)
        self.finish = finish = replace(finish, receipt=replace(receipt, excuse=excuse))
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._wake_reader()
        self._on_finish(finish, self._used())

    def _used(self) -> list[ModelUse]:
        used = []
        for model in dict.fromkeys(model for model, _ in self._calls):
            # Engines may report a prompt's length only at the end; count every leased call.
            calls = [p for name, p in self._calls if name == model and p.lease is not None]
            used.append(
                ModelUse(
                    model,
                    sum(_prompt_tokens(p) for p in calls),
                    sum(max(0, p.answer.cached_tokens) for p in calls),
                    sum(p.answer.output_tokens for p in calls),
                )
            )
        return used

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("run %s: a node failed with a defect in CATO", self.run.id, exc_info=error)
            self._perform(self.run.handle(RunCancelled(time.monotonic(), f"defect: {error!r}")))

    def _pass_deadline(self) -> None:
        self.error = self.error or DeadlineError(self.run.workflow.hard_deadline_s)
        self._perform(self._ended(str(self.error), DEADLINE_EXCEEDED))

    def _ended(self, reason: str, status: str) -> tuple[RunCommand, ...]:
        llm = {}
        for (node, round, item), (command, progress) in self._under_way.items():
            facts = self._facts(command, progress)
            if facts is not None:
                llm[node, round, item] = facts
        return self.run.handle(RunCancelled(time.monotonic(), reason, status, llm))

    def _output(self, node: NodeId, round: int) -> _Output:
        return self._outputs.setdefault((node, round), _Output())

    def _emit(self, command: StartNode, piece: Piece) -> None:
        """Send text of the streamed node at once; buffer text of other nodes."""
        if command.item is not None:
            return
        output = self._output(command.node.id, command.round)
        if output.is_live:
            self._send(piece)
        else:
            output.pieces.append(piece)

    def _send(self, piece: Piece) -> None:
        if not self._has_sent:
            self._has_sent = True
            self.run.handle(TextSent(time.monotonic()))
        self._out.append(piece)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # Nodes

    async def _execute(self, command: StartNode) -> None:
        progress = _Progress()
        where = (command.node.id, command.round, command.item)
        self._under_way[where] = command, progress
        try:
            async with asyncio.timeout(command.limit_s):
                result, llm = await self._node(command, progress)
        except TimeoutError:
            if not command.node.optional and time.monotonic() >= self.run.hard_deadline_s:
                self._pass_deadline()  # this timer fired before the watchdog
                return
            problem = f"not ready within its {command.limit_s or 0.0:.3f} s"
            if not command.node.optional:
                self.error = self.error or DeadlineError(command.limit_s or 0.0)
            event = NodeFailed(
                time.monotonic(), *where, problem, True, self._facts(command, progress)
            )
            self._perform(self.run.handle(event))
        except SupersededError:
            self.cancel(SUPERSEDED)
        except CatoError as error:
            if not command.node.optional:
                self.error = self.error or error
            problem = error.problem if isinstance(error, NodeError) else str(error)
            event = NodeFailed(
                time.monotonic(), *where, problem, False, self._facts(command, progress)
            )
            self._perform(self.run.handle(event))
        else:
            self._perform(self.run.handle(NodeDone(time.monotonic(), *where, result, llm)))
        finally:
            self._under_way.pop(where, None)

    async def _node(
        self, command: StartNode, progress: _Progress
    ) -> tuple[Mapping[str, object], LlmFacts | None]:
        settings = command.node.settings
        if isinstance(settings, LlmSettings | CallSettings):
            await self._invoke(command, settings, progress)
            result = {
                "text": progress.answer.text,
                "tokens": progress.answer.output_tokens,
                "finish_reason": progress.answer.finish_reason,
            }
            return result, self._facts(command, progress)
        result = dict(await self._nodes.run(command.node.id, settings, command.names))
        if isinstance(settings, TransformSettings):
            self._emit(command, Piece(str(result["text"])))
        return result, None

    async def _invoke(
        self, command: StartNode, settings: LlmSettings | CallSettings, progress: _Progress
    ) -> None:
        """One LLM call; falls back to another model if its own fails without output."""
        try:
            await self._invoke_model(command, settings, progress)
        except SupersededError:
            raise
        except CatoError as error:
            other = self._instead.get(settings.model)
            if other is None or progress.answer.has_output:
                raise
            log.warning("%s failed (%s); falling back to %s", settings.model, error, other)
            progress.reasons.append(f"{settings.model} failed: {error}; fell back to {other}")
            progress.flight, self.fell_back = None, True
            progress.losses = progress.all_losses = progress.missed = 0
            await self._invoke_model(command, replace(settings, model=other), progress)

    async def _invoke_model(
        self, command: StartNode, settings: LlmSettings | CallSettings, progress: _Progress
    ) -> None:
        """One LLM call to one model, over as many leases as it needs."""
        pool = self._pools.pool_of(settings.model)
        progress.pool = pool
        self._calls = [call for call in self._calls if call[1] is not progress]
        self._calls.append((pool.model.called(settings.model), progress))
        started_s = time.monotonic()
        suffix = "" if command.item is None else f".{command.item}"
        id = InvocationId(f"{self._key}.{command.node.id}.{command.round}{suffix}")
        self._retries.begin()
        try:
            call = key = None
            if self._reuse is not None:
                call = await self._engine_call(settings, command.names, pool, 1.0)
                key = self._reuse.key(self._tenant, call)
            if call is None or key is None or not await self._shared(command, call, key, progress):
                await self._lead(command, settings, pool, id, progress, started_s)
        finally:
            self._retries.end(time.monotonic())
            if self._reuse is not None and call and key and progress.flight is not None:
                self._reuse.done(self._tenant, key, call, progress.flight)

    async def _shared(
        self, command: StartNode, call: EngineCall, key: bytes, progress: _Progress
    ) -> bool:
        """Read the answer of an identical call; False when this call must lead, continuing
        after the text that was read."""
        assert self._reuse is not None, "answers are not shared"
        flight, how = self._reuse.find(self._tenant, key, call, command.deadline_s)
        answer, read, began_s = progress.answer, 0, time.monotonic()
        progress.flight, progress.asked_tokens = flight, call.prompt_tokens
        answer.next_call(call)
        flight.readers += 1
        try:
            while True:
                for chunk in flight.chunks[read:]:
                    read += 1
                    progress.reused = how
                    if progress.first_token_s is None and chunk.text:
                        progress.first_token_s = time.monotonic() - began_s
                    self._emit_chunks(command, answer.add(chunk), progress)
                if flight.is_whole and read == len(flight.chunks):
                    progress.reasons.append(f"the answer of an identical call ({how})")
                    return True
                if not flight.has_leader:
                    break
                if read == len(flight.chunks):
                    await flight.more()
        finally:
            flight.leave()
        if read:
            progress.reasons.append(f"an identical call ended after {answer.extent}")
            if not answer.can_go_on(call):
                raise ReplicaLostError("", "the call whose answer it shared ended")
        return False

    async def _lead(
        self,
        command: StartNode,
        settings: LlmSettings | CallSettings,
        pool: PoolInfo,
        id: InvocationId,
        progress: _Progress,
        started_s: float,
    ) -> None:
        """Get the answer from an engine; identical calls may read it meanwhile."""
        flight, is_whole = progress.flight, False
        if flight is not None:
            flight.has_leader = progress.leads = True
            self._leading.add(flight)
        try:
            await self._invoke_to_its_end(command, settings, pool, id, progress, started_s)
            is_whole = progress.answer.is_whole
        finally:
            progress.leads = False
            if flight is not None:
                self._leading.discard(flight)
                flight.end(is_whole=is_whole)
        if self._left:
            self.cancel(self._left)

    async def _invoke_to_its_end(
        self,
        command: StartNode,
        settings: LlmSettings | CallSettings,
        pool: PoolInfo,
        id: InvocationId,
        progress: _Progress,
        started_s: float,
    ) -> None:
        shrink, answer = 1.0, progress.answer
        lost: ReplicaLostError | EngineDeadError | None = None
        while True:
            call = await self._engine_call(settings, command.names, pool, shrink)
            try:
                while not await self._attempt(
                    command, pool, answer.next_call(call), id, progress, started_s
                ):
                    if not answer.can_go_on(call):
                        # Routers preempt only calls that can continue or that were superseded.
                        raise SupersededError("a newer run of the same buffer replaced it")
                    progress.reasons[-1] += f"; preempted after {answer.extent}"
                    log.info("invocation %s was preempted; it continues from its text", id)
                return
            except ContextLengthError as error:
                # Token counts are estimates: lower the output limit to fit the prompt, or cut a
                # prompt that can be cut further.
                if isinstance(settings, CallSettings):
                    shorter = with_room(settings, error)
                    if shorter is None or answer.has_output:
                        raise
                    settings = shorter
                elif settings.fim is None or shrink < 0.5:
                    raise
                else:
                    shrink *= 0.6
            except (ReplicaLostError, EngineDeadError) as error:
                if answer.is_whole:
                    return
                progress.reasons[-1] += f"; lost after {answer.extent}: {error}"
                if rest := answer.rest(call):
                    self._emit_chunks(command, rest, progress)
                    return
                if not answer.can_go_on(call) or not self._may_retry(progress, error):
                    raise
                log.warning("invocation %s: %s; asking for another lease", id, error)
                lost = error
            except EngineError as error:
                # The continuation request is CATO's own; if it is refused, report the loss.
                if lost is None or not answer.has_output:
                    raise
                progress.reasons[-1] += f"; could not continue: {error}"
                raise lost from error

    async def _engine_call(
        self,
        settings: LlmSettings | CallSettings,
        names: Mapping[str, object],
        pool: PoolInfo,
        shrink: float,
    ) -> EngineCall:
        """Render the prompt here if that takes milliseconds, else in a thread."""
        make = partial(engine_call, settings, names, pool, shrink, self._salt)
        try:
            with little_work():
                return make()
        except WorkLimitError:
            return await asyncio.to_thread(make)

    def _may_retry(self, progress: _Progress, error: ReplicaLostError | EngineDeadError) -> bool:
        """Count a lost attempt; return whether another may follow."""
        if isinstance(error, ReplicaLostError) and not error.was_reached:
            progress.missed += 1
            return progress.missed <= MAX_MISSED
        tokens = progress.answer.output_tokens
        progress.losses = 1 if tokens > progress.tokens_when_lost else progress.losses + 1
        progress.all_losses += 1
        progress.tokens_when_lost = tokens
        in_a_row = MAX_LOSSES_BEGUN if tokens else MAX_LOSSES
        is_too_often = progress.losses >= in_a_row or progress.all_losses >= MAX_ALL_LOSSES
        return not is_too_often and self._retries.take(time.monotonic())

    async def _attempt(
        self,
        command: StartNode,
        pool: PoolInfo,
        call: EngineCall,
        id: InvocationId,
        progress: _Progress,
        started_s: float,
    ) -> bool:
        """One lease and its stream; False when the pool preempted the call."""
        progress.attempts += 1
        now_s = time.monotonic()
        invocation = self._invocation(command, pool, call, id, progress, started_s - now_s)
        self._queued += 1
        progress.waits_since_s = now_s
        try:
            lease = await self._pools.lease(pool.name, invocation)
        except CapacityError as error:
            progress.reasons.append(f"refused: {error.problem}")
            raise
        finally:
            self._queued -= 1
            progress.queue_s = progress.waited_s
            progress.waits_since_s = None
        progress.lease = lease
        if progress.home is None:
            progress.home = lease.home
        progress.reasons.append(lease.reason)
        request = EngineRequest(
            id=f"{id}.{progress.attempts}",
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
        )
        progress.served_since_s = sent_s = time.monotonic()
        try:
            stream = self._pools.stream(pool.name, lease, request)
            async with contextlib.aclosing(stream) as chunks:
                return await self._read(command, chunks, progress, sent_s)
        finally:
            served_s = time.monotonic() - sent_s
            progress.service_s += served_s
            progress.served_since_s = None
            self._served_s += served_s

    async def _read(
        self,
        command: StartNode,
        chunks: AsyncGenerator[EngineChunk, None],
        progress: _Progress,
        sent_s: float,
    ) -> bool:
        async for chunk in chunks:
            new = progress.answer.add(chunk)
            if progress.first_token_s is None and any(piece.text for piece in new):
                progress.first_token_s = time.monotonic() - sent_s
            self._emit_chunks(command, new, progress)
            if chunk.finish_reason == PREEMPTED:
                return False
        return True

    def _emit_chunks(
        self, command: StartNode, chunks: list[EngineChunk], progress: _Progress
    ) -> None:
        answer = progress.answer
        for chunk in chunks:
            if progress.leads and progress.flight is not None:
                counts = (answer.output_tokens, answer.prompt_tokens, answer.cached_tokens)
                progress.flight.add(chunk, counts)
            if chunk.text or chunk.raw:
                self._emit(command, Piece(chunk.text, chunk.raw))

    def _invocation(
        self,
        command: StartNode,
        pool: PoolInfo,
        call: EngineCall,
        id: InvocationId,
        progress: _Progress,
        arrived_at_s: float,
    ) -> Invocation:
        """The call as its pool sees it; text generated so far counts as prompt."""
        run, node = self.run, command.node
        if progress.attempts == 1:
            progress.asked_tokens = call.prompt_tokens
            progress.predicted = self._lengths(run.workflow.name, node.id, call)
        length = progress.predicted.length
        progress.expected_tokens = call.expected_tokens if length is None else round(length.mean)
        # A TPOT target applies from the first token on, however late that is.
        is_streamed = node.id in run.workflow.stream
        is_paced = run.slo.metric is SloMetric.TPOT and is_streamed
        pace_s = run.slo.target_s if is_paced else run.slo.tpot_target_s
        invocation = Invocation(
            id=id,
            run_id=run.id,
            task=run.workflow.name,
            node=node.id,
            prompt_tokens=call.prompt_tokens,
            expected_tokens=max(1, progress.expected_tokens),
            arrived_at_s=arrived_at_s - self.head_start_s,
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
            tenant=self._tenant,
            weight=self._weight,
            buffer=self._buffer,
            user=self._user,
            began_at_s=run.arrived_at_s - time.monotonic(),
            leaves_at_s=run.arrived_at_s + self._patience_s - time.monotonic(),
        )
        if progress.attempts == 1:
            return invocation
        return invocation.continued(progress.attempts, progress.answer.output_tokens)

    def _facts(self, command: StartNode, progress: _Progress) -> LlmFacts | None:
        settings = command.node.settings
        lease, pool = progress.lease, progress.pool
        was_called = progress.attempts > 0 or bool(progress.reused)
        if not isinstance(settings, LlmSettings | CallSettings) or not was_called:
            return None
        assert pool is not None, "an invocation that was made has its pool"
        answer = progress.answer
        reasons = tuple(progress.reasons)
        if progress.waits_since_s is not None:
            reasons += (_why_it_waits(pool, progress.waited_s),)
        return LlmFacts(
            model=pool.model.called(settings.model),
            pool=pool.name,
            replica=lease.replica_id if lease else "",
            deployment=lease.deployment if lease else "",
            queue_s=progress.waited_s,
            priority=lease.priority if lease else 0,
            slack_s=lease.slack_s if lease else 0.0,
            predicted_s=lease.remaining_s if lease else 0.0,
            expected_prompt_tokens=progress.asked_tokens,
            expected_cached_tokens=lease.cached_tokens if lease else 0,
            expected_tokens=progress.expected_tokens,
            length_bound_tokens=_bound(progress.predicted),
            service_s=progress.engine_s,
            predicted_service_s=lease.service_s if lease else 0.0,
            predicted_queue_s=lease.predicted_queue_s if lease else 0.0,
            engine_ttft_s=progress.first_token_s,
            prompt_tokens=max(0, answer.prompt_tokens),
            cached_prompt_tokens=max(0, answer.cached_tokens),
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            attempts=progress.attempts,
            simulated=pool.simulated,
            reasons=reasons,
            uncached_prompt_tokens=max(0, answer.prompt_tokens - max(0, answer.cached_tokens)),
            placement=_placement(settings, progress),
            home=progress.home or "",
            reused=progress.reused if progress.attempts == 0 else "",
            features=progress.predicted.features,
        )


def _placement(settings: LlmSettings | CallSettings, progress: _Progress) -> Placement:
    """Where its latest lease placed it, relative to its session's home replica."""
    session = settings.prompt.session if isinstance(settings, CallSettings) else ""
    if not session or progress.lease is None or not progress.lease.replica_id:
        return Placement.NONE
    if not progress.home:
        return Placement.NEW
    is_home = progress.lease.replica_id == progress.home
    return Placement.HOME if is_home else Placement.MOVED


def _why_it_waits(pool: PoolInfo, waited_s: float) -> str:
    """The reason for a call that ended while queued."""
    if pool.ready_replicas == 0:
        return f"queued {waited_s:.2f} s: no replica of {pool.name} was ready"
    queued = pool.queued_per_place
    return f"queued {waited_s:.2f} s in {pool.name}: {queued:.1f} waiting calls per batch slot"


def _excuse(status: str, problem: str, error: CatoError | None) -> Excuse:
    if status == "cancelled":
        excuses = {SUPERSEDED: Excuse.SUPERSEDED, CLIENT_LEFT: Excuse.CLIENT_LEFT}
        return excuses.get(problem, Excuse.NONE)
    if status != "failed":
        return Excuse.NONE
    of_client = isinstance(error, InputError | UnknownNameError)
    if isinstance(error, EngineError) and not isinstance(error, EngineDeadError):
        of_client = error.status is not None and 400 <= error.status < 500 and error.status != 429
    return Excuse.CLIENT_ERROR if of_client else Excuse.NONE


def _bound(predicted: Predicted) -> int:
    length = predicted.length
    return 0 if length is None else round(length.left_quantile(BOUND_LEVEL, 0))


def _prompt_tokens(progress: _Progress) -> int:
    told = progress.answer.prompt_tokens
    return progress.asked_tokens if told < 0 else told
