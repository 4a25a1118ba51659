"""The OpenAI forms of an answer that CATO writes itself: completions and chat, whole and chunks."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.receipt import SlaReceipt
from cato.core.runs import FinishRun
from cato.serve.ingress.answers import finish_reason_of, tokens_of
from cato.serve.ingress.errors import Failure
from cato.serve.ingress.jsons import DONE_EVENT, sse
from cato.serve.ingress.receipts import as_json

COMPLETION_ID_PREFIX = "cmpl-"


@dataclass(slots=True)
class Shape:
    """One answer; `created` is Unix time.

    `tier` is the service tier to name, empty for none; `sign` as in `Form`. The receipt is in the
    usage chunk of a stream that `has_usage`, else in its last.
    """

    id: str
    model: str
    created: int
    is_chat: bool
    has_usage: bool = False
    tier: str = ""
    has_begun: bool = False
    sign: bytes = b""

    def whole(self, text: str, finish: FinishRun) -> dict[str, object]:
        return {
            **self._whole(text, finish_reason_of(finish)),
            "usage": usage_of(finish.receipt),
            "cato": as_json(finish.receipt),
        }

    def delta(self, text: str) -> bytes:
        return sse(self._chunk(text, None))

    def ending(self, text: str, finish: FinishRun) -> bytes:
        last = self._chunk("", finish_reason_of(finish))
        receipt = as_json(finish.receipt)
        if not self.has_usage:
            return sse({**last, "cato": receipt}) + DONE_EVENT
        usage = {**self.without_choices(), "usage": usage_of(finish.receipt), "cato": receipt}
        return sse(last) + sse(usage) + DONE_EVENT

    def failed(self, failure: Failure) -> bytes:
        return sse(failure.as_json(in_conversation=self.is_chat)) + DONE_EVENT

    def nothing(self) -> dict[str, object]:
        """An answer without text: what a shed completion gets."""
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return {**self._whole("", "stop"), "usage": usage}

    def nothing_streamed(self) -> bytes:
        """`nothing` as events."""
        return sse(self._chunk("", "stop")) + DONE_EVENT

    def without_choices(self) -> dict[str, object]:
        """A chunk that carries something else, such as the usage."""
        return {**self._object({}, is_chunk=True), "choices": []}

    def _whole(self, text: str, finish_reason: str) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return self._object(choice, is_chunk=False)

    def _chunk(self, text: str, finish_reason: str | None) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if not self.is_chat:
            choice["text"] = text
        else:
            role = {} if self.has_begun else {"role": "assistant"}
            content = {} if finish_reason and self.has_begun else {"content": text}
            choice["delta"] = role | content
        self.has_begun = True
        return self._object(choice, is_chunk=True)

    def _object(self, choice: dict[str, object], *, is_chunk: bool) -> dict[str, object]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": f"{'chatcmpl-' if self.is_chat else COMPLETION_ID_PREFIX}{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            **({"service_tier": self.tier} if self.tier else {}),
        }


def usage_of(receipt: SlaReceipt) -> dict[str, object]:
    """The tokens of every call that the run made; `cato.output_tokens` has the answer's own."""
    prompt, output, cached = tokens_of(receipt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
