"""Compilers and linters of validate nodes: real ones, in processes with limits."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ingress_kit import a_pool, running
from kits.processes import is_alive
from nodes_kit import Fixed
from typer.testing import CliRunner

from cato.cli import app
from cato.config.checkers import CheckerArgs
from cato.core.checkers import FILE_NAMES, SAMPLES, CheckerSpec
from cato.core.ids import NodeId
from cato.core.topology import IngressSpec
from cato.core.workflow import ValidateSettings
from cato.serve.nodes import validate
from cato.serve.nodes.checkers import Checkers, errors_in
from cato.serve.nodes.languages import LANGUAGES
from cato.serve.nodes.runner import NodeRunner
from cato.workflows.load import load_workflow
from cato.workflows.names import unknown_names

ROOT = Path(__file__).parents[3]
PY_COMPILE = CheckerSpec("python", (sys.executable, "-m", "py_compile", "{file}"))
GCC = CheckerSpec("c", ("gcc", "-fsyntax-only", "-Wall", "{file}"))
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
JAVAC = CheckerSpec("java", ("javac", "-proc:none", "{file}"), 60.0, 8 << 30)
needs_javac = pytest.mark.skipif(shutil.which("javac") is None, reason="no javac")
NODE = CheckerSpec("javascript", ("node", "--check", "{file}"), 60.0, 8 << 30)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node")
RETURNS_NOTHING = "x = 1\nreturn x\n"  # parses, and does not compile


def a_script(script: str, *words: str, **limits: float) -> CheckerSpec:
    """A checker of Python code that is itself a Python script."""
    return CheckerSpec("python", (sys.executable, "-c", script, *words, "{file}"), **limits)  # type: ignore[arg-type]


def checked(spec: CheckerSpec, code: str = "x = 1\n", name: str = "tool") -> dict[str, Any]:
    settings = ValidateSettings(Fixed(code), Fixed(spec.language), (name,))
    return asyncio.run(validate.run("check", settings, {}, Checkers({"tool": spec})))


def until(holds: Callable[[], bool]) -> None:
    """Wait for it, 20 s at most."""
    deadline_s = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.02)


def test_every_language_of_the_grammars_has_a_file_name() -> None:
    assert set(FILE_NAMES) == set(SAMPLES) == set(LANGUAGES)


def test_a_compiler_finds_what_a_grammar_cannot() -> None:
    result = checked(PY_COMPILE, RETURNS_NOTHING)
    assert (result["ok"], result["checked"]) == (False, True)
    [error] = result["errors"]
    assert error["line"] == 2
    assert "'return' outside function" in error["message"]
    assert checked(PY_COMPILE) == {"ok": True, "errors": [], "code": "x = 1\n", "checked": True}


@needs_gcc
def test_gcc_names_the_place_and_its_warnings_do_not_fail_code() -> None:
    result = checked(GCC, "int f(void) {\n  return y;\n}\n")
    assert not result["ok"]
    assert (result["errors"][0]["line"], result["errors"][0]["column"]) == (2, 10)
    assert result["errors"][0]["message"].startswith("tool: error: ")
    assert checked(GCC, "int f(void) { int unused; return 1; }\n")["ok"]


@needs_javac
@pytest.mark.parametrize(
    "code",
    [
        "package a.b;\n\npublic final class Solution { }\n",
        "interface Shape { }\n/**\n * public class Comment\n */\npublic record Point(int x) { }\n",
        "class Inner { public class Nested { } }\n",
    ],
)
def test_a_public_class_of_java_is_in_the_file_with_its_name(code: str) -> None:
    assert checked(JAVAC, code)["errors"] == []


@needs_javac
def test_javac_names_the_place_in_a_public_class() -> None:
    result = checked(JAVAC, "public class Solution {\n  int f() { return x; }\n}\n")
    [error] = result["errors"]
    assert (error["line"], error["message"]) == (2, "tool: error: cannot find symbol")


@needs_node
def test_node_names_the_place_though_it_prints_the_whole_path() -> None:
    [error] = checked(NODE, "let x = 1;\nlet x = 2;\n")["errors"]
    assert (error["line"], error["message"]) == (
        2,
        "tool: SyntaxError: Identifier 'x' has already been declared",
    )


@needs_gcc
def test_nothing_of_files_that_code_includes_is_told(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("topsecret words here\n")
    result = checked(GCC, f'#include "{secret}"\nint x;\n')
    assert not result["ok"]
    assert "topsecret" not in str(result["errors"])


def test_code_with_a_syntax_error_or_of_another_language_is_not_compiled(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    spec = a_script("import sys; open(sys.argv[1], 'w')", str(ran))
    assert not checked(spec, "def f(:\n")["ok"]
    settings = ValidateSettings(Fixed("int x;"), Fixed("c"), ("tool",))
    result = asyncio.run(validate.run("check", settings, {}, Checkers({"tool": spec})))
    assert (result["ok"], result["checked"], ran.exists()) == (True, True, False)


def test_without_checkers_nothing_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    checkers = Checkers({"tool": a_script("import sys; open(sys.argv[1], 'w')", str(ran))})
    settings = ValidateSettings(Fixed("x = 1\n"), Fixed("python"))
    result = asyncio.run(validate.run("check", settings, {}, checkers))
    assert (result["ok"], result["checked"], ran.exists()) == (True, True, False)


def test_all_that_a_checker_started_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(60)\n"
    )
    result = checked(a_script(script, str(pids), time_s=3.0))
    assert (result["ok"], result["checked"]) == (True, False)
    started = [int(pid) for pid in pids.read_text().split()]
    until(lambda: not any(map(is_alive, started)))
    assert not any(map(is_alive, started))


def test_a_checker_of_a_run_that_was_cancelled_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    checkers = Checkers({"tool": a_script(script, str(pid), time_s=60.0)})

    async def cancelled() -> None:
        task = asyncio.ensure_future(checkers.errors("tool", "x = 1\n"))
        await asyncio.to_thread(until, lambda: pid.exists() and bool(pid.read_text()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(until, lambda: not is_alive(int(pid.read_text())))

    asyncio.run(cancelled())
    assert not is_alive(int(pid.read_text()))


def test_memory_is_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cato"), "propagate", True)  # as before `logs.set_up`
    takes = "bytearray(400 << 20)"
    assert checked(a_script(takes))["ok"]
    checkers = Checkers({"tool": a_script(takes, memory_bytes=200 << 20)})

    async def twice() -> list[Any]:
        return [await checkers.errors("tool", "x = 1\n") for _ in range(2)]

    assert asyncio.run(twice()) == [None, None], "the code is not to blame"
    [record] = caplog.records  # not for every program
    assert "tool does not work here: exit status 1" in record.getMessage()
    assert "MemoryError" in record.getMessage()


def test_a_failure_without_a_place_is_the_codes_if_the_checker_works(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    script = (
        "import sys; open(sys.argv[1], 'a').write('.'); code = open(sys.argv[2]).read();"
        "sys.exit('no secret for the log' if 'x' in code else 0)"
    )
    checkers = Checkers({"tool": a_script(script, str(runs))})

    async def twice() -> list[Any]:
        return [await checkers.errors("tool", "x = 1\n") for _ in range(2)]

    error = {"line": 1, "column": 1, "message": "tool: exit status 1"}
    assert asyncio.run(twice()) == [[error]] * 2
    assert len(runs.read_text()) == 3, "it was tried once on a correct program"


def test_a_linter_that_dislikes_the_correct_program_still_has_verdicts() -> None:
    script = "import sys; print('main.py:1: D9 no author'); sys.exit(1)"
    assert checked(a_script(script))["errors"][0]["message"] == "tool: D9 no author"


@pytest.mark.parametrize(
    ("spec", "trouble"),
    [
        (PY_COMPILE, ""),
        (CheckerSpec("python", ("no-such-compiler", "{file}")), "cannot run: "),
        (a_script("bytearray(400 << 20)", memory_bytes=200 << 20), "MemoryError"),
        (a_script("import os; os.environ['GOPATH']"), "KeyError: 'GOPATH'"),
        (a_script("import time; time.sleep(60)", time_s=0.5), "was killed after 0.5 s"),
        (a_script("print('main.py:1: no'); exit(1)"), "finds a correct program wrong: tool: no"),
        pytest.param(GCC, "", marks=needs_gcc),
        pytest.param(JAVAC, "", marks=needs_javac),
        pytest.param(NODE, "", marks=needs_node),
    ],
)
def test_a_checker_is_tried_on_a_correct_program(spec: CheckerSpec, trouble: str) -> None:
    found = asyncio.run(Checkers({"tool": spec}).trouble("tool"))
    assert (trouble in found) if trouble else found == ""


@pytest.mark.parametrize("language", SAMPLES)
def test_the_correct_programs_are_correct(language: str) -> None:
    assert validate.syntax_errors(language, SAMPLES[language]) == []


def test_the_command_names_the_checkers_that_do_not_work(tmp_path: Path) -> None:
    deployment = yaml.safe_load((ROOT / "deployments" / "simulated.yaml").read_text())
    [args] = [a["args"] for a in deployment["applications"] if a["name"] == "cato"]
    works = {"language": "python", "command": list(PY_COMPILE.command)}
    args["checkers"] = {"works": works, "lost": {**works, "command": ["no-such-tool", "{file}"]}}
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment))
    result = CliRunner().invoke(app, ["check", str(file)])
    said = " ".join(result.output.split())
    assert result.exit_code == 2
    assert "checkers.lost: on this host it cannot run: " in said
    assert "checkers.works" not in said


def test_a_checker_sees_no_variable_of_the_server_and_no_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CATO_SECRET", "x")
    script = "import os, sys; sys.exit('CATO_SECRET' in os.environ or sys.argv[1] != '$(id);')"
    assert checked(a_script(script, "$(id);"))["ok"]


@pytest.mark.parametrize("command", [("no-such-compiler", "{file}"), ("/", "{file}")])
def test_a_program_that_cannot_run_leaves_the_code_unchecked(command: tuple[str, ...]) -> None:
    result = checked(CheckerSpec("python", command))
    assert (result["ok"], result["checked"]) == (True, False)


def test_a_checker_that_the_deployment_does_not_have_leaves_the_code_unchecked() -> None:
    result = checked(PY_COMPILE, name="tol")
    assert (result["ok"], result["checked"]) == (True, False)


@pytest.mark.parametrize(
    ("output", "file", "expected"),
    [
        ("main.c:3:5: error: no", "main.c", (3, 5, "t: error: no")),
        ("./main.go:2:1: undefined: x", "main.go", (2, 1, "t: undefined: x")),
        ("vet: ./main.go:2:1: undefined: x", "main.go", (2, 1, "t: undefined: x")),
        ("main.js:3\nfoo(\n^\n\nSyntaxError: no", "main.js", (3, 1, "t: SyntaxError: no")),
        ("Main.java:7: error: no symbol", "Main.java", (7, 1, "t: error: no symbol")),
        ("main.ts(4,9): error TS2304: no name", "main.ts", (4, 9, "t: error TS2304: no name")),
        ("main.py:1:8: F401 `os` unused", "main.py", (1, 8, "t: F401 `os` unused")),
        ("error[E04]: no value\n --> main.rs:2:5", "main.rs", (2, 5, "t: error[E04]: no value")),
    ],
)  # fmt: skip
def test_places_are_read_as_common_compilers_print_them(
    output: str, file: str, expected: tuple[int, int, str]
) -> None:
    [error] = errors_in(output, file, "t")
    assert (error["line"], error["column"], error["message"]) == expected


def test_notes_and_warnings_beside_errors_are_left_out() -> None:
    output = "main.c:1:1: warning: a\nmain.c:2:1: error: b\nmain.c:2:1: note: c\n/x.h:1:1: error: d"
    assert [e["line"] for e in errors_in(output, "main.c", "gcc")] == [2]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"language": "pyton", "command": ["x", "{file}"]}, "did you mean 'python'"),
        ({"language": "c", "command": ["gcc", "main.c"]}, "{file}"),
        ({"language": "c", "command": ["gcc", "{file}"], "time": "1h"}, "time"),
    ],
)
def test_a_wrong_checker_is_a_problem_of_the_deployment(args: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CheckerArgs.model_validate(args)


async def test_a_validate_node_of_a_deployment_with_checkers_runs_them() -> None:
    runner = NodeRunner({}, {"compile": PY_COMPILE})
    settings = ValidateSettings(Fixed(RETURNS_NOTHING), Fixed("python"), ("compile",))
    result = await runner.run(NodeId("check"), settings, {})
    assert (result["ok"], result["checked"]) == (False, True)


def test_a_workflow_that_names_an_unknown_checker_is_told_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(
        "name: w\nsla: {metric: e2e, target: 1s}\ninputs: {code: str}\nnodes:\n"
        "  check: {type: validate, source: '{{ code }}', language: c, checkers: [gc]}\n"
        "output: check\n"
    )
    ingress = IngressSpec(checkers={"gcc": GCC})
    [problem] = unknown_names(str(path), load_workflow(path), (), ingress)
    assert problem.path == "nodes.check.checkers"
    assert "gcc" in str(problem)


TUTORIAL = ROOT / "workflows" / "README.md"


async def test_the_documented_checker_model_mends_what_it_rejects(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.M | re.S)
    [text] = [b for b in blocks if "code-generation-reviewed" in b]
    (tmp_path / "run").mkdir()
    (tmp_path / "w.yaml").write_text(text)
    refine = load_workflow(tmp_path / "w.yaml").node(NodeId("refine"))
    assert refine.when is not None
    for answer, is_mended in ((" Yes.", False), (" no", True), ("", True)):
        assert refine.when.evaluate({"review": {"text": answer}}) is is_mended

    pools = (a_pool("large", "coder-large"), a_pool("review", "coder-review"))
    async with running(tmp_path / "run", *pools, workflows=(text,)) as kit:
        task = kit.service.run_task(
            "code-generation-reviewed", {"instruction": "sum"}, request_id="r"
        )
        finish = await task.wait()
    assert finish.status == "done"
    # The simulated reviewer says neither: two more versions, each judged but the last.
    nodes = [str(n.node) for n in finish.receipt.nodes]
    assert nodes[:3] == ["draft", "review", "refine"]
    assert nodes.count("refine") == 2


def test_the_documented_checkers_are_what_a_deployment_takes() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.M | re.S)
    [named] = [yaml.safe_load(b)["checkers"] for b in blocks if b.startswith("checkers:")]
    specs = {
        name: CheckerArgs.model_validate(args).made(CheckerSpec) for name, args in named.items()
    }
    assert specs["gcc"].memory_bytes == 512_000_000
