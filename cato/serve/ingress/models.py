"""`GET /v1/models`: the real models, and a virtual model for each task.

OpenAI and Anthropic share the path, so each object has the fields of both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import StartingError, UnknownNameError
from cato.core.ids import TaskName
from cato.core.workflow import CallSettings, LlmSettings, Workflow
from cato.serve.access.caller import Caller
from cato.serve.ingress import document, virtual
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.naming import AUTO_MODEL, GENERATION, names_of, pool_of, without_family
from cato.serve.pools import PoolInfo


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["openai"])

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", responses=document.MODELS)
    async def models(request: Request) -> Response:
        """Models that the API key may use, real ones first, since some clients take the first."""
        data = list(_models(ingress, caller_of(request)).values())
        ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return JsonAnswer({"object": "list", "data": data, "has_more": False, **ids})

    @router.get("/v1/models/{model:path}", responses=document.MODEL)
    async def model(request: Request, model: str) -> Response:
        """One model."""
        caller = caller_of(request)
        known = _models(ingress, caller)
        names, name = virtual.model_names(ingress.service.workflows), without_family(model)
        if name in names and caller.may_run(names[name]):
            return JsonAnswer(_virtual_model(ingress, model, names[name]))
        if name in known:
            return JsonAnswer({**known[name], "id": model})
        pool: PoolInfo | None = None
        with suppress(UnknownNameError):  # that one names models which this caller may not use
            pool = ingress.service.pool_of(name)
        if pool is None or not caller.may_call(names_of(ingress, name)):
            raise UnknownNameError("model", model, tuple(known))
        return JsonAnswer(_model(ingress, model, pool.context_tokens, pool.model.name))

    return router


def _models(ingress: Ingress, caller: Caller) -> dict[str, dict[str, object]]:
    """The models that `caller` may use, by name, except names that only match a pattern. Raise
    `StartingError` while the models are not known."""
    known: dict[str, dict[str, object]] = {}
    pools = ingress.service.pools()
    if not pools:
        raise StartingError("no pool is known yet")
    for pool in pools:
        for names in pool.model.groups:
            for name in names if caller.may_call(names) else ():
                known[name] = _model(ingress, name, pool.context_tokens, names[0])
    tasks = [task for task in sorted(ingress.service.workflows) if caller.may_run(task)]
    for task in tasks:
        name = virtual.model_name(task)
        known[name] = _virtual_model(ingress, name, task)
    auto = caller.default_task or GENERATION
    if auto in tasks:
        known[AUTO_MODEL] = _virtual_model(ingress, AUTO_MODEL, TaskName(auto))
    return known


def _model(ingress: Ingress, name: str, context_tokens: int | None, root: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": ingress.started_at,
        "owned_by": "cato",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(ingress.started_at, UTC).isoformat(),
        "lifecycle": "active",
        "root": root,
        # The same by the names that other clients read: llama.vscode, LiteLLM, Anthropic's SDK.
        "max_model_len": context_tokens,
        "max_input_tokens": context_tokens,
        "context_length": context_tokens,
    }


def _virtual_model(ingress: Ingress, name: str, task: TaskName) -> dict[str, object]:
    context = _context_tokens(ingress.service.workflow(task), partial(pool_of, ingress))
    return _model(ingress, name, context, task)


def _context_tokens(workflow: Workflow, pool_of: Callable[[str], PoolInfo]) -> int | None:
    """The shortest context of the models that a workflow calls; None if one of them is not served
    or its context is not known yet."""
    called = {
        n.settings.model
        for n in workflow.nodes
        if isinstance(n.settings, LlmSettings | CallSettings)
    }
    try:
        contexts = [pool_of(m).context_tokens for m in called]
    except (StartingError, UnknownNameError):
        return None
    known = [tokens for tokens in contexts if tokens is not None]
    return min(known, default=None) if len(known) == len(contexts) else None
