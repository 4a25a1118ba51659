"""The FastAPI application of an ingress replica."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import cato
from cato.core.prices import NO_PRICES, Prices
from cato.core.topology import OutputCaps
from cato.serve.access.buffers import Buffers
from cato.serve.access.control import AccessControl
from cato.serve.batches.folder import BatchRoom
from cato.serve.draining import Drain
from cato.serve.ingress import admin, document, errors, models, operations, rollouts, usage
from cato.serve.ingress.context import Ingress
from cato.serve.ingress.dialects import batches as batch_files
from cato.serve.ingress.dialects import (
    chat,
    completions,
    fim,
    infill,
    messages,
    others,
    responses,
    tabby,
    tasks,
)
from cato.serve.ingress.feedback import FeedbackSink, LoggedFeedback
from cato.serve.ingress.forwarded import Proxies
from cato.serve.ingress.gate import Gate
from cato.serve.ingress.hot import HotRoutes, hot_endpoints
from cato.serve.ingress.naming import TaskPrefix
from cato.serve.ingress.pages import Pages
from cato.serve.service import TaskService
from cato.serve.ui import routes as ui

# Routes are tried in order: the busiest first.
DIALECTS = (
    completions, fim, tabby, infill, chat, responses, messages, tasks, others, models, operations,
    usage, rollouts, batch_files, admin, ui,
)  # fmt: skip


def create_app(
    service: TaskService,
    *,
    max_body_bytes: int,
    ready: Callable[[], tuple[bool, str]],
    access: AccessControl,
    is_private: bool | None = None,
    proxies: Proxies = Proxies(),  # noqa: B008  # frozen
    pages: Pages = Pages(),  # noqa: B008  # frozen
    feedback: FeedbackSink | None = None,
    caps: OutputCaps = OutputCaps(),  # noqa: B008  # frozen
    prompt_rules_off: frozenset[str] = frozenset(),
    shared_prompts: bool = False,
    prices: Prices = NO_PRICES,
    batches: BatchRoom | None = None,
    drain: Drain | None = None,
) -> FastAPI:
    """The application with all dialects over `service`.

    `ready` reports whether tasks can be served; if not, why, and else what an operator should mend.
    `access` authenticates callers; `is_private` and `proxies` describe the clients' connections to
    `Gate`; `pages` lists the allowed web pages. `feedback` receives users' reactions to completions
    (None: the log). `caps` limit the output of direct calls; `prompt_rules_off` names rules of
    `cato.wire.stable` that are not applied. With `shared_prompts` tenants share the engines' prefix
    caches. `prices` convert usage into cost. `drain` counts requests in progress. `batches` stores
    the files of batches; `app.state.inside` serves the same paths without the gate, for callers
    that are already known: batches.
    """
    ingress = Ingress(
        service,
        max_body_bytes,
        ready,
        started_at=int(time.time()),
        feedback=feedback or LoggedFeedback(),
        access=access,
        buffers=Buffers(),
        caps=caps,
        prompt_rules_off=prompt_rules_off,
        shared_prompts=shared_prompts,
        prices=prices,
        batches=batches,
    )
    app = FastAPI(
        title="CATO",
        version=cato.__version__,
        description="Coding assistance with SLAs: tasks, and OpenAI-compatible models.",
        docs_url=None,  # FastAPI's page loads scripts from a public CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.inside = inside = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    # `include_router` would make every route again, which takes longer than all else here.
    routes = [route for dialect in DIALECTS for route in dialect.routes(ingress).routes]
    for one in (app, inside):
        one.router.routes.extend(routes)
        errors.install(one, ingress.has_replicas)
    hot = hot_endpoints(app)
    app.add_middleware(HotRoutes, endpoints=hot, has_replicas=ingress.has_replicas)
    app.add_middleware(
        Gate, access=access, is_private=is_private, proxies=proxies, pages=pages, drain=drain
    )
    app.add_middleware(TaskPrefix)  # outside the gate, which checks paths
    if pages.origins:  # outside the gate: a CORS preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=pages.origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    document.install(app)
    return app
