"""Chooses the answer writer for an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cato.wire.answer import AnswerWriter
from cato.wire.chat import ChatWriter
from cato.wire.choices import UsageIn
from cato.wire.completions import CompletionsWriter
from cato.wire.endpoint import Endpoint
from cato.wire.messages import MessagesWriter
from cato.wire.responses import ResponsesWriter

WRITERS: dict[Endpoint, type[AnswerWriter]] = {
    Endpoint.COMPLETIONS: CompletionsWriter,
    Endpoint.CHAT: ChatWriter,
    Endpoint.RESPONSES: ResponsesWriter,
    Endpoint.MESSAGES: MessagesWriter,
}


def writer_of(
    endpoint: Endpoint,
    id: str,
    model: str,
    created: int,
    asked: Mapping[str, Any],
    *,
    usage_in: UsageIn = UsageIn.OWN_CHUNK,
    extra: Mapping[str, object] | None = None,
) -> AnswerWriter:
    """The writer of the answer to the body `asked`; `created` is Unix time.

    `usage_in`, and `extra` fields of each object, apply to dialects with choices only.
    """
    match endpoint:
        case Endpoint.COMPLETIONS:
            return CompletionsWriter(id, model, created, usage_in, extra or {})
        case Endpoint.CHAT:
            return ChatWriter(id, model, created, usage_in, extra or {})
        case Endpoint.RESPONSES:
            return ResponsesWriter(id, model, created, asked)
        case Endpoint.MESSAGES:
            return MessagesWriter(id, model)
        case _:
            raise ValueError(f"{endpoint} does not generate answers, so it has no writer")
