"""OpenAI's files and batches: files of requests without urgency, with results as JSON lines.

Off by default: these paths then answer 404. When on, prompts and answers stay in files until they
are deleted or expire.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cato.core.errors import AccessError, InputError
from cato.core.topology import BatchLimits
from cato.serve.batches.folder import (
    LEAST_BYTES,
    Batch,
    BatchRoom,
    FileFacts,
    TenantFolder,
    copy_bounded,
    new_id,
    tenants,
)
from cato.serve.batches.lines import ENDPOINTS, checked, file_errors
from cato.serve.ingress import document
from cato.serve.ingress.admin_bodies import query_number
from cato.serve.ingress.body import check_uncompressed, known_keys, read_object, sub_object
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.jsons import JsonAnswer

T = TypeVar("T")
MAX_BODY_BYTES = 16_384
UPLOAD_WITHIN_S = 600.0
# Allowance for the rest of an upload: field names and boundaries.
FORM_BYTES = 65_536
MAX_NAME_CHARS = 200
MAX_METADATA = 16
WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
MAX_WINDOW_H = 168
# Entries of one page of a list, and the order of files: OpenAI's values, the default first.
MAX_FILES = 10_000
BATCHES, MAX_BATCHES = 20, 100
ORDERS = ("desc", "asc")
_FIELDS = (
    "input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"
)  # fmt: skip
_SHAPE = '{"input_file_id": str, "endpoint": str, "completion_window": "24h", "metadata": {...}}'


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["openai"])
    _add_files(router, ingress)
    _add_batches(router, ingress)
    return router


def _add_files(router: APIRouter, ingress: Ingress) -> None:
    @router.post("/v1/files", **document.UPLOAD)
    async def upload(request: Request) -> Response:
        """Upload a file of requests (`purpose` must be `batch`)."""
        folder, most = _folder(ingress, request), _room(ingress).limits
        check_uncompressed(request)
        declared = request.headers.get("content-length", "")
        if not declared.isdecimal():
            raise InputError("an upload must have the header Content-Length")
        if int(declared) > most.file_bytes + FORM_BYTES:
            raise HTTPException(413)
        try:
            async with (
                asyncio.timeout(UPLOAD_WITHIN_S),
                request.form(max_files=1, max_fields=8, max_part_size=FORM_BYTES) as form,
            ):
                given, purpose = form.get("file"), form.get("purpose")
                if not isinstance(given, UploadFile):
                    raise InputError("file must be an uploaded file", "file")
                if purpose != "batch":
                    raise InputError("purpose must be batch", "purpose")
                facts = await asyncio.to_thread(_kept, folder, most, given)
        except TimeoutError:
            raise InputError(f"the upload did not finish within {UPLOAD_WITHIN_S:g} s") from None
        return JsonAnswer(_file(facts))

    @router.get("/v1/files", **document.FILES)
    async def files(request: Request) -> Response:
        """The tenant's files, batch results included, newest first; all tenants' for operators."""
        purpose = request.query_params.get("purpose")
        order = request.query_params.get("order", ORDERS[0])
        if order not in ORDERS:
            raise InputError(f"order must be one of {', '.join(ORDERS)}", "order")
        found = await asyncio.to_thread(_all, [f.files for f in _seen_by(ingress, request)])
        found = [f for f in found if purpose in (None, f.purpose)]
        found.sort(key=lambda f: (f.created_at, f.id), reverse=order == ORDERS[0])
        page = _page(request, [f.id for f in found], MAX_FILES, MAX_FILES)
        return _list([_file(f) for f in found[page]], has_more=page.stop < len(found))

    @router.get("/v1/files/{file_id}", responses=document.FILE)
    async def file(request: Request, file_id: str) -> Response:
        """One file."""
        for folder in _seen_by(ingress, request):
            if (found := await asyncio.to_thread(folder.file, file_id)) is not None:
                return JsonAnswer(_file(found))
        raise _no_file("file_id")

    @router.get("/v1/files/{file_id}/content", responses=document.CONTENT)
    async def content(request: Request, file_id: str) -> Response:
        """The lines of a file; the tenant's own only, also for operators."""
        found, folder = await _own_file(ingress, request, file_id), _folder(ingress, request)
        return FileResponse(folder.content(found.id), media_type="application/jsonl")

    @router.delete("/v1/files/{file_id}", responses=document.DELETED)
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file. A batch that still needs it must be cancelled first."""
        found, folder = await _own_file(ingress, request, file_id), _folder(ingress, request)
        await asyncio.to_thread(_deleted, folder, found.id)
        return JsonAnswer({"id": found.id, "object": "file", "deleted": True})


def _add_batches(router: APIRouter, ingress: Ingress) -> None:
    @router.post("/v1/batches", **document.START_BATCH)
    async def create(request: Request) -> Response:
        """Run the requests of a file when there is spare capacity."""
        folder, most = _folder(ingress, request), _room(ingress).limits
        body = await read_object(request, MAX_BODY_BYTES)
        known_keys(body, _FIELDS, _SHAPE)
        endpoint, window_h = body.get("endpoint"), _window_h(body.get("completion_window"))
        if endpoint not in ENDPOINTS:
            raise InputError(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        source = await _own_file(ingress, request, str(body.get("input_file_id")), "input_file_id")
        metadata = _metadata(sub_object(body, "metadata"))
        _check_open(folder, most)
        lines, problem = await asyncio.to_thread(
            checked, folder.content(source.id), str(endpoint), most.lines, ingress.max_body_bytes
        )
        now_s = int(time.time())
        batch = Batch(
            new_id("batch"), str(endpoint), source.id, asdict(caller_of(request)),
            new_id("file"), new_id("file"), "failed" if problem else "validating",
            now_s, now_s + 3600 * window_h, lines, metadata=metadata,
            errors=file_errors(problem) if problem else (),
        )  # fmt: skip
        await asyncio.to_thread(_opened, folder, most, batch)
        return JsonAnswer(_batch(folder, batch))

    @router.get("/v1/batches", **document.BATCHES)
    async def batches(request: Request) -> Response:
        """The tenant's batches, newest first; all tenants' for operators."""

        def listed(folder: TenantFolder) -> list[tuple[TenantFolder, Batch]]:
            return [(folder, batch) for batch in folder.batches()]

        found = await asyncio.to_thread(
            _all, [partial(listed, f) for f in _seen_by(ingress, request)]
        )
        found.sort(key=lambda one: (one[1].created_at, one[1].id), reverse=True)
        page = _page(request, [batch.id for _, batch in found], BATCHES, MAX_BATCHES)
        data = [_batch(folder, batch) for folder, batch in found[page]]
        return _list(data, has_more=page.stop < len(found))

    @router.get("/v1/batches/{batch_id}", responses=document.BATCH)
    async def batch(request: Request, batch_id: str) -> Response:
        """One batch and its progress."""
        return JsonAnswer(_batch(*await _found_batch(ingress, request, batch_id)))

    @router.post("/v1/batches/{batch_id}/cancel", responses=document.BATCH)
    async def cancel(request: Request, batch_id: str) -> Response:
        """Cancel a batch; finished results are kept."""
        folder, found = await _found_batch(ingress, request, batch_id)
        if not found.is_over:
            folder.cancel(found.id)
        return JsonAnswer(_batch(folder, found))


def _room(ingress: Ingress) -> BatchRoom:
    if ingress.batches is None:
        raise AccessError(
            404, "batches_off",
            "Files and batches are off in this deployment; an operator can set `batches` in "
            "the ingress args.",
        )  # fmt: skip
    return ingress.batches


def _folder(ingress: Ingress, request: Request) -> TenantFolder:
    return TenantFolder.of(_room(ingress).root, caller_of(request).tenant)


def _seen_by(ingress: Ingress, request: Request) -> list[TenantFolder]:
    """The folders whose files and batches the caller may list: all, for operators."""
    if caller_of(request).sees is None:
        return tenants(_room(ingress).root)
    return [_folder(ingress, request)]


async def _own_file(
    ingress: Ingress, request: Request, id: str, param: str = "file_id"
) -> FileFacts:
    found = await asyncio.to_thread(_folder(ingress, request).file, id)
    if found is None:
        raise _no_file(param)
    return found


async def _found_batch(ingress: Ingress, request: Request, id: str) -> tuple[TenantFolder, Batch]:
    for folder in _seen_by(ingress, request):
        if (found := await asyncio.to_thread(folder.batch, id)) is not None:
            return folder, found
    told = "No batch has this id; see GET /v1/batches."
    raise AccessError(404, "batch_not_found", told, param="batch_id")


def _no_file(param: str) -> AccessError:
    told = f"No file has this {param}; see GET /v1/files."
    return AccessError(404, "file_not_found", told, param=param)


def _all(lists: Iterable[Callable[[], list[T]]]) -> list[T]:
    return [one for listed in lists for one in listed()]


def _page(request: Request, ids: list[str], default: int, most: int) -> slice:
    """The part of a list that the request asks for: up to `limit` entries, after the entry `after`.

    `default` is the limit without one in the request, `most` the highest one.
    """
    limit = query_number(request, "limit") or default
    if limit > most:
        raise InputError(f"limit must be at most {most}", "limit")
    after, start = request.query_params.get("after"), 0
    if after:
        if after not in ids:
            raise InputError("after must be the id of an entry of this list", "after")
        start = ids.index(after) + 1
    return slice(start, start + limit)


def _list(data: list[dict[str, object]], *, has_more: bool) -> Response:
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return JsonAnswer({"object": "list", "data": data, "has_more": has_more, **ids})


def _check_open(folder: TenantFolder, limits: BatchLimits) -> None:
    if len(folder.open_ids()) >= limits.open_batches:
        raise InputError(
            f"{limits.open_batches} batches are in progress; wait for one to finish or cancel one"
        )


def _opened(folder: TenantFolder, limits: BatchLimits, batch: Batch) -> None:
    with folder.locked():  # others may have been opened while the file was read
        if folder.file(batch.input_file_id) is None:
            raise _no_file("input_file_id")
        folder.make_room()
        if batch.is_over:
            folder.write(batch)
            return
        _check_open(folder, limits)
        folder.open(batch)


def _deleted(folder: TenantFolder, id: str) -> None:
    with folder.locked():  # no batch begins with it meanwhile
        batches = [folder.batch(open_id) for open_id in folder.open_ids()]
        if any(b is not None and b.input_file_id == id for b in batches):
            raise InputError("a running batch needs this file; cancel the batch first", "file_id")
        folder.delete_file(id)


def _kept(folder: TenantFolder, limits: BatchLimits, given: UploadFile) -> FileFacts:
    with folder.locked():
        room = limits.total_bytes - folder.size()
        is_full = room < LEAST_BYTES
        id, most = new_id("file"), min(limits.file_bytes, room)
        if is_full or copy_bounded(given.file, folder.content(id), most) < 0:
            if not is_full and most == limits.file_bytes:
                raise HTTPException(413)
            rule = f"the tenant's files would exceed {limits.total_bytes} bytes; delete some first"
            raise InputError(rule, "file")
        return folder.keep(id, (given.filename or "")[:MAX_NAME_CHARS], "batch")


def _file(facts: FileFacts) -> dict[str, object]:
    return {**asdict(facts), "object": "file", "status": "processed"}


def _batch(folder: TenantFolder, batch: Batch) -> dict[str, object]:
    """A batch in OpenAI's form; fields unknown to that form are left out."""
    status, ended_at = batch.status, batch.ended_at
    if not batch.is_over and folder.is_cancelled(batch.id):
        status = "cancelling"
    errors = {"object": "list", "data": list(batch.errors)} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": f"{(batch.expires_at - batch.created_at) // 3600}h",
        "status": status,
        "output_file_id": batch.output_file_id if batch.is_over and batch.completed else None,
        "error_file_id": batch.error_file_id if batch.is_over and batch.failed else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "completed_at": ended_at if status == "completed" else None,
        "failed_at": (ended_at or batch.created_at) if status == "failed" else None,
        "expired_at": ended_at if status == "expired" else None,
        "cancelled_at": ended_at if status == "cancelled" else None,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": dict(batch.metadata),
    }


def _window_h(value: object) -> int:
    found = WINDOW.fullmatch(value) if isinstance(value, str) else None
    if found is None or int(found[1]) > MAX_WINDOW_H:
        raise InputError(
            f"completion_window must be a number of hours up to {MAX_WINDOW_H}h, such as 24h",
            "completion_window",
        )
    return int(found[1])


def _metadata(given: Mapping[str, object]) -> dict[str, str]:
    is_small = len(given) <= MAX_METADATA and all(
        isinstance(v, str) and len(k) <= 64 and len(v) <= 512 for k, v in given.items()
    )
    if not is_small:
        rule = f"metadata must have at most {MAX_METADATA} strings of at most 512 characters"
        raise InputError(rule, "metadata")
    return {k: str(v) for k, v in given.items()}
