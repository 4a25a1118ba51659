"""Streams as the makers' SDKs put them together."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import httpx2
import openai

from cato.wire.answer import Part, Text, Thinking, ToolCall
from cato.wire.endpoint import Endpoint
from cato.wire.events import DONE_EVENT

SAID: Any = [{"role": "user", "content": "x"}]


def an_openai(data: bytes) -> openai.OpenAI:
    """OpenAI's SDK; whatever it asks for, it gets these bytes of a stream."""
    http = _http(httpx, data)
    return openai.OpenAI(base_url="http://x", api_key="x", http_client=http, max_retries=0)


def a_claude(data: bytes) -> anthropic.Anthropic:
    """Anthropic's."""
    http = _http(httpx2, data)
    return anthropic.Anthropic(base_url="http://x", api_key="x", http_client=http, max_retries=0)


def _http(library: Any, data: bytes) -> Any:
    headers = {"Content-Type": "text/event-stream"}
    reply = library.Response(200, content=data, headers=headers)
    return library.Client(transport=library.MockTransport(lambda request: reply))


def final(endpoint: Endpoint, data: bytes) -> Any:
    """The whole answer that the SDK makes of a stream."""
    match endpoint:
        case Endpoint.CHAT:
            sdk = an_openai(data + DONE_EVENT)
            with sdk.chat.completions.stream(model="m", messages=SAID) as chat:
                return chat.get_final_completion()
        case Endpoint.RESPONSES:
            with an_openai(data).responses.stream(model="m", input="x") as response:
                return response.get_final_response()
        case Endpoint.MESSAGES:
            with a_claude(data).messages.stream(model="m", max_tokens=9, messages=SAID) as message:
                return message.get_final_message()
    raise AssertionError(f"no SDK puts {endpoint} together")


def parts_in(endpoint: Endpoint, answer: Any) -> list[Part]:
    """What a whole answer of an SDK says, without what says nothing."""
    parts: list[Part] = []
    match endpoint:
        case Endpoint.CHAT:
            message = answer.choices[0].message
            parts.append(Thinking((message.model_extra or {}).get("reasoning", "")))
            parts.append(Text(message.content or ""))
            for call in message.tool_calls or ():
                parts.append(ToolCall(call.id, call.function.name, call.function.arguments))
        case Endpoint.RESPONSES:
            for item in answer.output:
                match item.type:
                    case "message":
                        parts.append(Text("".join(c.text for c in item.content)))
                    case "reasoning":
                        parts.append(Thinking("".join(c.text for c in item.content or ())))
                    case _:
                        parts.append(ToolCall(item.call_id, item.name, item.arguments))
        case _:
            for block in answer.content:
                match block.type:
                    case "text":
                        parts.append(Text(block.text))
                    case "thinking":
                        parts.append(Thinking(block.thinking))
                    case _:
                        parts.append(ToolCall(block.id, block.name, json.dumps(block.input)))
    return [part for part in parts if isinstance(part, ToolCall) or part.text]


def counts_in(endpoint: Endpoint, answer: Any) -> tuple[int, int, int]:
    """Prompt, cached and output tokens."""
    usage = answer.usage
    match endpoint:
        case Endpoint.CHAT:
            cached = usage.prompt_tokens_details.cached_tokens
            return usage.prompt_tokens, cached, usage.completion_tokens
        case Endpoint.RESPONSES:
            cached = usage.input_tokens_details.cached_tokens
            return usage.input_tokens, cached, usage.output_tokens
        case _:  # Anthropic's count is without what was cached
            cached = usage.cache_read_input_tokens
            return usage.input_tokens + cached, cached, usage.output_tokens


def finish_in(endpoint: Endpoint, answer: Any) -> str:
    """The finish reason, in the words of the dialect."""
    match endpoint:
        case Endpoint.CHAT:
            return str(answer.choices[0].finish_reason)
        case Endpoint.RESPONSES:
            return str(answer.status)
        case _:
            return str(answer.stop_reason)
