"""Broken bodies, workflows and deployment files: refused in plain words, never a crash or a hang.

`CATO_FUZZ_CASES` is how many of each are tried.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ingress_kit import COMPLETION, GENERATION, OF_JSON, a_fast_pool, served

from cato.config.deploy_file import load_deploy_file
from cato.core.errors import ConfigError, ExpressionError, Problem
from cato.lab.chaos.hostile import PIECES, repeated
from cato.lab.chaos.hostile_callers import WORKFLOW as INSPECTION
from cato.serve.nodes.languages import LANGUAGES
from cato.workflows.load import load_workflow
from cato.workflows.templates import compile_template
from cato.workflows.work import MAX_OUTPUT_CHARS

ROOT = Path(__file__).resolve().parents[3]
CASES = int(os.environ.get("CATO_FUZZ_CASES", "150"))
ANSWER_WITHIN_S = 20.0
# CPU time of one request in this process, client and server: nobody else is served meanwhile.
STALL_S = 1.0
many = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "sort"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "fast", "prompt": "x", "max_tokens": 3, "stop": ["a"], "stream": True,
        "stream_options": {"include_usage": True}, "suffix": "", "temperature": 0,
    },
    "/v1/chat/completions": {
        "model": "cato-generation", "messages": MESSAGES, "max_tokens": 3, "n": 1,
        "cato": {"inputs": {"language": "c"}, "sla": {"ttft": 1000}, "deadline_ms": 9000},
    },
    "/v1/chat/completions?grammar": {
        "model": "fast", "messages": MESSAGES, "max_tokens": 3,
        "structured_outputs": {"regex": "a+"},
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {
            "type": "object", "properties": {"a": {"type": "string", "pattern": "(a|b)*"}}}}},
    },
    "/v1/responses": {
        "model": "fast", "input": [{"role": "user", "content": "x"}], "max_output_tokens": 3,
        "instructions": "i", "stream": False, "metadata": {},
    },
    "/v1/messages": {
        "model": "fast", "max_tokens": 3, "system": "s", "stream": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    },
    "/v1/messages/count_tokens": {
        "model": "fast", "messages": [{"role": "user", "content": "x"}],
    },
    "/v1/fim/completions": {
        "model": "cato-completion", "prompt": "x", "suffix": "y", "max_tokens": 3,
    },
    "/infill": {
        "input_prefix": "x", "input_suffix": "y", "n_predict": 3, "stop": ["b"],
        "input_extra": [{"filename": "f.py", "text": "t"}],
    },
    "/v1/tasks/code-generation": {
        "inputs": {"instruction": "x", "language": "c"}, "stream": True,
    },
    "/v1/events": {"type": "view", "completion_id": "c", "choice_index": 0},
    "/v1/tasks/inspect": {"inputs": {"source": "def f(: x", "language": "python"}},
    "/tokenize": {"model": "fast", "prompt": "x"},
    "/v1/embeddings": {"model": "fast", "input": ["x"]},
    "/v1/rerank": {"model": "fast", "query": "x", "documents": ["y"]},
    "/v1/admin/rollouts": {
        "name": "fast", "canary": "slow", "rule": {"shares": [0.1], "hold_s": 1.0},
    },
    "/v1/admin/rollouts/promote": {"name": "fast", "stage": 0},
}  # fmt: skip

odd = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        2**63,
        10**40,
        10**400,
        1e308,
        -0.0,
        "",
        "\ud800",
        "\0",
        "a" * 5000,
        [],
        {},
        [[]],
    ]
)
junk = st.one_of(
    odd,
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.lists(odd, max_size=3),
    st.dictionaries(st.text(max_size=5), odd, max_size=3),
)


class Broken:
    """One change of a value somewhere inside another."""

    def __init__(self, where: int, how: str, value: object) -> None:
        self.where, self.how, self.value = where, how, value

    def __repr__(self) -> str:
        return f"Broken({self.where}, {self.how!r}, {self.value!r})"

    def apply(self, root: Any) -> Any:
        value = copy.deepcopy(self.value)  # it is changed by the next, and used by other cases
        places = list(_places(root))
        if not places:
            return value
        container, key = places[self.where % len(places)]
        if self.how == "wrap":
            container[key] = [container[key]]
        elif self.how == "nest":
            for _ in range(60):
                container[key] = {"a": container[key]}
        elif self.how == "delete":
            del container[key]
        elif self.how == "add" and isinstance(container, dict):
            container[str(self.value)[:30]] = copy.deepcopy(container[key])
        else:
            container[key] = value
        return root


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


changes = st.lists(
    st.builds(
        Broken,
        st.integers(0, 500),
        st.sampled_from(["replace", "replace", "delete", "wrap", "nest", "add"]),
        junk,
    ),
    min_size=1,
    max_size=4,
)


def broken(root: Any, mutations: list[Broken]) -> Any:
    value = copy.deepcopy(root)
    for mutation in mutations:
        value = mutation.apply(value)
    return value


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., httpx.Response]]:
    folder = tmp_path_factory.mktemp("workflows")
    with (
        served(folder, a_fast_pool(), workflows=(COMPLETION, GENERATION, INSPECTION)) as url,
        httpx.Client(base_url=url, timeout=ANSWER_WITHIN_S, headers=OF_JSON) as client,
    ):

        def post(path: str, content: bytes) -> httpx.Response:
            gc.disable()  # to collect what Hypothesis keeps of 50,000 examples takes seconds
            try:
                used_s = time.process_time()
                answer = client.post(path, content=content)
                assert time.process_time() - used_s < STALL_S, "others waited"
            finally:
                gc.enable()
            return answer

        yield post


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"]


@many
@given(st.sampled_from(sorted(BODIES)), changes)
@example("/v1/completions", [Broken(1, "replace", "\ud800")])
def test_broken_bodies_are_answered_in_order(
    post: Callable[..., httpx.Response], path: str, mutations: list[Broken]
) -> None:
    data = json.dumps(broken(BODIES[path], mutations))
    check(post(path, content=data.encode("utf-8", "surrogatepass")))


@many
@given(st.sampled_from(sorted(BODIES)), st.binary(max_size=60), st.integers(0, 200))
def test_bytes_that_are_no_json_are_refused(
    post: Callable[..., httpx.Response], path: str, noise: bytes, at: int
) -> None:
    data = json.dumps(BODIES[path]).encode()
    check(post(path, content=data[:at] + noise + data[at + len(noise) :]))


pieces = st.sampled_from(sorted({*itertools.chain(*PIECES.values()), *"(){}[]<>'\"`#@:;,?=&*!-"}))


@many
@given(st.sampled_from(LANGUAGES), st.lists(pieces, min_size=1, max_size=3), st.integers(1, 28_000))
@example("csharp", ["A<"], 28_000)
@example("tsx", ["a<b,"], 28_000)
def test_texts_that_keep_a_grammar_busy_are_answered_and_nobody_waits(
    post: Callable[..., httpx.Response], language: str, parts: list[str], length: int
) -> None:
    source = repeated("".join(parts), length)
    answer = post(
        "/v1/tasks/inspect",
        content=json.dumps({"inputs": {"source": source, "language": language}}).encode(),
    )
    assert answer.status_code == 200, answer.text


@many
@given(
    st.sampled_from(sorted(BODIES)),
    st.integers(0, 500),
    st.one_of(
        st.integers(-(10**30), 10**30).map(str),
        st.integers(20, 60_000).map(lambda digits: "7" * digits),
        st.integers(0, 10**9).map(lambda power: f"-1e{power}"),
    ),
)
def test_numbers_of_any_size_are_answered_in_order(
    post: Callable[..., httpx.Response], path: str, where: int, number: str
) -> None:
    body = broken(BODIES[path], [Broken(where, "replace", "NUMBER")])
    check(post(path, content=json.dumps(body).replace('"NUMBER"', number).encode()))


# Expressions of a template, put into one another, and what repeats them.
_VALUES = ("text", "text[1:]", "[text] * 999", "range(999)", "9 ** 9", "{'a': text}", "[[0] * 999]")
_AROUND = (
    "(@ ~ text)", "(@ | upper)", "(@ | list)", "(@ | join(text))", "(@ | replace('x', text))",
    "(@ | tojson)", "(@ | string)", "(@ | sort)", "(@ | map('default', text) | list)", "[@, @]",
    "('xy' in @)", "(@ == text)", "(@ * 999)", "(@ + @)", "(@ | sum(start=[]))",
    "(@.count('xy'))", "(@.split('x'))", "(@ | indent(999))", "(@ is lower)", "(@ % 7)",
)  # fmt: skip
_REPEATED = (
    "{{ @ }}", "{% set a = @ %}{{ a }}", "{% if @ %}{{ text }}{% endif %}",
    "{% for i in range(9999) %}{{ @ }}{% endfor %}",
    "{% for i in @ %}{% for j in text %}{% endfor %}{% endfor %}",
)  # fmt: skip
# CPU time of one rendering, in a thread of its own: as `test_workflows_templates.py` has it.
RENDERED_WITHIN_S = 5.0


@settings(many, max_examples=max(1, CASES // 3))
@given(
    st.recursive(
        st.sampled_from(_VALUES),
        lambda inner: st.builds(
            lambda around, value: around.replace("@", value), st.sampled_from(_AROUND), inner
        ),
        max_leaves=6,
    ),
    st.sampled_from(_REPEATED),
)
def test_templates_of_any_work_are_rendered_or_stopped(expression: str, around: str) -> None:
    source = around.replace("@", expression)
    started_s = time.thread_time()
    with contextlib.suppress(ExpressionError):
        compile_template(source).render({"text": "x" * MAX_OUTPUT_CHARS})
    assert time.thread_time() - started_s < RENDERED_WITHIN_S, source


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_body_that_is_too_large_is_refused_before_it_was_read(
    post: Callable[..., httpx.Response], path: str
) -> None:
    assert post(path, content=b"[" * 200_000).status_code == 413


WORKFLOWS = sorted((ROOT / "workflows").glob("*.yaml"))
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))


def problems_in(load: Callable[[Path], object], path: Path, text: str) -> tuple[Problem, ...]:
    """What is wrong with a file; raises whatever else `load` does."""
    prompts = path.parent / "prompts"
    if not prompts.exists():
        shutil.copytree(ROOT / "workflows" / "prompts", prompts)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        load(path)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("source", [*WORKFLOWS, *DEPLOYMENTS], ids=lambda path: path.name)
def test_the_files_themselves_are_whole(tmp_path: Path, source: Path) -> None:
    load = load_workflow if source in WORKFLOWS else load_deploy_file
    assert problems_in(load, tmp_path / source.name, source.read_text()) == ()


@many
@given(st.sampled_from([*WORKFLOWS, *DEPLOYMENTS]), changes)
def test_broken_files_say_what_is_wrong(
    tmp_path: Path, source: Path, mutations: list[Broken]
) -> None:
    load = load_workflow if source in WORKFLOWS else load_deploy_file
    value = broken(yaml.safe_load(source.read_text()), mutations)
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    assert all(p.rule for p in problems_in(load, tmp_path / source.name, text))


@many
@given(
    st.sampled_from([*WORKFLOWS, *DEPLOYMENTS]),
    st.integers(0, 20_000),
    st.integers(0, 40),
    st.one_of(st.text(max_size=8), st.sampled_from(["&a ", "*a", "!!python/object:os.system ",
        "{{", "}}", "{% for i in range(10**9) %}", ": ", "- ", "\t", "\x00", "<<: ", "|", ">"])),
)  # fmt: skip
def test_broken_text_of_files_says_what_is_wrong(
    tmp_path: Path, source: Path, at: int, cut: int, noise: str
) -> None:
    load = load_workflow if source in WORKFLOWS else load_deploy_file
    text = source.read_text()
    at %= len(text)
    text = text[:at] + noise + text[at + cut :]
    assert all(p.rule for p in problems_in(load, tmp_path / source.name, text))
