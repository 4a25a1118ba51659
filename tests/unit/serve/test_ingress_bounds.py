"""Small bodies that would keep an engine busy for everybody."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_kit import COMPLETION, a_fast_pool, an_access, running
from typer.testing import CliRunner

from cato.cli import app as cli
from cato.core.administration import AddKey
from cato.core.errors import InputError
from cato.core.tenancy import Access, ApiKey, Tenant
from cato.serve.access.keys import new_key
from cato.serve.ingress.bounds import DEFAULT, check_call
from cato.store.store import MetadataStore

WIDE = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(5000)}}
COMPLETE = {"model": "fast", "prompt": "x", "max_tokens": 2}
CHAT = {"model": "fast", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def formatted(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"n": 4096}, "n"),
    ({"n": 1e9}, "n"),
    ({"n": "4096"}, "n"),
    ({"n": " 4_096"}, "n"),
    ({"n": [4096]}, "n"),
    ({"n": -1}, "n"),
    ({"best_of": 17}, "best_of"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"prompt": ["x"] * 9, "n": 16}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"prompt_logprobs": 1000}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"top_logprobs": "-1"}, "top_logprobs"),
    (formatted(WIDE), "response_format"),
    (formatted(deep(40)), "response_format"),
    (formatted({"type": "string", "maxLength": 1_000_000}), "response_format"),
    (formatted({"type": "string", "pattern": "a{1,50}" * 3}), "response_format"),
    (formatted({"enum": ["x" * 100] * 1000}), "response_format"),
    ({"structured_outputs": {"regex": "a" * 1001}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "((a{100}){100}){100}"}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"maxItems": 100000}'}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["x"] * 5000}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "x" * 65_000}}, "structured_outputs"),
    ({"guided_regex": "(a|b){5000}"}, "guided_regex"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"text": {"format": {"type": "json_schema", "schema": WIDE}}}, "text"),
    ({"output_config": {"format": {"schema": WIDE}}}, "output_config"),
    ({"tool_choice": "required", "tools": [{"function": {"parameters": WIDE}}]}, "tools"),
    ({"tools": [{"function": {"strict": True, "parameters": WIDE}}]}, "tools"),
    ({"tools": [{"strict": "yes", "parameters": WIDE}], "tool_choice": "auto"}, "tools"),
    ({"structured_outputs": {"structural_tag": json.dumps(deep(40))}}, "structured_outputs"),
    ({"structural_tag": json.dumps({"pattern": "a" * 1001})}, "structural_tag"),
]


@pytest.mark.parametrize(("fields", "param"), TOO_MUCH)
def test_too_much_is_refused_with_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as refused:
        check_call({**COMPLETE, **fields})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, 1),
        ({"n": None, "best_of": None, "logprobs": True}, 1),
        ({"n": 16, "best_of": 16, "top_logprobs": 20}, 16),
        ({"best_of": 4, "n": 2}, 4),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        (formatted(deep(10)), 1),
        ({"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}"}}, 1),
        ({"tool_choice": "auto", "tools": [{"function": {"parameters": WIDE}}]}, 1),  # no grammar
        ({"tools": [{"function": {"strict": False, "parameters": WIDE}}, 1]}, 1),
        ({"tools": [{"function": {"strict": True, "parameters": deep(3)}}]}, 1),
    ],
)
def test_what_people_ask_for_passes_and_counts(fields: dict[str, Any], calls: int) -> None:
    assert check_call({**COMPLETE, **fields}) == calls


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    st.dictionaries(
        st.sampled_from(["n", "best_of", "prompt", "logprobs", "tools", "tool_choice", "text"])
        | st.sampled_from(["response_format", "structured_outputs", "guided_json"]),
        json_values,
    )
)
def test_any_body_is_counted_or_refused(body: dict[str, Any]) -> None:
    try:
        calls = check_call(body)
    except InputError:
        return
    assert 1 <= calls <= DEFAULT.calls


async def test_the_doors_of_direct_calls_are_bounded(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answers = [
            await http.post("/v1/completions", json={**COMPLETE, "n": 4096}),
            await http.post("/v1/chat/completions", json={**CHAT, **formatted(deep(40))}),
            await http.post(
                "/v1/responses",
                json={"model": "fast", "input": "x", "text": {"format": {"schema": deep(40)}}},
            ),
            await http.post(
                "/v1/messages", json={**CHAT, "output_config": {"format": {"schema": deep(40)}}}
            ),
        ]
        served = await http.post("/v1/completions", json=COMPLETE)
    assert [a.status_code for a in answers] == [400] * 4, [a.text for a in answers]
    assert served.status_code == 200


async def test_several_answers_count_as_several_requests(tmp_path: Path) -> None:
    secret, id, digest = new_key()
    tenant = Tenant("a", requests_per_minute=60)  # ten at once
    access = an_access(Access((ApiKey(id, digest, "a"),), (tenant,)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        http.headers["api-key"] = secret
        first = await http.post("/v1/completions", json={**COMPLETE, "n": 16})
        second = await http.post("/v1/completions", json=COMPLETE)
    # It got there.
    assert "the simulated engine gives one answer" in first.headers["X-CATO-Problem"]
    assert second.status_code == 429
    assert int(second.headers["Retry-After"]) >= 6


async def test_a_key_may_have_bounds_of_its_own(tmp_path: Path) -> None:
    keys = [new_key() for _ in range(3)]
    bounds = ((), (("answers", 1), ("regex_chars", 3)), (("answers", 100),))
    known = tuple(
        ApiKey(id, digest, "a", bounds=own)
        for (_, id, digest), own in zip(keys, bounds, strict=True)
    )
    path = tmp_path / "metadata.db"
    store = MetadataStore.open(path)
    for key in known:
        store.administer(AddKey(key), "cli:t")
    access = an_access(store.access("2026-11"))
    store.close()
    asked = [COMPLETE | more for more in ({"n": 2}, {"n": 50}, {"guided_regex": "aaaa"})]
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        told = []
        for secret, _, _ in keys:
            http.headers["api-key"] = secret
            told.append([(await http.post("/v1/completions", json=body)).text for body in asked])
    refused = [["at most" in t or "a number from 0 to" in t for t in texts] for texts in told]
    assert refused == [[False, True, False], [True, True, True], [False, False, False]]


def test_bounds_of_a_key_are_checked_when_it_is_made(tmp_path: Path) -> None:
    create = ("keys", "create", "--tenant", "a", "--store", str(tmp_path / "metadata.db"))
    assert CliRunner().invoke(cli, (*create, "--bound", "answers=1")).exit_code == 0
    for wrong in ("answer=1", "answers=x", "answers"):
        assert CliRunner().invoke(cli, (*create, "--bound", wrong)).exit_code == 1


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-" + "9" * 30, "1e400", "1" * 5000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            '{"model": "cato-completion", "prompt": "x", "cato": {"deadline_ms": N}}',
        ),
        (
            "/v1/tasks/code-completion",
            '{"inputs": {"prefix": "x"}, "sla": {"metric": "ttft", "target_ms": N}}',
        ),
        ("/v1/events", '{"type": "view", "completion_id": "c", "elapsed": N}'),
        ("/infill", '{"prompt": "x", "t_max_prompt_ms": N}'),
        ("/v1/completions", '{"model": "fast", "prompt": "x", "n": N}'),
    ],
)
async def test_a_number_of_any_size_is_an_error_of_the_client(
    tmp_path: Path, path: str, body: str, number: str
) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answer = await http.post(path, content=body.replace("N", number))
    assert answer.status_code == (413 if path == "/v1/events" and len(number) > 4096 else 400)


def test_spaces_in_a_pattern_are_looked_at_once() -> None:
    # A pattern with neighbouring runs of spaces tried each split of them: a second for these.
    patterns = {f"p{n}": {"type": "string", "pattern": "{" + " " * 998} for n in range(60)}
    body = formatted({"type": "object", "properties": patterns})
    started_s = process_time()
    check_call(body)
    assert process_time() - started_s < 0.5
