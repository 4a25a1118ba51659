"""One answer out of several attempts: what was sent, and how a lost stream goes on elsewhere.

An engine is asked for the prompt plus the text that was sent. In a completion that is a longer
prompt; in a chat it is an unfinished message of the assistant (`continue_final_message`). See
`cato/core/decisions/0008-failure-model.md` for what is promised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from cato.engines.base import PREEMPTED, Endpoint, EngineChunk
from cato.serve.prompts import EngineCall

_LIMITS = ("max_tokens", "max_completion_tokens")
# vLLM's, of a completion that names none.
_DEFAULT_LIMIT = 16
# Fields whose meaning is lost in the middle of an answer: places and grammars count from its
# beginning, and tools and reasoning are output that the text does not hold.
_FROM_THE_BEGINNING = (
    "logprobs", "top_logprobs", "prompt_logprobs", "echo", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools", "functions",
    "prompt_embeds", "use_beam_search", "return_token_ids",
)  # fmt: skip
# In an event's JSON; the same words in a text have their quotes escaped.
_END = re.compile(rb'"finish_reason":\s*"(\w+)"')
_NO_TEXT = re.compile(
    rb'"(?:tool_calls|function_call|reasoning|reasoning_content|refusal)":(?!\s*(?:null|\[\]|""))'
)
_HEAD = ("id", "object", "created", "model")


def can_continue(call: EngineCall) -> bool:
    """Whether another engine can go on in the middle of the answer."""
    body = call.body
    if not call.stream or any(body.get(name) for name in _FROM_THE_BEGINNING):
        return False
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    match call.endpoint:
        case Endpoint.COMPLETIONS:
            return isinstance(body.get("prompt"), str)
        case Endpoint.CHAT:
            return isinstance(body.get("messages"), list)
        case _:
            return False


@dataclass(slots=True)
class Answer:
    """What one call has sent over all its attempts. Counts are of tokens, -1 where unknown."""

    text: str = ""
    output_tokens: int = 0
    prompt_tokens: int = -1
    cached_tokens: int = -1
    finish_reason: str = ""
    has_output: bool = False  # text, or bytes without text such as a tool call
    # Bytes were sent that the text does not hold.
    _is_opaque: bool = False
    _first: bytes = b""  # the first bytes: all events of a stream have the head of its first
    _end_sent: str = ""  # the finish reason that bytes told before the last chunk
    # Text and tokens up to the last character that is no white space.
    _solid_chars: int = 0
    _solid_tokens: int = 0
    # Of the present attempt: whether something came before it, how many tokens, and text that it
    # repeats.
    _goes_on: bool = False
    _before: int = 0
    _repeats: str = ""

    def next_call(self, call: EngineCall) -> EngineCall:
        """The call that goes on after what was sent; begins an attempt."""
        self._goes_on, self._before, self._repeats = self.has_output, 0, ""
        if not self.text:
            return call
        body = dict(call.body)
        if call.endpoint is Endpoint.CHAT:
            cut = self._cut_for_a_template()
            self._repeats = self.text[cut:]
            body |= _begun(body, self.text[:cut])
        else:
            self._before = self.output_tokens
            body["prompt"] = f"{body['prompt']}{self.text}"
        for name, limit in _limits(call).items():
            body[name] = max(1, limit - self._before)
        if isinstance(least := body.get("min_tokens"), int):
            body["min_tokens"] = max(0, least - self._before)
        return replace(call, body=body)

    @property
    def extent(self) -> str:
        """How much was sent, in words."""
        return f"{self.output_tokens} tokens, {len(self.text)} characters"

    def can_go_on(self, call: EngineCall) -> bool:
        """Whether a lost attempt costs the client nothing: it has nothing, or only text."""
        return not self.has_output or (can_continue(call) and not self._is_opaque)

    def add(self, chunk: EngineChunk) -> EngineChunk:
        """Count a chunk of the present attempt; returns what of it is new to the client."""
        self.output_tokens = self._before + chunk.output_tokens
        if chunk.prompt_tokens >= 0 and self.prompt_tokens < 0:
            self.prompt_tokens = max(0, chunk.prompt_tokens - self._before)
            self.cached_tokens = chunk.cached_tokens
        if chunk.finish_reason not in (None, PREEMPTED):
            self.finish_reason = chunk.finish_reason
        if self._goes_on:
            chunk = self._continued(chunk)
        if chunk.text or chunk.raw:
            self._note(chunk)
        return chunk

    def rest(self, call: EngineCall) -> EngineChunk | None:
        """The end of an answer of which only the end was lost; None while there is more to it.

        An engine that was asked to go on would say more than the first would have.
        """
        is_full = self.output_tokens >= min(_limits(call).values(), default=inf)
        if not self.has_output or not (self._end_sent or is_full):
            return None
        self.finish_reason = self._end_sent or "length"
        if self.prompt_tokens < 0:
            self.prompt_tokens = call.prompt_tokens
        raw = b"" if not call.raw else self._last_events(call.endpoint)
        return EngineChunk("", self.output_tokens, self.prompt_tokens, 0, self.finish_reason, raw)

    def _note(self, chunk: EngineChunk) -> None:
        self.has_output = True
        self.text += chunk.text
        if chunk.text and not chunk.text[-1].isspace():
            self._solid_chars, self._solid_tokens = len(self.text), self.output_tokens
        if chunk.raw:
            self._first = self._first or chunk.raw
            if end := _END.search(chunk.raw):
                self._end_sent = end[1].decode()
            self._is_opaque = self._is_opaque or _NO_TEXT.search(chunk.raw) is not None

    def _cut_for_a_template(self) -> int:
        """Where the message breaks off that the next engine is given; sets the tokens up to there.

        Templates strip white space from the end of a message, so an engine that was given it
        would write it once more: it is left out, and what comes of it again is dropped.
        """
        cut = len(self.text.rstrip())
        is_known = cut == self._solid_chars or cut == len(self.text)
        tokens = self._solid_tokens if cut == self._solid_chars else self.output_tokens
        self._before = tokens if is_known else max(self._solid_tokens, self.output_tokens - 1)
        return cut

    def _continued(self, chunk: EngineChunk) -> EngineChunk:
        if not chunk.raw:
            return replace(chunk, text=self._new(chunk.text))
        events, texts = [], []
        for event in chunk.raw.removesuffix(b"\n\n").split(b"\n\n"):
            value = json.loads(event.removeprefix(b"data: "))
            text, has_news = self._as_one_stream(value)
            if has_news:
                texts.append(text)
                events.append(_event(value))
        return replace(chunk, text="".join(texts), raw=b"".join(events))

    def _as_one_stream(self, value: dict[str, Any]) -> tuple[str, bool]:
        """Make an event of a later attempt one of the first's; its new text, and if it says any."""
        value |= self._head()
        if isinstance(usage := value.get("usage"), dict):
            usage |= self._usage(usage.get("completion_tokens") or 0)
        if not value.get("choices"):
            return "", True
        choice = value["choices"][0]
        delta = choice.get("delta")
        place, name = (choice, "text") if delta is None else (delta, "content")
        text = place[name] = self._new(place.get(name) or "")
        if delta is not None:
            delta.pop("role", None)  # said by the first event of all
        return text, bool(text or choice.get("finish_reason"))

    def _new(self, text: str) -> str:
        """`text` without what it repeats of what was sent."""
        if not self._repeats:
            return text
        same = 0
        while same < min(len(text), len(self._repeats)) and text[same] == self._repeats[same]:
            same += 1
        is_on_its_own_way = same < len(text)
        self._repeats = "" if is_on_its_own_way else self._repeats[same:]
        return text[same:]

    def _head(self) -> dict[str, Any]:
        value = json.loads(self._first.split(b"\n\n", 1)[0].removeprefix(b"data: "))
        return {name: value[name] for name in _HEAD if name in value}

    def _usage(self, output_tokens: int) -> dict[str, int]:
        prompt, output = max(0, self.prompt_tokens), self._before + output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }

    def _last_events(self, endpoint: Endpoint) -> bytes:
        usage = _event(
            {**self._head(), "choices": [], "usage": self._usage(self.output_tokens - self._before)}
        )
        if self._end_sent:
            return usage
        said: dict[str, Any] = {"delta": {}} if endpoint is Endpoint.CHAT else {"text": ""}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": self.finish_reason}
        return _event({**self._head(), "choices": [choice]}) + usage


def _limits(call: EngineCall) -> dict[str, int]:
    """The fields that bound the output, with their values."""
    limits = {n: limit for n in _LIMITS if isinstance(limit := call.body.get(n), int)}
    if call.endpoint is Endpoint.COMPLETIONS and "max_tokens" not in call.body:
        limits["max_tokens"] = _DEFAULT_LIMIT
    return limits


def _begun(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Fields of a chat body whose last message is an answer that has begun with `text`."""
    messages = list(body["messages"])
    if body.get("continue_final_message") and messages:
        *messages, last = messages
        text = f"{last.get('content') or ''}{text}"
    messages.append({"role": "assistant", "content": text})
    return {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def _event(value: Mapping[str, Any]) -> bytes:
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + data.encode("utf-8", "replace") + b"\n\n"
