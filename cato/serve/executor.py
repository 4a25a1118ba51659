"""Executes one workflow run in real time: carries out the commands of `cato.core.runs.Run`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from cato.core.errors import (
    CatoError,
    DeadlineError,
    InputError,
    NodeError,
    SupersededError,
    WorkLimitError,
)
from cato.core.ids import NodeId
from cato.core.receipt import CLIENT_LEFT, DEADLINE_EXCEEDED, SUPERSEDED
from cato.core.record import changed
from cato.core.retries import RetryBudget
from cato.core.run_record import Execution
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
from cato.core.workflow import CallSettings, LlmSettings, TransformSettings
from cato.serve.attempts import Attempts
from cato.serve.excuses import excuse_of
from cato.serve.invoker import NO_RULES, CallRules, Invoker, ModelUse, Piece
from cato.serve.lengths import Lengths
from cato.serve.nodes.runner import NodeRunner
from cato.serve.pools import Pools
from cato.serve.reuse import Reuse
from cato.wire.answer import AnswerWriter

log = logging.getLogger("cato.executor")


@dataclass(slots=True)
class _Output:
    """Text of one node execution, buffered until the node is known to be the streamed one."""

    pieces: list[Piece] = field(default_factory=list)
    is_live: bool = False


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
        rules: CallRules = NO_RULES,
        reuse: Reuse | None = None,
    ) -> None:
        """All runs of the process share `retries`; with `reuse`, identical calls share answers."""
        self.run = run
        self.head_start_s = rules.head_start_s
        self.finish: FinishRun | None = None
        self.error: CatoError | None = None
        self._invoker = Invoker(run, pools, draw, lengths, retries, rules, reuse, self._emit)
        self._nodes = nodes
        self._left = ""  # why its client left, when the run continues for readers of its answer
        self._on_finish = on_finish
        self._out: list[Piece] = []  # pieces not read yet
        self._reader: asyncio.Future[None] | None = None
        self._has_sent = False
        self._outputs: dict[tuple[NodeId, int], _Output] = {}
        self._tasks: dict[asyncio.Task[None], NodeId] = {}
        self._watchdog: asyncio.TimerHandle | None = None
        self._under_way: dict[Execution, Attempts] = {}

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
        return max((call.asked_tokens for call in self._invoker.calls), default=0)

    @property
    def writer(self) -> AnswerWriter | None:
        """Writer that can extend a direct call's stream; None until something was sent."""
        calls = self._invoker.calls
        return calls[-1].answer.writer if calls else None

    @property
    def is_queued(self) -> bool:
        """Whether a call of the run is waiting for a lease."""
        return self._invoker.queued > 0

    @property
    def fell_back(self) -> bool:
        """Whether a call was made to a fallback of its model."""
        return self._invoker.fell_back

    def cancel(self, reason: str) -> None:
        """Cancel the run; a no-op when it has finished.

        If the client left but other calls read an answer that this run leads, it continues for
        them until the last reader leaves.
        """
        if reason in (CLIENT_LEFT, SUPERSEDED) and not self.run.is_finished:
            shared = [flight for flight in self._invoker.leading if flight.readers]
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
        if isinstance(finish.error, WorkLimitError | InputError):  # the inputs are at fault
            self.error = self.error or finish.error
        excuse = excuse_of(receipt.status, receipt.problem, self.error)
        self.finish = finish = changed(finish, receipt=changed(receipt, excuse=excuse))
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._wake_reader()
        self._on_finish(finish, self._invoker.used())

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("run %s ended by a defect in CATO", self.run.id, exc_info=error)
            self._perform(self.run.handle(RunCancelled(time.monotonic(), f"defect: {error!r}")))

    def _pass_deadline(self) -> None:
        self.error = self.error or DeadlineError(self.run.workflow.hard_deadline_s)
        self._perform(self._ended(str(self.error), DEADLINE_EXCEEDED))

    def _ended(self, reason: str, status: str) -> tuple[RunCommand, ...]:
        facts = {where: attempts.facts() for where, attempts in self._under_way.items()}
        llm = {where: known for where, known in facts.items() if known is not None}
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
        attempts, node = self._invoker.begin(command), command.node
        where = (node.id, command.round, command.item)
        self._under_way[where] = attempts
        try:
            async with asyncio.timeout(command.limit_s):
                result = await self._result(command, attempts)
        except TimeoutError:
            if not node.optional and time.monotonic() >= self.run.hard_deadline_s:
                self._pass_deadline()  # this timer fired before the watchdog
                return
            problem = f"not ready within its {command.limit_s or 0.0:.3f} s"
            self._fail(attempts, DeadlineError(command.limit_s or 0.0, node.id), problem)
        except SupersededError:
            self.cancel(SUPERSEDED)
        except CatoError as error:
            problem = error.problem if isinstance(error, NodeError) else str(error)
            self._fail(attempts, error, problem)
        except Exception as error:
            log.exception("run %s: a defect in CATO failed node %r", self.run.id, node.id)
            problem = f"a defect in CATO: {error!r}"
            self._fail(attempts, NodeError(node.id, problem), problem)
        else:
            done = NodeDone(time.monotonic(), *where, result, attempts.facts())
            self._perform(self.run.handle(done))
        finally:
            self._under_way.pop(where, None)

    def _fail(self, attempts: Attempts, error: CatoError, problem: str) -> None:
        command = attempts.command
        if not command.node.optional:
            self.error = self.error or self.run.workflow.blamed(command.node, error)
        where = (command.node.id, command.round, command.item)
        event = NodeFailed(time.monotonic(), *where, problem, attempts.facts())
        self._perform(self.run.handle(event))

    async def _result(self, command: StartNode, attempts: Attempts) -> Mapping[str, object]:
        settings = command.node.settings
        if isinstance(settings, LlmSettings | CallSettings):
            await self._invoker.invoke(settings, attempts)
            if self._left:
                self.cancel(self._left)
            answer = attempts.answer
            stop = {"stop_sequence": answer.stop_sequence} if answer.stop_sequence else {}
            return {
                "text": answer.text,
                "tokens": answer.output_tokens,
                "finish_reason": answer.finish_reason,
                **stop,
            }
        result = dict(await self._nodes.run(command.node.id, settings, command.names))
        if isinstance(settings, TransformSettings):
            self._emit(command, Piece(str(result["text"])))
        return result
