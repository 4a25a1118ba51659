"""How long answers may get: the server's caps of direct calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ingress_kit import a_pool

from cato.core.errors import InputError
from cato.engines.base import Endpoint
from cato.serve.ingress.limits import AGENT_CAP, CHAT_CAP, COMPLETION_CAP, capped
from cato.serve.pools import PoolInfo

SAID = [{"role": "user", "content": "Write add."}]
TOOLS = [{"type": "function"}]


def a_pool_info(context_tokens: int = 32_000) -> PoolInfo:
    info = a_pool("large").info
    return replace(info, profile=replace(info.profile, context_tokens=context_tokens))


@pytest.mark.parametrize(
    ("endpoint", "body", "field", "expected"),
    [
        (Endpoint.CHAT, {}, "max_completion_tokens", CHAT_CAP),
        (Endpoint.CHAT, {"tools": TOOLS}, "max_completion_tokens", AGENT_CAP),
        (Endpoint.CHAT, {"max_tokens": 5}, "max_tokens", 5),
        (Endpoint.CHAT, {"max_tokens": 99_999}, "max_tokens", CHAT_CAP),
        (Endpoint.RESPONSES, {"tools": TOOLS}, "max_output_tokens", AGENT_CAP),
        (Endpoint.MESSAGES, {"max_tokens": 99_999}, "max_tokens", CHAT_CAP),
        (Endpoint.COMPLETIONS, {"max_tokens": 99_999}, "max_tokens", COMPLETION_CAP),
    ],
)
def test_a_direct_call_writes_no_more_than_its_cap(
    endpoint: Endpoint, body: dict[str, object], field: str, expected: int
) -> None:
    assert capped({"messages": SAID, **body}, endpoint, a_pool_info())[field] == expected


def test_a_completion_without_a_limit_has_the_engines_own() -> None:
    assert capped({"prompt": "x"}, Endpoint.COMPLETIONS, a_pool_info()) == {"prompt": "x"}


def test_no_limit_is_set_that_may_not_fit_behind_the_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 4000}]}
    assert capped(body, Endpoint.CHAT, a_pool_info(CHAT_CAP + 500)) == body
    assert capped(body, Endpoint.CHAT, a_pool_info(1024)) == body


def test_anthropics_limit_gives_way_to_the_context() -> None:
    body = {"messages": SAID, "max_tokens": 32_000}
    assert 900 < capped(body, Endpoint.MESSAGES, a_pool_info(1024))["max_tokens"] < 1024
    body["messages"] = [{"role": "user", "content": "x" * 4000}]
    assert capped(body, Endpoint.MESSAGES, a_pool_info(1024))["max_tokens"] == 256


@pytest.mark.parametrize("limit", [0, -1, "9", 1.5, True])
def test_a_limit_that_is_no_number_of_tokens_is_refused(limit: object) -> None:
    with pytest.raises(InputError) as refused:
        capped({"messages": SAID, "max_tokens": limit}, Endpoint.CHAT, a_pool_info())
    assert refused.value.param == "max_tokens"
