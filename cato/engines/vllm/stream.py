"""Parse the answers of vLLM's OpenAI server: events, JSON answers, errors, metrics. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from cato.core.errors import CatoError, ContextLengthError, EngineDeadError, EngineError
from cato.engines.base import EngineChunk, EngineLoad

_DONE = b"data: [DONE]"
_PREFIX = b"data: "

# vLLM's wording for "does not fit", in every version from 0.10 to 0.33.
_CONTEXT_WORDS = re.compile(
    r"maximum context length|maximum model length|context length is only"
    r"|greater than max_model_len|(max_tokens|max_completion_tokens).{0,40}too large",
    re.IGNORECASE,
)
# vLLM 0.32 lowers a limit to what the prompt leaves, and refuses 0. CATO sends no limit of 0.
_NO_ROOM_WORDS = re.compile(r"max_tokens must be at least 1, got 0\b")
_CONTEXT_TOKENS = re.compile(r"context length (?:is|of) (\d+)|max_model_len[ =]*\(?(\d+)")
# Not "at least N": that is one above the limit, where it stopped counting.
_ASKED_INPUT = re.compile(r"contains (\d+) input tokens")
_ASKED_OUTPUT = re.compile(r"max_tokens=(\d+)|(\d+) output tokens|too large: (\d+)")
# The server outlives its dead core by up to 5 s and by its open streams, and answers 500 with these
# words.
_DEAD_WORDS = ("EngineCore encountered an issue", "EngineDeadError")


class EventStream:
    """Turns the bytes of a server-sent event stream into chunks.

    All events of one read become one chunk: under load the reader lags, reads hold several
    events, and the cost per token falls. The finish reason is held back until the usage-only
    event arrives, since the last chunk carries the counts. With `raw` that event's bytes are
    alone in the last chunk, so that a caller can drop or replace them.

    Without `continuous_usage` each event with output counts as one token, until the usage event
    corrects it.
    """

    def __init__(self, *, raw: bool = False, continuous_usage: bool = True) -> None:
        self._raw = raw
        self._continuous_usage = continuous_usage
        self._rest = b""
        self._output_tokens = 0
        self._prompt_tokens = -1
        self._cached_tokens = -1
        self._finish_reason: str | None = None
        self._stop_sequence = ""
        self.is_finished = False

    def feed(self, data: bytes) -> list[EngineChunk]:
        """Zero to two chunks; raises the `EngineError` that the stream reports."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        texts: list[str] = []
        passed: list[bytes] = []
        chunks: list[EngineChunk] = []
        for event in events:
            if not event.startswith(_PREFIX):
                continue  # a comment or an empty line
            if event == _DONE:
                if self._finish_reason is not None and not self.is_finished:
                    # The server sends no usage event.
                    chunks.append(self._last("".join(texts), _joined(passed)))
                    texts, passed = [], []
                continue
            value = json.loads(event[6:])
            choices = value.get("choices")
            usage = value.get("usage")
            if usage is not None:
                self._count(usage)
            if choices:
                text = self._read_choice(choices[0])
                if text:
                    texts.append(text)
                if self._raw:
                    passed.append(event)
            elif "error" in value:
                raise stream_error(value["error"])
            elif usage is not None and self._finish_reason is not None:
                if self._raw:
                    if passed:
                        chunks.append(self._chunk("".join(texts), _joined(passed)))
                        passed, texts = [], []
                    chunks.append(self._last("".join(texts), event + b"\n\n"))
                else:
                    chunks.append(self._last("".join(texts), b""))
                texts = []
        if texts or passed:
            chunks.append(self._chunk("".join(texts), _joined(passed)))
        return chunks

    def _read_choice(self, choice: dict[str, Any]) -> str:
        reason = choice.get("finish_reason")
        if reason is not None:
            if reason == "abort":
                raise aborted()
            self._finish_reason, self._stop_sequence = reason, _stop_sequence(choice)
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text")
        elif "role" in delta and not delta.get("content"):
            return ""  # opens a chat answer; no token
        else:
            text = delta.get("content")
        if not self._continuous_usage:
            self._output_tokens += 1
        # Only the first of several choices is text; the others pass in `raw`.
        return text or "" if choice.get("index", 0) == 0 else ""

    def _count(self, usage: dict[str, Any]) -> None:
        self._output_tokens = usage.get("completion_tokens") or 0
        self._prompt_tokens = usage.get("prompt_tokens", -1)
        details = usage.get("prompt_tokens_details")
        if details:
            self._cached_tokens = details.get("cached_tokens") or 0

    def _chunk(self, text: str, raw: bytes) -> EngineChunk:
        return EngineChunk(
            text, self._output_tokens, self._prompt_tokens, self._cached_tokens, None, raw
        )

    def _last(self, text: str, raw: bytes) -> EngineChunk:
        self.is_finished = True
        return EngineChunk(
            text,
            self._output_tokens,
            max(0, self._prompt_tokens),
            max(0, self._cached_tokens),
            self._finish_reason,
            raw,
            self._stop_sequence,
        )


def aborted() -> EngineDeadError:
    """The error for an answer that vLLM ended itself, as it does when it is told to stop."""
    return EngineDeadError("the engine aborted the request", 503)


def _stop_sequence(choice: dict[str, Any]) -> str:
    reason = choice.get("stop_reason")
    return reason if isinstance(reason, str) else ""  # or the id of a token


def _joined(events: list[bytes]) -> bytes:
    return b"\n\n".join([*events, b""]) if events else b""


def whole_answer(body: bytes) -> EngineChunk:
    """The single chunk of an answer that was not streamed."""
    try:
        value = json.loads(body)
        choice, usage = value["choices"][0], value["usage"]
        message = choice.get("message")
        text = choice["text"] if message is None else message.get("content")
        details = usage.get("prompt_tokens_details") or {}
        finish_reason = choice["finish_reason"]
        chunk = EngineChunk(
            text or "",
            usage["completion_tokens"],
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
            finish_reason,
            body,
            _stop_sequence(choice),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        raise EngineError(f"unreadable answer from the engine: {body[:200]!r}") from exc
    if finish_reason == "abort":
        raise aborted()
    return chunk


_PYDANTIC_FIELD = re.compile(r"'loc': \('body', '(\w+)'")


def http_error(status: int, body: bytes, context_tokens: int | None = None) -> CatoError:
    """The error for an HTTP error response of an engine with that context."""
    param = None
    try:
        value = json.loads(body)
        error = value.get("error", value)
        message = str(error.get("message") or error)
        param = _param(error.get("param"), message)
    except (ValueError, AttributeError):
        message = body[:500].decode(errors="replace") or f"the engine answered {status}"
    if status in (400, 413, 422) and _CONTEXT_WORDS.search(message):
        return _context_error(message)
    if status == 400 and _NO_ROOM_WORDS.search(message):
        return ContextLengthError(
            message, prompt_tokens=context_tokens, context_tokens=context_tokens
        )
    if status >= 500 and _is_of_dead_core(message):
        return EngineDeadError(message, 503)
    return EngineError(message, status, param)


def says_core_is_dead(error: EngineError) -> bool:
    """Whether the server says that its core has ended: it will answer no call any more."""
    return isinstance(error, EngineDeadError) and _is_of_dead_core(error.problem)


def _is_of_dead_core(message: str) -> bool:
    return any(words in message for words in _DEAD_WORDS)


def _param(told: object, message: str) -> str | None:
    """The request field that an error is about; pydantic names it first in its lists."""
    # vLLM puts the body before some names: `body.temperature`, or `body` alone.
    name = "" if told == "body" or not isinstance(told, str) else told.removeprefix("body.")
    if name:
        return name
    found = _PYDANTIC_FIELD.search(message)
    return None if found is None else found[1]


def _context_error(message: str) -> ContextLengthError:
    """Parse the numbers from the server's message: its errors have no fields for them."""

    def number(pattern: re.Pattern[str]) -> int | None:
        found = pattern.search(message)
        return None if found is None else int(next(g for g in found.groups() if g))

    return ContextLengthError(
        message,
        prompt_tokens=number(_ASKED_INPUT),
        max_tokens=number(_ASKED_OUTPUT),
        context_tokens=number(_CONTEXT_TOKENS),
    )


def stream_error(error: object) -> CatoError:
    """The error for an error event inside a stream."""
    if not isinstance(error, dict):
        return EngineError(str(error))
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    return http_error(status, json.dumps({"error": error}).encode())


# Tokens per block and number of blocks: labels of a metric whose value is always 1.
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_BLOCK_SIZE = re.compile(rb'\bblock_size="(\d+)"')
_BLOCKS = re.compile(rb'\bnum_gpu_blocks="(\d+)"')


def kv_cache_of_metrics(text: bytes) -> tuple[int, int]:
    """The KV cache's capacity and block size in tokens, from a Prometheus page; 0 if not
    stated."""
    config = _CACHE_CONFIG.search(text)
    if config is None:
        return 0, 0
    size, blocks = _BLOCK_SIZE.search(config[1]), _BLOCKS.search(config[1])
    block_tokens = int(size[1]) if size else 0
    return (block_tokens * int(blocks[1]) if blocks else 0), block_tokens


_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
_COUNTERS = (b"vllm:prompt_tokens_total", b"vllm:generation_tokens_total")
_KV_CACHE = b"vllm:kv_cache_usage_perc"
_KV_CACHE_BEFORE_0_11 = b"vllm:gpu_cache_usage_perc"


def load_of_metrics(text: bytes) -> EngineLoad:
    """The load in a Prometheus page; a missing metric counts as zero."""
    kv_cache = _samples(text, _KV_CACHE) or _samples(text, _KV_CACHE_BEFORE_0_11)
    return EngineLoad(
        running=int(sum(_samples(text, _RUNNING))),
        waiting=int(sum(_samples(text, _WAITING))),
        kv_cache_usage=min(1.0, max(kv_cache, default=0.0)),
    )


def tokens_of_metrics(text: bytes) -> float:
    """Prompt and output tokens that the engine has computed since its start."""
    return sum(sum(_samples(text, name)) for name in _COUNTERS)


def _samples(text: bytes, name: bytes) -> list[float]:
    """The values of one metric; searched for, since parsing all 55 kB costs 50 times more."""
    values: list[float] = []
    at = text.find(name)
    while at >= 0:
        end = text.find(b"\n", at)
        line = text[at : end if end >= 0 else len(text)]
        is_sample = at == 0 or text[at - 1 : at] == b"\n"
        if is_sample and line[len(name) : len(name) + 1] in (b"{", b" "):
            values.append(float(line.rpartition(b" ")[2]))
        at = text.find(name, at + len(line))
    return values
