"""The analyze node: definitions, scope, chunks and identifiers of half-written code."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodes_kit import Broken, Fixed

from cato.core.errors import NodeError
from cato.core.workflow import AnalyzeSettings
from cato.serve.nodes import analyze
from cato.serve.nodes.analyze import MAX_IDENTIFIERS
from cato.serve.nodes.chunks import MAX_CHUNK_CHARS
from cato.serve.nodes.languages import LANGUAGES, MAX_PARSED_CHARS


def ran(source: str, language: str, cursor: str | None = None) -> dict[str, Any]:
    at = None if cursor is None else Fixed(cursor)
    settings = AnalyzeSettings(Fixed(source), Fixed(language), at)
    return asyncio.run(analyze.run("parse", settings, {}))


def analyzed(source: str, language: str, cursor: int | None = None) -> dict[str, Any]:
    return analyze.analyzed(source, language, len(source) if cursor is None else cursor)


def scope_at_bar(source: str, language: str) -> object:
    """The scope where `source` has its `¦`."""
    return analyzed(source.replace("¦", ""), language, source.index("¦"))["scope"]


def outline(source: str, language: str) -> list[tuple[str, str]]:
    return [(d["kind"], d["name"]) for d in analyzed(source, language)["definitions"]]


def test_describes_a_python_module() -> None:
    source = '''import os
from a import (b,
               c)


@cached
class Parser:
    """Parses."""

    def parse(self, text):
        return os.path.join(text)
'''
    result = ran(source, "Py")
    assert result == {
        "ok": True,
        "language": "python",
        "definitions": [
            {
                "kind": "class",
                "name": "Parser",
                "start_line": 6,
                "end_line": 11,
                "text": source[source.index("@cached") :].rstrip("\n"),
            },
            {
                "kind": "method",
                "name": "parse",
                "start_line": 10,
                "end_line": 11,
                "text": "def parse(self, text):\n        return os.path.join(text)",
            },
        ],
        "imports": ["import os", "from a import (b,\n               c)"],
        "scope": [],
        "chunks": [source],
        "identifiers": [
            *("os", "text", "a", "b", "c", "cached", "Parser", "parse", "self", "path", "join")
        ],
    }


@pytest.mark.parametrize(
    ("language", "source", "expected"),
    [
        ("java", "class A { void f() {} enum E { X } }", "class A, method f, enum E"),
        (
            "javascript",
            "export const f = (a) => a; class A { m() {} }",
            "function f, class A, method m",
        ),
        ("typescript", "interface I { x: string } type T = I;", "interface I, type T"),
        ("tsx", "function App() { return <p>hi</p>; }", "function App"),
        ("c", "struct s { int a; };\nint *f(struct s *x) { return 0; }", "struct s, function f"),
        ("c", "typedef struct { int x; } point;", "type point"),
        ("cpp", "namespace n { class X { int g() {} }; }", "namespace n, class X, method g"),
        ("cpp", "template <class T> T id(T x) { return x; }", "function id"),
        (
            "csharp",
            "namespace N { class A { int F() { return 1; } } }",
            "namespace N, class A, method F",
        ),
        ("go", "package a\nfunc (t *T) F() {}\ntype T struct{}", "method F, type T"),
        ("rust", "impl Run for Fast { fn go(&self) {} }", "impl Fast, method go"),
    ],
)
def test_finds_the_definitions_of(language: str, source: str, expected: str) -> None:
    assert ", ".join(f"{kind} {name}" for kind, name in outline(source, language)) == expected


def test_leaves_out_functions_inside_functions() -> None:
    assert outline("def f():\n    def g(): pass\n", "python") == [("function", "f")]


def test_a_function_inside_a_value_does_not_take_the_whole_statement() -> None:
    [definition] = analyzed("const x = run(function f() {});", "javascript")["definitions"] or [
        None
    ]
    assert definition is None or definition["text"] == "function f() {}"


def test_keeps_definitions_around_a_half_written_line() -> None:
    source = "class A:\n    def f(self):\n        return self.\n\n    def g(self): pass\n"
    assert outline(source, "python") == [("class", "A"), ("method", "f"), ("method", "g")]


@pytest.mark.parametrize(
    ("language", "source", "expected"),
    [
        ("python", "class A:\n    def f(self):\n        x = 1\n        ¦", ["A", "f"]),
        ("python", "class A:\n    def f(self):\n        x = 1\n    ¦", ["A"]),
        ("python", "class A:\n    def f(self, x¦", ["A", "f"]),
        ("python", "def f(\n    a,\n) -> int:\n    ¦", ["f"]),
        ("python", "def f():\n    s = '''\nSELECT\n'''\n    ¦", ["f"]),
        ("python", "def f():\n    a\n¦\n    b\n", ["f"]),
        ("python", "def f():\n    a\n¦\nclass B: pass", []),
        ("java", "class A { void f() { x.¦ } void g() {} }", ["A", "f"]),
        ("java", "class A { void f(int a) throws E { if (a > 1) { x.¦", ["A", "f"]),
        ("javascript", "class A { m(a) { const f = async (x) => { return x.¦", ["A", "m", "f"]),
        ("javascript", "const f = function (a) { a.b({ x: 1, y: ¦", ["f"]),
        ("typescript", "class A { private m(a: string): Promise<void> { a.¦", ["A", "m"]),
        ("c", "static int f(struct s *a) { char c = '{'; /* { */ a->¦", ["f"]),
        ("cpp", "namespace n { class X : public Y { X() : a(1) { while (b) { c.¦", ["n", "X", "X"]),
        ("csharp", "namespace A { class B { public Task<int> F(int a) { a.¦", ["A", "B", "F"]),
        ("go", "package a\nfunc (t *T) F(a int) (int, error) {\n\tfor {\n\t\tx.¦", ["F"]),
        ("rust", "impl<'a> X for Y<'a> { fn f<'b>(x: &'b str) -> Vec<T> { x.¦", ["Y", "f"]),
    ],
)
def test_names_the_scope_at_the_cursor(language: str, source: str, expected: list[str]) -> None:
    assert scope_at_bar(source, language) == expected


def test_without_a_cursor_the_scope_is_that_of_the_end() -> None:
    source = "def f():\n    x = 1\n    "
    assert ran(source, "python")["scope"] == ran(source, "python", "")["scope"] == ["f"]


def test_counts_the_cursor_in_characters() -> None:
    assert scope_at_bar("class Ä { void f() { s = 'ééééé'; ¦ } } // é", "java") == ["Ä", "f"]


@pytest.mark.parametrize("cursor", ["-5", "99999"])
def test_a_cursor_outside_the_source_means_its_nearest_end(cursor: str) -> None:
    assert ran("def f(): pass\n", "python", cursor)["ok"]


def test_a_cursor_that_is_no_number_fails_the_node() -> None:
    with pytest.raises(NodeError, match=r"'parse'.*character offset.*'3:7'"):
        ran("x", "python", "3:7")


def test_a_template_that_fails_makes_the_node_fail() -> None:
    with pytest.raises(NodeError, match="'x' is undefined"):
        asyncio.run(analyze.run("parse", AnalyzeSettings(Broken(), Fixed("python")), {}))


def test_an_unknown_language_is_split_by_lines() -> None:
    source = "MOVE A TO B.\n" * 1000
    result = ran(source, "COBOL")
    assert (result["ok"], result["language"], result["definitions"]) == (False, "cobol", [])
    assert "".join(result["chunks"]) == source
    assert all(chunk.endswith("\n") for chunk in result["chunks"])
    assert result["identifiers"] == ["MOVE", "A", "TO", "B"]


def test_source_beyond_the_limit_is_not_parsed() -> None:
    result = ran("x = 1\n" * (MAX_PARSED_CHARS // 6 + 1), "python")
    assert (result["ok"], result["language"]) == (False, "python")


def test_cuts_before_the_comment_that_belongs_to_a_definition() -> None:
    body = "    x = 1\n" * (MAX_CHUNK_CHARS // 10 - 20)
    first, second = f"def f():\n{body}", f"# About g.\n@cached\ndef g():\n{body}"
    assert analyzed(first + second, "python")["chunks"] == [first, second]


def test_cuts_a_huge_class_between_its_methods() -> None:
    method = "    def f(self):\n" + "        x = 1\n" * 100
    chunks = analyzed("class A:\n" + method * 10, "python")["chunks"]
    assert len(chunks) > 1
    assert all(chunk.startswith("    def f") for chunk in chunks[1:])


def test_keeps_the_most_frequent_identifiers() -> None:
    source = "\n".join(f"v{i} = 0" for i in range(100)) + "\nhot = hot + v99"
    identifiers = analyzed(source, "python")["identifiers"]
    assert len(identifiers) == MAX_IDENTIFIERS
    assert identifiers[:3] == ["v99", "hot", "v0"]


@given(st.text(), st.sampled_from(LANGUAGES))
def test_chunks_joined_are_the_source(source: str, language: str) -> None:
    assert "".join(analyzed(source, language)["chunks"]) == source
    assert "".join(analyze.unparsed(source, language)["chunks"]) == source


@given(st.lists(st.sampled_from(["def f():\n", "    x\n", "\n", "class A:\n", "# c\n", "y" * 999])))
def test_chunks_of_code_are_never_too_long(lines: list[str]) -> None:
    source = "".join(lines) * 5
    chunks = analyzed(source, "python")["chunks"]
    assert "".join(chunks) == source
    assert all(0 < len(chunk) <= MAX_CHUNK_CHARS for chunk in chunks)


_SAMPLE = """namespace n { class A<T> : B { int f(int a) { if (a < 1) { return "}"; } } }
def g(x): # c
  const h = (y) => { y.z({ q: `w` }) }; fn i<'a>() -> &'a T where T: U { 'c' }
func (t *T) J() (int, error) { for i := 0; i < 3; i++ { } } @d export impl K for L { /* */"""
fragments = st.lists(
    st.sampled_from([*_SAMPLE.split(" "), "\n", "    ", "\0", "é", "\ud800", "'''"])
).map(" ".join)


@given(st.text() | fragments, st.sampled_from(LANGUAGES), st.integers(-1, 200))
def test_never_raises_whatever_the_source(source: str, language: str, cursor: int) -> None:
    result = analyzed(source, language, min(max(cursor, 0), len(source)))
    rows = source.count("\n") + 1
    assert all(1 <= d["start_line"] <= d["end_line"] <= rows for d in result["definitions"])


@pytest.mark.parametrize("language", LANGUAGES)
def test_survives_deep_nesting_and_long_runs_of_brackets(language: str) -> None:
    n = 2_000
    for source in ("(" * n, "{" * n, "a." * n, "class A {" * n, "'" * n, "if x:\n " * n):
        assert analyzed(source, language)["ok"]


def test_a_source_cut_anywhere_is_still_analyzed() -> None:
    rng = random.Random(7)
    for language in LANGUAGES:
        for _ in range(20):
            source = _SAMPLE[: rng.randrange(len(_SAMPLE))]
            assert analyzed(source, language)["ok"]
