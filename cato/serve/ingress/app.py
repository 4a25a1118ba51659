"""The FastAPI application of an ingress replica."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI

import cato
from cato.serve.ingress import (
    document,
    errors,
    fim,
    infill,
    messages,
    models,
    native,
    openai,
    operations,
    relays,
    responses,
    tabby,
)
from cato.serve.ingress.context import Ingress
from cato.serve.ingress.feedback import FeedbackSink, LoggedFeedback
from cato.serve.ingress.naming import TaskPrefix
from cato.serve.service import TaskService

# Routes are tried in order: the busiest first.
DIALECTS = (
    openai, fim, tabby, infill, responses, messages, native, relays, models, operations,
)  # fmt: skip


def create_app(
    service: TaskService,
    *,
    max_body_bytes: int,
    ready: Callable[[], tuple[bool, str]],
    feedback: FeedbackSink | None = None,
) -> FastAPI:
    """All dialects over `service`.

    `ready` says whether tasks can be served, and why not; `feedback` is told what people did with
    completions (None: the log).
    """
    ingress = Ingress(
        service,
        max_body_bytes,
        ready,
        started_at=int(time.time()),
        feedback=feedback or LoggedFeedback(),
    )
    app = FastAPI(
        title="CATO",
        version=cato.__version__,
        description="Coding assistance with SLAs: tasks, and OpenAI-compatible models.",
        docs_url=None,  # its page loads scripts from a public network
        redoc_url=None,
        redirect_slashes=False,
    )
    for dialect in DIALECTS:
        app.include_router(dialect.routes(ingress))
    app.add_middleware(TaskPrefix)
    errors.install(app, ingress.has_replicas)
    document.install(app)
    return app
