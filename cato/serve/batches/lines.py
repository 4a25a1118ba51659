"""Lines of a batch file: reads and checks them, and finds those with results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/score", "/v1/rerank",
)  # fmt: skip
MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch."""

    custom_id: str
    body: Mapping[str, Any]


class LineError(ValueError):
    """A line is invalid."""


def file_errors(problem: str) -> tuple[dict[str, Any], ...]:
    """The `errors` of a batch whose file is invalid, in OpenAI's form."""
    return ({"code": "invalid_file", "message": problem, "param": None, "line": None},)


def lines_of(path: Path, endpoint: str, max_line_bytes: int) -> Iterator[tuple[int, Line]]:
    """The non-empty lines with their numbers from 1; raise `LineError` at an invalid one."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_line_bytes + 2):
            number += 1
            if len(raw.rstrip(b"\r\n")) > max_line_bytes:
                raise LineError(f"line {number}: longer than {max_line_bytes} bytes")
            if raw.strip():
                yield number, _line(raw, number, endpoint)


def _line(raw: bytes, number: int, endpoint: str) -> Line:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise LineError(f"line {number}: not valid JSON") from None
    if not isinstance(value, dict):
        raise LineError(f"line {number}: not a JSON object")
    id, body = value.get("custom_id"), value.get("body")
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID_CHARS:
        raise LineError(f"line {number}: custom_id must be 1 to {MAX_ID_CHARS} characters")
    if value.get("method", "POST") != "POST":
        raise LineError(f"line {number}: method must be POST")
    if value.get("url") != endpoint:
        raise LineError(f"line {number}: url must be {endpoint}, the batch's endpoint")
    if not isinstance(body, dict):
        raise LineError(f"line {number}: body must be an object")
    if body.get("stream"):
        raise LineError(f"line {number}: batch requests cannot stream; leave `stream` out")
    return Line(id, body)


def checked(path: Path, endpoint: str, max_lines: int, max_line_bytes: int) -> tuple[int, str]:
    """The number of lines, and the problem of the first invalid one; empty if all are valid."""
    seen: set[str] = set()
    try:
        for number, line in lines_of(path, endpoint, max_line_bytes):
            if line.custom_id in seen:
                return (0, f"line {number}: custom_id {line.custom_id!r} is used twice")
            seen.add(line.custom_id)
            if len(seen) > max_lines:
                return 0, f"more than {max_lines} lines"
    except LineError as error:
        return 0, str(error)
    return len(seen), "" if seen else "the file has no line"


def done_in(path: Path) -> set[str]:
    """The ids of the results in a file. Truncates it at the first result that a crash cut short or
    damaged: the lines without a result are asked again."""
    done: set[str] = set()
    if not path.exists():
        return done
    with path.open("rb+") as file:
        end = 0
        for raw in file:
            try:
                id = json.loads(raw)["custom_id"] if raw.endswith(b"\n") else None
            except (ValueError, LookupError, TypeError):
                id = None
            if not isinstance(id, str):
                break
            done.add(id)
            end += len(raw)
        file.truncate(end)
    return done
