"""`Ingress`: the parts that every dialect uses; and the state kept for one request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from cato.core.errors import AccessError
from cato.core.prices import NO_PRICES, Prices
from cato.core.receipt import Drawn
from cato.core.runs import FinishRun
from cato.core.session_slo import SessionBook
from cato.core.topology import OutputCaps
from cato.serve.access.buffers import BufferId, Buffers
from cato.serve.access.caller import ANYBODY, Caller
from cato.serve.access.control import AccessControl
from cato.serve.batches.folder import BatchRoom
from cato.serve.executor import RunningTask
from cato.serve.ingress.clients import SESSION_HEADER, UNKNOWN, Client, client_of, patience_s
from cato.serve.ingress.feedback import FeedbackSink
from cato.serve.ingress.grammars import Grammars
from cato.serve.service import Origin, TaskService, new_request_id
from cato.serve.sessions import SessionMemory

# A client's request id is kept if it is safe in a path, a header and a log line.
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")


@dataclass(frozen=True, slots=True)
class Ingress:
    """The parts of an ingress replica.

    `started_at` is Unix time, for `created` of models. `caps` limit the output of direct calls;
    `prompt_rules_off` names the rules of `cato.wire.stable` that are switched off. With
    `shared_prompts` tenants share the engines' prefix caches. `prices` convert usage into cost.
    `batches` stores the files of batches; None if batches are off.
    """

    service: TaskService
    max_body_bytes: int
    ready: Callable[[], tuple[bool, str]]
    started_at: int
    feedback: FeedbackSink
    access: AccessControl
    buffers: Buffers
    caps: OutputCaps
    sessions: SessionMemory = field(default_factory=SessionMemory)
    session_book: SessionBook = field(default_factory=SessionBook)
    prompt_rules_off: frozenset[str] = frozenset()
    shared_prompts: bool = False
    prices: Prices = NO_PRICES
    batches: BatchRoom | None = None
    grammars: Grammars = field(default_factory=Grammars)

    def has_replicas(self, pool: str) -> bool:
        """Whether any replica of `pool` can take work now."""
        return any(p.ready_replicas > 0 for p in self.service.pools() if p.name == pool)

    def salt_of(self, request: Request) -> str:
        """The cache salt that separates the caller's prompts in the engines' prefix caches; empty
        if they are shared."""
        tenant = caller_of(request).tenant
        if self.shared_prompts or not tenant:
            return ""
        return hashlib.blake2b(
            b"tenant\0" + tenant.encode("utf-8", "replace"), digest_size=16
        ).hexdigest()

    def started(
        self,
        request: Request,
        buffer: BufferId | None,
        start: Callable[[Origin], RunningTask],
        *,
        calls: int = 1,
        client: Client = UNKNOWN,
    ) -> RunningTask:
        """Start a run for the caller with `start`; it supersedes the buffer's latest run and counts
        as `calls` requests of the tenant. `client` is the agent, if it was recognized by more than
        the headers.

        Raise `QuotaError` if the tenant is over its limits.
        """
        caller = caller_of(request)
        self.access.begin(caller, calls)

        settle: list[Callable[[int], None]] = []

        def reserve(expected: int, most: int) -> None:
            settle.append(self.access.reserve(caller, expected, most))

        def spend(tokens: int) -> None:
            for one in settle:
                one(tokens)

        user = hashlib.blake2b(repr(whose(request)).encode(), digest_size=8).hexdigest()
        agent = client if client.name else client_of(request.headers, "")
        origin = Origin(
            caller.key,
            caller.tenant,
            caller.weight,
            user=user,
            salt=self.salt_of(request),
            patience_s=patience_s(request.headers, agent),
            reserve=reserve,
            spend=spend,
            session=session_of(request, buffer),
            drawn=getattr(request.state, "cato_drawn", ()),
        )
        return self.buffers.started(buffer, origin, start)


def whose(request: Request, user: object = "") -> tuple[str, ...]:
    """The API key and machine behind a request, and the `user` that its body names. A forged value
    only separates callers further within one key.
    """
    address: str = getattr(request.state, "cato_address", "")
    agent = request.headers.get("user-agent", "")
    return caller_of(request).key, address, agent, user if isinstance(user, str) else ""


def remember_caller(request: Request, caller: Caller, address: str) -> None:
    """Store the caller, and the client's address as reported by trusted proxies."""
    request.state.cato_caller = caller
    request.state.cato_address = address


def caller_of(request: Request) -> Caller:
    """The caller that the gate identified."""
    caller: Caller = getattr(request.state, "cato_caller", ANYBODY)
    return caller


def check_task(request: Request, task: str) -> None:
    """Raise `AccessError` when the caller may not run `task`."""
    if not caller_of(request).may_run(task):
        told = "This API key may not run this task; see GET /v1/tasks for those it may run."
        raise AccessError(403, "task_not_permitted", told)


def request_id(request: Request) -> str:
    """The request's id: the client's `x-request-id` if it is safe to use, else a new one."""
    known: str | None = getattr(request.state, "cato_request_id", None)
    if known is None:
        offered = request.headers.get("x-request-id", "")
        known = offered if _SANE_ID.fullmatch(offered) else new_request_id()
        request.state.cato_request_id = known
    return known


def session_of(request: Request, buffer: BufferId | None) -> str:
    """The session key for rollouts without a conversation: the session named by a header, else the
    editor's buffer, else this request."""
    named = request.headers.get(SESSION_HEADER, "") or "\0".join(buffer or ())
    return f"{caller_of(request).tenant}\0{named or request_id(request)}"


def remember_drawn(request: Request, drawn: Drawn | None) -> None:
    """Store the rollout that chose the model of a direct call."""
    request.state.cato_drawn = () if drawn is None else (drawn,)


def remember_task(request: Request, task: RunningTask) -> None:
    """Store the task, so that an error response can name it and its SLO."""
    request.state.cato_task = task


def finish_of(task: RunningTask) -> FinishRun:
    """How the run of `task` ended; the run must have finished."""
    assert task.finish is not None, f"run {task.run.id} is not finished"
    return task.finish


def task_of(request: Request) -> RunningTask | None:
    task: RunningTask | None = getattr(request.state, "cato_task", None)
    return task
