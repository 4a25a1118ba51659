"""Bodies of each dialect, read once as a `Conversation`.

What a dialect does not know survives in the body and is counted as JSON; what cannot be read at
all is an `InputError` that names the field.
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
"""By the path of the dialect below `/v1/`."""


def conversation_of(endpoint: str, body: Mapping[str, object]) -> Conversation:
    """The conversation of a body; raise `InputError` where it has none, `KeyError` for a dialect
    without conversations."""
    return READERS[endpoint](body)


__all__ = ["READERS", "conversation_of", "read_chat", "read_messages", "read_responses"]
