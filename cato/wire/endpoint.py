"""The engine's API endpoints: the dialects in which it is called."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    """The vLLM endpoint that a body is for."""

    COMPLETIONS = "completions"
    CHAT = "chat/completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "messages/count_tokens"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    EMBEDDINGS = "embeddings"
    SCORE = "score"
    RERANK = "rerank"

    @property
    def path(self) -> str:
        """Its path on vLLM's server."""
        is_versioned = self not in (Endpoint.TOKENIZE, Endpoint.DETOKENIZE)
        return f"/v1/{self}" if is_versioned else f"/{self}"

    @property
    def generates(self) -> bool:
        """Whether the endpoint generates tokens; others answer at once, without a final event."""
        return self in _GENERATING

    @property
    def computes(self) -> bool:
        """Whether the model itself runs; the other endpoints only use its tokenizer."""
        return self not in _TOKENIZING

    @property
    def has_choices(self) -> bool:
        """Whether answers have OpenAI's list of choices, with usage on demand."""
        return self in (Endpoint.COMPLETIONS, Endpoint.CHAT)


_GENERATING = frozenset(
    {Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES}
)
_TOKENIZING = frozenset({Endpoint.COUNT_TOKENS, Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
