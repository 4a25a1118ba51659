"""Errors as HTTP answers: the OpenAI error object with all four keys, codes as strings or null; on
Anthropic's paths that dialect's.

The text of an error is constant for its kind, since editors show every distinct text once (and
Continue the whole body): what differs stands in the header `X-CATO-Problem`. Statuses are chosen
by how often real clients repeat them (measured): 429 rather than 503 for a full queue, 504 with
`x-should-retry: false` for a missed deadline, never 408, 409 or 422, and never the word
"overloaded", which Continue repeats five times.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import (
    AccessError,
    CapacityError,
    CatoError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    InputError,
    NotLoadedError,
    QuotaError,
    ReplicaLostError,
    UnknownNameError,
)
from cato.core.receipt import SUPERSEDED
from cato.serve.executor import RunningTask
from cato.serve.ingress.context import finish_of, request_id, task_of
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.receipts import receipt_headers, run_headers
from cato.wire.choices import openai_error
from cato.wire.messages import anthropic_error

log = logging.getLogger("cato.ingress")

# The code of work that a pool refused or dropped because too much waits for it, and of requests
# beyond their tenant's rates.
FULL = "rate_limit_exceeded"
# The reason given to `RunningTask.cancel` when the connection closed.
CLIENT_LEFT = "the client left"
# A lost engine is back after seconds; the pool's other replicas take the work at once.
LOST_RETRY_S = 1.0
MAX_PROBLEM_CHARS = 300


# Paths below this one answer in Anthropic's dialect.
ANTHROPIC_PATH = "/v1/messages"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error answer; `problem` is the part that differs from case to case."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    problem: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return openai_error(self)

    def as_anthropic(self) -> dict[str, object]:
        return anthropic_error(self)


_CLIENT_GONE = Failure(499, "The client closed the request.", "invalid_request_error", "cancelled")
_HTTP_FAILURES = {
    404: ("There is no such path; see GET /v1/models and GET /v1/tasks.", "not_found"),
    405: ("This path does not take that method.", "method_not_allowed"),
    413: ("The request is larger than this server takes.", "request_too_large"),
}
NO_RETRY = {"x-should-retry": "false"}
_SUPERSEDED = Failure(
    499, "A newer request of the same buffer replaced this one.", "invalid_request_error",
    "superseded", headers=NO_RETRY,
)  # fmt: skip


def invalid(message: str, param: str | None, code: str | None = None) -> Failure:
    return Failure(400, message, "invalid_request_error", code, param)


def failure_of_error(error: Exception, has_replicas: Callable[[str], bool]) -> Failure:
    """The answer for `error`; `has_replicas` says whether a pool has any ready replica."""
    match error:
        case UnknownNameError(kind="model"):
            return Failure(
                404, str(error), "invalid_request_error", "model_not_found", param="model"
            )
        case UnknownNameError(kind="task"):
            return Failure(404, str(error), "invalid_request_error", "task_not_found", param="task")
        case ContextLengthError():
            message = (
                "The request does not fit this model's maximum context length; "
                "shorten the input or lower max_tokens."
            )
            return Failure(
                400, message, "invalid_request_error", "context_length_exceeded",
                param=error.param, problem=str(error),
            )  # fmt: skip
        case InputError():
            return invalid(str(error), error.param)
        case AccessError():
            return _not_let_in(error)
        case QuotaError():
            return _over_quota(error)
        case DeadlineError():
            return Failure(
                504, "The task was not finished before its deadline.", "timeout_error",
                "deadline_exceeded", problem=str(error), headers=NO_RETRY,
            )  # fmt: skip
        case NotLoadedError():
            return Failure(
                503, "This model does not load now; X-CATO-Problem says why.",
                "server_error", "model_not_loaded", problem=str(error),
                headers=_retry_after(error.retry_after_s),
            )  # fmt: skip
        case CapacityError():
            return _no_capacity(error, has_replicas(error.pool))
        case EngineDeadError() | ReplicaLostError():
            return Failure(
                503, "The model's engine was lost while it worked on this request.",
                "server_error", "engine_lost", problem=str(error),
                headers=_retry_after(LOST_RETRY_S),
            )  # fmt: skip
        case EngineError(status=404 | 405 | 501):
            return Failure(
                404, "This model's engine does not serve this endpoint.",
                "invalid_request_error", "not_supported", problem=str(error),
            )  # fmt: skip
        case EngineError(status=status) if 400 <= status < 500:
            return invalid(str(error), None)
        case EngineError():
            return Failure(
                502, "The model's engine failed on this request.", "server_error",
                "engine_failed", problem=str(error),
            )  # fmt: skip
        case CatoError():
            return Failure(
                500, "A node of the task's workflow failed.", "server_error", "node_failed",
                problem=str(error),
            )  # fmt: skip
        case HTTPException(status_code=status):
            message, code = _HTTP_FAILURES.get(status, (str(error.detail), None))
            kind = "invalid_request_error" if status < 500 else "server_error"
            return Failure(status, message, kind, code, headers=dict(error.headers or {}))
        case RequestValidationError():
            return invalid("The request's path or query is not valid.", None)
        case _:
            return Failure(500, "CATO failed on this request.", "server_error", "internal_error")


def _not_let_in(error: AccessError) -> Failure:
    kinds = {401: "authentication_error", 403: "permission_error"}
    headers = NO_RETRY if error.retry_after_s is None else _retry_after(error.retry_after_s)
    kind = kinds.get(error.status, "server_error")
    return Failure(error.status, error.message, kind, error.code, headers=headers)


def _over_quota(error: QuotaError) -> Failure:
    headers = _retry_after(error.retry_after_s)
    if error.is_budget:
        return Failure(
            429, "The tokens of this month are used up.", "insufficient_quota",
            "insufficient_quota", problem=str(error), headers=headers | NO_RETRY,
        )  # fmt: skip
    return Failure(
        429, "This API key's tenant asks for too much; try again later.", "rate_limit_error",
        FULL, problem=str(error), headers=headers,
    )  # fmt: skip


def _no_capacity(error: CapacityError, is_pool_up: bool) -> Failure:
    headers = _retry_after(error.retry_after_s)
    if is_pool_up:
        return Failure(
            429, "Too many requests wait for this model; try again later.",
            "rate_limit_error", FULL, problem=str(error), headers=headers,
        )  # fmt: skip
    return Failure(
        503, "No replica of this model is ready; try again later.", "server_error",
        "no_replica", problem=str(error), headers=headers,
    )  # fmt: skip


def _retry_after(seconds: float) -> dict[str, str]:
    return {
        "Retry-After": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }


def failure_of_run(task: RunningTask, has_replicas: Callable[[str], bool]) -> Failure | None:
    """Why a finished run has no answer; None when it has one."""
    finish = finish_of(task)
    if finish.status == "done":
        return None
    if task.error is not None:
        return failure_of_error(task.error, has_replicas)
    problem = finish.receipt.problem
    if problem == CLIENT_LEFT:
        return _CLIENT_GONE
    if problem == SUPERSEDED:
        return _SUPERSEDED
    return Failure(
        500, "A node of the task's workflow failed.", "server_error", "node_failed",
        problem=problem,
    )  # fmt: skip


def answer(request: Request, failure: Failure) -> Response:
    """`failure` as a response, with what is known of the request's run."""
    if failure.status >= 500:
        log.warning("request %s: %s", request_id(request), failure.problem or failure.message)
    headers = known_headers(request)
    if failure.problem:
        headers["X-CATO-Problem"] = _header_text(failure.problem)
    is_anthropic = ANTHROPIC_PATH in request.url.path  # which may begin with /t/{task}
    body = failure.as_anthropic() if is_anthropic else failure.as_json()
    return JsonAnswer(body, failure.status, headers | dict(failure.headers))


def known_headers(request: Request) -> dict[str, str]:
    """What is known of a request, and of its run if there is one."""
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
    """Make every error of `app` an OpenAI error object, those of the framework included."""

    async def handle(request: Request, error: Exception) -> Response:
        return answer(request, failure_of_error(error, has_replicas))

    for kind in (CatoError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle)
