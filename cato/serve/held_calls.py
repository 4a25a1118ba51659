"""Running calls of a replica: their streams, and the notes about them to the pool's router.

Independent of Ray and of the model that the replica holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from cato.control.messages import Told
from cato.core.errors import EngineError, ReplicaLostError
from cato.core.events import FirstTokenSent, InvocationEnded
from cato.core.ids import InvocationId, ReplicaId
from cato.core.profile import Profile
from cato.engines.base import PREEMPTED, Engine, EngineChunk, EngineRequest, EngineState
from cato.serve.cache_news import CacheNews
from cato.serve.coalesce import coalesced
from cato.serve.progress import Progress


class HeldCalls:
    """The running calls of one replica. Belongs to one asyncio loop."""

    def __init__(self, replica: ReplicaId, tell: Callable[[Told], None]) -> None:
        self._replica, self._tell = replica, tell
        self.attempts: dict[InvocationId, int] = {}
        self.answered = 0  # calls whose answer is whole
        self.progress = Progress(replica, self.attempts, tell)
        self.cache = CacheNews(replica, tell)
        self.is_idle = asyncio.Event()  # set while no call runs
        self.is_idle.set()

    async def stream(
        self,
        engine: Engine,
        profile: Profile,
        request: EngineRequest,
        id: InvocationId,
        attempt: int,
    ) -> AsyncGenerator[EngineChunk, None]:
        """Stream the tokens of one invocation: the first at once, later ones batched under load."""
        self.attempts[id] = attempt
        self.is_idle.clear()
        self.progress.begin(id)
        self.cache.begin(request)
        loop = asyncio.get_running_loop()
        tokens, outcome, is_first = 0, "cancelled", True
        prompt_tokens = cached_tokens = None
        if not request.stream:
            self._expect_first_token(id, attempt, request, profile)

        async def noting() -> AsyncGenerator[EngineChunk, None]:
            """The engine's chunks, up to a preemption by the pool or a later attempt's."""
            nonlocal tokens, outcome, is_first, prompt_tokens, cached_tokens
            generated = engine.generate(request)
            if not request.stream:
                generated = _unless_stopped(generated, self.progress.stop_of(id))
            async with contextlib.aclosing(generated) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason == PREEMPTED:
                        outcome = PREEMPTED
                        yield chunk
                        return
                    tokens = chunk.output_tokens
                    if chunk.cached_tokens >= 0 and chunk.prompt_tokens > 0:
                        prompt_tokens, cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
                    if is_first and tokens > 0 and self.attempts.get(id) == attempt:
                        is_first = False
                        # After the token itself: the reader waits for it, the router does not.
                        loop.call_soon(self._tell, FirstTokenSent(0.0, id))
                    if self.progress.note(id, attempt, tokens) and chunk.finish_reason is None:
                        outcome = PREEMPTED
                        yield replace(chunk, finish_reason=PREEMPTED)
                        return
                    yield chunk

        try:
            if engine.state is not EngineState.READY:
                problem = f"its engine is {engine.state}"
                raise ReplicaLostError(self._replica, problem, was_reached=False)
            noted = coalesced(noting(), lambda: len(self.attempts), raw=request.raw)
            async with contextlib.aclosing(noted) as chunks:
                async for chunk in chunks:
                    yield chunk
            if outcome != PREEMPTED:
                outcome = "done"
                self.answered += 1
        except (EngineError, ReplicaLostError):
            outcome = "failed"
            raise
        finally:
            self.cache.end(request, prompt_tokens, cached_tokens)
            if outcome != PREEMPTED:  # the pool ordered it
                ended = InvocationEnded(
                    0.0, id, attempt, tokens, outcome, cached_tokens, prompt_tokens
                )
                loop.call_soon(self._tell, ended)  # as above, and before `is_idle` wakes a drain
            if self.attempts.get(id) == attempt:  # else this replica already has the next attempt
                del self.attempts[id]
                self.progress.end(id)
                if not self.attempts:
                    self.is_idle.set()

    def _expect_first_token(
        self, id: InvocationId, attempt: int, request: EngineRequest, profile: Profile
    ) -> None:
        """A non-streamed answer shows no first token: report one when its prompt should be
        computed. Otherwise the router would hold back all other prompts until its end.
        """
        delay_s = profile.first_token_s(request.prompt_tokens, len(self.attempts))
        asyncio.get_running_loop().call_later(delay_s, self._note_expected, id, attempt)

    def _note_expected(self, id: InvocationId, attempt: int) -> None:
        if self.attempts.get(id) == attempt:
            self._tell(FirstTokenSent(0.0, id))


async def _unless_stopped(
    chunks: AsyncGenerator[EngineChunk, None], stop: asyncio.Event
) -> AsyncGenerator[EngineChunk, None]:
    """A non-streamed answer; only PREEMPTED if the router preempts the call first."""
    async with contextlib.aclosing(chunks):
        answer = asyncio.ensure_future(anext(chunks))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((answer, stopped), return_when=asyncio.FIRST_COMPLETED)
            whole = answer.result() if answer.done() else EngineChunk(finish_reason=PREEMPTED)
        finally:
            for task in (answer, stopped):
                task.cancel()
            await asyncio.gather(answer, stopped, return_exceptions=True)
        yield whole
