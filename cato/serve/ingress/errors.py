"""Answers every error with an HTTP response.

OpenAI's error object has all four keys (`code` is a string or null). Anthropic's paths and clients
get Anthropic's error object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import MAX_RETRY_S, CatoError
from cato.serve.ingress.context import request_id, task_of
from cato.serve.ingress.failures import (
    MAX_PROBLEM_CHARS,
    Failure,
    failure_of_error,
    retry_after,
)
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.receipts import receipt_headers, run_headers

log = logging.getLogger("cato.ingress")

# Paths under this one answer in Anthropic's dialect.
ANTHROPIC_PATH = "/v1/messages"
# Anthropic's clients send it everywhere, also to paths that they share, such as /v1/models.
ANTHROPIC_HEADER = "anthropic-version"
# Its SDKs read the request's id from this header, and from the field `request_id` of an error.
ANTHROPIC_ID = "request-id"
# Endpoints that agents use; each may be prefixed with /t/{task}.
_AGENT_PATHS = ("/v1/chat/completions", "/v1/responses", ANTHROPIC_PATH)


def answer(request: Request, failure: Failure) -> Response:
    """`failure` as a response, with the headers of the request's run."""
    if failure.status >= 500:
        log.warning("request %s: %s", request_id(request), failure.problem or failure.message)
    headers = known_headers(request)
    if failure.problem:
        headers["X-CATO-Problem"] = _header_text(failure.problem)
    headers |= failure.headers
    path = request.url.path
    is_of_agents = any(known in path for known in _AGENT_PATHS)
    if is_of_agents and float(headers.get("Retry-After", "0")) > MAX_RETRY_S:
        headers |= retry_after(MAX_RETRY_S)  # X-CATO-Problem has the real time
    if ANTHROPIC_PATH in path or ANTHROPIC_HEADER in request.headers:
        headers[ANTHROPIC_ID] = request_id(request)
        body = {**failure.as_anthropic(), "request_id": request_id(request)}
    else:
        body = failure.as_json(in_conversation=is_of_agents)
    return JsonAnswer(body, failure.status, headers)


def known_headers(request: Request) -> dict[str, str]:
    """Headers known so far about a request, and about its run if it has one."""
    headers = {"x-request-id": request_id(request)}
    task = task_of(request)
    if task is not None:
        headers |= run_headers(task.run)
        if task.finish is not None:
            headers |= receipt_headers(task.finish.receipt)
    return headers


def _header_text(text: str) -> str:
    """`text` as one line of ASCII, short enough for any proxy."""
    line = " ".join(text.split()).encode("ascii", "replace").decode()
    return line[:MAX_PROBLEM_CHARS]


def install(app: FastAPI, has_replicas: Callable[[str], bool]) -> None:
    """Answer every error of `app`, FastAPI's included, with an OpenAI error object."""

    async def handle(request: Request, error: Exception) -> Response:
        return answer(request, failure_of_error(error, has_replicas))

    for kind in (CatoError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle)
