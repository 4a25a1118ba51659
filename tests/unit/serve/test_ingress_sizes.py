"""Bodies of many values or levels, within the limit of bytes: refused before they take time."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, running
from starlette.requests import Request
from starlette.types import Message

from cato.core.errors import InputError
from cato.serve.ingress import body as bodies
from cato.serve.ingress.body import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, read_object
from cato.serve.ingress.failures import failure_of_run
from cato.workflows.work import MAX_OUTPUT_CHARS

CHAT = {"model": "fast", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


async def read(data: bytes) -> dict[str, object]:
    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    return await read_object(Request({"type": "http", "headers": []}, receive), 4_000_000)


def listed(value: str) -> bytes:
    return f'{{"prompt":[{",".join([value] * (MAX_VALUES + 2))}]}}'.encode()


@pytest.mark.parametrize("value", ["1", '""', '"\\\\"', '"\\""', '"a,"', "[]", "{}", "null"])
async def test_more_values_than_any_client_sends_are_not_read(value: str) -> None:
    with pytest.raises(InputError, match=f"at most {MAX_VALUES} values"):
        await read(listed(value))


@pytest.mark.parametrize("value", ["[]", "{}", '{"role":"user","content":"x"}', "[1]"])
async def test_more_parts_than_any_conversation_has_are_not_read(value: str) -> None:
    for count, is_right in ((MAX_CONTAINERS - 2, True), (MAX_CONTAINERS, False)):
        data = f'{{"messages":[{",".join([value] * count)}]}}'.encode()
        if is_right:
            assert await read(data)
        else:
            with pytest.raises(InputError, match="lists and objects"):
                await read(data)


async def test_commas_of_texts_are_no_values() -> None:
    text = ',"\\' * MAX_VALUES
    assert await read(json.dumps({"prompt": text}).encode()) == {"prompt": text}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a,"\\[]{}\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text('b,"\\', max_size=4), inner, max_size=5)
    ),
)


def commas(value: object) -> int:
    match value:
        case list():
            return max(0, len(value) - 1) + sum(map(commas, value))
        case dict():
            return max(0, len(value) - 1) + sum(map(commas, value.values()))
        case _:
            return 0


def strings(value: object) -> int:
    match value:
        case str():
            return 1
        case list():
            return sum(map(strings, value))
        case dict():
            return len(value) + sum(map(strings, value.values()))
        case _:
            return 0


@given(json_values, st.integers(0, 6))
def test_exactly_the_commas_between_values_are_counted(value: Any, most: int) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_VALUES", most)
        has_too_many = bodies._has_too_many_values(data)
    is_stopped_early = strings(value) > most
    assert has_too_many == (commas(value) > most) or is_stopped_early


async def test_an_unclosed_string_of_escaped_quotes_takes_no_time() -> None:
    # A pattern for whole strings began again at each quote: 9 s for the smallest of these.
    for data in (b'"' + b'\\"' * n + b"," * (MAX_VALUES + 1) for n in (2_000, 1_800_000)):
        started_s = process_time()
        with pytest.raises(InputError, match="not valid JSON"):
            await read(data)
        assert process_time() - started_s < 3


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1, 500, 950, 100_000])
async def test_what_is_nested_deeper_than_any_client_nests_is_refused(levels: int) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        data = f'{{"x":{opening * (levels - 1)}1{closing * (levels - 1)}}}'.encode()
        if levels <= MAX_DEPTH:
            assert await read(data)
        else:
            with pytest.raises(InputError, match=r"nested|not valid JSON"):
                await read(data)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "fast", "prompt": [[["x"]]]}),
        ("/v1/completions", {"model": "fast", "prompt": [["x"], []]}),
        ("/v1/completions", {"model": "fast", "prompt": ["x"] * 5000}),
        ("/v1/embeddings", {"model": "fast", "input": ["x"] * 2049}),
        ("/v1/rerank", {"model": "fast", "query": "x", "documents": ["x"] * 2049}),
        ("/v1/score", {"model": "fast", "text_1": "x", "text_2": ["x"] * 2049}),
    ],
)
async def test_lists_of_prompts_are_bounded_and_flat(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text


async def test_any_text_may_name_a_buffer(tmp_path: Path) -> None:
    odd = '"\\u0000\\ud83e\\udd89"'
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answers = [
            await http.post(path, content=content)
            for path, content in (
                (
                    "/v1/completions",
                    f'{{"model": "fast", "prompt": "a", "suffix": "b", "max_tokens": 2, '
                    f'"user": {odd}, "prompt_cache_key": {odd}}}',
                ),
                (
                    "/v1/completions",
                    f'{{"segments": {{"prefix": "a"}}, "prompt_cache_key": {odd}}}',
                ),
                ("/infill", f'{{"input_prefix": "a", "n_predict": 2, "prompt_cache_key": {odd}}}'),
            )
        ]
    assert [a.status_code for a in answers] == [200] * 3, [a.text for a in answers]


async def test_inputs_that_no_template_may_render_are_the_clients_error(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit:
        task = kit.service.run_task(
            "code-generation", {"instruction": "x" * (MAX_OUTPUT_CHARS + 1)}, request_id="r"
        )
        await task.wait()
        refused = kit.records.receipts["", "r"]
    assert (refused.status, refused.excuse) == ("failed", "client_error")
    failure = failure_of_run(task, lambda _: True)
    assert failure is not None
    assert (failure.status, failure.code) == (400, "inputs_too_large")
