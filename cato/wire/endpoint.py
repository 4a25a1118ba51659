"""The dialects that an engine is asked in."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    """Which of vLLM's dialects a body is in."""

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
        """Where vLLM's server has it."""
        is_versioned = self not in (Endpoint.TOKENIZE, Endpoint.DETOKENIZE)
        return f"/v1/{self}" if is_versioned else f"/{self}"

    @property
    def generates(self) -> bool:
        """Whether answers are tokens; the others come whole and without an end of their own."""
        return self in _GENERATING

    @property
    def has_choices(self) -> bool:
        """Whether answers are OpenAI's lists of choices, with usage on demand."""
        return self in (Endpoint.COMPLETIONS, Endpoint.CHAT)


_GENERATING = frozenset(
    {Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES}
)
