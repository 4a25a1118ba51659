"""Tabby's dialect: health, settings, completions with `segments`, and completion events.

https://tabby.tabbyml.com/api. Completions share OpenAI's path; the answer is a subset of OpenAI's.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import cato
from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.serve.ingress import document
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import cato_of, read_object, sub_object, text_field, whole_number
from cato.serve.ingress.context import Ingress, caller_of, request_id
from cato.serve.ingress.feedback import Feedback, Reaction
from cato.serve.ingress.fill import Fill, start_fill
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.naming import COMPLETION, GENERATION, resolve
from cato.serve.ingress.virtual import model_name
from cato.wire.completions import COMPLETION_ID_PREFIX, CompletionsWriter

# The version of Tabby's API that this implements; clients use fewer features of older servers.
API_VERSION = "v0.17.0"
# An event has about 200 bytes of ids and numbers.
MAX_EVENT_BYTES = 4096
MAX_NAME_CHARS = 200
MAX_CHOICE = 1023
MAX_ELAPSED_MS = 7 * 86_400_000


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["completion"])

    @router.get("/v1/health", responses=document.TABBY_HEALTH)
    @router.post("/v1/health", responses=document.TABBY_HEALTH)
    async def health() -> Response:
        """Server information that Tabby's clients check before anything else."""
        return JsonAnswer(_health(ingress))

    @router.get("/v1beta/server_setting", responses=document.TABBY_SETTING)
    async def setting() -> Response:
        """Disables the client's telemetry to third parties."""
        return JsonAnswer({"disable_client_side_telemetry": True})

    @router.post("/v1/events", response_class=Response, **document.TABBY_EVENT)
    async def event(request: Request) -> Response:
        """Report that a completion was shown, accepted or dismissed."""
        caller = caller_of(request)
        ingress.access.tell(caller)
        body = await read_object(request, min(MAX_EVENT_BYTES, ingress.max_body_bytes))
        select_kind = _name(request.query_params.get("select_kind"), "select_kind")
        ingress.feedback.note(replace(_feedback(body, select_kind), tenant=caller.tenant))
        return Response()

    return router


async def complete(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    """A completion for a body with `segments`; the answer is empty if it is shed under load."""
    extra = cato_of(body)
    segments = sub_object(body, "segments")
    if not isinstance(segments.get("prefix"), str):
        raise InputError("segments.prefix must be the text before the cursor", "segments")
    target = resolve(ingress, request, body.get("model"), extra, COMPLETION, needs_model=False)
    fill = Fill(
        text_field(segments, "prefix"),
        text_field(segments, "suffix"),
        context=_context(segments),
        path=text_field(segments, "filepath"),
        language=text_field(body, "language"),
    )
    task = start_fill(ingress, request, target, fill, body, extra)
    writer = CompletionsWriter(request_id(request), task.run.workflow.name, int(time.time()))
    form = WrittenForm(writer)
    shed = partial(form.nothing, is_streamed=False)
    return await serve_text(ingress, request, task, form, is_streamed=False, shed=shed)


# Fields with code of other files, most relevant first.
_SNIPPET_FIELDS = (
    "declarations",
    "relevant_snippets_from_changed_files",
    "relevant_snippets_from_recently_opened_files",
)


def _context(segments: Mapping[str, object]) -> str:
    """Code of other files, each piece preceded by its path."""
    found = []
    for field in _SNIPPET_FIELDS:
        snippets = segments.get(field)
        for snippet in snippets if isinstance(snippets, list) else ():
            if isinstance(snippet, dict) and isinstance(snippet.get("body"), str):
                found.append(f"{snippet.get('filepath', '')}\n{snippet['body']}".strip("\n"))
    return "\n\n".join(found)


def _feedback(body: Mapping[str, object], select_kind: str) -> Feedback:
    """The event in a body; raise `InputError` if it is invalid."""
    kind, completion = body.get("type"), body.get("completion_id")
    if not isinstance(kind, str) or kind not in set(Reaction):
        raise InputError(f"type must be one of {', '.join(Reaction)}", "type")
    if not isinstance(completion, str) or not completion:
        raise InputError("completion_id must be the id of a completion", "completion_id")
    elapsed_ms = _bounded(body, "elapsed", MAX_ELAPSED_MS)
    return Feedback(
        request_id=_name(completion, "completion_id").removeprefix(COMPLETION_ID_PREFIX),
        reaction=Reaction(kind),
        choice=_bounded(body, "choice_index", MAX_CHOICE) or 0,
        view_id=_name(body.get("view_id"), "view_id"),
        select_kind=select_kind,
        after_s=None if elapsed_ms is None else elapsed_ms / 1000,
    )


def _name(value: object, field: str) -> str:
    """A short text; empty when absent or null."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise InputError(f"{field} must be text of at most {MAX_NAME_CHARS} characters", field)
    return value


def _bounded(body: Mapping[str, object], key: str, most: int) -> int | None:
    value = whole_number(body, key)
    if value is not None and not 0 <= value <= most:
        raise InputError(f"{key} must be a whole number from 0 to {most}", key)
    return value


def _health(ingress: Ingress) -> dict[str, object]:
    def offered(task: TaskName) -> str | None:
        return model_name(task) if task in ingress.service.workflows else None

    return {
        "model": offered(COMPLETION),
        "chat_model": offered(GENERATION),
        "device": "cato",
        "arch": platform.machine(),
        "cpu_info": platform.processor(),
        "cpu_count": os.cpu_count() or 1,
        "cuda_devices": [],
        "version": {
            "build_date": "",
            "build_timestamp": "",
            "git_sha": "",
            "git_describe": f"{API_VERSION}+cato.{cato.__version__}",
        },
    }
