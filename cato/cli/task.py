"""`cato task`: run a task from the shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console

from cato.cli.client import Url, answer, client, error_text, events, fail
from cato.cli.outputs import print_json


def task(
    name: Annotated[str, typer.Argument(help="A task, such as code-completion.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="KEY=VALUE",
            help="An input; KEY=@FILE reads a file, KEY=@- standard input.",
        ),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it arrives.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = (
        False
    ),
    url: Url = None,
) -> None:
    """Run a task and print its answer; a line about its SLO goes to stderr."""
    with client(url) as http:
        path = f"/v1/tasks/{quote(name, safe='')}"
        known = answer(http.get(path))
        body = {"inputs": _read_inputs(inputs or (), known["inputs"]), "stream": stream}
        done = _streamed(http, path, body, quiet=as_json) if stream else None
        if done is None:
            done = answer(http.post(path, json=body))
            if not as_json:
                print(done["text"])
        if as_json:
            print_json(done)
        told = _sla_line(done)
    Console(stderr=True, soft_wrap=True).print(told, style="dim", markup=False, highlight=False)


def _streamed(http: httpx.Client, path: str, body: Any, *, quiet: bool) -> dict[str, Any]:
    sent = ""
    done: dict[str, Any] | None = None
    with http.stream("POST", path, json=body) as response:
        if response.is_error:
            response.read()
            answer(response)
        for event, value in events(response.iter_lines()):
            match event:
                case "text":
                    sent += value["text"]
                    if not quiet:
                        print(value["text"], end="", flush=True)
                case "done":
                    done = value
                case _:
                    if sent and not quiet:
                        print()
                    fail(error_text(value, response))
    if done is None:
        fail("the stream ended before the answer was complete")
    if not quiet:
        print()
        if done["text"] != sent:
            print(f"--- the task's final output:\n{done['text']}")
    return done


def _read_inputs(given: Sequence[str], known: Sequence[dict[str, Any]]) -> dict[str, object]:
    types = {i["name"]: i["type"] for i in known}
    inputs: dict[str, object] = {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals:
            fail(f"--input {item!r} has no '='; write KEY=VALUE or KEY=@FILE")
        if key not in types:
            fail(f"this task has no input {key!r}; it has: {', '.join(types) or 'none'}")
        inputs[key] = _value(key, types[key], _read(text))
    return inputs


def _read(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return sys.stdin.read() if text == "@-" else Path(text[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        fail(f"{text[1:]} cannot be read: {error}")


def _value(key: str, type_: str, text: str) -> object:
    """`text` as the input's type; types other than text are read as JSON."""
    if type_ == "str":
        return text
    try:
        value: object = json.loads(text)
    except ValueError:
        fail(f"input {key!r} must be of type {type_}, written as JSON; got {text!r}")
    return value


def _sla_line(done: dict[str, Any]) -> str:
    receipt = done["cato"]
    achieved = receipt["achieved_s"]
    took = "never" if achieved is None else f"{achieved * 1000:.0f} ms"
    verdict = "met" if receipt["met"] else "missed"
    simulated = ", simulated" if receipt["simulated"] else ""
    return (
        f"{receipt['metric']} {took} of {receipt['target_s'] * 1000:.0f} ms: {verdict}; "
        f"{receipt['e2e_s'] * 1000:.0f} ms in total{simulated}; `cato explain {done['id']}`"
    )
