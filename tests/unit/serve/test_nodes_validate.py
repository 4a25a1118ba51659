"""The validate node: syntax errors with their places, and nothing executed."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodes_kit import Broken, Fixed

from cato.core.errors import NodeError
from cato.core.workflow import ValidateSettings
from cato.serve.nodes import validate
from cato.serve.nodes.languages import LANGUAGES, MAX_PARSED_CHARS
from cato.serve.nodes.validate import MAX_ERRORS


def validated(source: str, language: str) -> dict[str, Any]:
    settings = ValidateSettings(Fixed(source), Fixed(language))
    return asyncio.run(validate.run("check", settings, {}))


def an_error(line: int, column: int, message: str) -> dict[str, object]:
    return {"line": line, "column": column, "message": message}


SOUND = {
    "python": "match x:\n    case [1, *_]: print(f'{x!r}')\n",
    "java": "class A { int f() { return 1; } }",
    "javascript": "const f = async (a) => ({ ...a });",
    "typescript": "const f = <T,>(a: T): T => a;",
    "tsx": "const f = () => <p className='x'>hi</p>;",
    "c": "int main(void) { return 0; }",
    "cpp": "template <class T> T f(T x) { return x; }",
    "csharp": "class A { int F() => 1; }",
    "go": "package a\n\ntype T struct{}",  # no newline at the end
    "rust": "fn f<'a>(x: &'a str) -> &'a str { x }",
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_sound_code_is_ok(language: str) -> None:
    code = SOUND[language]
    assert validated(code, language) == {"ok": True, "errors": [], "code": code, "checked": True}


@pytest.mark.parametrize("language", LANGUAGES)
def test_code_cut_off_is_not_ok(language: str) -> None:
    code = SOUND[language].rstrip().rstrip("}>;) ")
    result = validated(f"{code} ((", language)
    assert (result["ok"], result["checked"]) == (False, True)


@pytest.mark.parametrize(
    ("language", "code", "error"),
    [
        ("java", "class A {\n  int x = (1;\n}", an_error(2, 13, "missing ')'")),
        ("java", "class A { int é = 1 }", an_error(1, 20, "missing ';'")),
        ("c", "int main() { return 0;", an_error(1, 23, "missing '}'")),
        ("go", "package a\nfunc f() {\n  x := \n}", an_error(3, 7, "missing identifier")),
        ("javascript", "f( { return 1 }", an_error(1, 2, "missing ')' to close this '('")),
        ("javascript", "let x = ) 5;", an_error(1, 9, "unexpected ')'")),
        ("rust", "fn f() { let x = 5 6; }", an_error(1, 20, "unexpected '6'")),
        ("python", "x = (1,\ny = 2\n", an_error(1, 5, "'(' was never closed")),
        ("python", "x = 1\0", an_error(1, 1, "source code string cannot contain null bytes")),
        ("python", "-" * 100_000 + "1", an_error(1, 1, "nested too deeply")),
    ],
)
def test_says_what_is_missing_or_unexpected_and_where(
    language: str, code: str, error: dict[str, object]
) -> None:
    result = validated(code, language)
    assert not result["ok"]
    assert result["errors"][0] == error


def test_reports_a_bounded_number_of_errors() -> None:
    assert len(validated("int x = ;\n" * 100, "java")["errors"]) == MAX_ERRORS


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("x = 1", "x = 1"),
        ("Sure:\n```python\nx = 1\n```\nor\n```\ny = 2\n```\n", "x = 1"),
        ("```py\nx = 1\ny = 2", "x = 1\ny = 2"),
        ("~~~~\n'''\n~~~\n'''\n~~~~\n", "'''\n~~~\n'''"),
        ("  ```\n  if a:\n      b\n  ```", "if a:\n    b"),
        ("x = 1\n```\n", "x = 1"),
        ('def f():\n    """\n    ```\n    f()\n    ```\n    """', None),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r"),
    ],
)
def test_takes_the_code_out_of_its_fences(source: str, code: str | None) -> None:
    result = validated(source, "python")
    assert result["code"] == (source if code is None else code)
    assert result["ok"]


def test_without_a_language_the_fence_names_it() -> None:
    assert validated("```python\nx = (\n```", "")["errors"]
    assert validated("```js\nx = [1]\n```", "")["checked"]


@pytest.mark.parametrize("language", ["python", "cobol"])
@pytest.mark.parametrize("source", ["", " \n", "```python\n```", "Here:\n```\n\n```\n"])
def test_no_code_is_an_error(source: str, language: str) -> None:
    assert validated(source, language)["errors"] == [an_error(1, 1, "no code")]


def test_an_unknown_language_is_ok_but_not_checked() -> None:
    expected = {"ok": True, "errors": [], "code": "MOVE A TO", "checked": False}
    assert validated("MOVE A TO", "cobol") == expected


def test_code_beyond_the_limit_is_not_checked() -> None:
    assert not validated("(" * (MAX_PARSED_CHARS + 1), "python")["checked"]


def test_a_template_that_fails_makes_the_node_fail() -> None:
    with pytest.raises(NodeError, match=r"'check'.*'x' is undefined"):
        asyncio.run(validate.run("check", ValidateSettings(Fixed("x"), Broken()), {}))


def test_never_runs_the_code() -> None:
    assert validated("raise SystemExit(__import__('os').abort())", "python")["ok"]


def test_odd_escapes_in_the_code_are_not_our_warnings() -> None:
    check = r"""
from cato.serve.nodes.validate import syntax_errors
assert syntax_errors("python", r"x = '\d'") == []"""
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True)


PYTHON_BITS = [
    "def f",
    "(",
    ")",
    ":",
    "\n",
    "    ",
    "x",
    "=",
    "1",
    "'",
    '"""',
    "\\",
    "if",
    "é",
    "#",
]


def compiles(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<test>", "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


@given(st.text() | st.lists(st.sampled_from(PYTHON_BITS)).map("".join))
def test_python_is_ok_exactly_when_it_compiles(source: str) -> None:
    assert validate.validated(source, "python")["ok"] == compiles(source)


@given(
    st.text()
    | st.lists(st.sampled_from([*PYTHON_BITS, "{", "}", "```", "\ud800", "\0"])).map("".join),
    st.sampled_from(LANGUAGES),
)
def test_never_raises_and_places_errors_inside_the_code(source: str, language: str) -> None:
    result: dict[str, Any] = validate.validated(source, language)
    assert result["ok"] == (not result["errors"])
    lines = source.count("\n") + 2  # a missing end stands on the line after the last
    for error in result["errors"]:
        assert 1 <= error["line"] <= lines
        assert error["column"] >= 1
        assert error["message"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_survives_deep_nesting_and_long_runs_of_brackets(language: str) -> None:
    n = 2_000
    for source in ("(" * n, "{" * n, "a." * n, "class A {" * n, "'" * n, "if x:\n " * n):
        assert validate.validated(source, language)["checked"]
