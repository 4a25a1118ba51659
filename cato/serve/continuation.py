"""Continuing a lost stream on another engine: one answer out of several attempts.

The next engine gets the prompt plus the text sent so far. For a completion that is a longer prompt.
For chat it is an unfinished assistant message (`continue_final_message`), for Responses an item
with status `in_progress`; a Messages call continues as a chat. The bytes of later attempts are
parsed and rewritten as part of the first attempt's stream (`cato.wire.transcript`).
`cato/core/decisions/0008-failure-model.md` says what is promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from cato.core.errors import InputError
from cato.engines.base import PREEMPTED, EngineChunk
from cato.serve.prompts import EngineCall
from cato.wire.answer import AnswerWriter, Ending, Text
from cato.wire.as_chat import messages_as_chat
from cato.wire.begun import begun_chat, begun_response
from cato.wire.endpoint import Endpoint
from cato.wire.events import Event, events_bytes
from cato.wire.limits import COMPLETION_TOKENS, limits_of, shortened
from cato.wire.transcript import Transcript, deltas_of, events_of, with_usage

# Longer streams are read in between, so that what is unread does not fill the memory.
MAX_UNREAD_BYTES = 64 * 1024
# Fields that rule out a continuation: positions and grammars count from the start of the answer.
_FROM_THE_BEGINNING = (
    "top_logprobs", "echo", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "functions", "prompt_embeds", "use_beam_search", "return_token_ids",
    "include_stop_str_in_output",
)  # fmt: skip
# The same for these, where 0 asks for the log probabilities of the tokens themselves.
_LOGPROBS = ("logprobs", "prompt_logprobs")
_LOGPROBS_OF_RESPONSES = "message.output_text.logprobs"
# Fields that hold the output format in Responses and Messages.
_FORMATS = ("text", "output_config")


def can_continue(call: EngineCall) -> bool:
    """Whether another engine can continue from the middle of the answer's text."""
    body = call.body
    if not call.stream or any(body.get(name) for name in _FROM_THE_BEGINNING):
        return False
    if _is_form(body.get("response_format")):
        return False
    # By identity, because 0 == False.
    if any(body.get(name) is not None and body[name] is not False for name in _LOGPROBS):
        return False
    include = body.get("include")
    if isinstance(include, list) and _LOGPROBS_OF_RESPONSES in include:
        return False
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    match call.endpoint:
        case Endpoint.COMPLETIONS:
            return isinstance(body.get("prompt"), str)
        case Endpoint.CHAT:
            return isinstance(body.get("messages"), list)
        case Endpoint.RESPONSES | Endpoint.MESSAGES:
            return call.raw and not any(map(_has_grammar, map(body.get, _FORMATS)))
        case _:
            return False


def _has_grammar(options: object) -> bool:
    return _is_form(options.get("format") if isinstance(options, Mapping) else None)


def _is_form(asked: object) -> bool:
    """Whether a format asks for more than plain text."""
    return isinstance(asked, Mapping) and asked.get("type") != "text"


@dataclass(slots=True)
class Answer:
    """What one call has sent over all its attempts. Counts are in tokens; -1: unknown."""

    text: str = ""
    output_tokens: int = 0
    prompt_tokens: int = -1
    cached_tokens: int = -1
    finish_reason: str = ""
    stop_sequence: str = ""  # at which it ended, where the engine tells it
    has_output: bool = False  # text, or bytes without text such as a tool call
    is_whole: bool = False  # its end was sent too
    # The stream as the client has it, for calls whose bytes are passed on; without the unread
    # chunks: most streams end without a continuation, and nothing asks what was sent.
    _transcript: Transcript | None = None
    _unread: list[EngineChunk] = field(default_factory=list)
    _unread_bytes: int = 0
    # Text and tokens up to the last non-whitespace character.
    _solid_chars: int = 0
    _solid_tokens: int = 0
    # Current attempt: whether it continues earlier output, its dialect, the tokens sent before it,
    # and text that it is expected to repeat.
    _goes_on: bool = False
    _dialect: Endpoint = Endpoint.CHAT
    _before: int = 0
    _repeats: str = ""

    def next_call(self, call: EngineCall) -> EngineCall:
        """Begin an attempt: the call that continues after the text sent so far."""
        if not self.has_output:
            self.prompt_tokens = self.cached_tokens = -1
        self._goes_on, self._before, self._repeats = self.has_output, 0, ""
        if call.raw and call.stream and call.endpoint.generates and self._transcript is None:
            self._transcript = Transcript(call.endpoint, call.body)
        next_call = self._continued_call(call) if self.text else call
        self._dialect = next_call.endpoint
        return next_call

    @property
    def writer(self) -> AnswerWriter | None:
        """Writer that can extend the client's stream; None if no bytes are passed on."""
        sent = self._sent()
        return None if sent is None else sent.writer

    def _sent(self) -> Transcript | None:
        """The stream as the client has it, with all chunks read."""
        sent = self._transcript
        if sent is not None:
            for chunk in self._unread:
                sent.sent(chunk.raw, chunk.text)
            self._unread.clear()
            self._unread_bytes = 0
        return sent

    @property
    def extent(self) -> str:
        """How much was sent, as text for reasons and logs."""
        return f"{self.output_tokens} tokens, {len(self.text)} characters"

    def can_go_on(self, call: EngineCall) -> bool:
        """Whether a lost attempt can be continued: the client has nothing yet, or only text."""
        if not self.has_output:
            return True
        sent = self._sent()
        if not can_continue(call) or (sent is not None and (sent.has_thinking or sent.calls)):
            return False
        return call.endpoint is not Endpoint.MESSAGES or _as_chat(call) is not None

    def add(self, chunk: EngineChunk) -> list[EngineChunk]:
        """Count a chunk of the current attempt; return the chunks that are new to the client."""
        self.output_tokens = self._before + chunk.output_tokens
        # vLLM counts cached tokens in the last chunk alone; a later attempt finds other ones.
        if chunk.prompt_tokens >= 0 and (self.prompt_tokens < 0 or not self._goes_on):
            self.prompt_tokens = max(0, chunk.prompt_tokens - self._before)
            # The next engine's cache may also have held the text so far, which is no prompt here.
            self.cached_tokens = min(
                max(self.cached_tokens, chunk.cached_tokens), self.prompt_tokens
            )
        if chunk.finish_reason not in (None, PREEMPTED):
            self.finish_reason, self.is_whole = chunk.finish_reason, True
            self.stop_sequence = chunk.stop_sequence or self.stop_sequence
        if self._goes_on:
            return self._more(chunk)
        if self._transcript is not None and chunk.raw:
            self._unread.append(chunk)
            self._unread_bytes += len(chunk.raw)
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._sent()
        self._note(chunk)
        return [chunk]

    def rest(self, call: EngineCall) -> list[EngineChunk]:
        """The closing chunks of an answer that lost only its end; empty if more text is missing.

        Another engine would write more than the first one had left to say. A whole tool call is an
        end: the client runs the tool and calls again. Of several answers, one may have ended while
        another goes on.
        """
        if call.calls != 1:
            return []
        sent, reason = self._sent(), ""
        if sent is not None:
            reason = sent.finish_reason or ("tool_calls" if sent.has_whole_calls else "")
        if not reason and self.output_tokens >= min(_limits(call).values(), default=inf):
            reason = "length"
        if not self.has_output or not reason:
            return []
        self.finish_reason = reason
        if self.prompt_tokens < 0:
            self.prompt_tokens, self.cached_tokens = call.prompt_tokens, 0
        if sent is None:
            return [self._chunk("", (), reason)]
        return self._closing(sent, "", [])

    def _more(self, chunk: EngineChunk) -> list[EngineChunk]:
        """Rewrite a chunk of a later attempt as part of the first one's stream."""
        sent = self._sent()
        if sent is None:
            new = [replace(chunk, text=self._new(chunk.text))]
        else:
            text, events = self._rewritten(sent, chunk)
            if chunk.finish_reason in (None, PREEMPTED):
                new = [self._chunk(text, events, chunk.finish_reason)]
            else:
                new = self._closing(sent, text, events)
        for piece in new:
            self._note(piece)
        return new

    def _rewritten(self, sent: Transcript, chunk: EngineChunk) -> tuple[str, list[Event]]:
        texts: list[str] = []
        written: list[Event] = []
        came = events_of(chunk.raw) if chunk.raw else []
        told = [usage.get("completion_tokens") or 0 for e in came if (usage := e.get("usage"))]
        # Only the chunk's count includes the tokens sent by earlier attempts.
        before = self.output_tokens - max(told, default=0)
        for event in came:
            for choice in event.get("choices") or ():
                if isinstance(stop := choice.get("stop_reason"), str):
                    self.stop_sequence = stop
            for delta in deltas_of(self._dialect, event):
                if isinstance(delta, Text):
                    delta = Text(self._new(delta.text))
                    texts.append(delta.text)
                    if not delta.text:
                        continue
                events = sent.more(delta)
                if counts := event.get("usage"):
                    output_tokens = before + (counts.get("completion_tokens") or 0)
                    events = [with_usage(e, self._ending(output_tokens)) for e in events]
                written += events
        return "".join(texts), written

    def _closing(self, sent: Transcript, text: str, events: list[Event]) -> list[EngineChunk]:
        """The end of a stream; its last event gets its own chunk, as engines send it."""
        *closing, last = sent.closing(self._ending(self.output_tokens))
        first = self._chunk(text, [*events, *closing], None)
        return [first, self._chunk("", [last], self.finish_reason)]

    def _ending(self, output_tokens: int) -> Ending:
        prompt, cached = max(0, self.prompt_tokens), max(0, self.cached_tokens)
        return Ending(self.finish_reason, prompt, output_tokens, cached, self.stop_sequence)

    def _chunk(self, text: str, events: Sequence[Event], finish_reason: str | None) -> EngineChunk:
        counts = (self.output_tokens, self.prompt_tokens, self.cached_tokens)
        return EngineChunk(text, *counts, finish_reason, events_bytes(events))

    def _note(self, chunk: EngineChunk) -> None:
        self.has_output = self.has_output or bool(chunk.text or chunk.raw)
        self.text += chunk.text
        if chunk.text and not chunk.text[-1].isspace():
            self._solid_chars, self._solid_tokens = len(self.text), self.output_tokens

    def _continued_call(self, call: EngineCall) -> EngineCall:
        """`call` with the text so far as the start of its answer."""
        body, endpoint = dict(call.body), call.endpoint
        if endpoint is Endpoint.COMPLETIONS:
            self._before = self.output_tokens
            body["prompt"] = f"{body['prompt']}{self.text}"
        else:
            cut = self._cut_for_a_template()
            self._repeats = self.text[cut:]
            if endpoint is Endpoint.RESPONSES:
                body |= begun_response(body, self.text[:cut])
            else:
                if endpoint is Endpoint.MESSAGES:
                    body, endpoint = _as_chat(call) or body, Endpoint.CHAT
                body |= begun_chat(body, self.text[:cut])
        body = shortened({**body, **_limits(call)}, self._before)
        begun = self.text.removesuffix(self._repeats)
        return replace(call, body=body, endpoint=endpoint, begun=begun, begun_tokens=self._before)

    def _cut_for_a_template(self) -> int:
        """Where to cut the message for the next engine; sets the token count up to there.

        Chat templates strip trailing whitespace, so the engine would write it again. It is cut off
        here, and its repetition is dropped.
        """
        cut = len(self.text.rstrip())
        is_known = cut == self._solid_chars or cut == len(self.text)
        tokens = self._solid_tokens if cut == self._solid_chars else self.output_tokens
        self._before = tokens if is_known else max(self._solid_tokens, self.output_tokens - 1)
        return cut

    def _new(self, text: str) -> str:
        """`text` without the part that repeats text already sent."""
        if not self._repeats:
            return text
        same = 0
        while same < min(len(text), len(self._repeats)) and text[same] == self._repeats[same]:
            same += 1
        is_on_its_own_way = same < len(text)
        self._repeats = "" if is_on_its_own_way else self._repeats[same:]
        return text[same:]


def _limits(call: EngineCall) -> dict[str, int]:
    """The fields that bound the output, with their values."""
    limits = limits_of(call.body)
    if call.endpoint is Endpoint.COMPLETIONS and "max_tokens" not in call.body:
        limits["max_tokens"] = COMPLETION_TOKENS
    return limits


def _as_chat(call: EngineCall) -> dict[str, Any] | None:
    """The chat body of a Messages call; None if it cannot be converted."""
    try:
        return messages_as_chat(call.body)
    except (InputError, KeyError, TypeError, AttributeError):
        return None
