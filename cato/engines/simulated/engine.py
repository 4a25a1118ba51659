"""The simulated engine: start, stop and requests, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from cato.core.errors import EngineDeadError, EngineError
from cato.core.kv_events import BlocksCleared, KvEvent
from cato.core.pool.prefill import DueDateRule
from cato.core.profile import Profile
from cato.core.topology import DUE_DATE, EngineSpec, TemplateFacts
from cato.engines.base import EngineChunk, EngineFacts, EngineLoad, EngineRequest, EngineState
from cato.engines.simulated.asked import Asked, read_asked, read_prompt
from cato.engines.simulated.batch import DEFAULT_BATCHED_TOKENS, Batch, Run
from cato.engines.simulated.chunks import Chunks
from cato.engines.simulated.text import simulated_answer, simulated_seed
from cato.wire.answer import Ending
from cato.wire.endpoint import Endpoint
from cato.wire.events import to_json
from cato.wire.writers import writer_of

FINGERPRINT = "simulated"

# After a longer stall of the process, lost time stays lost instead of coming back as a burst.
_MAX_LAG_S = 0.25


class SimulatedEngine:
    """Runs a `Batch` with the timings of `profile`, stepping as `spec` configures.

    `block_tokens` is the block size of its prefix cache (None: the profile's). `start` may be
    called again after a death or a stop.
    """

    def __init__(
        self,
        profile: Profile,
        spec: EngineSpec,
        served_model: str = "",
        *,
        block_tokens: int | None = None,
    ) -> None:
        self._profile = profile
        self._seed = spec.seed
        self._max_running = min(spec.max_num_seqs, profile.max_running)
        context = profile.context_tokens
        if spec.max_model_len is not None:
            context = min(context, spec.max_model_len)
        self._context_tokens = context
        batched_tokens = spec.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        self._block_tokens = block_tokens or profile.block_tokens
        self._host_tokens = profile.host_capacity_tokens if spec.host_memory else 0
        self._batch = Batch(
            profile,
            self._max_running,
            batched_tokens,
            self._block_tokens,
            spec.long_prefill_token_threshold or 0,
            self._host_tokens,
            DueDateRule(spec.prefill_step_s) if spec.scheduler == DUE_DATE else None,
            self._tell,
        )
        self._heard: Callable[[KvEvent], None] | None = None
        self._has_prefix_caching = spec.prefix_caching
        self._has_priority = spec.priority_scheduling
        self._served_model = served_model or profile.model
        self._state = EngineState.STOPPED
        self._start_s = 0.0
        self._death: asyncio.Future[str] | None = None
        self._stepper: asyncio.Task[None] | None = None
        self._work = asyncio.Event()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int | None:
        return None

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            kind="simulated",
            served_model=self._served_model,
            max_running=self._max_running,
            context_tokens=self._context_tokens,
            simulated=True,
            start_s=self._start_s,
            version="1",
            kv_capacity_tokens=self._profile.kv_capacity_tokens,
            block_tokens=self._block_tokens,
            host_tokens=self._host_tokens,
            template=TemplateFacts(),
            capabilities=frozenset({"priority"} if self._has_priority else ()),
        )

    async def start(self) -> None:
        """Takes as long as loading the profile's model."""
        if self._state is EngineState.READY:
            return
        self._state = EngineState.STARTING
        started_s = time.monotonic()
        try:
            await asyncio.sleep(self._profile.load_s)
        except asyncio.CancelledError:
            self._state = EngineState.STOPPED
            raise
        self._start_s = time.monotonic() - started_s
        self._death = asyncio.get_running_loop().create_future()
        self._tell(BlocksCleared())
        self._stepper = asyncio.create_task(self._step_forever())
        self._state = EngineState.READY

    async def stop(self) -> None:
        self._state = EngineState.STOPPED
        await self._end()

    async def kill(self, reason: str = "killed") -> None:
        """Die like a crashed engine. For recovery tests."""
        if self._state is EngineState.READY and self._death is not None:
            self._state = EngineState.DEAD
            self._death.set_result(f"the simulated engine was {reason}")
            await self._end()

    async def wait_dead(self) -> str:
        if self._death is None:
            raise EngineError("the engine was never started")
        return await asyncio.shield(self._death)

    def watch_cache(self, heard: Callable[[KvEvent], None]) -> None:
        self._heard = heard

    def _tell(self, event: KvEvent) -> None:
        if self._heard is not None:
            self._heard(event)

    async def load(self) -> EngineLoad:
        self._check_ready()
        return EngineLoad(len(self._batch.running), self._batch.waiting, self._batch.kv_cache_usage)

    async def count_tokens(self, text: str) -> int:
        return self._profile.count_tokens(text)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self._check_ready()
        if not request.endpoint.generates:
            yield self._counted(request)
            return
        asked = read_asked(request.endpoint, request.body, self._profile, self._context_tokens)
        run, end = self._run(request, asked)
        if self._profile.latency_s > 0.0:
            await asyncio.sleep(self._profile.latency_s)
            self._check_ready()
        self._batch.add(run, request.priority if self._has_priority else 0)
        self._work.set()
        answer: Chunks | None = None
        try:
            sent = 0
            while True:
                await run.news.wait()
                run.news.clear()
                self._check_ready()
                answer = answer or self._chunks(request, asked, run, end)
                tokens, is_last = run.pieces[sent : run.emitted_tokens], run.is_finished
                if request.stream:
                    for chunk in answer.stream(tokens, sent, is_last=is_last):
                        yield chunk
                elif is_last:
                    yield answer.whole(run.pieces)
                sent += len(tokens)
                if is_last:
                    return
        finally:
            self._batch.remove(run)

    def _run(self, request: EngineRequest, asked: Asked) -> tuple[Run, tuple[str, str]]:
        """The run, and its finish reason and stop string."""
        adapter = request.adapter.name if request.adapter else ""
        seed = simulated_seed(self._seed, adapter) if adapter else self._seed
        pieces, reason, stop = simulated_answer(seed, asked)
        hashes: list[int] = []
        if self._has_prefix_caching:
            root = f"{adapter}\0{asked.cache_salt}"
            hashes = asked.prompt.hashes("".join(pieces), root, self._block_tokens)
        now_s = asyncio.get_running_loop().time()
        run = Run(asked.prompt, pieces, hashes, request.id, request.target, now_s)
        return run, (reason, stop)

    def _chunks(
        self, request: EngineRequest, asked: Asked, run: Run, end: tuple[str, str]
    ) -> Chunks:
        model = request.adapter.name if request.adapter else self._served_model
        created, extra = int(time.time()), {"system_fingerprint": FINGERPRINT}
        writer = writer_of(request.endpoint, request.id, model, created, request.body, extra=extra)
        counts = asked.prompt.tokens, len(run.pieces), run.cached_tokens
        ending = Ending(end[0], *counts, stop_sequence=end[1])
        echo = asked.prompt.text if asked.has_echo else ""
        return Chunks(writer, ending, request.raw, asked.continuous_usage, echo, asked.only_echo)

    def _check_ready(self) -> None:
        if self._state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self._state}", 503)

    def _counted(self, request: EngineRequest) -> EngineChunk:
        prompt = None
        if request.endpoint in (Endpoint.COUNT_TOKENS, Endpoint.TOKENIZE):
            prompt = read_prompt(request.endpoint, request.body, self._profile)
        match request.endpoint:
            case Endpoint.COUNT_TOKENS if prompt:
                value: dict[str, object] = {"input_tokens": prompt.tokens}
            case Endpoint.TOKENIZE if prompt:
                context, ids = self._context_tokens, prompt.ids()
                value = {"count": prompt.tokens, "max_model_len": context, "tokens": ids}
            case _:
                raise EngineError(f"the simulated engine has no {request.endpoint}", 501)
        return EngineChunk("", 0, prompt.tokens, 0, "stop", to_json(value))

    async def _end(self) -> None:
        stepper, self._stepper = self._stepper, None
        if stepper is not None:
            stepper.cancel()
            await asyncio.wait([stepper])
        for run in self._batch.clear():
            run.news.set()

    async def _step_forever(self) -> None:
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while True:
            if self._batch.is_idle:
                self._work.clear()
                await self._work.wait()
                due_s = clock()
            emitting, step_s = self._batch.plan_step(due_s)
            if step_s is None:  # wait for blocks from host memory, or a new request
                load_s = self._batch.next_load_s
                self._work.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(load_s):
                        await self._work.wait()
                due_s = min(clock(), load_s)
                continue
            # Absolute times: a late wake-up shortens the next sleep.
            due_s = max(due_s, clock() - _MAX_LAG_S) + step_s
            await asyncio.sleep(max(0.0, due_s - clock()))
            self._batch.end_step(emitting)
