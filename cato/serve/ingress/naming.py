"""Chooses the task or model that serves a request. The first of these that is present wins:

1. the native path `/v1/tasks/{task}`,
2. the header `X-CATO-Task`, then `task` in the body's object `cato`,
3. a base URL that begins with `/t/{task}` or `/t/{task}/{sla}`, in front of any dialect,
4. the model: a virtual one (`cato-completion`), or a virtual one after a family's name, which makes
   a client choose that family's fill-in-the-middle tokens (`qwen2.5-coder:cato-completion`),
5. for the model `cato-auto` and for dialects without a model, the shape of the request: text around
   a cursor is a completion; one user message is the API key's default task, if it has one.

Workflows take one text, so a conversation cannot be a task: the rest of it would be lost. A chat,
Responses or Messages request that names a task goes unchanged to the model that answers for this
task if it has a system prompt, tools or more than one message, or comes from a known agent.
`cato.serve.ingress.chats.target_of` decides this for all three dialects.

A real model is called directly unless a stronger sign names a task. The API key limits which tasks
and models a request may use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cato.core.errors import AccessError, InputError, UnknownNameError
from cato.core.ids import TaskName
from cato.core.record import changed, record
from cato.core.workflow import LlmSettings, Workflow
from cato.serve.ingress import virtual
from cato.serve.ingress.context import Ingress, caller_of, check_task, remember_drawn, session_of
from cato.serve.ingress.hints import SlaClass
from cato.serve.pools import PoolInfo, pool_named
from cato.workflows.load import AUTO_TASK

TASK_HEADER = "X-CATO-Task"
AUTO_MODEL = f"{virtual.PREFIX}{AUTO_TASK}"
COMPLETION = TaskName("code-completion")
GENERATION = TaskName("code-generation")

_PREFIX = "/t/"
_SCOPE_KEY = "cato.prefix"


@record
class Target:
    """What serves a request: a task's workflow, or a model that is called directly.

    `why` tells the receipt why a request that named no model went to one; `session_target_s` is the
    task's target for whole sessions of such requests.
    """

    task: TaskName | None = None
    model: str = ""
    why: str = ""
    session_target_s: float | None = None


class TaskPrefix:
    """Strips `/t/{task}[/{sla}]` from the path of every request and keeps it for `resolve`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_PREFIX):
            task, _, rest = scope["path"].removeprefix(_PREFIX).partition("/")
            sla, _, after = rest.partition("/")
            if sla in set(SlaClass):
                rest = after
            else:
                sla = ""
            path = f"/{rest}"
            scope = {**scope, "path": path, "raw_path": path.encode(), _SCOPE_KEY: (task, sla)}
        await self._app(scope, receive, send)


def prefix_of(request: Request) -> tuple[str, str]:
    """Task and SLA class from the path prefix; empty where absent."""
    found: tuple[str, str] = request.scope.get(_SCOPE_KEY, ("", ""))
    return found


def task_named(ingress: Ingress, name: str) -> TaskName:
    """The task with this full name, short name or virtual model name."""
    names = virtual.model_names(ingress.service.workflows)
    for known in (name, f"{virtual.PREFIX}{name}"):
        if known in names:
            return names[known]
    return ingress.service.workflow(name).name


def resolve(
    ingress: Ingress,
    request: Request,
    model: object,
    extra: Mapping[str, object],
    shape: TaskName,
    *,
    needs_model: bool = True,
    session: Callable[[], str] | None = None,
) -> Target:
    """The task or model that serves the request, if its caller may use it.

    `extra` is the body's object `cato`, `shape` the task that the dialect and the body suggest.
    Rollouts choose by `session` (None: derived from the headers).
    Raise `AccessError` if the API key does not allow the target, `InputError` if nothing is named
    and the dialect `needs_model`, or if a model gets a task's inputs, `UnknownNameError` for an
    unknown task. A model is looked up when it is called.
    """
    target = _resolved(ingress, request, model, extra, shape, needs_model=needs_model)
    if target.task is not None:
        check_task(request, target.task)
    else:
        _check_model(ingress, request, target.model)
        if extra.get("inputs"):
            pool_of(ingress, target.model)  # an unknown model may be a misspelt task
            raise InputError(
                "a model takes no inputs; leave cato.inputs out, or name the task that takes them "
                "(see GET /v1/tasks)",
                "cato.inputs",
            )
        target = changed(target, model=_drawn(ingress, request, target.model, session))
    return target


def model_of_task(
    ingress: Ingress, request: Request, task: TaskName, session: Callable[[], str] | None = None
) -> str:
    """The model that gets a request directly instead of `task`, if its caller may call it; rollouts
    choose as in `resolve`.

    Permission to run a task covers the task's own prompts only, not other prompts to its model:
    raise `AccessError` if the key does not allow the model.
    """
    model = answering_model(ingress.service.workflow(task))
    _check_model(ingress, request, model, f" It may run {task}: send one user message.")
    return _drawn(ingress, request, model, session)


def _drawn(
    ingress: Ingress, request: Request, model: str, session: Callable[[], str] | None
) -> str:
    """The model that the rollout of `model` assigns to the session; `model` if there is no rollout.

    For a key limited to certain models, the key must allow the rollout's name or the assigned
    model; otherwise the rollout does not apply.
    """
    if model not in ingress.service.records.rollouts():
        return model
    asked = session_of(request, None) if session is None else session()
    chosen, drawn = ingress.service.arms.draw(model, asked)
    caller = caller_of(request)
    if not caller.may_call((model,)) and not caller.may_call(names_of(ingress, chosen)):
        return model
    remember_drawn(request, drawn)
    return chosen


def _check_model(ingress: Ingress, request: Request, model: str, instead: str = "") -> None:
    caller = caller_of(request)
    if caller.models and not caller.may_call(names_of(ingress, model)):
        with suppress(UnknownNameError):
            # Raises StartingError: an ingress that starts may not know the model's other names.
            ingress.service.pool_of(model)
        told = f"This API key may not call this model.{instead}"
        raise AccessError(403, "model_not_permitted", told)


def with_model(body: dict[str, object]) -> dict[str, object]:
    """`body`, with the default model if it names none."""
    return body if body.get("model") not in (None, "") else {**body, "model": AUTO_MODEL}


def names_a_task(request: Request, extra: Mapping[str, object]) -> bool:
    """Whether the request (apart from its model) or its API key names a task."""
    asked = request.headers.get(TASK_HEADER) or extra.get("task") or prefix_of(request)[0]
    return bool(asked or caller_of(request).default_task)


def _resolved(
    ingress: Ingress,
    request: Request,
    model: object,
    extra: Mapping[str, object],
    shape: TaskName,
    *,
    needs_model: bool,
) -> Target:
    named = request.headers.get(TASK_HEADER) or extra.get("task") or prefix_of(request)[0]
    if named:
        if not isinstance(named, str):
            raise InputError("cato.task must name a task; see GET /v1/tasks", "cato.task")
        return Target(task_named(ingress, named))
    is_missing = model is None or model == ""
    if (is_missing and needs_model) or not isinstance(model, str | None):
        raise InputError("model must name a model; see GET /v1/models", "model")
    if not model or without_family(model) == AUTO_MODEL:
        default = caller_of(request).default_task if shape == GENERATION else ""
        return Target(ingress.service.workflow(default or shape).name)
    names = virtual.model_names(ingress.service.workflows)
    task = names.get(without_family(model))
    return Target(model=model) if task is None else Target(task)


def names_of(ingress: Ingress, model: str) -> tuple[str, ...]:
    """All names of this model, including `model` itself, which may only match a pattern."""
    pool = pool_named(ingress.service.pools(), model)
    if pool is None:
        return (model,)
    called = pool.model.called(model)
    return (model, *(name for group in pool.model.groups if group[0] == called for name in group))


def without_family(model: str) -> str:
    """`cato-completion` for `qwen2.5-coder:cato-completion`; other names unchanged."""
    _, _, last = model.rpartition(":")
    return last if last.startswith(virtual.PREFIX) else model


def pool_of(ingress: Ingress, model: str) -> PoolInfo:
    """The pool of a real model. Raise `UnknownNameError` listing all names that clients may use, or
    `StartingError` while not all models are known."""
    pools = ingress.service.pools()
    pool = pool_named(pools, model)
    if pool is not None:
        return pool
    try:
        return ingress.service.pool_of(model)
    except UnknownNameError:
        real = (name for pool in pools for name in (*pool.model.names, *pool.model.patterns))
        tasks = (virtual.model_name(task) for task in ingress.service.workflows)
        raise UnknownNameError("model", model, (*real, *sorted(tasks))) from None


def pools_behind(ingress: Ingress, model: object) -> Sequence[PoolInfo]:
    """The pools of a model, or of the model that answers for a virtual one, and of its canary in a
    rollout; empty for an unknown name."""
    if not isinstance(model, str):
        return ()
    names = {**virtual.model_names(ingress.service.workflows), AUTO_MODEL: GENERATION}
    workflow = ingress.service.workflows.get(names.get(without_family(model), TaskName("")))
    answering = "" if workflow is None else _answering_model(workflow)
    called = answering or model
    rollout = ingress.service.records.rollouts().get(called)
    targets = (called,) if rollout is None else (rollout.stable, rollout.canary)
    pools = ingress.service.pools()
    return [pool for target in targets if (pool := pool_named(pools, target)) is not None]


def answering_model(workflow: Workflow) -> str:
    """The model that writes a task's answer: that of the first streamed, else output, node."""
    if model := _answering_model(workflow):
        return model
    raise InputError(
        f"task {workflow.name!r} calls no model; use POST /v1/tasks/{workflow.name}", "model"
    )


def _answering_model(workflow: Workflow) -> str:
    for id in (*workflow.stream, *workflow.output, *(n.id for n in reversed(workflow.nodes))):
        settings = workflow.node(id).settings
        if isinstance(settings, LlmSettings):
            return settings.model
    return ""
