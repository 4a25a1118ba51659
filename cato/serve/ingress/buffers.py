"""Which editor buffer a request is about.

A buffer's name is, from strong to weak: the header `X-CATO-Buffer`, for a request of any kind; for
a completion, its session (a header, or OpenAI's `prompt_cache_key`) or its body's `user`, and the
path of its file. The path alone names none: everybody has a `main.py`, and people behind one
address or one API key would end each other's work. A
session of a conversation may well ask for two answers at once, so there it names no buffer; neither
does anything else that clients send.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from cato.serve.access.buffers import BufferId
from cato.serve.ingress.context import whose

BUFFER_HEADER = "X-CATO-Buffer"
# opencode and load tools; Codex; Claude Code.
SESSION_HEADERS = (
    "x-session-affinity", "x-session-id", "session-id", "x-claude-code-session-id",
)  # fmt: skip


def named_buffer(request: Request) -> BufferId | None:
    """The buffer that a request names itself."""
    name = request.headers.get(BUFFER_HEADER)
    return (*whose(request), "name", name) if name else None


def completion_buffer(
    request: Request, body: Mapping[str, object], path: str = ""
) -> BufferId | None:
    """The buffer of a completion in the file at `path`; None when nothing tells it."""
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
