"""Parses request bodies of each dialect into a `Conversation`.

Unknown content stays in the body and is counted as JSON; invalid content raises an `InputError`
that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping

from cato.wire.conversation import Conversation
from cato.wire.reading.chat import read_chat
from cato.wire.reading.messages import read_messages
from cato.wire.reading.responses import read_responses

READERS = {
    "chat/completions": read_chat,
    "responses": read_responses,
    "messages": read_messages,
    "messages/count_tokens": read_messages,
}
"""Readers by the dialect's path under `/v1/`."""


def conversation_of(endpoint: str, body: Mapping[str, object]) -> Conversation:
    """The conversation in a body. Raise `InputError` if it has none, `KeyError` for a dialect
    without conversations."""
    return READERS[endpoint](body)


__all__ = ["READERS", "conversation_of", "read_chat", "read_messages", "read_responses"]
