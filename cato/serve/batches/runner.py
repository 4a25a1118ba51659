"""Batch runner: sends each line of a batch as a request of SLA class `batch` for its caller.

Every ingress replica has a runner, and one of them runs a batch at a time. When that one ends,
another runner, or the same after its restart, continues with the lines that have no result yet.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, TextIO

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from cato.core.tenancy import Role
from cato.serve.access.caller import Caller
from cato.serve.batches.folder import OUTPUT, Batch, BatchRoom, TenantFolder, tenants
from cato.serve.batches.lines import Line, LineError, done_in, file_errors, lines_of

log = logging.getLogger("cato.batches")

LOOK_S = 1.0
# Pause before a batch whose files could not be read or written runs again.
RESTART_S = 10.0
SWEEP_S = 3600.0
# A full pool, an exhausted quota, a starting server: the line waits until the batch expires. Other
# server errors are retried a few times.
WAITS, RETRIED = frozenset({429, 503}), frozenset({500, 502, 504})
MAX_TRIES = 3
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0
KEEP_PROGRESS_S = 1.0
# Why no request was made for a line; the second is OpenAI's code.
REVOKED, EXPIRED = "key_revoked", "batch_expired"
NOT_MADE = {
    REVOKED: "The request was not made: the key or sign-in that made the batch is no longer valid.",
    EXPIRED: "The request was not answered before the batch's completion window ended.",
}


def new_request_id() -> str:
    return f"batch_req-{secrets.token_hex(10)}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one line; `error` says why no request was made."""

    status: int = 0
    body: Any = None
    request_id: str = ""
    error: str = ""

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300


class BatchRunner:
    """Runs the batches in `room`.

    `app` serves a line like any authenticated request. `rights` returns a caller with its current
    rights, None if its key is gone. While `is_paused`, no line runs.
    """

    def __init__(
        self,
        room: BatchRoom,
        app: ASGIApp,
        rights: Callable[[Caller], Caller | None],
        *,
        max_line_bytes: int,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._room = room
        self._app = app
        self._rights = rights
        self._places = asyncio.Semaphore(room.at_once)
        self._max_line_bytes = max_line_bytes
        self._is_paused = is_paused
        self._running: dict[str, asyncio.Task[None]] = {}
        self._swept_at_s = 0.0

    async def run(self) -> None:
        """Poll for work for ever."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("batches in %s cannot be read; trying again", self._room.root)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Start open batches that no runner runs."""
        now_s = time.time()
        is_sweeping = now_s - self._swept_at_s > SWEEP_S
        for folder in await asyncio.to_thread(tenants, self._room.root):
            try:
                self._start(folder)
                if is_sweeping:
                    await asyncio.to_thread(folder.sweep, now_s - self._room.limits.keep_s)
            except Exception:  # one tenant's folder must not stop the others
                log.exception("batches in %s cannot be read; trying again", folder.path)
        if is_sweeping:
            self._swept_at_s = now_s

    def _start(self, folder: TenantFolder) -> None:
        for id in folder.open_ids():
            if id not in self._running and not self._is_paused():
                task = asyncio.get_running_loop().create_task(self._run(folder, id))
                self._running[id] = task
                task.add_done_callback(lambda _, id=id: self._running.pop(id, None))  # type: ignore[misc]

    async def close(self) -> None:
        """Stop; other runners or a later start continue the batches."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, folder: TenantFolder, id: str) -> None:
        """Run a batch that no other runner runs. After a failure, `look` starts it again."""
        try:
            await self._run_once(folder, id)
        except Exception:
            log.exception("batch %s failed; it is started again in %g s", id, RESTART_S)
            await asyncio.sleep(RESTART_S)

    async def _run_once(self, folder: TenantFolder, id: str) -> None:
        with ExitStack() as held:
            if not held.enter_context(folder.running(id)):
                return
            batch = folder.batch(id)
            assert batch is not None, "checked when its lock was taken"
            run = _BatchRun(folder, batch)
            held.callback(run.close)
            await asyncio.to_thread(run.open)
            await self._run_lines(run)

    async def _run_lines(self, run: _BatchRun) -> None:
        """Run the batch's lines. An unreadable file ends it only after the lines in progress:
        their results are kept."""
        lines = run.lines(self._max_line_bytes)
        unreadable: OSError | LineError | None = None
        asked: set[asyncio.Task[None]] = set()
        try:
            while run.why_over() == "" and not self._is_paused():
                while len(asked) < self._room.at_once and unreadable is None:
                    try:
                        line = await asyncio.to_thread(next, lines, None)
                    except (OSError, LineError) as error:
                        unreadable = error
                        break
                    if line is None:
                        break
                    task = asyncio.get_running_loop().create_task(self._line(run, line))
                    asked.add(task)
                if not asked:
                    if isinstance(unreadable, OSError):
                        raise unreadable  # the folder may come back
                    problem = unreadable or run.lost_lines()
                    run.end("completed" if problem is None else "failed", problem)
                    return
                done, asked = await asyncio.wait(
                    asked, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                run.keep_progress()
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if (why := run.why_over()) != "":
            if why == "expired":
                run.write_expired(await asyncio.to_thread(run.ids_left, self._max_line_bytes))
            run.end(why)

    async def _line(self, run: _BatchRun, line: Line) -> None:
        failures = waits = 0
        while True:
            async with self._places:
                caller = self._rights(run.caller)
                if caller is None:
                    answer = Answer(error=REVOKED)
                else:
                    answer = await self._answer(run, line, caller)
            failures += answer.status in RETRIED
            is_final = answer.error or answer.status not in WAITS | RETRIED
            if is_final or failures >= MAX_TRIES:
                run.write(line, answer)
                return
            waits += 1
            await asyncio.sleep(min(MAX_WAIT_S, MIN_WAIT_S * 2 ** min(waits, 10)))

    async def _answer(self, run: _BatchRun, line: Line, caller: Caller) -> Answer:
        """The answer to a line; a line on which CATO fails must not stop the others."""
        try:
            return await self._ask(run, line, caller)
        except Exception:
            log.exception("batch %s: line %r failed", run.batch.id, line.custom_id)
            return Answer(500, "internal error", new_request_id())

    async def _ask(self, run: _BatchRun, line: Line, caller: Caller) -> Answer:
        async def as_caller(scope: Scope, receive: Receive, send: Send) -> None:
            state = {"cato_caller": caller, "cato_address": f"batch:{run.batch.id}"}
            await self._app({**scope, "state": state}, receive, send)

        request_id = new_request_id()
        headers = {
            "x-request-id": request_id, "X-CATO-SLA": "batch", "content-type": "application/json",
        }  # fmt: skip
        # Written as it was read: the API refuses NaN and lone surrogates itself.
        body = json.dumps(line.body).encode()
        transport = httpx.ASGITransport(as_caller, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch") as http:
            response = await http.post(
                run.batch.endpoint, content=body, headers=headers, timeout=None
            )
        try:
            answered = response.json()
        except ValueError:
            answered = response.text
        _add_problem(answered, response.headers.get("x-cato-problem", ""))
        return Answer(response.status_code, answered, request_id)


class _BatchRun:
    """A batch run by this process, with its output and error files."""

    def __init__(self, folder: TenantFolder, batch: Batch) -> None:
        self.batch = batch
        self.caller = _caller(batch)
        self._folder = folder
        self._done: set[str] = set()
        self._out: TextIO | None = None
        self._errors: TextIO | None = None
        self._kept_at_s = 0.0

    def open(self) -> None:
        """Find the lines that have results already."""
        good, bad = (self._folder.content(id) for id in self._result_ids)
        done, failed = done_in(good), done_in(bad)
        self._done = done | failed
        self.batch = replace(
            self.batch, status="in_progress", completed=len(done), failed=len(failed)
        )
        self._out, self._errors = (path.open("a", encoding="utf-8") for path in (good, bad))
        self._folder.write(self.batch)

    @property
    def _result_ids(self) -> tuple[str, str]:
        return self.batch.output_file_id, self.batch.error_file_id

    def lines(self, max_line_bytes: int) -> Iterator[Line]:
        """The lines without a result; raises `OSError`, or `LineError` if the file was changed
        since the batch was created."""
        path = self._folder.content(self.batch.input_file_id)
        for _, line in lines_of(path, self.batch.endpoint, max_line_bytes):
            if line.custom_id not in self._done:
                yield line

    def lost_lines(self) -> LineError | None:
        """The problem, after the last line, if the file had others when the batch was created."""
        found = self.batch.completed + self.batch.failed
        if found == self.batch.total:
            return None
        return LineError(f"it had {self.batch.total} lines when the batch began, and now {found}")

    def why_over(self) -> str:
        """The final status if the batch must end before its last line; else empty."""
        if self._folder.is_cancelled(self.batch.id):
            return "cancelled"
        return "expired" if time.time() >= self.batch.expires_at else ""

    def ids_left(self, max_line_bytes: int) -> list[str]:
        """The ids of the lines without a result, as far as the file can be read."""
        ids: list[str] = []
        with suppress(OSError, LineError):
            ids.extend(line.custom_id for line in self.lines(max_line_bytes))
        return ids

    def write_expired(self, ids: Iterable[str]) -> None:
        """The results of the lines that the end of the window left without one."""
        assert self._errors is not None
        answer = Answer(error=EXPIRED)
        lines = [_result(id, answer) for id in ids]
        self._errors.write("".join(lines))
        self._errors.flush()
        self.batch = replace(self.batch, failed=self.batch.failed + len(lines))

    def write(self, line: Line, answer: Answer) -> None:
        assert self._out is not None
        assert self._errors is not None
        file = self._out if answer.is_good else self._errors
        file.write(_result(line.custom_id, answer))
        file.flush()
        self._done.add(line.custom_id)
        if answer.is_good:
            self.batch = replace(self.batch, completed=self.batch.completed + 1)
        else:
            self.batch = replace(self.batch, failed=self.batch.failed + 1)

    def keep_progress(self) -> None:
        """Store the counts for display; after a restart the results themselves are counted."""
        if time.monotonic() - self._kept_at_s >= KEEP_PROGRESS_S:
            self._kept_at_s = time.monotonic()
            self._folder.write(self.batch)

    def end(self, status: str, problem: LineError | None = None) -> None:
        if problem is not None:
            log.error("batch %s: its file is not valid any more: %s", self.batch.id, problem)
            self.batch = replace(self.batch, errors=file_errors(str(problem)))
        self.close()
        for id, kind, count in zip(
            self._result_ids,
            ("output", "error"),
            (self.batch.completed, self.batch.failed),
            strict=True,
        ):
            if count:
                self._folder.keep(id, f"{self.batch.id}_{kind}.jsonl", OUTPUT)
            else:
                self._folder.delete_file(id)
        self._folder.close(replace(self.batch, status=status, ended_at=int(time.time())))

    def close(self) -> None:
        for file in (self._out, self._errors):
            if file is not None:
                file.close()


def _result(custom_id: str, answer: Answer) -> str:
    """A line of the output or error file."""
    result: dict[str, Any] = {
        "id": answer.request_id or new_request_id(),
        "custom_id": custom_id,
        "response": None,
        "error": None,
    }
    if answer.status:
        result["response"] = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": answer.body,
        }
    if answer.error:
        result["error"] = {"code": answer.error, "message": NOT_MADE[answer.error]}
    return json.dumps(result) + "\n"


def _add_problem(answered: object, problem: str) -> None:
    """Add the response's header X-CATO-Problem to an error's message, if that lacks it: results
    have no headers."""
    match answered:
        case {"error": {"message": str(message)} as error} if problem not in message:
            error["message"] = f"{message} X-CATO-Problem: {problem}"


def _caller(batch: Batch) -> Caller:
    kept = dict(batch.caller)
    return Caller(
        **kept
        | {
            "role": Role(kept["role"]),
            "tasks": tuple(kept["tasks"]),
            "models": tuple(kept["models"]),
            "bounds": tuple((name, value) for name, value in kept["bounds"]),
        }
    )
