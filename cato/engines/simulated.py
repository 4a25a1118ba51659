"""An engine that computes nothing: a profile's timings, and text that is a function of the prompt.

The next token is a hash of the seed and of everything before it, prompt and answer alike. So an
answer continued elsewhere, from the prompt plus what was already sent, goes on exactly as it would
have here; a test can recompute any answer and see a lost, doubled or swapped token.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import json
import time
import zlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cato.core.errors import ContextLengthError, EngineDeadError, EngineError
from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.answers import (
    Ending,
    MessagesAnswer,
    ResponsesAnswer,
    TypedAnswer,
    event_bytes,
)
from cato.engines.base import (
    Endpoint,
    EngineChunk,
    EngineFacts,
    EngineLoad,
    EngineRequest,
    EngineState,
)

# vLLM's defaults: output tokens of a completion, prompt tokens of one step (server).
DEFAULT_MAX_TOKENS = 16
DEFAULT_BATCHED_TOKENS = 2048
FINGERPRINT = "simulated"

# An answer ends after a line with this probability: with the words below, ~100 tokens on average.
_END_CHANCE = 1 / 10
# When the process was held up for longer, lost time stays lost instead of coming back as a burst.
_MAX_LAG_S = 0.25
_HASH_RANGE = 1 << 32
_WORDS = (
    *(" value", " item", " result", " total", " count", " index", " name", " key", " node"),
    *(" self", " return", " if", " else", " for", " in", " not", " and", " None", " True"),
    *(" =", " =", " ==", " +", " -", " *", "(", "(", ")", ")", "[", "]", ".", ".", ",", ",", ":"),
    *(" 0", " 1", " 2", ' "text"', "append", "get", "items", "size", "load", "parse", "check"),
    *("\n    ", "\n    ", "\n        ", "\n", "\n"),
)


def simulated_tokens(seed: int, prompt: str) -> Iterator[str]:
    """The endless continuation of `prompt`, token by token, as if no answer ever ended."""
    for token, _ in _tokens(seed, prompt):
        yield token


def simulated_seed(seed: int, model: str) -> int:
    """The seed of one of several models that share engines: another for each, the same anywhere."""
    return seed + zlib.crc32(model.encode())


def simulated_text(seed: int, prompt: str, n: int) -> str:
    """The first `n` tokens after `prompt`.

    `simulated_text(s, p, n + m)` is `simulated_text(s, p, n)` followed by the first `m` tokens
    after `p` plus that.
    """
    return "".join(itertools.islice(simulated_tokens(seed, prompt), n))


def _tokens(seed: int, prompt: str) -> Iterator[tuple[str, bool]]:
    """Each token, and whether the model would rather have ended before it."""
    context = hashlib.blake2b(f"{seed}:{prompt}".encode("utf-8", "replace"), digest_size=8)
    last = prompt
    while True:
        digest = context.copy().digest()
        word = _WORDS[int.from_bytes(digest[:4]) % len(_WORDS)]
        # Ends of answers, too, depend on the text alone, so that a continuation ends alike.
        may_end = last.rstrip(" ").endswith("\n")
        ends = may_end and int.from_bytes(digest[4:]) < _END_CHANCE * _HASH_RANGE
        yield word, ends
        context.update(word.encode())
        last = word


@dataclass(frozen=True, slots=True)
class _Options:
    """What the body of a request asks for, checked."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    include_stop: bool
    ignore_eos: bool
    continuous_usage: bool


@dataclass(eq=False, slots=True)
class _Run:
    """One request inside the engine. The answer is known from the start, its moments are not."""

    request: EngineRequest
    prompt_tokens: int
    pieces: Sequence[str]
    finish_reason: str
    prefilled_tokens: int = 0
    emitted_tokens: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + len(self.pieces)

    @property
    def is_finished(self) -> bool:
        return self.emitted_tokens >= len(self.pieces)


class SimulatedEngine:
    """Continuous batching in real time with the timings of `profile`.

    One step is the next piece of waiting prompt work plus one token for every running request, as
    in vLLM. A request is admitted when its prompt and its whole answer fit the KV cache: the
    length is known here, so nothing is ever preempted, which flatters a full cache a little.
    `start` may be called again after a death or a stop.
    """

    def __init__(self, profile: Profile, spec: EngineSpec, served_model: str = "") -> None:
        self._profile = profile
        self._seed = spec.seed
        self._max_running = min(spec.max_num_seqs, profile.max_running)
        context = profile.context_tokens
        if spec.max_model_len is not None:
            context = min(context, spec.max_model_len)
        self._context_tokens = context
        self._batched_tokens = spec.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        self._has_priority = spec.priority_scheduling
        self._served_model = served_model or profile.model
        self._state = EngineState.STOPPED
        self._start_s = 0.0
        self._death: asyncio.Future[str] | None = None
        self._stepper: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, _Run]] = []
        self._running: list[_Run] = []

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
            capabilities=frozenset({"priority"} if self._has_priority else ()),
        )

    async def start(self) -> None:
        """Takes as long as the profile's model takes to load."""
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
        self._stepper = asyncio.create_task(self._step_forever())
        self._state = EngineState.READY

    async def stop(self) -> None:
        self._state = EngineState.STOPPED
        await self._end()

    async def kill(self, reason: str = "killed") -> None:
        """Die as a crashed engine does. For tests of what survives it."""
        if self._state is EngineState.READY and self._death is not None:
            self._state = EngineState.DEAD
            self._death.set_result(f"the simulated engine was {reason}")
            await self._end()

    async def wait_dead(self) -> str:
        if self._death is None:
            raise EngineError("the engine was never started")
        return await asyncio.shield(self._death)

    async def load(self) -> EngineLoad:
        self._check_ready()
        return EngineLoad(len(self._running), len(self._waiting), self._kv_usage(0))

    async def count_tokens(self, text: str) -> int:
        return self._profile.count_tokens(text)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self._check_ready()
        if not request.endpoint.generates:
            yield self._counted(request)
            return
        options = self._read(request)
        adapter = request.adapter.name if request.adapter else ""
        seed = simulated_seed(self._seed, adapter) if adapter else self._seed
        pieces, finish_reason = _answer(seed, options)
        run = _Run(request, options.prompt_tokens, pieces, finish_reason)
        if run.kv_tokens > self._profile.kv_capacity_tokens:
            raise ContextLengthError(
                f"prompt and answer of {run.kv_tokens} tokens do not fit the "
                f"{self._profile.kv_capacity_tokens} tokens of the KV cache"
            )
        if self._profile.latency_s > 0.0:
            await asyncio.sleep(self._profile.latency_s)
            self._check_ready()
        priority = request.priority if self._has_priority else 0
        heapq.heappush(self._waiting, (priority, next(self._arrivals), run))
        self._work.set()
        model = adapter or self._served_model
        answer = _answer_form(request, options, model, finish_reason)
        try:
            sent = 0
            while True:
                await run.news.wait()
                run.news.clear()
                self._check_ready()
                tokens, is_last = pieces[sent : run.emitted_tokens], run.is_finished
                if request.stream:
                    for chunk in answer.stream(tokens, sent, is_last=is_last):
                        yield chunk
                elif is_last:
                    yield answer.whole(pieces)
                sent += len(tokens)
                if is_last:
                    return
        finally:
            self._remove(run)

    def _check_ready(self) -> None:
        if self._state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self._state}", 503)

    def _counted(self, request: EngineRequest) -> EngineChunk:
        if request.endpoint is not Endpoint.COUNT_TOKENS:
            raise EngineError(f"the simulated engine has no {request.endpoint}", 501)
        _, prompt_tokens = self._prompt(request)
        raw = _json({"input_tokens": prompt_tokens})
        return EngineChunk("", 0, prompt_tokens, 0, "stop", raw)

    def _read(self, request: EngineRequest) -> _Options:
        body = request.body
        for name in ("n", "best_of"):
            if body.get(name) not in (None, 1):
                raise EngineError(f"the simulated engine gives one answer; {name} must be 1", 400)
        prompt, prompt_tokens = self._prompt(request)
        limits = ("max_completion_tokens", "max_output_tokens", "max_tokens")
        asked = next((body[name] for name in limits if body.get(name) is not None), None)
        if asked is None and request.endpoint is Endpoint.COMPLETIONS:
            asked = DEFAULT_MAX_TOKENS
        context = self._context_tokens
        max_tokens = _whole_number("max_tokens", asked, least=1, default=context)
        if prompt_tokens >= context or max_tokens > context:
            raise ContextLengthError(
                f"This model's maximum context length is {context} tokens. However, the prompt "
                f"has {prompt_tokens} tokens and {max_tokens} output tokens are asked for.",
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens if asked is not None else None,
                context_tokens=context,
            )
        temperature = body.get("temperature")
        if isinstance(temperature, int | float) and temperature < 0:
            raise EngineError(f"temperature must be non-negative, got {temperature}", 400)
        stop = body.get("stop") or body.get("stop_sequences") or ()
        stops = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stops, list | tuple) or not all(isinstance(s, str) for s in stops):
            raise EngineError("stop must be a string or a list of strings", 400)
        stream_options = body.get("stream_options")
        return _Options(
            prompt=prompt,
            prompt_tokens=prompt_tokens,
            max_tokens=min(max_tokens, context - prompt_tokens),
            min_tokens=_whole_number("min_tokens", body.get("min_tokens"), least=0, default=0),
            stop=tuple(s for s in stops if s),
            include_stop=bool(body.get("include_stop_str_in_output")),
            ignore_eos=bool(body.get("ignore_eos")),
            continuous_usage=isinstance(stream_options, Mapping)
            and bool(stream_options.get("continuous_usage_stats")),
        )

    def _prompt(self, request: EngineRequest) -> tuple[str, int]:
        body = request.body
        if request.endpoint is not Endpoint.COMPLETIONS:
            if request.endpoint is Endpoint.RESPONSES:
                body = _as_chat(body.get("instructions"), body.get("input"))
            elif request.endpoint in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS):
                body = _as_chat(body.get("system"), body.get("messages"))
            prompt = _chat_prompt(body)
            return prompt, self._profile.count_tokens(prompt)
        value = body.get("prompt")
        if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
            value = value[0]
        if isinstance(value, str):
            return value, self._profile.count_tokens(value)
        if isinstance(value, list) and value and all(isinstance(t, int) for t in value):
            return " ".join(map(str, value)), len(value)
        raise EngineError("prompt must be one string or one list of token ids", 400)

    def _kv_usage(self, more_tokens: int) -> float:
        held = sum(run.kv_tokens for run in self._running) + more_tokens
        return held / max(1, self._profile.kv_capacity_tokens)

    def _remove(self, run: _Run) -> None:
        if run in self._running:
            self._running.remove(run)
        elif not run.is_finished:
            self._waiting = [entry for entry in self._waiting if entry[2] is not run]
            heapq.heapify(self._waiting)

    async def _end(self) -> None:
        stepper, self._stepper = self._stepper, None
        if stepper is not None:
            stepper.cancel()
            await asyncio.wait([stepper])
        runs = [*self._running, *(entry[2] for entry in self._waiting)]
        self._running, self._waiting = [], []
        for run in runs:
            run.news.set()

    async def _step_forever(self) -> None:
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while True:
            if not self._running and not self._waiting:
                self._work.clear()
                await self._work.wait()
                due_s = clock()
            self._admit()
            emitting, step_s = self._plan_step()
            # Against absolute times: a late wake-up shortens the next sleep.
            due_s = max(due_s, clock() - _MAX_LAG_S) + step_s
            await asyncio.sleep(max(0.0, due_s - clock()))
            for run in emitting:
                if run in self._running:  # not aborted meanwhile
                    run.emitted_tokens += 1
                    run.news.set()
                    if run.is_finished:
                        self._running.remove(run)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            run = self._waiting[0][2]
            if self._kv_usage(run.kv_tokens) > 1.0:
                return  # strict order: a smaller one behind it must not starve it
            heapq.heappop(self._waiting)
            self._running.append(run)

    def _plan_step(self) -> tuple[list[_Run], float]:
        """Who gets a token in the next step, and how long it takes: `Profile.step_s`."""
        emitting = [run for run in self._running if run.prefilled_tokens >= run.prompt_tokens]
        held = sum(run.prefilled_tokens + run.emitted_tokens for run in self._running)
        batch, prompt_tokens = len(emitting), 0
        room = max(1, self._batched_tokens - batch)  # decoding comes first
        for run in self._running:
            piece = min(run.prompt_tokens - run.prefilled_tokens, room)
            if piece > 0:
                room -= piece
                prompt_tokens += piece
                run.prefilled_tokens += piece
                if run.prefilled_tokens == run.prompt_tokens:
                    emitting.append(run)
        ended = len(emitting) - batch
        return emitting, self._profile.step_s(batch, held, prompt_tokens, ended)


def _whole_number(name: str, value: object, *, least: int, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise EngineError(f"{name} must be a whole number of at least {least}, got {value!r}", 400)
    return value


def _chat_prompt(body: Mapping[str, object]) -> str:
    """The messages as one text; an answer continues it whether or not it has begun."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise EngineError("messages must be a list of at least one message", 400)
    parts: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise EngineError("each message must be an object with a role", 400)
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping))
        parts.append(f"<|{message['role']}|>{content}")
    if not body.get("continue_final_message"):
        parts.append("<|assistant|>")
    return "\n".join(parts)


def _as_chat(system: object, said: object) -> dict[str, object]:
    """A chat body with the texts of another dialect's; items without a role, such as the results of
    tools, are left out."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if isinstance(messages, list):
        messages = [m for m in messages if not isinstance(m, Mapping) or "role" in m]
        if system:
            messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def _answer(seed: int, options: _Options) -> tuple[list[str], str]:
    """All tokens of the answer and its finish reason; at least one token, maybe an empty one.

    A stop string cuts the text where it begins, as vLLM does, so the tokens that spell it are
    empty or shortened.
    """
    pieces: list[str] = []
    text = ""
    longest_stop = max(map(len, options.stop), default=0)
    for token, ends in _tokens(seed, options.prompt):
        if ends and not options.ignore_eos and len(pieces) >= options.min_tokens:
            return pieces or [""], "stop"
        if len(pieces) == options.max_tokens:
            return pieces, "length"
        pieces.append(token)
        text += token
        if longest_stop and len(pieces) > options.min_tokens:
            window = max(0, len(text) - len(token) - longest_stop + 1)
            found = [
                (at, len(stop)) for stop in options.stop if (at := text.find(stop, window)) >= 0
            ]
            if found:
                at, length = min(found)
                return _cut(pieces, at + (length if options.include_stop else 0)), "stop"
    raise AssertionError("the tokens never end")


def _cut(pieces: list[str], end: int) -> list[str]:
    """The same number of pieces, with the text cut after `end` characters."""
    starts = itertools.accumulate(map(len, pieces), initial=0)
    return [piece[: max(0, end - start)] for piece, start in zip(pieces, starts, strict=False)]


def _answer_form(
    request: EngineRequest, options: _Options, model: str, finish_reason: str
) -> _Answer | _TypedChunks:
    counts = (options.prompt_tokens, finish_reason)
    match request.endpoint:
        case Endpoint.RESPONSES:
            created = int(time.time())
            return _TypedChunks(ResponsesAnswer(request.id, model, created, request.body), *counts)
        case Endpoint.MESSAGES:
            return _TypedChunks(MessagesAnswer(request.id, model), *counts)
        case _:
            return _Answer(request, options, model, finish_reason)


class _TypedChunks:
    """Chunks of one answer in a dialect whose events have types."""

    def __init__(self, answer: TypedAnswer, prompt_tokens: int, finish_reason: str) -> None:
        self._answer = answer
        self._prompt_tokens = prompt_tokens
        self._finish_reason = finish_reason
        self._text = ""

    def stream(self, tokens: Sequence[str], sent: int, *, is_last: bool) -> list[EngineChunk]:
        """Chunks for the tokens after the first `sent`; the last has the last event alone."""
        events = self._answer.opening() if sent == 0 else []
        for token in tokens:
            events += self._answer.delta(token)
        text, output_tokens = "".join(tokens), sent + len(tokens)
        self._text += text
        if not is_last:
            return [self._chunk(text, output_tokens, events)]
        *closing, last = self._answer.closing(self._text, self._ending(output_tokens))
        return [
            self._chunk(text, output_tokens, [*events, *closing]),
            self._chunk("", output_tokens, [last], self._finish_reason),
        ]

    def whole(self, pieces: Sequence[str]) -> EngineChunk:
        text = "".join(pieces)
        raw = _json(self._answer.whole(text, self._ending(len(pieces))))
        return EngineChunk(text, len(pieces), self._prompt_tokens, 0, self._finish_reason, raw)

    def _ending(self, output_tokens: int) -> Ending:
        return Ending(self._finish_reason, self._prompt_tokens, output_tokens)

    def _chunk(
        self, text: str, output_tokens: int, events: list[dict[str, Any]], end: str | None = None
    ) -> EngineChunk:
        raw = b"".join(map(event_bytes, events))
        return EngineChunk(text, output_tokens, self._prompt_tokens, 0, end, raw)


class _Answer:
    """Chunks of one answer, with vLLM's bytes when they are asked for."""

    def __init__(
        self, request: EngineRequest, options: _Options, model: str, finish_reason: str
    ) -> None:
        self._raw = request.raw
        self._options = options
        self._finish_reason = finish_reason
        self._is_chat = request.endpoint is Endpoint.CHAT
        kind = "chat.completion" if self._is_chat else "text_completion"
        if self._is_chat and request.stream:
            kind = "chat.completion.chunk"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request.id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def stream(self, tokens: Sequence[str], sent: int, *, is_last: bool) -> list[EngineChunk]:
        """Chunks for the tokens after the first `sent`."""
        text, output_tokens = "".join(tokens), sent + len(tokens)
        prompt_tokens = self._options.prompt_tokens
        if not self._raw:
            reason = self._finish_reason if is_last else None
            return [EngineChunk(text, output_tokens, prompt_tokens, 0, reason)]
        events = b"".join(
            self._events(token, sent + i + 1, is_last=is_last and i == len(tokens) - 1)
            for i, token in enumerate(tokens)
        )
        chunks = [EngineChunk(text, output_tokens, prompt_tokens, 0, None, events)]
        if is_last:
            usage = self._event(
                [], self._usage(output_tokens) | {"system_fingerprint": FINGERPRINT}
            )
            chunks.append(
                EngineChunk("", output_tokens, prompt_tokens, 0, self._finish_reason, usage)
            )
        return chunks

    def whole(self, pieces: Sequence[str]) -> EngineChunk:
        text = "".join(pieces)
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": self._finish_reason,
        }
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        answer = {**self._head, "choices": [choice], "system_fingerprint": FINGERPRINT}
        raw = _json(answer | self._usage(len(pieces)))
        return EngineChunk(
            text, len(pieces), self._options.prompt_tokens, 0, self._finish_reason, raw
        )

    def _events(self, token: str, number: int, *, is_last: bool) -> bytes:
        extra = self._usage(number) if self._options.continuous_usage else {}
        reason = self._finish_reason if is_last else None
        rest = {"index": 0, "logprobs": None, "finish_reason": reason}
        if not self._is_chat:
            return self._event([{**rest, "text": token}], extra)
        event = self._event([{**rest, "delta": {"content": token}}], extra)
        if number > 1:
            return event
        role = {**rest, "finish_reason": None, "delta": {"role": "assistant", "content": ""}}
        return self._event([role], {}) + event

    def _event(self, choices: list[dict[str, Any]], extra: Mapping[str, object]) -> bytes:
        return b"data: " + _json({**self._head, "choices": choices, **extra}) + b"\n\n"

    def _usage(self, output_tokens: int) -> dict[str, object]:
        prompt_tokens = self._options.prompt_tokens
        return {
            "usage": {
                "prompt_tokens": prompt_tokens,
                "total_tokens": prompt_tokens + output_tokens,
                "completion_tokens": output_tokens,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
        }


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
