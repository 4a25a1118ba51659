"""What a request asks for besides its conversation: its last message, tools and answer format."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from cato.wire.conversation import Message, Part, PartKind
from cato.wire.reading import READERS, conversation_of
from cato.wire.reading.responses import is_silent

_LISTS = {"responses": "input"}
# Fields of vLLM that fix the form of an answer, as they were before `structured_outputs`.
_GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar"}
_STRUCTURED = {"json": "json_schema", "json_object": "json_object"}


def last_message(endpoint: str, body: Mapping[str, object]) -> Message:
    """The last message of a body, or the prompt of a completion as a user's message.

    Only this message is read; items without text that follow it are passed over. `endpoint` is the
    dialect's path under `/v1/`. Raise `InputError` for an invalid message.
    """
    if endpoint not in READERS:
        prompt = body.get("prompt")
        return Message("user", (Part(PartKind.TEXT, prompt),) if isinstance(prompt, str) else ())
    field = _LISTS.get(endpoint, "messages")
    listed = body.get(field)
    last = listed
    if isinstance(listed, list):
        last = list(islice((item for item in reversed(listed) if not is_silent(item)), 1))
    messages = conversation_of(endpoint, {field: last}).messages if last else ()
    return messages[-1] if messages else Message("user", ())


def tools_of(body: Mapping[str, object]) -> int:
    """How many tools the model may call."""
    lists = (body.get("tools"), body.get("functions"))
    return sum(len(tools) for tools in lists if isinstance(tools, list))


def format_of(body: Mapping[str, object]) -> str:
    """The form that the answer must have: `json_object`, `json_schema`, `regex`, `grammar`, another
    of the engine's names, or empty for free text."""
    for field in ("response_format", "text", "output_config"):
        value = body.get(field)
        if isinstance(value, Mapping):
            value = value.get("format", value)
        kind = value.get("type") if isinstance(value, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            return kind
    structured = body.get("structured_outputs")
    if isinstance(structured, Mapping):
        given = next((str(key) for key, value in structured.items() if value is not None), "")
        return _STRUCTURED.get(given, given)
    return next((kind for field, kind in _GUIDED.items() if body.get(field) is not None), "")
