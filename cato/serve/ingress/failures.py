"""The failure for each kind of error: status, constant message, code and headers.

Each kind of error has a constant message, because editors show every distinct message once (and
Continue the whole body). Details go into the header `X-CATO-Problem`. Conversation endpoints get
the token counts of a prompt that is too long, which agents read to compact the history, and an
engine's reason for a refusal, since SDKs and agents show no headers.

Statuses follow how real clients retry (measured): 429 for a full queue, a pool without replicas or
router and a lost engine, since Codex retries a 503 30 times in 33 s; 503 while the server starts;
504 with `x-should-retry: false` for a missed deadline; never 408, 409, 422 or 529, and never the
word "overloaded", which makes Continue retry five times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cato.core.errors import (
    MIN_RETRY_S,
    AccessError,
    CapacityError,
    CatoError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    InputError,
    LinkCallError,
    NotLoadedError,
    QuotaError,
    ReplicaLostError,
    RouterAwayError,
    StartingError,
    UnknownNameError,
    WorkLimitError,
    retry_s,
)
from cato.core.receipt import CLIENT_LEFT, SUPERSEDED
from cato.serve.executor import RunningTask
from cato.serve.ingress.context import finish_of
from cato.serve.ingress.too_long import too_long
from cato.store.errors import StoreError
from cato.wire.choices import openai_error
from cato.wire.messages import anthropic_error

# Error code when a pool refuses or sheds work because its queue is full, and when a request exceeds
# its tenant's rate limit.
FULL = "rate_limit_exceeded"
# A lost engine restarts within seconds; the pool's other replicas can take the work at once.
LOST_RETRY_S = 1.0
# The control plane is ready a few seconds after the ingress.
STARTING_RETRY_S = 3.0
STORE_RETRY_S = 5.0
MAX_PROBLEM_CHARS = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """An error response; `problem` holds the details of this case.

    `to_openai` and `to_anthropic` replace `message` for conversations, in OpenAI's dialects and
    in Anthropic's. Empty: `message` itself.
    """

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    problem: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    to_openai: str = ""
    to_anthropic: str = ""

    def as_json(self, *, in_conversation: bool = False) -> dict[str, object]:
        return openai_error(self, in_conversation=in_conversation)

    def as_anthropic(self) -> dict[str, object]:
        return anthropic_error(self)


_CLIENT_GONE = Failure(499, "The client closed the request.", "invalid_request_error", "cancelled")
_HTTP_FAILURES = {
    404: ("No such path; see /docs, GET /v1/models and GET /v1/tasks.", "not_found"),
    405: ("This path does not support this method; see /docs.", "method_not_allowed"),
    413: ("The request body is too large for this server; send less.", "request_too_large"),
}
NO_RETRY = {"x-should-retry": "false"}
_SUPERSEDED = Failure(
    499, "A newer request for the same buffer replaced this one.", "invalid_request_error",
    "superseded", headers=NO_RETRY,
)  # fmt: skip
# The parameter that names what is unknown.
_PARAM_OF = {"model": "model", "task": "task", "rollout": "name"}


def invalid(message: str, param: str | None, code: str | None = None) -> Failure:
    return Failure(400, message, "invalid_request_error", code, param)


def failure_of_error(error: Exception, has_replicas: Callable[[str], bool]) -> Failure:
    """The response for `error`; `has_replicas` says whether a pool has a ready replica."""
    match error:
        case UnknownNameError(kind=kind) if kind in _PARAM_OF:
            return Failure(
                404, str(error), "invalid_request_error", f"{kind}_not_found",
                param=_PARAM_OF[kind],
            )  # fmt: skip
        case ContextLengthError():
            return _too_long(error)
        case InputError():
            return invalid(str(error), error.param, error.code)
        case AccessError():
            return _not_let_in(error)
        case QuotaError():
            return _over_quota(error)
        case DeadlineError():
            return Failure(
                504, "The task did not finish before its deadline.", "timeout_error",
                "deadline_exceeded", problem=str(error), headers=NO_RETRY,
            )  # fmt: skip
        case StartingError():
            return Failure(
                503, "The server is starting; try again in a moment.", "server_error", "starting",
                problem=str(error), headers=retry_after(STARTING_RETRY_S),
            )  # fmt: skip
        case NotLoadedError():
            return Failure(
                429, "This model cannot be loaded now; see X-CATO-Problem for the reason.",
                "server_error", "model_not_loaded", problem=str(error),
                headers=_soon(error.retry_after_s),
            )  # fmt: skip
        case RouterAwayError():
            return Failure(
                429, "This model's router does not answer now; try again in a moment.",
                "server_error", "router_away", problem=str(error),
                headers=_soon(error.retry_after_s),
            )  # fmt: skip
        case CapacityError():
            return _no_capacity(error, has_replicas(error.pool))
        case EngineDeadError() | ReplicaLostError():
            return Failure(
                429, "The model's engine was lost while serving this request; try again.",
                "server_error", "engine_lost", problem=str(error),
                headers=_soon(LOST_RETRY_S),
            )  # fmt: skip
        case LinkCallError():
            return Failure(
                500, "The server failed to serve this request; see X-CATO-Problem for the reason.",
                "server_error", "internal_error", problem=str(error),
            )  # fmt: skip
        case EngineError():
            return _of_engine(error)
        case StoreError():
            return Failure(
                503, "The store is unavailable; try again later.",
                "server_error", "store_unavailable", problem=str(error),
                headers=retry_after(STORE_RETRY_S),
            )  # fmt: skip
        case WorkLimitError():
            return Failure(
                400, "The inputs are too large for this task; send less text.",
                "invalid_request_error", "inputs_too_large", problem=str(error),
            )  # fmt: skip
        case CatoError():
            return _node_failed(str(error))
        case HTTPException(status_code=status):
            message, code = _HTTP_FAILURES.get(status, (str(error.detail), None))
            headers = dict(error.headers or {})
            return Failure(status, message, _kind_of(status), code, headers=headers)
        case RequestValidationError():
            return invalid("The request's path or query is invalid; see /docs.", None)
        case _:
            return Failure(
                500, "Internal server error; see the ingress log for this request id.",
                "server_error", "internal_error",
            )  # fmt: skip


def _kind_of(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def _of_engine(error: EngineError) -> Failure:
    match error.status:
        case 404 | 405 | 501:
            return Failure(
                404, "This model's engine does not support this endpoint.",
                "invalid_request_error", "not_supported", problem=str(error),
            )  # fmt: skip
        case 429:
            return Failure(
                429, "The model's engine accepts no more work now; try again in a moment.",
                "rate_limit_error", FULL, problem=str(error), headers=_soon(MIN_RETRY_S),
            )  # fmt: skip
        case status if status is not None and 400 <= status < 500:
            field = f"the value of {error.param}" if error.param else "the request"
            rejected = f"This model's engine rejected {field}"
            reason = f"{rejected}: {' '.join(str(error).split())[:MAX_PROBLEM_CHARS]}"
            return Failure(
                400, f"{rejected}; see X-CATO-Problem for the reason.",
                "invalid_request_error", None, error.param, problem=str(error),
                to_openai=reason, to_anthropic=reason,
            )  # fmt: skip
        case _:
            return Failure(
                502, "The model's engine failed while serving this request.", "server_error",
                "engine_failed", problem=str(error),
            )  # fmt: skip


def _too_long(error: ContextLengthError, estimated_tokens: int = 0) -> Failure:
    """`estimated_tokens` is used when the engine stopped counting the prompt early: clients shorten
    a conversation by the excess over the context."""
    prompt, output, context = error.prompt_tokens, error.max_tokens, error.context_tokens
    if prompt is None and context is not None and estimated_tokens > context:
        prompt = estimated_tokens
    to_openai, to_anthropic = too_long(prompt, output, context)
    return Failure(
        400,
        "The request does not fit this model's maximum context length; "
        "shorten the input or lower max_tokens.",
        "invalid_request_error", "context_length_exceeded", error.param, str(error),
        to_openai=to_openai, to_anthropic=to_anthropic,
    )  # fmt: skip


def _not_let_in(error: AccessError) -> Failure:
    kinds = {401: "authentication_error", 403: "permission_error"}
    headers = NO_RETRY if error.retry_after_s is None else retry_after(error.retry_after_s)
    kind = kinds.get(error.status, _kind_of(error.status))
    return Failure(error.status, error.message, kind, error.code, error.param, headers=headers)


def _over_quota(error: QuotaError) -> Failure:
    headers = retry_after(error.retry_after_s)
    if error.is_budget:
        return Failure(
            429, "This month's token budget is used up; ask an operator.", "insufficient_quota",
            "insufficient_quota", problem=str(error), headers=headers | NO_RETRY,
        )  # fmt: skip
    return Failure(
        429, "This tenant's rate limit is exceeded; try again later.", "rate_limit_error",
        FULL, problem=str(error), headers=headers,
    )  # fmt: skip


def _no_capacity(error: CapacityError, is_pool_up: bool) -> Failure:
    headers = _soon(error.retry_after_s)
    if is_pool_up:
        return Failure(
            429, "Too many requests are queued for this model; try again later.",
            "rate_limit_error", FULL, problem=str(error), headers=headers,
        )  # fmt: skip
    return Failure(
        429, "No replica of this model is ready; try again later.", "server_error",
        "no_replica", problem=str(error), headers=headers,
    )  # fmt: skip


def _soon(seconds: float) -> dict[str, str]:
    """The expected time, clamped to the range in which clients honour it."""
    return retry_after(retry_s(seconds))


def retry_after(seconds: float) -> dict[str, str]:
    return {
        "Retry-After": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }


def failure_of_run(task: RunningTask, has_replicas: Callable[[str], bool]) -> Failure | None:
    """Why a finished run has no answer; None if it has one."""
    finish = finish_of(task)
    if finish.status == "done":
        return None
    if isinstance(task.error, ContextLengthError):
        return _too_long(task.error, task.asked_tokens)
    if task.error is not None:
        return failure_of_error(task.error, has_replicas)
    problem = finish.receipt.problem
    if problem == CLIENT_LEFT:
        return _CLIENT_GONE
    if problem == SUPERSEDED:
        return _SUPERSEDED
    return _node_failed(problem)


def _node_failed(problem: str) -> Failure:
    message = "A node of the task's workflow failed."
    return Failure(500, message, "server_error", "node_failed", problem=problem)
