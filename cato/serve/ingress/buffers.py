"""Identifies the editor buffer of a request.

The header `X-CATO-Buffer` names the buffer of any request. Without it, a completion's buffer is its
session (a header, or OpenAI's `prompt_cache_key`) or its body's `user`, plus the path of its file.
The path alone is not enough: everybody has a `main.py`, and users behind one address or API key
would cancel each other's requests. A conversation's session does not name a buffer, since it may
ask for two answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from cato.serve.access.buffers import BufferId
from cato.serve.ingress.context import whose

BUFFER_HEADER = "X-CATO-Buffer"
# Headers of opencode and load tools, Codex, and Claude Code.
SESSION_HEADERS = (
    "x-session-affinity", "x-session-id", "session-id", "x-claude-code-session-id",
)  # fmt: skip


def named_buffer(request: Request) -> BufferId | None:
    """The buffer that a request names explicitly."""
    name = request.headers.get(BUFFER_HEADER)
    return (*whose(request), "name", name) if name else None


def completion_buffer(
    request: Request, body: Mapping[str, object], path: str = ""
) -> BufferId | None:
    """The buffer of a completion in the file at `path`; None if it cannot be told."""
    named = named_buffer(request)
    if named is not None:
        return named
    session = next((v for h in SESSION_HEADERS if (v := request.headers.get(h))), "")
    if not session and isinstance(key := body.get("prompt_cache_key"), str):
        session = key
    user = body.get("user")
    if not session and not (path and isinstance(user, str) and user):
        return None
    return (*whose(request, user), session, path)
