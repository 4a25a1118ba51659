"""The shape of the code: who may import whom, and what the pure part never does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE_FILES = sorted(
    path for package in ("core", "policies") for path in (ROOT / "cato" / package).rglob("*.py")
)
IMPURE_MODULES = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib",
    "random", "secrets", "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "time",
    "uuid", "warnings",
}  # fmt: skip
IMPURE_BUILTINS = {"breakpoint", "exec", "eval", "input", "open", "print"}


def test_imports_follow_the_layers() -> None:
    lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    report = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stdout + report.stderr


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_and_policies_read_no_clock_draw_no_number_log_and_await_nothing(path: Path) -> None:
    assert impurities(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "path",
    [p for p in PURE_FILES if p.is_relative_to(ROOT / "cato" / "core")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_core_imports_only_itself_and_the_standard_library(path: Path) -> None:
    known = sys.stdlib_module_names
    foreign = [
        name
        for _, name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name.split(".")[0] not in known and not f"{name}.".startswith("cato.core.")
    ]
    assert foreign == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\nnow = time.monotonic()", ["line 1: imports time"]),
        ("from random import Random", ["line 1: imports random"]),
        ("def f():\n    import logging", ["line 2: imports logging"]),
        ("async def f():\n    await g()", ["line 1: async", "line 2: await"]),
        ("print('x')", ["line 1: calls print"]),
        ("from cato.core.time import f\nclass random: ...", []),
    ],
)
def test_the_check_itself_finds_what_it_names(source: str, found: list[str]) -> None:
    assert impurities(source) == found


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            found.append((node.lineno, node.module or ""))
    return found


def impurities(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [
        (line, f"imports {name}")
        for line, name in imports(tree)
        if name.split(".")[0] in IMPURE_MODULES
    ]
    for node in ast.walk(tree):
        match node:
            case ast.AsyncFunctionDef() | ast.AsyncFor() | ast.AsyncWith():
                found.append((node.lineno, "async"))
            case ast.Await():
                found.append((node.lineno, "await"))
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_BUILTINS:
                found.append((node.lineno, f"calls {name}"))
    return [f"line {line}: {what}" for line, what in sorted(found)]
