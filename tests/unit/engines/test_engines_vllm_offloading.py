"""vLLM's own KV offloading: when it is on, how much it gets, and what fits into it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.ids import ModelName
from cato.core.topology import EngineSpec, ModelSpec
from cato.engines.vllm.arguments import server_argv
from cato.engines.vllm.offloading import (
    GIB,
    HOST_SHARE,
    HostMemory,
    Offloading,
    kv_token_bytes,
    offloading_of,
    share_of,
)

MODEL = ModelSpec(ModelName("m"), "m", "qwen")
FLAG = "--kv-offloading-size"


def a_host(total: int, *, free: int | None = None, shm: int | None = None) -> HostMemory:
    """In GiB."""
    free, shm = total if free is None else free, total if shm is None else shm
    return HostMemory(total * GIB, free * GIB, shm * GIB, shm * GIB)


def argv(spec: EngineSpec, accelerator: str) -> list[str]:
    found = offloading_of(spec, accelerator, 1, "/nowhere")
    return server_argv(spec, MODEL, "/m", "/s", accelerator=accelerator, cards=1, offloading=found)


def test_is_on_for_vllm_on_a_gpu_alone() -> None:
    spec = EngineSpec("vllm")
    assert spec.on("gpu").host_memory is True
    assert spec.on("cpu").host_memory is False
    assert spec.on("npu").host_memory is False
    assert not EngineSpec("simulated").on("gpu").host_memory


@pytest.mark.parametrize(
    "spec",
    [
        EngineSpec("vllm", host_memory=False),
        EngineSpec("vllm", prefix_caching=False),
        EngineSpec("vllm", sleep=True),
        EngineSpec("vllm", swap=True),
        EngineSpec("vllm", args=(FLAG, "9")),
        EngineSpec("vllm", args=("--kv-transfer-config={}",)),
        EngineSpec("vllm", args=("--kv_offloading_size", "8")),
        EngineSpec("vllm", args=("--kv-offloading-s=8",)),
        EngineSpec("vllm", args=("--kv_transfer_config.kv_role", "kv_both")),
    ],
)
def test_is_off_where_it_was_set_or_would_be_wrong(spec: EngineSpec) -> None:
    assert spec.on("gpu").host_memory is False
    assert argv(spec, "gpu").count(FLAG) == spec.args.count(FLAG)


def test_a_size_that_was_set_is_what_vllm_gets() -> None:
    words = argv(EngineSpec("vllm", host_memory=48 * GIB), "gpu")
    assert words[words.index(FLAG) + 1] == "48"
    assert words[words.index("--kv-offloading-backend") + 1] == "native"
    assert FLAG not in argv(EngineSpec("vllm"), "cpu")


def test_engines_of_a_host_share_its_memory() -> None:
    assert share_of(a_host(1024), 8) == 64 * GIB
    assert share_of(a_host(1024, free=64), 8) == 32 * GIB
    assert share_of(a_host(1024, shm=64), 8) == 4 * GIB


def test_a_share_of_less_than_a_few_prompts_is_none() -> None:
    assert share_of(a_host(1024, shm=1), 1) == 0
    assert "--shm-size" in Offloading().words


@given(st.integers(1, 4096), st.integers(0, 4096), st.integers(0, 4096), st.integers(1, 16))
def test_engines_that_start_one_after_another_never_take_more_than_there_is(
    total: int, used: int, shm: int, engines: int
) -> None:
    taken = 0
    for _ in range(engines):
        free = max(0, total - used - taken)
        host = HostMemory(total * GIB, free * GIB, shm * GIB, max(0, shm - taken) * GIB)
        taken += share_of(host, engines) // GIB
    assert taken <= HOST_SHARE * total
    assert taken <= min(max(0, total - used), shm)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Qwen2.5-7B: 28 layers, 4 KV heads of 128.
        (
            {
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "hidden_size": 3584,
                "torch_dtype": "bfloat16",
            },
            57_344,
        ),
        # DeepSeek-V2-Lite: 27 layers of one latent vector.
        (
            {
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "hidden_size": 2048,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            27 * 576 * 2,
        ),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}}, 64),
        ({"model_type": "mamba"}, 0),
        ([], 0),
    ],
)
def test_the_size_of_a_token_is_read_from_the_model(
    tmp_path: Path, config: object, expected: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_token_bytes(str(tmp_path)) == expected


def test_an_engine_tells_how_many_tokens_it_keeps(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = EngineSpec("vllm", host_memory=2 * GIB)
    found = offloading_of(spec, "gpu", 1, str(tmp_path))
    assert found == Offloading(2 * GIB, 2 * GIB // 64)
    assert "2 GiB of the host's memory, 33554432 tokens" in found.words
    assert offloading_of(spec, "gpu", 1, "/nowhere").tokens == 0
