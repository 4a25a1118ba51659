"""An engine that answers from a script: text, thinking, tool calls and injected faults.

Real agents work with it as with a model. Its prompt counts are real: it renders the whole
conversation, counts it with a real model's vocabulary, and caches its blocks as vLLM does.
Computing takes no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from cato.core.errors import ContextLengthError, EngineDeadError, EngineError
from cato.core.kv_events import BlocksCleared, KvEvent
from cato.core.prefix_cache import PrefixCache, block_hashes
from cato.core.profile import Profile
from cato.core.topology import EngineSpec, TemplateFacts
from cato.engines.base import (
    Endpoint,
    EngineChunk,
    EngineFacts,
    EngineLoad,
    EngineRequest,
    EngineState,
)
from cato.engines.scripted.answer import Answer
from cato.engines.scripted.request_log import Note, Prompt, is_first
from cato.engines.scripted.script import Fault, Script, choose, load_script
from cato.engines.scripted.vocabulary import Tekken, Vocabulary
from cato.wire.answer import Ending
from cato.wire.conversation import Conversation, Message, Part, PartKind
from cato.wire.events import to_json
from cato.wire.reading import READERS, conversation_of

# Gives the reader of the stream time to leave, and faults time to hit mid-answer.
_PIECE_S = 0.001
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class ScriptedEngine:
    """Answers from `script`; `start` may be called again after a death or a stop."""

    def __init__(
        self,
        profile: Profile,
        spec: EngineSpec,
        served_model: str = "",
        vocabulary: Vocabulary | None = None,
    ) -> None:
        if spec.script is None:
            raise EngineError("a scripted engine needs a script")
        self._path = Path(spec.script)
        self._max_running = min(spec.max_num_seqs, profile.max_running)
        context = profile.context_tokens
        self._context_tokens = min(context, spec.max_model_len or context)
        self._capacity_tokens = profile.kv_capacity_tokens
        self._served_model = served_model or profile.model
        self._vocabulary = vocabulary
        self._script: Script | None = None
        self._cache = PrefixCache(self._capacity_tokens, tell=self._tell)
        self._freed = asyncio.Condition()
        self._heard: Callable[[KvEvent], None] | None = None
        self._state = EngineState.STOPPED
        self._start_s = 0.0
        self._death: asyncio.Future[str] | None = None
        self._running = 0
        self._waiting = 0

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int | None:
        return None

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            kind="scripted",
            served_model=self._served_model,
            max_running=self._max_running,
            context_tokens=self._context_tokens,
            simulated=True,
            start_s=self._start_s,
            version="1",
            kv_capacity_tokens=self._capacity_tokens,
            block_tokens=self._cache.block_tokens,
            template=TemplateFacts(),
        )

    async def start(self) -> None:
        """Raise `EngineError` for a script that cannot be read."""
        if self._state is EngineState.READY:
            return
        self._state = EngineState.STARTING
        started_s = time.monotonic()
        try:
            self._script = load_script(self._path)
            if self._vocabulary is None:
                self._vocabulary = await asyncio.to_thread(Tekken)
        except BaseException:
            self._state = EngineState.STOPPED
            raise
        self._cache = PrefixCache(self._capacity_tokens, tell=self._tell)
        self._start_s = time.monotonic() - started_s
        self._death = asyncio.get_running_loop().create_future()
        self._tell(BlocksCleared())
        self._state = EngineState.READY

    async def stop(self) -> None:
        self._state = EngineState.STOPPED

    async def kill(self, reason: str = "killed") -> None:
        """Die like a crashed engine. For recovery tests."""
        if self._state is EngineState.READY and self._death is not None:
            self._state = EngineState.DEAD
            self._death.set_result(f"the scripted engine was {reason}")

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
        return EngineLoad(self._running, self._waiting, self._cache.usage)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self._check_ready()
        assert self._script is not None, "a ready engine has read its script"
        prompt = self._read(request)
        if not request.endpoint.generates:
            yield self._counted(request, prompt)
            return
        script = self._script
        chosen = choose(script, prompt.conversation)
        has_fault = chosen.step.fault is not Fault.NONE and is_first(script.log, chosen)
        note = Note(script.log, request, prompt, chosen)
        try:
            if has_fault and chosen.step.fault is Fault.REFUSES:
                note.outcome = "refused"
                raise EngineError("the script refuses this request once", 429)
            answer = Answer(request, self._served_model, chosen.step, self._words)
            limit = self._limit(request.body, len(prompt.tokens))
            stream = self._stream(request.id, answer, limit, prompt, note, dies=has_fault)
            async with contextlib.aclosing(stream) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            note.write()

    async def _stream(
        self, id: str, answer: Answer, limit: int, prompt: Prompt, note: Note, *, dies: bool
    ) -> AsyncGenerator[EngineChunk, None]:
        pieces = answer.pieces[:limit]
        is_cut = len(pieces) < len(answer.pieces)
        # Markup of tool calls counts as output too, though no dialect returns it as text.
        written = self._words.encode(prompt.text + answer.rendered(pieces))
        hashes = self._hashes(written)
        total = max(len(written), len(prompt.tokens) + 1)
        cache = self._cache  # a restarted engine has a new one
        async with self._freed:
            self._waiting += 1
            try:
                while (held := cache.admit(hashes, len(prompt.tokens), total, id)) is None:
                    await self._freed.wait()
                    self._check_ready()
            finally:
                self._waiting -= 1
        self._running += 1
        note.cached_tokens = held.cached_tokens
        ending = Ending(
            "length" if is_cut else answer.finish_reason,
            len(prompt.tokens),
            len(pieces),
            held.cached_tokens,
        )
        try:
            await asyncio.sleep(answer.step.delay_s)
            cache.compute(held, len(prompt.tokens))
            for i, chunk in enumerate(answer.chunks(pieces, ending)):
                if dies and i == max(1, len(pieces) // 2):
                    note.outcome = "died"
                    await self.kill("ended by its script")
                await asyncio.sleep(_PIECE_S)
                self._check_ready()
                note.output_tokens = chunk.output_tokens
                if chunk.finish_reason is not None:  # few readers read past the last chunk
                    note.outcome = "done"
                    cache.compute(held, total)
                yield chunk
        finally:
            self._running -= 1
            cache.release(held)
            async with self._freed:
                self._freed.notify_all()

    def _check_ready(self) -> None:
        if self._state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self._state}", 503)

    @property
    def _words(self) -> Vocabulary:
        assert self._vocabulary is not None, "a ready engine has a vocabulary"
        return self._vocabulary

    def _read(self, request: EngineRequest) -> Prompt:
        body = request.body
        if request.endpoint is Endpoint.COMPLETIONS and isinstance(body.get("prompt"), str):
            said = (Part(PartKind.TEXT, str(body["prompt"])),)
            text = str(body["prompt"])
            conversation = Conversation(messages=(Message("user", said),))
            return Prompt(conversation, text, self._words.encode(text))
        if request.endpoint not in READERS:
            raise EngineError(f"the scripted engine has no {request.endpoint}", 501)
        conversation = conversation_of(request.endpoint, body)
        is_begun = bool(body.get("continue_final_message"))
        text = conversation.prompt(is_begun=is_begun)
        return Prompt(conversation, text, self._words.encode(text))

    def _counted(self, request: EngineRequest, prompt: Prompt) -> EngineChunk:
        if request.endpoint is not Endpoint.COUNT_TOKENS:
            raise EngineError(f"the scripted engine has no {request.endpoint}", 501)
        raw = to_json({"input_tokens": len(prompt.tokens)})
        return EngineChunk("", 0, len(prompt.tokens), 0, "stop", raw)

    def _limit(self, body: Mapping[str, object], prompt_tokens: int) -> int:
        """Maximum answer tokens; raise `ContextLengthError` when there is no room."""
        asked = next((v for name in _LIMITS if isinstance(v := body.get(name), int)), None)
        room = self._context_tokens - prompt_tokens
        if room < 1 or (asked is not None and asked > self._context_tokens):
            raise ContextLengthError(
                f"This model's maximum context length is {self._context_tokens} tokens. However, "
                f"the prompt has {prompt_tokens} tokens and {asked or 0} output tokens are asked."
            )
        return room if asked is None else min(asked, room)

    def _hashes(self, tokens: list[int]) -> list[int]:
        size = self._cache.block_tokens
        whole = range(0, len(tokens) - size + 1, size)
        blocks = (b"".join(t.to_bytes(4) for t in tokens[i : i + size]) for i in whole)
        return block_hashes(self._served_model, blocks)
