"""The OpenAI forms of an answer that CATO writes itself: completions and chat, whole and chunks."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.receipt import SlaReceipt
from cato.core.runs import FinishRun


@dataclass(slots=True)
class Shape:
    """One answer; `created` is Unix time."""

    id: str
    model: str
    created: int
    is_chat: bool
    has_begun: bool = False

    def whole(self, text: str, finish_reason: str) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return self._object(choice, is_chunk=False)

    def delta(self, text: str) -> dict[str, object]:
        return self._chunk(text, None)

    def last(self, finish_reason: str) -> dict[str, object]:
        return self._chunk("", finish_reason)

    def without_choices(self) -> dict[str, object]:
        """A chunk that carries something else, such as the usage."""
        return {**self._object({}, is_chunk=True), "choices": []}

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
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


def usage_of(receipt: SlaReceipt) -> dict[str, object]:
    """The tokens of every call that the run made; `cato.output_tokens` has the answer's own."""
    calls = [n.llm for n in receipt.nodes if n.llm is not None]
    prompt = sum(c.prompt_tokens for c in calls)
    output = sum(c.output_tokens for c in calls)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_prompt_tokens for c in calls)},
    }


def finish_reason_of(finish: FinishRun) -> str:
    """`length` when the answer was cut there, else `stop`."""
    is_cut = isinstance(finish.output, dict) and finish.output.get("finish_reason") == "length"
    return "length" if is_cut else "stop"
