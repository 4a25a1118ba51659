"""The FastAPI application of an ingress replica."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI

import cato
from cato.serve.ingress import errors, native, openai, operations
from cato.serve.ingress.context import Ingress
from cato.serve.service import TaskService


def create_app(
    service: TaskService, *, max_body_bytes: int, ready: Callable[[], tuple[bool, str]]
) -> FastAPI:
    """All dialects over `service`; `ready` says whether tasks can be served, and why not."""
    ingress = Ingress(service, max_body_bytes, ready, started_at=int(time.time()))
    app = FastAPI(
        title="CATO",
        version=cato.__version__,
        description="Coding assistance with SLAs: tasks, and OpenAI-compatible models.",
        docs_url=None,  # its page loads scripts from a public network
        redoc_url=None,
        redirect_slashes=False,
    )
    for dialect in (openai, native, operations):  # routes are tried in order: the busiest first
        app.include_router(dialect.routes(ingress))
    errors.install(app, ingress.has_replicas)
    return app
