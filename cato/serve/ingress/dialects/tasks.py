"""CATO's own dialect: tasks by name, with named inputs.

`POST /v1/tasks/{task}` with `{"inputs": {...}, "stream": false, "sla": {...}}`. A streamed answer
is a sequence of `event: text` with `{"text": ...}`, then one `event: done` with `{"id", "task",
"output", "text", "cato"}` or one `event: error` with the error object, then `data: [DONE]`. If the
output in `done` differs from the streamed text, `done` is authoritative. While no node streams, a
comment (`: keep-alive`) shows that the run goes on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.baseline import baseline_s, warning
from cato.core.slo import Slo
from cato.core.workflow import Workflow
from cato.serve.executor import RunningTask
from cato.serve.ingress import document, virtual
from cato.serve.ingress.body import flag, known_keys, read_object, sub_object
from cato.serve.ingress.buffers import completion_buffer, named_buffer
from cato.serve.ingress.context import Ingress, caller_of, check_task, finish_of, request_id
from cato.serve.ingress.exchange import Exchange, streamed, whole
from cato.serve.ingress.fill import slo_of
from cato.serve.ingress.hints import SLA_SHAPE
from cato.serve.ingress.jsons import DONE_EVENT, JsonAnswer, sse
from cato.serve.ingress.naming import COMPLETION
from cato.serve.ingress.receipts import as_json
from cato.serve.invoker import Piece
from cato.wire.events import KEEP_ALIVE

SHAPE = (
    f'{{"inputs": {{...}}, "stream": bool, "sla": {SLA_SHAPE}, "deadline_ms": number, '
    '"tpot_ms": number}'
)


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["tasks"])
    service = ingress.service

    @router.get("/v1/tasks", responses=document.TASKS)
    async def tasks(request: Request) -> Response:
        """Tasks that the API key may run, with their inputs and SLAs."""
        names = filter(caller_of(request).may_run, sorted(service.workflows))
        workflows = [service.workflows[name] for name in names]
        return JsonAnswer({"object": "list", "data": [_described(w) for w in workflows]})

    @router.get("/v1/tasks/{task}", responses=document.TASK)
    async def task(request: Request, task: str) -> Response:
        """One task that the API key may run, with its inputs and SLA."""
        check_task(request, service.workflow(task).name)
        return JsonAnswer(_described(service.workflow(task)))

    @router.get("/v1/tasks/{task}/sla", responses=document.TASK_SLA)
    async def sla(request: Request, task: str) -> Response:
        """The SLA of a task that the API key may run, and its measured baseline."""
        workflow = service.workflow(task)
        check_task(request, workflow.name)
        measured = service.measured(workflow)
        expected_s = baseline_s(workflow, measured)
        return JsonAnswer(
            {
                "task": workflow.name,
                **_sla(workflow.slo),
                **_limit(workflow),
                "baseline_ms": None if expected_s is None else round(expected_s * 1000, 3),
                "warning": warning(workflow, measured),
            }
        )

    @router.post("/v1/tasks/{task}", **document.RUN)
    async def run(request: Request, task: str) -> Response:
        """Run a task; with `stream`, the answer is server-sent events."""
        body = await read_object(request, ingress.max_body_bytes)
        known_keys(body, ("inputs", "stream", "sla", "deadline_ms", "tpot_ms"), SHAPE)
        is_streamed = flag(body, "stream")
        inputs = sub_object(body, "inputs")
        check_task(request, task)
        slo = slo_of(request, "", body, service.workflow(task))
        buffer = named_buffer(request)
        if task == COMPLETION:
            buffer = completion_buffer(request, {}, str(inputs.get("path") or ""))
        start = partial(service.run_task, task, inputs, request_id=request_id(request), slo=slo)
        running = ingress.started(request, buffer, lambda origin: start(origin=origin))
        exchange = Exchange(request, running, ingress.has_replicas)
        if is_streamed:
            return await streamed(request, exchange, _events, sign=KEEP_ALIVE)
        return await whole(request, exchange, lambda _: _done(running))

    return router


async def _events(exchange: Exchange, batch: list[Piece]) -> AsyncGenerator[bytes, None]:
    while batch:
        text = "".join(piece.text for piece in batch)
        if text:
            yield sse({"text": text}, "text")
        batch = await exchange.next()
    failure = exchange.failure()
    if failure is None:
        yield sse(_done(exchange.task), "done") + DONE_EVENT
    else:
        yield sse(failure.as_json(), "error") + DONE_EVENT


def _done(task: RunningTask) -> dict[str, object]:
    finish = finish_of(task)
    return {
        "id": task.run.id,
        "task": task.run.workflow.name,
        "output": finish.output,
        "text": virtual.text_of(finish.output),
        "cato": as_json(finish.receipt),
    }


def _described(workflow: Workflow) -> dict[str, object]:
    return {
        "name": workflow.name,
        "description": workflow.description,
        "model": virtual.model_name(workflow.name),
        "sla": _sla(workflow.slo) | _limit(workflow),
        "streams": bool(workflow.stream),
        "inputs": [
            {
                "name": i.name,
                "type": i.type,
                "required": i.required,
                "default": i.default,
                "description": i.description,
            }
            for i in workflow.inputs
        ],
        "nodes": [
            {"id": n.id, "type": n.kind.value, "needs": n.needs, "optional": n.optional}
            for n in workflow.nodes
        ],
    }


def _sla(slo: Slo) -> dict[str, object]:
    return {"metric": slo.metric.value, "target_ms": round(slo.target_s * 1000, 3)}


def _limit(workflow: Workflow) -> dict[str, object]:
    return {"hard_deadline_ms": round(workflow.hard_deadline_s * 1000, 3)}
