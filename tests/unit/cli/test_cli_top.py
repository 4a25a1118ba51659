"""What `cato top` shows fits into a terminal, with every number whole."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from rich.console import Console

from cato.cli.top import look_again, rendered

NOW_S = 10_000.0
LONG = "cato/qwen-2.5-coder-32b-instruct"


def a_task(name: str) -> dict[str, Any]:
    points = [{"at_s": NOW_S - 60.0, "runs": 12_345, "met": 12_000}]
    return {"task": name, "metric": "ttft", "target_s": 0.2, "points": points}


def a_replica() -> dict[str, Any]:
    slots = {"held": 120, "slots": 256, "wait_s": 0.25, "model": "", "note": ""}
    memory = {"kv_tokens": 1_000_000, "host_tokens": 0, "working_set_tokens": 1_200_000}
    return {"id": "qwen-32b-h100#0", "state": "ready", "sessions": 40} | slots | memory


def a_state() -> dict[str, Any]:
    return {
        "now_s": NOW_S,
        "pools": [
            {
                "name": "qwen-coder-32b",
                "queued": 12,
                "slack_least_s": -12.5,
                "note": "",
                "replicas": [a_replica()],
            }
        ],
        "deployments": [
            {"pool": "qwen-coder-32b", "wanted": 2, "problem": "no host has 2 free GPUs"}
        ],
        "tasks": [a_task("code-completion"), a_task(LONG)],
        "sessions": {"count": 0},
        "decisions": [
            {
                "at_s": NOW_S,
                "kind": "dispatch",
                "task": LONG,
                "replica": "",
                "slack_s": 0.1,
                "reason": "kept in time",
            }
        ],
        "runs": [],
        "rollouts": [],
        "missing": [],
        "warnings": [],
        "problem": "",
    }


@pytest.mark.parametrize("width", [80, 160])
def test_numbers_and_notes_are_whole(width: int) -> None:
    console = Console(width=width, record=True)
    console.print(rendered(a_state(), width))
    lines = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    (short,) = [line for line in lines if "code-completion" in line]
    assert short.split()[:5] == ["code-completion", "ttft", "200", "ms", "12345"]
    assert short.split()[5:] == ["97.2", "%", "█"]
    text = " ".join("\n".join(lines).split())
    for words in ("120 of 256", "250 ms", "-12.50 s", "100 ms", "kept in time"):
        assert words in text
    for note in ("no host has 2 free GPUs", "1.2M of 1M tokens"):
        assert note in text


def test_a_restart_does_not_end_the_watch() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return answers.pop(0)

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    before, after = a_state(), a_state() | {"now_s": NOW_S + 2.0}
    answers = [httpx.Response(503, json={}), httpx.Response(200, json=after)]
    with httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://cato") as http:
        assert look_again(http, before) == (
            before,
            ["no answer (Connection refused); this is what was seen last"],
        )
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://cato") as http:
        seen, (warning,) = look_again(http, before)
        assert seen is before
        assert "status 503" in warning
        assert look_again(http, before) == (after, [])
