"""The transform and runner of nodes: text to value, and each node to its kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodes_kit import Broken, Fixed

from cato.core.errors import NodeError
from cato.core.ids import NodeId
from cato.core.workflow import (
    AnalyzeSettings,
    LlmSettings,
    RetrieveSettings,
    TransformSettings,
    ValidateSettings,
)
from cato.serve.nodes import CodeIndex, NodeRunner, transform


def transformed(text: str, *, as_json: bool = True) -> object:
    return transform.run("shape", TransformSettings(Fixed(text), as_json), {})["value"]


def test_the_value_of_plain_text_is_the_text() -> None:
    result = transform.run("shape", TransformSettings(Fixed("[1]")), {})
    assert result == {"text": "[1]", "value": "[1]"}


def test_json_is_parsed_into_a_value() -> None:
    result = transform.run("shape", TransformSettings(Fixed('{"a": [1, null]}'), as_json=True), {})
    assert result == {"text": '{"a": [1, null]}', "value": {"a": [1, None]}}


def test_json_may_stand_in_a_fence() -> None:
    assert transformed('Here:\n```json\n{"a": 1}\n```') == {"a": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": }', "not JSON: Expecting value at line 1 column 7"),
        ("", "not JSON"),
        ("[NaN]", "NaN"),
        ("[1, -1e999]", "not JSON: a number is too large"),
        ("[" * 100_000, "not JSON: nested too deeply"),
        ("1" * 10_000, "not JSON"),
    ],
)
def test_what_is_no_json_fails_the_node(text: str, problem: str) -> None:
    with pytest.raises(NodeError, match=problem) as failure:
        transformed(text)
    assert failure.value.node == "shape"


def test_a_template_that_fails_makes_the_node_fail() -> None:
    with pytest.raises(NodeError, match="'x' is undefined"):
        transform.run("shape", TransformSettings(Broken()), {})


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_any_json_value_comes_back_as_it_was(value: object) -> None:
    assert transformed(json.dumps(value)) == value
    assert transformed(json.dumps(value, ensure_ascii=False, indent=1)) == value


async def test_the_runner_runs_each_kind_of_node(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("def greet(): pass\n")
    runner = NodeRunner({"app": CodeIndex.open(tmp_path / "code", tmp_path / "store")})
    node, code = NodeId("n"), Fixed("def greet(): pass\n")
    found = await runner.run(node, RetrieveSettings("app", Fixed("greet"), 3), {})
    analyzed = await runner.run(node, AnalyzeSettings(code, Fixed("python")), {})
    validated = await runner.run(node, ValidateSettings(code, Fixed("python")), {})
    shaped = await runner.run(node, TransformSettings(Fixed("hi")), {})
    assert json.loads(json.dumps([found, analyzed, validated, shaped])) == [
        found,
        analyzed,
        validated,
        shaped,
    ]
    assert set(found) == {"snippets"}
    assert set(validated) == {"ok", "errors", "code", "checked"}
    assert set(shaped) == {"text", "value"}


async def test_the_runner_refuses_nodes_that_call_a_model() -> None:
    settings = LlmSettings(model="m", max_tokens=1, expected_tokens=1, prompt=Fixed("hi"))
    with pytest.raises(TypeError, match="calls a model"):
        await NodeRunner({}).run(NodeId("draft"), settings, {})


def test_importing_the_nodes_imports_neither_ray_nor_fastapi() -> None:
    check = "import sys, cato.serve.nodes; print({'ray', 'fastapi'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
