"""Recognizes the agent behind a request, its session, and the kind of call within the session.

What each client sends was measured (2026-11-23): Claude Code 2.1.197 and 2.1.330, Codex 0.169,
opencode 1.18, Qwen Code 0.24, Continue's `cn` 1.5, aider 0.86. Nothing here is trusted: headers
and prompts only distinguish sessions of one API key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from cato.core.session import Turn, TurnKind
from cato.wire.conversation import Conversation
from cato.wire.endpoint import Endpoint

SESSION_HEADER = "x-cato-session"
# Timeout headers of openai-python, openai-js and clients built on them, in seconds. 600 is their
# default and carries no information; the value may also be NOT_GIVEN or None.
TIMEOUT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
SDK_DEFAULT_TIMEOUT_S = 600.0
MAX_AGENT_CHARS = 500
# A name that is safe in a log line, a label and a path.
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,119}")


@dataclass(frozen=True, slots=True)
class Client:
    """An agent, recognized by the header `user-agent` or, without a name there, by its system
    prompt.

    `session` and `parent` are headers; `part` is a header that distinguishes sub-agents of one
    session. A call that summarizes the history has `sums_up` in its system prompt or last user
    message; a call that names it has `title` in its system prompt. `patience_s` is how long the
    agent waits for a first token: the shortest time after which it was seen to leave, else the
    longest it was seen to wait.
    """

    name: str
    agent: str = ""
    system: str = ""
    session: str = ""
    part: str = ""
    parent: str = ""
    sums_up: str = ""
    title: str = ""
    patience_s: float = inf


CLIENTS = (
    Client(
        "claude-code",
        agent=r"claude-cli/",
        session="x-claude-code-session-id",
        part="x-claude-code-agent-id",
        sums_up="create a detailed summary of the conversation",
        patience_s=300.0,
    ),
    Client(
        "codex",
        agent=r"codex",
        session="thread-id",
        parent="x-codex-parent-thread-id",
        sums_up="CONTEXT CHECKPOINT COMPACTION",
        patience_s=300.0,
    ),
    Client(
        "opencode",
        agent=r"opencode/",
        session="x-session-id",
        parent="x-parent-session-id",
        sums_up="context summarization agent",
        title="title generator",
        patience_s=300.0,
    ),
    Client(
        "qwen-code", agent=r"qwencode/", sums_up="produce the <state_snapshot>", patience_s=120.0
    ),
    Client(
        "cn",
        system=r"You are an agent in the Continue CLI",
        sums_up="provide a concise summary of our conversation",
        patience_s=420.0,
    ),
    Client(
        "aider",
        agent=r"aider/",
        system=r"SEARCH/REPLACE|Act as an expert software|one-line Git commit messages|"
        r"ummarize this partial conversation about programming",
        sums_up="ummarize this partial conversation about programming",
        title="one-line Git commit messages",  # names a commit
        patience_s=570.0,
    ),
)
UNKNOWN = Client("")


def client_of(headers: Mapping[str, str], system: str) -> Client:
    """The agent behind a request; `UNKNOWN` for any other client."""
    for client in CLIENTS:
        if client.session.startswith("x-claude") and client.session in headers:
            return client
    if (named := _called(headers.get("user-agent", "")[:MAX_AGENT_CHARS])) is not None:
        return named
    beginning = system[:20_000]
    for client in CLIENTS:
        if client.system and re.search(client.system, beginning):
            return client
    return UNKNOWN


@lru_cache(maxsize=256)  # every request of a client asks
def _called(agent: str) -> Client | None:
    """The client whose name is in the header `user-agent`."""
    named = (c for c in CLIENTS if c.agent and re.search(c.agent, agent, re.IGNORECASE))
    return next(named, None)


def timeouts_s(headers: Mapping[str, str]) -> list[float]:
    """Timeouts that the client's SDK states in its headers."""
    found = (_seconds(headers.get(name, "")) for name in TIMEOUT_HEADERS)
    return [s for s in found if 0 < s < SDK_DEFAULT_TIMEOUT_S]


def patience_s(headers: Mapping[str, str], client: Client) -> float:
    """How long the client waits for a first token; inf if unknown."""
    return min([client.patience_s, *timeouts_s(headers)])


def _seconds(text: str) -> float:
    try:
        return float(text or 0.0)
    except ValueError:
        return 0.0


def turn_of(
    client: Client,
    headers: Mapping[str, str],
    endpoint: Endpoint,
    body: Mapping[str, object],
    conversation: Conversation,
    whose: str,
) -> Turn:
    """The session of a request, and its call's kind.

    The session is the first found of: the header `X-CATO-Session`, the client's own header,
    OpenAI's `prompt_cache_key`, Anthropic's `metadata.user_id`, and the beginning of the
    conversation (its system prompt and first user message, for the caller `whose`).
    """
    session, parent = _named(client, headers, body)
    return Turn(
        session=session or _by_beginning(client, conversation, whose),
        number=conversation.answers + 1,
        parent=parent,
        client=client.name,
        kind=_kind(client, endpoint, body, conversation),
    )


def _named(
    client: Client, headers: Mapping[str, str], body: Mapping[str, object]
) -> tuple[str, str]:
    """Names of the session and of its parent session; empty where absent."""
    if asked := headers.get(SESSION_HEADER):
        return _sane(asked), ""
    if client.session and (own := headers.get(client.session)):
        session = f"{client.name}:{_sane(own)}"
        parent = headers.get(client.parent) if client.parent else ""
        if client.part and (part := headers.get(client.part)):
            return f"{session}/{_sane(part)}", session
        return session, f"{client.name}:{_sane(parent)}" if parent else ""
    if isinstance(key := body.get("prompt_cache_key"), str) and key:
        return f"key:{_sane(key)}", ""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if isinstance(user, str) and user:
        return f"user:{_sane(_session_id(user))}", ""
    return "", ""


def _session_id(user: str) -> str:
    """The session in Anthropic's `user_id`, if that is the JSON that Claude Code writes."""
    if user.startswith("{"):
        try:
            value = json.loads(user)
        except (ValueError, RecursionError):
            return user
        if isinstance(value, dict) and isinstance(value.get("session_id"), str):
            found: str = value["session_id"]
            return found or user
    return user


def _by_beginning(client: Client, conversation: Conversation, whose: str) -> str:
    """A name from the conversation's beginning, which agents never change: they only append."""
    digest = hashlib.blake2b(digest_size=9)
    for text in (whose, conversation.system, _first_user_text(conversation)):
        digest.update(text.encode("utf-8", "replace") + b"\0")
    return f"{client.name or 'chat'}:{digest.hexdigest()}"


def _first_user_text(conversation: Conversation) -> str:
    return next((m.text for m in conversation.messages if m.role == "user" and m.text), "")


def _sane(name: str) -> str:
    """`name`, or its digest if it is too long or has unsafe characters."""
    if _SANE.fullmatch(name):
        return name
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=12).hexdigest()


def _kind(
    client: Client, endpoint: Endpoint, body: Mapping[str, object], conversation: Conversation
) -> TurnKind:
    """Calls outside the main loop are recognized by their form."""
    if endpoint is Endpoint.COUNT_TOKENS:
        return TurnKind.COUNT
    if not client.name:
        return TurnKind.MAIN
    if client.title and client.title in conversation.system[:2_000]:
        return TurnKind.TITLE
    if client.sums_up and (
        client.sums_up in conversation.last_user_text or client.sums_up in conversation.system
    ):
        return TurnKind.COMPACTION
    if not conversation.tools and "title" in _schema_of(body):
        return TurnKind.TITLE
    return TurnKind.MAIN


def _schema_of(body: Mapping[str, object]) -> Mapping[str, object]:
    """The properties of the JSON schema in a Messages body; empty without a schema."""
    found: object = body
    for key in ("output_config", "format", "schema", "properties"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
