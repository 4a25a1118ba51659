"""Files and functions stay short enough to read in one go."""

from __future__ import annotations

import ast
from pathlib import Path

CODE = Path(__file__).parents[2] / "cato"
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80


def test_no_file_is_too_long() -> None:
    lines = {str(f.relative_to(CODE)): len(f.read_text().splitlines()) for f in CODE.rglob("*.py")}
    assert lines, f"no code in {CODE}"
    assert {f: n for f, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    functions = [
        (f"{file.relative_to(CODE)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)
        for file in CODE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    assert [f"{name}: {lines}" for name, lines in functions if lines > MAX_FUNCTION_LINES] == []
