"""Reading request bodies: bounded, JSON objects only, with errors that name the field."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cato.core.errors import InputError

# The largest body takes a second over the slowest connection that people code on.
BODY_WITHIN_S = 30.0
# Values of a body, its lists and objects, and their nesting. The largest honest list is a prompt of
# tokens; a conversation of a million tokens has some thousand messages and parts. Ten times as many
# take the event loop seconds.
MAX_VALUES = 150_000
MAX_CONTAINERS = 20_000
MAX_DEPTH = 200
# Digits of an integer including its sign: enough for any 64-bit value.
MAX_DIGITS = 20


def check_uncompressed(request: Request) -> None:
    """Answer 415 for a compressed body."""
    if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise HTTPException(415, "Compressed bodies are not supported; send the body uncompressed.")


async def read_object(request: Request, max_bytes: int) -> dict[str, object]:
    """The JSON object in the body.

    Raise `InputError` for anything else, for text that is not Unicode and for a body that arrives
    too slowly; answer 413 for more than `max_bytes`, before reading all of it, and 415 for a
    compressed body.
    """
    check_uncompressed(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise HTTPException(413)
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            data = await _read(request, max_bytes)
    except TimeoutError:
        raise InputError(f"the body did not arrive within {BODY_WITHIN_S:g} s") from None
    if _has_too_many_values(data):
        raise InputError(f"the body must have at most {MAX_VALUES} values")
    try:
        # Decoded here because `json.loads` accepts half of a surrogate pair in its bytes.
        text = data.decode(json.detect_encoding(data))
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_int=_whole, parse_float=_finite
        )
    except InputError:
        raise
    except UnicodeDecodeError:
        raise InputError("the body is not valid UTF-8 text") from None
    except (ValueError, RecursionError):
        raise InputError("the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise InputError("the body must be a JSON object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_shape(value)
    if "\\ud" in text or "\\uD" in text:  # few bodies: most clients send UTF-8
        _check_characters(value)
    return value


def _has_too_many_values(data: bytes) -> bool:
    """Counts commas outside of strings, and strings first: each takes time to look at.

    Takes milliseconds for any bytes, JSON or not: a regular expression would try every quote.
    """
    if data.count(b",") <= MAX_VALUES:
        return False
    quotes = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # without escaped ones
    if quotes.count(b'"') > 2 * MAX_VALUES:
        return True
    return sum([part.count(b",") for part in quotes.split(b'"')[::2]]) > MAX_VALUES


def _check_shape(value: object) -> None:
    """What the parser can still read may be too deep for those that write it again."""
    level, depth, count = [value], 0, 0
    while level:
        depth, count = depth + 1, count + len(level)
        if depth > MAX_DEPTH:
            raise InputError(f"the body must be nested at most {MAX_DEPTH} levels deep")
        if count > MAX_CONTAINERS:
            raise InputError(f"the body must have at most {MAX_CONTAINERS} lists and objects")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined]
            if isinstance(inner, dict | list)
        ]


def _check_characters(value: object) -> None:
    """Halves of surrogate pairs cannot be encoded; engines fail on them in various ways."""
    waiting = [value]
    try:
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                one.encode()
            elif isinstance(one, dict):
                waiting += one
                waiting += one.values()
            elif isinstance(one, list):
                waiting += one
    except UnicodeEncodeError:
        raise InputError(
            "the body contains half of an emoji (a lone surrogate); cut the text between characters"
        ) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > max_bytes:
            raise HTTPException(413)
    return bytes(data)


def _whole(text: str) -> int:
    """Bounded so that no sum of times or tokens overflows a float or a column of the store."""
    if len(text) > MAX_DIGITS:
        raise InputError("the body contains a number that is too large")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InputError("the body contains a number that is too large")
    return value


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON value")


def flag(body: Mapping[str, object], key: str) -> bool:
    """A boolean field; false when absent or null."""
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InputError(f"{key} must be true or false", key)
    return value


def sub_object(body: Mapping[str, object], key: str) -> dict[str, object]:
    """An object field; empty when absent or null."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{key} must be an object", key)
    return value


def known_keys(body: dict[str, object], known: tuple[str, ...], shape: str) -> None:
    """Raise `InputError` for a key that is not `known`, showing the expected `shape`."""
    unknown = sorted(body.keys() - set(known))
    if unknown:
        raise InputError(f"unknown field {unknown[0]!r}; expected {shape}", unknown[0])


def positive_number(value: object, param: str) -> float:
    """A finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:  # type: ignore[operator,arg-type]
        raise InputError(f"{param} must be a number above 0", param)
    return float(value)  # type: ignore[arg-type]


def text_field(body: Mapping[str, object], key: str) -> str:
    """A string field; empty when absent or null."""
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{key} must be a string", key)
    return value


def whole_number(body: Mapping[str, object], key: str) -> int | None:
    """An integer field; None when absent or null."""
    value = body.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise InputError(f"{key} must be a whole number", key)
    return value


CATO_KEYS = (
    "inputs", "sla", "receipt", "task", "deadline_ms", "tpot_ms", "session_deadline_ms"
)  # fmt: skip
CATO_SHAPE = (
    '{"cato": {"inputs": {...}, "sla": ..., "task": str, "deadline_ms": number, "tpot_ms": number, '
    '"session_deadline_ms": number, "receipt": bool}}'
)


def cato_of(body: Mapping[str, object]) -> dict[str, object]:
    """The body's object `cato`, its keys checked."""
    extra = sub_object(body, "cato")
    known_keys(extra, CATO_KEYS, CATO_SHAPE)
    return extra
