"""The verbs of the command line that talk to a running CATO, and those that only read files."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, running
from rich.console import Console, RenderableType
from store_kit import a_receipt
from typer.testing import CliRunner, Result

from cato.cli import VERBS, app, client, cluster, command_of_verb, explain, top
from cato.cli.outputs import print_json
from cato.cli.task import _read
from cato.core.receipt import Excuse

# A console of stdout; lines on stderr are no tables.
MADE_CONSOLE = re.compile(r"\bConsole\((?!stderr|file|soft_wrap=True\)\.)([^()]*)\)")


async def cato(*arguments: str, stdin: str = "") -> Result:
    """`cato ARGUMENTS` beside the server, which needs this thread's event loop."""
    return await asyncio.to_thread(
        CliRunner(env={"COLUMNS": "80"}).invoke, app, arguments, input=stdin
    )


async def test_help_names_every_verb() -> None:
    result = await cato("--help")
    assert result.exit_code == 0
    assert all(verb in result.stdout for verb in VERBS)


async def test_a_task_runs_from_the_shell_and_can_be_explained(tmp_path: Path) -> None:
    code = tmp_path / "half.py"
    code.write_text("def add(a, b):\n    return ", encoding="utf-8")
    marked = tmp_path / "marked.py"  # with a byte order mark, as some editors write it
    marked.write_text("def add(a, b):\n    return ", encoding="utf-8-sig")
    workflows = (COMPLETION, GENERATION)
    async with running(tmp_path, a_fast_pool(), workflows=workflows) as kit, kit.server() as url:
        asked = ("code-completion", "-i", f"prefix=@{code}", "--url", url)
        whole = await cato("task", *asked)
        streamed = await cato("task", *asked, "--stream")
        piped = await cato("task", "code-completion", "-i", "prefix=@-", "--url", url, stdin="x")
        as_json = await cato("task", *asked, "--json")
        differing = await cato(
            "task", "code-generation", "-i", "instruction=add", "--stream", "--url", url
        )
        id = json.loads(as_json.stdout)["id"]
        explained = await cato("explain", id, "--url", url)
        as_receipt = await cato("explain", id, "--url", url, "--json")
    assert whole.exit_code == streamed.exit_code == piped.exit_code == 0, whole.output
    assert whole.stdout == streamed.stdout != ""
    assert _read(f"@{marked}") == _read(f"@{code}")
    assert "met" in whole.stderr
    assert differing.stdout.rstrip().endswith("# 8 tokens")
    assert explained.exit_code == 0, explained.output
    assert all(word in explained.stdout for word in (id, "fill *", "sim-fast#0", "slack", "met"))
    assert json.loads(as_receipt.stdout) == json.loads(as_json.stdout)["cato"]


async def test_mistakes_end_with_one_clear_line(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
    ):
        mistakes = {
            ("explain", "req-nobody"): "No receipt has this request id",
            ("task", "nope"): "no task named 'nope'",
            ("task", "code-completion"): "'prefix' is required",
            ("task", "code-completion", "--stream"): "'prefix' is required",
            ("task", "code-completion", "-i", "prefix"): "KEY=VALUE",
            ("task", "code-completion", "-i", "prefi=x"): "it has: prefix, suffix",
            ("task", "code-completion", "-i", "prefix=@/no/file"): "cannot be read",
        }
        results = {words: await cato(*words, "--url", url) for words in mistakes}
    for words, expected in mistakes.items():
        assert results[words].exit_code == 1, words
        assert expected in results[words].stderr, words
        assert len(results[words].stderr.splitlines()) == 1, words


def test_no_table_takes_outside_text_for_markup() -> None:
    folder = Path(client.__file__).parent
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    shown = [(name, m[1]) for name, text in texts.items() for m in MADE_CONSOLE.finditer(text)]
    assert len(shown) > 15
    own_words = {name for name, options in shown if "markup=False" not in options}
    assert own_words == {"greeting.py"}


async def test_a_server_that_is_not_there_is_named() -> None:
    for url in ("http://127.0.0.1:1", "ftp://x"):
        result = await cato("explain", "req-1", "--url", url)
        assert result.exit_code == 1
        assert url in result.stderr


@pytest.mark.parametrize(
    "words", [("task", "x"), ("explain", "x"), ("top", "--once"), ("rollout", "status")]
)
def test_the_answer_of_another_version_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    another = httpx.MockTransport(lambda request: httpx.Response(200, json={"object": "other"}))
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=another))
    result = CliRunner().invoke(app, [*words, "--url", "http://cato.example"])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("the answer of http://cato.example lacks '")


async def test_checking_workflows_prints_all_problems_of_all_files(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(COMPLETION, encoding="utf-8")
    bad.write_text("name: x\nsla: {metric: speed}\nnodes: {}\n", encoding="utf-8")
    assert (await cato("workflows", "check", str(good))).exit_code == 0
    result = await cato("workflows", "check", str(bad), str(good), str(tmp_path / "none.yaml"))
    assert result.exit_code == 1
    for part in ("sla.metric", "sla.target", "output", "code-completion: 1 node,", "none.yaml"):
        assert part in result.stdout
    assert json.loads((await cato("workflows", "schema")).stdout)["title"] == "CATO workflow"


async def test_top_shows_what_the_status_page_shows(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
    ):
        idle = await cato("top", "--once", "--url", url)
        await kit.service.run_task("code-completion", {"prefix": "a"}, request_id="my-run").wait()
        busy = await cato("top", "--once", "--url", url)
    assert idle.exit_code == busy.exit_code == 0, busy.output
    assert "no run ended" in idle.stdout
    for words in ("1 of 1 replicas ready", "100.0 %", "sim-fast#0", "my-run", "slack", "█"):
        assert words in busy.stdout


# Options and addresses


@pytest.mark.parametrize(
    "words",
    [
        ("--hold", "inf"),
        ("--hold", "nan"),
        ("--share", "nan"),
        ("--share", "5"),
        ("--miss-limit", "nan"),
    ],
)
async def test_a_number_that_no_rollout_can_have_is_refused(words: tuple[str, str]) -> None:
    asked = ("rollout", "start", "x", "--canary", "y", *words, "--url", "http://127.0.0.1:1")
    result = await cato(*asked)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert words[0] in result.stderr


@pytest.mark.parametrize("key", ["cato_é", "cato_a\nb"])
async def test_a_key_that_no_header_can_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(client.KEY_VARIABLE, key)
    result = await cato("explain", "req-1", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert f"{client.KEY_VARIABLE} is not an API key" in result.stderr
    assert key not in result.stderr


def test_no_group_installs_a_completion_and_every_option_has_a_help_text() -> None:
    for verb in ("keys", "models", "rollout", "workflows"):
        command = command_of_verb(verb)
        assert "install_completion" not in [p.name for p in command.params], verb
    for verb, name in (("rollout", "start"), ("keys", "limit")):
        options = [p for p in command_of_verb(verb).commands[name].params if p.opts[0][:2] == "--"]
        assert [p.name for p in options if not p.help] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["check", "deployments/simulated.yaml"]]
)
def test_output_that_cannot_be_written_ends_with_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "cato", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["[Errno 28] No space left on device"]


def shown(what: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, color_system="standard",
                      force_terminal=True, legacy_windows=False)  # fmt: skip
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_an_excused_run_is_not_explained_as_missed() -> None:
    receipt = a_receipt(met=False, status="cancelled", problem="superseded by a newer completion")
    missed = shown(explain.rendered(receipt.as_dict()), 80)
    assert "missed" in missed
    excused = replace(receipt, excuse=Excuse.CLIENT_LEFT)
    found = shown(explain.rendered(excused.as_dict()), 80)
    assert "excused: client left" in found
    assert "missed" not in found
    assert "31m" in missed
    assert "31m" not in found


async def a_state(tmp_path: Path) -> dict[str, Any]:
    """What `cato top` shows of a deployment without runs."""
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        found: dict[str, Any] = (await http.get("/ui/state")).json()
    return found


ID = "req-0123456789abcdef0123"
RUN = {
    "request_id": ID, "task": "code-translation-of-a-whole-repository", "status": "done",
    "metric": "e2e", "target_s": 20.0, "achieved_s": 1234.5, "met": False, "e2e_s": 1234.5,
    "queue_s": 0.777, "output_tokens": 10, "ended_at_s": 0.0, "excuse": "",
}  # fmt: skip


async def test_the_list_of_missed_runs_fits_a_terminal(tmp_path: Path) -> None:
    runs = [RUN, RUN | {"status": "deadline_exceeded"}]
    now = await a_state(tmp_path) | {"runs": runs}
    narrow, wide = (shown(top.rendered(now, width), width) for width in (80, 120))
    for found in (narrow, wide):
        assert found.count(ID) == 2, "whole"
        for word in ("late", "deadline_exceeded", "achieved", "1234.50 s", "target", "20.00 s"):
            assert word in found
        assert "code-t" in found
    assert "777 ms" in wide
    assert "end to end" in wide
    assert "777 ms" not in narrow
    assert "end to end" not in narrow


async def test_an_id_that_is_too_long_for_the_terminal_is_continued_not_cut(tmp_path: Path) -> None:
    now = await a_state(tmp_path) | {"runs": [RUN | {"request_id": "f" * 64}]}
    found = shown(top.rendered(now, 80), 80)
    assert sum(line.count("f") for line in found.splitlines() if "fff" in line) == 64
    assert "late" in found


async def test_excused_runs_and_planned_ends_of_replicas_are_no_alarm(tmp_path: Path) -> None:
    run = RUN | {"status": "cancelled", "excuse": "superseded"}
    decided = {"at_s": 0.0, "pool": "p", "reason": "left the deployment", "task": "", "node": "",
               "replica": "r#1", "slack_s": None}  # fmt: skip
    now = await a_state(tmp_path) | {"runs": [run], "decisions": [decided | {"kind": "left"}]}
    assert "excused: superseded" in shown(top.rendered(now, 120), 120)
    found = shown(top.rendered(now, 80), 80)
    assert "excused:" in found
    assert "superseded" in found
    assert ID in found
    assert "31m" not in found
    assert "33m" not in found, "no yellow"


def test_a_reader_that_left_is_no_error_to_report() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "cato", "--version"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_without_unicode_gets_what_its_encoding_has(tmp_path: Path) -> None:
    store = str(tmp_path / "s.db")
    command = [sys.executable, "-m", "cato", "keys"]
    made = ["create", "--tenant", "a", "--name", "ключ é", "--store", store]
    subprocess.run([*command, *made], capture_output=True, check=True)
    latin = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([*command, "list", "--store", store], capture_output=True, env=latin)
    assert done.returncode == 0, done.stderr
    assert "???? é" in done.stdout.decode("latin-1")


def test_json_is_whole_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "utf-8"):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", out)
        print_json({"text": "ключ 😀"})
        out.flush()
        assert json.loads(out.buffer.getvalue()) == {"text": "ключ 😀"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("prefix", ["", "ray://"])
async def test_an_address_without_a_listener_fails_before_ray_starts(prefix: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"{prefix}127.0.0.1:{taken.getsockname()[1]}"
        result = await cato("status", "--address", address)
    assert result.exit_code == 1
    assert f"No Ray cluster at '{address}': [Errno 111]" in result.stdout


def test_only_an_address_with_a_port_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert cluster._why_unreachable(f"127.0.0.1:{server.getsockname()[1]}") == ""
    assert cluster._why_unreachable("127.0.0.1:99999") != ""
    for address in ("auto", "local", "/tmp/ray", "http://h:x"):
        assert cluster._why_unreachable(address) == ""
