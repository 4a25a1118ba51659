"""Direct calls: a body passed to a model's engine in the engine's own dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from cato.core.runs import FinishRun
from cato.core.slo import Slo
from cato.engines.base import Endpoint
from cato.serve.access.buffers import BufferId
from cato.serve.executor import RunningTask
from cato.serve.ingress.buffers import named_buffer
from cato.serve.ingress.context import Ingress, finish_of, request_id
from cato.serve.ingress.exchange import Exchange, whole
from cato.serve.ingress.limits import capped
from cato.serve.ingress.naming import pool_of
from cato.serve.ingress.templates import check_tools

# Fields of a body that never reach an engine: CATO's own, and those that it sets.
OWN_FIELDS = frozenset(
    {"model", "stream", "suffix", "cato", "user", "priority", "request_id", "service_tier"}
)


def start_call(
    ingress: Ingress,
    request: Request,
    model: str,
    endpoint: Endpoint,
    body: dict[str, object],
    slo: Slo,
    *,
    is_streamed: bool,
    buffer: BufferId | None = None,
    why: str = "",
) -> RunningTask:
    """Pass `body` to `model`, without CATO's fields and with a capped limit of tokens; `why` stands
    in the receipt.

    It takes the place of the latest run of `buffer`, or of the one that the request names itself.
    Raise `UnknownNameError` when no pool serves the model, and `InputError` for tools that it
    would never see.
    """
    pool = pool_of(ingress, model)
    check_tools(pool, body)
    passed = {key: value for key, value in body.items() if key not in OWN_FIELDS}
    if not is_streamed:
        passed.pop("stream_options", None)  # an engine refuses it there
    if endpoint.generates:
        passed = capped(passed, endpoint, pool, ingress.caps)
    start = partial(
        ingress.service.run_model,
        model,
        endpoint.value,
        passed,
        request_id=request_id(request),
        stream=is_streamed,
        slo=slo,
        why=why,
    )
    return ingress.started(
        request, buffer or named_buffer(request), lambda origin: start(origin=origin)
    )


async def whole_call(
    ingress: Ingress,
    request: Request,
    task: RunningTask,
    finished: Callable[[dict[str, object], FinishRun], dict[str, object]] | None = None,
) -> Response:
    """The engine's JSON answer; `finished` adds what is known at its end."""

    def value(raw: bytes) -> dict[str, object]:
        answer: dict[str, object] = json.loads(raw)
        return answer if finished is None else finished(answer, finish_of(task))

    exchange = Exchange(request, task, ingress.has_replicas)
    return await whole(
        request, exchange, lambda pieces: value(b"".join(piece.raw for piece in pieces))
    )
