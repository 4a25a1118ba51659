"""HTTP client of the commands that call a running CATO: URL, API key, errors, SSE."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn
from urllib.parse import urlsplit

import httpx
import typer
from rich.console import Console

import cato
from cato.config.places import run_dir
from cato.serve.served import running

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "CATO_API_KEY"
# A task may take minutes; a server that does not accept a connection in seconds is down.
TIMEOUT = httpx.Timeout(600.0, connect=3.0)

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="CATO_URL",
        help=f"CATO's URL; by default that of the `cato serve` on this host, else {DEFAULT_URL}.",
    ),
]


def fail(message: str) -> NoReturn:
    """End with exit code 1 and one line on stderr."""
    Console(stderr=True, soft_wrap=True).print(message, style="red", markup=False, highlight=False)
    raise typer.Exit(1)


@contextmanager
def ends_on(*errors: type[Exception]) -> Generator[None, None, None]:
    """End the command with the message of one of these `errors`."""
    try:
        yield
    except errors as error:
        fail(str(error))


@contextmanager
def client(url: str | None) -> Generator[httpx.Client, None, None]:
    """An HTTP client for the CATO at `url`, by default the one on this host; ends the command when
    the connection fails."""
    url = url or _served()
    try:
        with httpx.Client(base_url=url, timeout=TIMEOUT, headers=_key_header()) as http:
            yield http
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        fail(f"no CATO answers at {url} ({error}); start one with `cato serve`, or give --url")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        fail(f"{url} is not a URL such as {DEFAULT_URL}: {error}")
    except httpx.HTTPError as error:
        fail(f"the connection to {url} broke: {error}")
    except KeyError as error:  # another version's answer, or another program's
        fail(
            f"the answer of {url} lacks {error}; is this CATO, in the version of this command "
            f"({cato.__version__})?"
        )


def _served() -> str:
    """The URL of the `cato serve` on this host's default port, else of the newest one; without
    any, the default URL."""
    here = [s.url for s in running(run_dir())]
    usual = [url for url in here if urlsplit(url).port == urlsplit(DEFAULT_URL).port]
    return next(iter(usual + here), DEFAULT_URL)


def _key_header() -> dict[str, str]:
    """The API key from the environment: an option would show it in the process list."""
    key = os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):  # a header cannot hold it
        fail(f"{KEY_VARIABLE} is not an API key: it has a character that no key has")
    return {"Authorization": f"Bearer {key}"} if key else {}


def this_user() -> str:
    """The user of this shell, for the audit log."""
    try:
        user = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container user without a name
        user = str(os.getuid())
    return f"cli:{user}@{socket.gethostname()}"


def answer(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of a successful response; ends the command with the server's error."""
    try:
        value = response.json()
    except ValueError:
        value = None
    if response.is_error:
        fail(error_text(value, response))
    if not isinstance(value, dict):
        fail(f"{response.url} did not answer with a JSON object; is this CATO?")
    return value


def error_text(value: Any, response: httpx.Response) -> str:
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return f"{response.url} answered {response.status_code}; is this CATO?"
    text = f"{error.get('message')}"
    if problem := response.headers.get("X-CATO-Problem"):
        text += f" ({problem})"
    return text


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Server-sent events as (name, value), up to `[DONE]`."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line == "data: [DONE]":
            return
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
            name = ""
