"""Streams of a real vLLM that are cut and go on, and what it makes of bodies that CATO rewrote."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cato.demo import demo_model_path
from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.vllm.host import Zygote
from cato.engines.vllm.process import VllmEngine
from cato.serve.continuation import Answer
from cato.serve.prompts import EngineCall
from cato.wire.as_chat import messages_as_chat
from cato.wire.endpoint import Endpoint
from cato.wire.stable import stable
from tests.live.test_engines_vllm import MODEL, SPEC

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from wire_kit import counts_in, final, finish_in, parts_in

pytestmark = [
    pytest.mark.live,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

SAID = [{"role": "user", "content": "def read(path):\n    with open(path) as file:\n"}]
TOKENS = 40
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {
        "messages": SAID,
        "max_tokens": TOKENS,
        "tools": [{"type": "function", "function": {"name": "read", "parameters": TOOL}}],
        "tool_choice": "none",  # this engine parses no calls
    },
    Endpoint.RESPONSES: {"input": SAID, "max_output_tokens": TOKENS, "store": False},
    Endpoint.MESSAGES: {
        "system": "Be brief.",
        "messages": SAID,
        "max_tokens": TOKENS,
    },
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(zygote: Zygote) -> AsyncIterator[VllmEngine]:
    with tempfile.TemporaryDirectory(prefix="cato-e-") as folder:  # short: it holds sockets
        engine = VllmEngine(SPEC, MODEL, str(demo_model_path()), folder, zygote.socket)
        await engine.start()
        yield engine
        await engine.stop()


async def attempt(
    engine: VllmEngine, answer: Answer, call: EngineCall, number: int, chunks_left: int | None
) -> list[EngineChunk]:
    """What a client gets of one attempt that is lost after so many chunks; all, if that is None."""
    asked = answer.next_call(call)
    request = EngineRequest(
        f"{number}-{os.urandom(3).hex()}", asked.endpoint, asked.body, raw=True,
        begun=asked.begun, begun_tokens=asked.begun_tokens,
    )  # fmt: skip
    sent: list[EngineChunk] = []
    taken = 0
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            if chunks_left is not None and taken >= chunks_left:
                break
            sent += answer.add(chunk)
            taken += 1
    return sent


@pytest.mark.parametrize("endpoint", list(BODIES))
async def test_a_cut_stream_of_vllm_goes_on_as_one(engine: VllmEngine, endpoint: Endpoint) -> None:
    body = {**BODIES[endpoint], "temperature": 0}
    call = EngineCall(endpoint, body, 20, TOKENS, TOKENS, MODEL.name, raw=True)
    whole = Answer()
    whole_sent = await attempt(engine, whole, call, 0, None)
    expected = final_of(endpoint, whole_sent)
    assert whole.output_tokens > 10, "the demo model says something"
    begun = ""
    for lost_after in (1, 2, 4, 8):
        answer = Answer()
        sent = await attempt(engine, answer, call, 1, lost_after)
        begun = answer.text
        if answer.is_whole:  # a reader that lags gets all of a short answer at once
            continue
        assert answer.can_go_on(call)
        sent += answer.rest(call) or await attempt(engine, answer, call, 2, None)
        told = final_of(endpoint, sent)
        (text,) = parts_in(endpoint, told)
        assert text.text == answer.text  # type: ignore[union-attr]
        assert answer.text.startswith(begun)
        assert told.id == id_in(sent[0])
        # The rest follows from text, which may be split into other tokens than the model chose.
        assert answer.text[: len(begun) + 8] == whole.text[: len(begun) + 8]
        prompt, _, output = counts_in(endpoint, told)
        assert abs(prompt - counts_in(endpoint, expected)[0]) <= 3
        assert output == answer.output_tokens <= TOKENS
        assert finish_in(endpoint, told)
    assert begun, "a first chunk may have no text, later ones have"


def final_of(endpoint: Endpoint, sent: list[EngineChunk]) -> Any:
    data = b"".join(chunk.raw for chunk in sent)
    if endpoint is Endpoint.CHAT:  # its SDK's helper takes no answer that was cut
        data = data.replace(b'"finish_reason":"length"', b'"finish_reason":"stop"')
    return final(endpoint, data)


def id_in(first: EngineChunk) -> str:
    """The id that a stream begins with."""
    event = json.loads(first.raw.split(b"\n\n")[0].partition(b"data: ")[2])
    inner = event.get("response") or event.get("message") or event
    return str(inner["id"])


MESSAGES_BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 50,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop_sequences": ["END"],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; "},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": " Be kind."},
    ],
    "tools": [
        {"name": "read", "description": "Read a file.", "input_schema": TOOL},
        {"name": "fetch", "input_schema": TOOL, "defer_loading": True},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "!"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a.py"}},
                {"type": "tool_use", "id": "c2", "name": "read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "x = 1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [
                        {"type": "text", "text": "one"},
                        {"type": "text", "text": "two"},
                        {"type": "tool_reference", "tool_name": "fetch"},
                    ],
                },
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "A reminder."},
        {"role": "assistant", "content": "Well."},
        {
            "role": "user",
            "content": [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="},
                },
                {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}},
            ],
        },
    ],
}


class Words:
    """A tokenizer that knows only the marks of tool calls."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, marks: list[str]) -> None:
        self.vocab = {mark: i for i, mark in enumerate(["other", *marks])}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.vocab.get(text, 0)]

    def decode(self, ids: list[int], **_: object) -> str:
        return ""

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.vocab.get(token)


# By parser: its marks, and how the model calls a tool with a number and a list.
CALLS = {
    "qwen3.Qwen3Parser": (
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
        "<tool_call>\n<function=Todo>\n<parameter=list>\n[1]\n</parameter>\n"
        "<parameter=limit>\n5\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm47_moe.Glm47MoeParser": (
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
         "<arg_value>", "</arg_value>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "<tool_call>Todo<arg_key>list</arg_key><arg_value>[1]</arg_value>"
        "<arg_key>limit</arg_key><arg_value>5</arg_value></tool_call>",
    ),
    "minimax_m2.MinimaxM2Parser": (
        ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
        '<minimax:tool_call>\n<invoke name="Todo">\n<parameter name="list">[1]</parameter>\n'
        '<parameter name="limit">5</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
}  # fmt: skip


@pytest.mark.parametrize("parser", CALLS)
async def test_a_tool_that_was_loaded_later_is_called_with_its_types(parser: str) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    types = {"list": {"type": "array"}, "limit": {"type": "integer"}}
    schema = {"type": "object", "properties": types}
    found = {"type": "tool_reference", "tool_name": "Todo"}
    body = {
        "model": "m",
        "max_tokens": 9,
        "tools": [
            {"name": "Read", "input_schema": {"type": "object"}},
            {"name": "Todo", "input_schema": schema, "defer_loading": True},
        ],
        "messages": [
            {"role": "user", "content": "Note it."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [found]}],
            },
        ],
    }
    better, changed = stable(Endpoint.MESSAGES, body)
    assert changed == ["deferred-tools"]
    asked = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(better)
    )
    marks, said = CALLS[parser]
    module, _, name = parser.partition(".")
    words = Words(marks)
    reader = getattr(import_module(f"vllm.parser.{module}"), name)(
        words, asked.tools, chat_template_kwargs={"enable_thinking": False}
    )
    pieces = [piece for piece in re.split(f"({'|'.join(map(re.escape, marks))})", said) if piece]
    names, arguments = "", ""
    for i, piece in enumerate(pieces):
        is_last = i == len(pieces) - 1
        delta = reader.parse_delta(
            piece, words.encode(piece), asked, prompt_token_ids=[0], finished=is_last
        )
        for call in delta.tool_calls if delta else ():
            names += call.function.name or ""
            arguments += call.function.arguments or ""
    assert names == "Todo"
    assert json.loads(arguments) == {"list": [1], "limit": 5}


async def test_messages_become_the_chat_that_vllm_makes_of_them() -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = AnthropicMessagesRequest.model_validate(MESSAGES_BODY)
    theirs = AnthropicServingMessages.to_chat_completion_request(asked)
    ours = ChatCompletionRequest.model_validate({"model": "m", **messages_as_chat(MESSAGES_BODY)})
    assert ours.messages == theirs.messages
    for name in (
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_tokens",
        "temperature",
        "top_p",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.stop == theirs.stop == ["END"]
