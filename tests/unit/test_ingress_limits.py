"""How long answers may get: the server's caps of direct calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ingress_kit import a_pool
from pydantic import ValidationError

from cato.config.schema import IngressArgs
from cato.core.errors import InputError
from cato.core.topology import OutputCaps
from cato.engines.base import Endpoint
from cato.serve.ingress.limits import capped
from cato.serve.pools import PoolInfo

SAID = [{"role": "user", "content": "Write add."}]
TOOLS = [{"type": "function"}]
CAPS = OutputCaps(completion=500, chat=1000, agent=2000)


def a_pool_info(context_tokens: int = 32_000) -> PoolInfo:
    info = a_pool("large").info
    return replace(info, profile=replace(info.profile, context_tokens=context_tokens))


@pytest.mark.parametrize(
    ("endpoint", "body", "field", "expected"),
    [
        (Endpoint.CHAT, {}, "max_completion_tokens", CAPS.chat),
        (Endpoint.CHAT, {"tools": TOOLS}, "max_completion_tokens", CAPS.agent),
        (Endpoint.CHAT, {"max_tokens": 5}, "max_tokens", 5),
        (Endpoint.CHAT, {"max_tokens": 99_999}, "max_tokens", CAPS.chat),
        (Endpoint.RESPONSES, {"tools": TOOLS}, "max_output_tokens", CAPS.agent),
        (Endpoint.MESSAGES, {"max_tokens": 99_999}, "max_tokens", CAPS.chat),
        (Endpoint.COMPLETIONS, {"max_tokens": 99_999}, "max_tokens", CAPS.completion),
    ],
)
def test_a_direct_call_writes_no_more_than_its_cap(
    endpoint: Endpoint, body: dict[str, object], field: str, expected: int
) -> None:
    assert capped({"messages": SAID, **body}, endpoint, a_pool_info(), CAPS)[field] == expected


def test_a_completion_without_a_limit_has_the_engines_own() -> None:
    assert capped({"prompt": "x"}, Endpoint.COMPLETIONS, a_pool_info(), CAPS) == {"prompt": "x"}


def test_no_limit_is_set_that_may_not_fit_behind_the_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 4000}]}
    assert capped(body, Endpoint.CHAT, a_pool_info(CAPS.chat + 500), CAPS) == body
    assert capped(body, Endpoint.CHAT, a_pool_info(1024), CAPS) == body


def test_anthropics_limit_gives_way_to_the_context() -> None:
    body = {"messages": SAID, "max_tokens": 32_000}
    assert 900 < capped(body, Endpoint.MESSAGES, a_pool_info(1024), CAPS)["max_tokens"] < 1024
    body["messages"] = [{"role": "user", "content": "x" * 4000}]
    assert capped(body, Endpoint.MESSAGES, a_pool_info(1024), CAPS)["max_tokens"] == 256


@pytest.mark.parametrize("limit", [0, -1, "9", 1.5, True])
def test_a_limit_that_is_no_number_of_tokens_is_refused(limit: object) -> None:
    with pytest.raises(InputError) as refused:
        capped({"messages": SAID, "max_tokens": limit}, Endpoint.CHAT, a_pool_info(), CAPS)
    assert refused.value.param == "max_tokens"


def test_a_deployment_file_sets_the_caps() -> None:
    args = IngressArgs.model_validate({"output_caps": {"agent": 64}})
    assert args.to_ingress().output_caps == replace(OutputCaps(), agent=64)
    for wrong in ({"agent": 0}, {"agents": 64}):
        with pytest.raises(ValidationError):
            IngressArgs.model_validate({"output_caps": wrong})
