"""How long answers may get: the server's caps of direct calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from cato.config.schema import IngressArgs
from cato.core.errors import InputError
from cato.core.topology import OutputCaps
from cato.engines.base import Endpoint
from cato.serve.ingress.limits import limited

SAID = [{"role": "user", "content": "Write add."}]
TOOLS = [{"type": "function"}]
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
CAPS = OutputCaps(completion=500, chat=1000, agent=2000)


def limited_to(
    endpoint: Endpoint, body: dict[str, object], prompt_tokens: int, context_tokens: int = 32_000
) -> dict[str, object]:
    changed, limit = limited(body, endpoint, prompt_tokens, context_tokens, CAPS)
    said = [changed[f] for f in LIMITS if f in changed]
    assert limit == (min(said) if said else None)  # type: ignore[type-var]
    return changed


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
    assert limited_to(endpoint, {"messages": SAID, **body}, 3)[field] == expected


def test_a_completion_without_a_limit_has_the_engines_own() -> None:
    assert limited_to(Endpoint.COMPLETIONS, {"prompt": "x"}, 1) == {"prompt": "x"}


def test_no_limit_is_set_that_may_not_fit_behind_the_prompt() -> None:
    body: dict[str, object] = {"messages": SAID}
    assert limited_to(Endpoint.CHAT, body, 1000, CAPS.chat + 500) == body
    assert limited_to(Endpoint.CHAT, body, 1000, 1024) == body


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [
        (Endpoint.CHAT, "max_tokens"),
        (Endpoint.CHAT, "max_completion_tokens"),
        (Endpoint.MESSAGES, "max_tokens"),
        (Endpoint.RESPONSES, "max_output_tokens"),
        (Endpoint.COMPLETIONS, "max_tokens"),
    ],
)
def test_a_limit_gives_way_to_the_prompt_in_every_dialect(endpoint: Endpoint, field: str) -> None:
    body: dict[str, object] = {"messages": SAID, field: 8_192}
    assert limited_to(endpoint, body, 600, 1024)[field] == 256  # a quarter, should it fit
    assert limited_to(endpoint, body, 450, 1024)[field] == 1024 - 585
    sure, limit = limited(body, endpoint, 400, 800, CAPS, is_sure=True)
    assert sure[field] == limit == 800 - 424


@pytest.mark.parametrize("limit", [0, -1, "9", 1.5, True])
def test_a_limit_that_is_no_number_of_tokens_is_refused(limit: object) -> None:
    with pytest.raises(InputError) as refused:
        limited({"messages": SAID, "max_tokens": limit}, Endpoint.CHAT, 3, 1024, CAPS)
    assert refused.value.param == "max_tokens"


def test_a_deployment_file_sets_the_caps() -> None:
    args = IngressArgs.model_validate({"output_caps": {"agent": 64}})
    assert args.to_ingress().output_caps == replace(OutputCaps(), agent=64)
    for wrong in ({"agent": 0}, {"agents": 64}):
        with pytest.raises(ValidationError):
            IngressArgs.model_validate({"output_caps": wrong})
