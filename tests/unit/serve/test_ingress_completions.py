"""The dialects of autocompletion: Mistral's, Tabby's, llama.cpp's, and sentinels in a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ingress_kit import (
    COMPLETION,
    COMPLETION_WITH_CONTEXT,
    GENERATION,
    SLOW,
    a_fast_pool,
    a_pool,
    a_profile,
    a_slow_pool,
    running,
    sse_events,
    until,
    until_busy,
)
from mistralai.client import Mistral

from cato.core.errors import ContextLengthError
from cato.core.ids import ReplicaId
from cato.core.topology import EngineSpec
from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine, simulated_text
from cato.serve.ingress.feedback import Feedback, Reaction
from cato.serve.prompts import MARGIN_FRACTION, MARGIN_TOKENS, MOST_CUTS
from cato.workflows.fim import render_fim

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
FIM = {"model": "cato-completion", "prompt": PREFIX, "suffix": SUFFIX}
TABBY = {"language": "python", "segments": {"prefix": PREFIX, "suffix": SUFFIX}}
INFILL = {"input_prefix": PREFIX[:15], "prompt": PREFIX[15:], "input_suffix": SUFFIX}
WRITTEN = simulated_text(0, render_fim("starcoder", PREFIX, SUFFIX), 12)


async def post(folder: Path, path: str, body: Any, **headers: str) -> httpx.Response:
    workflows = (COMPLETION, GENERATION)
    async with running(folder, a_fast_pool(), workflows=workflows) as kit, kit.http() as http:
        return await http.post(path, json=body, headers=headers)


def text_of(response: httpx.Response) -> str:
    """The completion in an answer of any of the dialects."""
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    if "content" in value:
        return str(value["content"])
    (choice,) = value["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/fim/completions", FIM),
        ("/v1/fim/completions", {**FIM, "model": "fast", "max_tokens": 12}),
        ("/v1/completions", FIM),
        ("/v1/completions", {**FIM, "prompt": [PREFIX]}),
        ("/v1/completions", {**FIM, "model": "fast", "prompt": [PREFIX], "max_tokens": 12}),
        ("/v1/completions", TABBY),
        ("/infill", INFILL),
        ("/infill", {**INFILL, "model": "fast", "n_predict": 12}),
    ],
)
async def test_every_dialect_fills_in_the_same_middle(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    assert text_of(await post(tmp_path, path, body)) == WRITTEN


# Sentinels


@pytest.mark.parametrize("family", ["qwen", "starcoder", "deepseek-coder", "codestral", "glm"])
@pytest.mark.parametrize("model", ["cato-completion", "fast", "qwen2.5-coder:cato-completion"])
async def test_sentinels_of_any_family_are_written_again_for_the_model_that_answers(
    tmp_path: Path, family: str, model: str
) -> None:
    prompt = render_fim(family, PREFIX, SUFFIX)
    for asked in (prompt, [prompt]):
        body = {"model": model, "prompt": asked, "max_tokens": 12}
        assert text_of(await post(tmp_path, "/v1/completions", body)) == WRITTEN


async def test_a_model_of_an_unknown_family_gets_the_prompt_that_its_client_wrote(
    tmp_path: Path,
) -> None:
    pool = a_pool("other", family="none")
    prompt = render_fim("qwen", PREFIX, SUFFIX)
    async with running(tmp_path, pool, workflows=()) as kit, kit.http() as http:
        body = {"model": "other", "prompt": prompt, "max_tokens": 3}
        response = await http.post("/v1/completions", json=body)
    assert text_of(response) == simulated_text(0, prompt, 3)


async def test_a_task_without_a_suffix_gets_sentinels_as_text(tmp_path: Path) -> None:
    prompt = render_fim("qwen", PREFIX, SUFFIX)
    body = {"model": "cato-generation", "prompt": prompt}
    text = text_of(await post(tmp_path, "/v1/completions", body))
    assert text.startswith(simulated_text(0, f"python: {prompt}", 8))


async def test_code_of_other_files_reaches_a_workflow_that_takes_it(tmp_path: Path) -> None:
    snippet = {"filepath": "a.rb", "body": "A = 1\n"}
    segments = {
        "prefix": PREFIX,
        "suffix": SUFFIX,
        "filepath": "b.rb",
        "declarations": [snippet],
        "relevant_snippets_from_changed_files": None,
    }
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"language": "ruby", "segments": segments}),
        ("/infill", {**INFILL, "input_extra": [{"filename": "a.rb", "text": "A = 1\n"}]}),
        (
            "/v1/completions",
            {
                "model": "cato-completion",
                "prompt": "<|file_sep|>a.rb\nA = 1\n<|file_sep|>b.rb\n"
                + render_fim("qwen", PREFIX, SUFFIX),
            },
        ),
    ]
    prompt = render_fim("starcoder", f"a.rb\nA = 1\n{PREFIX}", SUFFIX)
    workflows = (COMPLETION_WITH_CONTEXT,)
    async with running(tmp_path, a_fast_pool(), workflows=workflows) as kit, kit.http() as http:
        for path, body in bodies:
            response = await http.post(path, json=body)
            assert text_of(response) == simulated_text(0, prompt, 12), path


async def test_a_direct_call_keeps_the_code_of_other_files_as_comments(tmp_path: Path) -> None:
    files = "<|file_sep|>a.rb\nA = 1\n<|file_sep|>b.rb\n"
    prompt = files + render_fim("qwen", PREFIX, SUFFIX)
    body = {"model": "fast", "prompt": prompt, "max_tokens": 12}
    expected = render_fim("starcoder", f"# a.rb\n# A = 1\n{PREFIX}", SUFFIX)
    text = text_of(await post(tmp_path, "/v1/completions", body))
    assert text == simulated_text(0, expected, 12)


@pytest.mark.parametrize("lines", [1, 5000])
async def test_editors_that_name_a_model_keep_the_code_of_other_files_that_fits(
    tmp_path: Path, lines: int
) -> None:
    code = "A = 1\n" * lines
    segments = {"prefix": PREFIX, "suffix": SUFFIX, "filepath": "b.js"}
    snippet = {"filepath": "a.rb", "body": code}
    bodies: list[tuple[str, str, dict[str, object]]] = [
        ("/infill", "#", {**INFILL, "input_extra": [{"filename": "a.rb", "text": code}]}),
        ("/v1/completions", "//", {"segments": {**segments, "declarations": [snippet]}}),
    ]
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        for path, marker, body in bodies:
            response = await http.post(path, json={"model": "fast", "n_predict": 12, **body})
            if lines == 1:
                context = f"{marker} a.rb\n{marker} A = 1\n"
                prompt = render_fim("starcoder", f"{context}{PREFIX}", SUFFIX)
                said = text_of(response)  # it may end early
                assert said, path
                assert simulated_text(0, prompt, 12).startswith(said), path
            asked = (
                response.json().get("tokens_evaluated") or response.json()["usage"]["prompt_tokens"]
            )
            assert (asked > 1000) == (lines > 1), path


async def test_a_stream_of_one_prompt_in_a_list_goes_on_when_its_engine_is_lost(
    tmp_path: Path,
) -> None:
    pool = a_pool("sim-slow", "slow", step_s=0.02, replicas=2)
    async with running(tmp_path, pool, workflows=()) as kit, kit.server() as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.completions.create(
                model="slow",
                prompt=[PREFIX],
                max_tokens=30,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            texts = [(await anext(aiter(stream))).choices[0].text]
            await pool.kill(ReplicaId("sim-slow#0"))
            texts += [chunk.choices[0].text async for chunk in stream if chunk.choices]
    assert "".join(texts) == simulated_text(0, PREFIX, 30)


class CountingEngine(SimulatedEngine):
    """Refuses prompts by its own tokens per character; `counts`: and says how many it counted."""

    def __init__(self, tokens_per_char: float, *, counts: bool = True) -> None:
        super().__init__(a_profile(), EngineSpec(kind="simulated"), "sim-fast")
        self._tokens_per_char, self._counts = tokens_per_char, counts
        self.prompts: list[str] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self.prompts.append(str(request.body["prompt"]))
        tokens, context = len(self.prompts[-1]) * self._tokens_per_char, self.facts.context_tokens
        if tokens + 12 > context:
            counted = round(tokens) if self._counts else None
            raise ContextLengthError("too long", prompt_tokens=counted, context_tokens=context)
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


async def prompts_of(folder: Path, engine: CountingEngine, code: str) -> list[str]:
    """The prompts that reach `engine` for a completion in the middle of `code`, the last of them
    with success."""
    pool, half = a_pool("sim-fast", "fast", replicas=0), len(code) // 2
    pool.add(engine)
    async with running(folder, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        body = {**FIM, "prompt": code[:half], "suffix": code[half:]}
        text_of(await http.post("/v1/completions", json=body))
    return engine.prompts


DIGITS = "".join(f"{n:04x}" for n in range(0, 65_536, 3))


@pytest.mark.parametrize(
    ("code", "tokens_per_char"),
    [
        (" ".join(f"0x{DIGITS[i : i + 2]}," for i in range(0, 20_000, 2)), 0.95),
        ("\n".join(DIGITS[i : i + 64] for i in range(0, 20_000, 64)), 0.9),
        ("    # この関数をリファクタリングして\n    x = compute(x)\n" * 400, 0.51),
        ("🎉🚀🔥💡📦🐛😀🤖👍🧪\n" * 900, 3.7),
    ],
)
async def test_dense_code_is_cut_to_fit_at_once(
    tmp_path: Path, code: str, tokens_per_char: float
) -> None:
    engine = CountingEngine(tokens_per_char)
    (prompt,) = await prompts_of(tmp_path, engine, code)
    assert len(prompt) * tokens_per_char > 0.6 * engine.facts.context_tokens


async def test_the_window_of_ordinary_code_is_that_of_its_characters(tmp_path: Path) -> None:
    code = "    for item in items:\n        total += item.price\n" * 900
    (prompt,) = await prompts_of(tmp_path, CountingEngine(0.25), code)
    room_chars = int((4096 - 12 - MARGIN_TOKENS) * (1 - MARGIN_FRACTION)) * 3.5
    assert room_chars - 100 < len(prompt) <= room_chars + 40


@pytest.mark.parametrize("chars", [5_000, 40_000])
async def test_a_prompt_that_an_engine_refuses_is_cut_by_the_engines_count(
    tmp_path: Path, chars: int
) -> None:
    engine = CountingEngine(2.5)
    refused, prompt = await prompts_of(tmp_path, engine, "word word\n" * (chars // 10))
    assert len(prompt) < len(refused)
    assert 2.5 * len(prompt) > 0.8 * engine.facts.context_tokens


@pytest.mark.parametrize("tokens_per_char", [0.5, 1.0, 2.5])
async def test_a_prompt_that_an_engine_refuses_without_a_count_gets_ever_shorter(
    tmp_path: Path, tokens_per_char: float
) -> None:
    engine = CountingEngine(tokens_per_char, counts=False)
    prompts = await prompts_of(tmp_path, engine, "word word\n" * 4000)
    assert 2 <= len(prompts) <= 1 + MOST_CUTS


async def test_a_prompt_that_no_cut_makes_fit_is_refused(tmp_path: Path) -> None:
    engine = CountingEngine(1000.0, counts=False)
    with pytest.raises(AssertionError, match="context_length_exceeded"):
        await prompts_of(tmp_path, engine, "word word\n" * 4000)
    assert len(engine.prompts) == 1 + MOST_CUTS


@pytest.mark.parametrize("prompt", [["x", "y"], [[1, 2]], []])
async def test_other_lists_are_no_prompt_to_fill_in(tmp_path: Path, prompt: list[object]) -> None:
    body = {"model": "fast", "prompt": prompt, "suffix": SUFFIX}
    response = await post(tmp_path, "/v1/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


# Limits


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**FIM, "max_tokens": 3}),
        ("/v1/completions", {**FIM, "options": {"num_predict": 3}}),
        ("/v1/fim/completions", {**FIM, "max_tokens": 3}),
        ("/infill", {**INFILL, "n_predict": 3}),
    ],
)
async def test_a_client_may_ask_for_less_than_the_task_gives(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    text = text_of(await post(tmp_path, path, body))
    assert text == simulated_text(0, render_fim("starcoder", PREFIX, SUFFIX), 3)


async def test_a_model_may_write_as_much_as_the_client_wants_at_least(tmp_path: Path) -> None:
    body = {**FIM, "model": "fast", "min_tokens": 100}
    answer = await post(tmp_path, "/v1/fim/completions", body)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 100)
    refused = await post(tmp_path, "/v1/fim/completions", {**body, "max_tokens": 50})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


async def test_stop_strings_of_the_client_end_a_tasks_answer_too(tmp_path: Path) -> None:
    stop = WRITTEN[4:9]
    text = text_of(await post(tmp_path, "/v1/completions", {**FIM, "stop": ["zzz", stop]}))
    assert text == WRITTEN[: WRITTEN.index(stop)]


# Mistral's


async def test_mistrals_answers_are_those_of_chat(tmp_path: Path) -> None:
    whole = (await post(tmp_path, "/v1/fim/completions", FIM)).json()
    assert whole["object"] == "chat.completion"
    response = await post(tmp_path, "/v1/fim/completions", {**FIM, "stream": True})
    *chunks, end = (value for _, value in sse_events(response.text))
    assert end == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == WRITTEN
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-1]["cato"]["status"] == "done"


async def test_mistrals_sdk_streams_as_its_users_read_it(tmp_path: Path) -> None:
    pool, workflows = a_fast_pool(), (COMPLETION, GENERATION)
    async with (
        running(tmp_path, pool, workflows=workflows) as kit,
        kit.server() as url,
        Mistral(api_key="none", server_url=url) as sdk,
    ):
        ask = {"model": "cato-completion", "prompt": PREFIX, "suffix": SUFFIX}
        chunks = [event.data async for event in await sdk.fim.stream_async(**ask)]
    # Without a guard: every chunk has a choice.
    assert "".join(str(data.choices[0].delta.content or "") for data in chunks) == WRITTEN
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 12


async def test_counts_come_in_a_chunk_of_their_own_to_those_who_ask_as_openais_clients(
    tmp_path: Path,
) -> None:
    body = {**FIM, "stream": True, "stream_options": {"include_usage": True}}
    response = await post(tmp_path, "/v1/fim/completions", body)
    *_, last, usage, _ = (value for _, value in sse_events(response.text))
    assert last["choices"][0]["finish_reason"] == "length"
    assert "usage" not in last
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["cato"]["status"] == "done"


# llama.cpp's


async def test_infill_answers_in_compact_json_with_the_fields_that_were_asked_for(
    tmp_path: Path,
) -> None:
    fields = ["content", "timings/prompt_n", "tokens_predicted", "timings/nothing"]
    response = await post(tmp_path, "/infill", {**INFILL, "response_fields": fields})
    assert '"content":"' in response.text
    answer = response.json()
    assert answer.keys() == {"content", "timings/prompt_n", "tokens_predicted"}
    assert answer["tokens_predicted"] == 12
    assert answer["timings/prompt_n"] > 0


@pytest.mark.parametrize("model", ["cato-completion", "fast"])
async def test_infill_says_why_it_ended(tmp_path: Path, model: str) -> None:
    body = {**INFILL, "model": model, "n_predict": 12}
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        cut = (await http.post("/infill", json=body)).json()
        word = cut["content"].split()[3]
        stopped = (await http.post("/infill", json={**body, "stop": ["never", word]})).json()
    assert (cut["stop_type"], cut["stopping_word"]) == ("limit", "")
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert word not in stopped["content"]


async def test_infill_streams_pieces_and_ends_with_the_counts(tmp_path: Path) -> None:
    response = await post(tmp_path, "/infill", {**INFILL, "stream": True})
    *pieces, last = (value for _, value in sse_events(response.text))
    assert "".join(p["content"] for p in pieces) == WRITTEN
    assert not any(p["stop"] for p in pieces)
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 12)


async def test_a_request_to_warm_a_cache_costs_nothing(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        response = await http.post("/infill", json={**INFILL, "n_predict": 0})
        assert response.json()["content"] == ""
        assert response.headers["X-CATO-Outcome"] == "nothing-asked"
        assert not kit.records.receipts


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"t_max_prompt_ms": 500, "t_max_predict_ms": 250}, "ttft=500ms"),
        ({"t_max_prompt_ms": 99_999}, "ttft=10000ms"),
        ({"t_max_predict_ms": 250}, "ttft=10000ms"),
    ],
)
async def test_the_time_that_an_editor_gives_tightens_the_sla(
    tmp_path: Path, limits: dict[str, object], expected: str
) -> None:
    response = await post(tmp_path, "/infill", {**INFILL, **limits})
    assert response.headers["X-CATO-SLA"] == expected


# Tabby's


async def test_tabby_finds_models_for_what_is_deployed(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        health = await http.get("/v1/health")
        assert (await http.post("/v1/health")).json() == health.json()
        setting = await http.get("/v1beta/server_setting")
    assert health.json()["model"] == "cato-completion"
    assert health.json()["chat_model"] is None
    assert health.json()["version"]["git_describe"].startswith("v0.")
    assert setting.json() == {"disable_client_side_telemetry": True}


async def test_what_people_did_with_a_completion_is_handed_on(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        completion = await http.post("/v1/completions", json=TABBY)
        event = {
            "type": "select",
            "completion_id": completion.json()["id"],
            "choice_index": 0,
            "view_id": "v-1",
            "elapsed": 230,
        }
        noted = await http.post("/v1/events", params={"select_kind": "line"}, json=event)
    assert (noted.status_code, noted.content) == (200, b"")
    assert kit.feedback.noted == [
        Feedback(
            completion.headers["x-request-id"], Reaction.SELECT, 0, "v-1", "line", after_s=0.23
        )
    ]


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"type": "bought", "completion_id": "cmpl-1"}, "type"),
        ({"type": ["view"], "completion_id": "cmpl-1"}, "type"),
        ({"type": "view"}, "completion_id"),
        ({"type": "view", "completion_id": "cmpl-1", "elapsed": "soon"}, "elapsed"),
    ],
)
async def test_an_event_that_says_nothing_is_refused(
    tmp_path: Path, event: dict[str, object], param: str
) -> None:
    response = await post(tmp_path, "/v1/events", event)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"segments": {"suffix": "x"}}, "segments"),
        ("/v1/completions", {"segments": "x"}, "segments"),
        ("/v1/fim/completions", {"model": "fast", "suffix": "x"}, "prompt"),
        ("/v1/fim/completions", {**FIM, "model": 3}, "model"),
        ("/v1/fim/completions", {**FIM, "suffix": 3}, "suffix"),
        ("/v1/fim/completions", {**FIM, "max_tokens": 0}, "max_tokens"),
        ("/infill", {**INFILL, "prompt": 3}, "prompt"),
        ("/infill", {**INFILL, "n_predict": "3"}, "n_predict"),
        ("/infill", {**INFILL, "input_extra": "x"}, "input_extra"),
        ("/infill", {**INFILL, "response_fields": [1]}, "response_fields"),
        ("/infill", {**INFILL, "t_max_prompt_ms": "x"}, "t_max_prompt_ms"),
        ("/infill", {**INFILL, "stop": [1]}, "stop"),
    ],
)
async def test_what_a_completion_cannot_take_is_refused_by_field(
    tmp_path: Path, path: str, body: dict[str, object], param: str
) -> None:
    response = await post(tmp_path, path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_model_that_cannot_fill_in_refuses_a_suffix(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_pool("other", family="none"), workflows=()) as kit,
        kit.http() as http,
    ):
        response = await http.post("/v1/fim/completions", json={**FIM, "model": "other"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")


# Overload

SHED: list[tuple[str, dict[str, object]]] = [
    ("/v1/fim/completions", FIM),
    ("/v1/completions", TABBY),
    ("/infill", INFILL),
]


@pytest.mark.parametrize(("path", "body"), SHED)
async def test_a_shed_completion_is_an_empty_answer(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    response = (await under_load(tmp_path, (path, body)))[0]
    assert text_of(response) == ""
    assert response.headers["X-CATO-Outcome"] == "shed"
    assert response.headers["X-CATO-Met"] == "false"


async def test_a_shed_stream_ends_at_once_without_text(tmp_path: Path) -> None:
    mistral, infill = await under_load(
        tmp_path,
        ("/v1/fim/completions", {**FIM, "stream": True}),
        ("/infill", {**INFILL, "stream": True}),
    )
    *chunks, end = (value for _, value in sse_events(mistral.text))
    assert not any(c["choices"][0]["delta"].get("content") for c in chunks)
    assert (chunks[-1]["choices"][0]["finish_reason"], end) == ("stop", "[DONE]")
    assert [value for _, value in sse_events(infill.text)] == [{"content": "", "stop": True}]


async def test_openais_clients_are_told_to_come_again(tmp_path: Path) -> None:
    (response,) = await under_load(tmp_path, ("/v1/completions", FIM))
    assert response.status_code == 429
    assert "Retry-After" in response.headers


async def under_load(
    folder: Path, *requests: tuple[str, dict[str, object]]
) -> list[httpx.Response]:
    """The answers while the one slot of the completions' pool is taken and one more waits."""
    pool = a_slow_pool(slots=1, max_queued=1)
    slow_completion = COMPLETION.replace("model: fast", "model: slow")
    workflows = (slow_completion, SLOW)
    async with running(folder, pool, workflows=workflows) as kit, kit.http() as http:
        task = {"inputs": {"instruction": "x"}}
        busy = [asyncio.create_task(http.post("/v1/tasks/slow", json=task)) for _ in range(2)]
        await until_busy(pool)
        await until(lambda: pool.orchestrator.picture(0.0).queued == 1, within_s=2)
        answers = [await http.post(path, json=body) for path, body in requests]
        for task_ in busy:
            task_.cancel()
        await asyncio.wait(busy)
    return answers
