"""How long answers may get: the server's caps of direct calls."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from ingress_kit import COMPLETION, a_pool, a_profile, running
from pydantic import ValidationError

from cato.config.schema import IngressArgs
from cato.core.errors import ContextLengthError, InputError
from cato.core.session import Prompt
from cato.core.topology import EngineSpec, OutputCaps
from cato.core.workflow import CallSettings
from cato.engines.base import Endpoint, EngineChunk, EngineRequest
from cato.engines.simulated.engine import SimulatedEngine
from cato.serve.ingress.limits import CORRECTED, limited
from cato.serve.prompts import with_room
from cato.wire.limits import shortened

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
    assert limited_to(endpoint, body, 1300, 1024)[field] == 256  # a quarter, should it fit
    assert limited_to(endpoint, body, 780, 1024)[field] == 1024 - 600, "the engine lowers it more"
    sure, limit = limited(body, endpoint, 530, 800, CAPS, factor=CORRECTED)
    assert sure[field] == limit == 800 - 500


def test_a_thinking_budget_stays_below_a_limit_that_is_lowered() -> None:
    caps = OutputCaps(completion=8192, chat=4096, agent=8192)
    thinking = {"type": "enabled", "budget_tokens": 10_000, "display": "omitted"}
    asked: dict[str, object] = {"messages": SAID, "max_tokens": 16_000, "thinking": thinking}
    before = copy.deepcopy(asked)
    for tools, budget in (({}, 4095), ({"tools": TOOLS}, 8191)):
        body, limit = limited({**asked, **tools}, Endpoint.MESSAGES, 100, 131_072, caps)
        assert (body["max_tokens"], limit) == (budget + 1, budget + 1)
        assert body["thinking"] == {**thinking, "budget_tokens": budget}
    body, _ = limited(asked, Endpoint.MESSAGES, 600, 6000, caps)
    assert body["max_tokens"] == 4096
    body, _ = limited(asked, Endpoint.MESSAGES, 3000, 6000, caps)
    assert (body["max_tokens"], body["thinking"]) == (3692, {**thinking, "budget_tokens": 3691})
    assert asked == before, "the client's body is kept for the receipt and for other attempts"


def test_a_thinking_budget_below_the_smallest_that_engines_take_is_left_out() -> None:
    for cap, left in ((1024, None), (1025, {"type": "enabled", "budget_tokens": 1024})):
        thinking = {"type": "enabled", "budget_tokens": 2000}
        body = {"messages": SAID, "max_tokens": 4000, "thinking": thinking}
        changed, _ = limited(body, Endpoint.MESSAGES, 3, 32_000, replace(CAPS, chat=cap))
        assert changed.get("thinking") == left


@pytest.mark.parametrize(
    "thinking",
    [
        *(None, 3, {"type": "disabled"}, {"type": "adaptive"}),
        *({"type": "enabled", "budget_tokens": tokens} for tokens in ("x", 999)),
    ],
)
def test_thinking_without_a_budget_that_is_too_large_passes_unchanged(thinking: object) -> None:
    body = {"messages": SAID, "max_tokens": 4000, "thinking": thinking}
    assert limited_to(Endpoint.MESSAGES, body, 3)["thinking"] == thinking


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_the_least_tokens_are_no_more_than_a_limit_that_is_lowered(endpoint: Endpoint) -> None:
    body: dict[str, object] = {"max_tokens": 3000, "min_tokens": 2000}
    changed = limited_to(endpoint, body, 3)
    cap = CAPS.chat if endpoint is Endpoint.CHAT else CAPS.completion
    assert (changed["min_tokens"], changed["max_tokens"]) == (cap, cap)
    assert limited_to(endpoint, {**body, "min_tokens": 20}, 3)["min_tokens"] == 20


def test_the_least_tokens_are_no_more_than_a_limit_that_the_client_did_not_set() -> None:
    changed = limited_to(Endpoint.CHAT, {"messages": SAID, "min_tokens": 20_000}, 3)
    assert changed["min_tokens"] == changed["max_completion_tokens"] == CAPS.chat


def test_fields_that_contradict_each_other_are_the_engines_to_refuse() -> None:
    thinking = {"type": "enabled", "budget_tokens": 500}
    body: dict[str, object] = {"max_tokens": 400, "min_tokens": 401, "thinking": thinking}
    assert limited_to(Endpoint.MESSAGES, body, 3) == body


def test_the_rest_of_an_answer_keeps_its_budget_below_its_limit() -> None:
    thinking = {"type": "enabled", "budget_tokens": 3000}
    body = {"max_tokens": 3100, "min_tokens": 3050, "thinking": thinking}
    assert shortened(body, 600) == {
        "max_tokens": 2500,
        "min_tokens": 2450,
        "thinking": {"type": "enabled", "budget_tokens": 2499},
    }


def test_an_engine_that_has_less_room_than_estimated_is_asked_for_less_of_everything() -> None:
    thinking = {"type": "enabled", "budget_tokens": 3000}
    body = {"max_tokens": 4000, "min_tokens": 2500, "thinking": thinking}
    call = CallSettings("m", "messages", body, False, 100, Prompt(9000, 9000), 4000)
    refused = ContextLengthError("too long", prompt_tokens=8000, context_tokens=10_000)
    lowered = with_room(call, refused)
    assert lowered is not None
    assert lowered.body == {
        "max_tokens": 2000,
        "min_tokens": 2000,
        "thinking": {"type": "enabled", "budget_tokens": 1999},
    }


@pytest.mark.parametrize(("estimate", "room"), [(2000, 1400), (3500, 1000)])
def test_an_engine_that_stopped_counting_is_asked_for_what_fits_for_certain(
    estimate: int, room: int
) -> None:
    prompt = Prompt(estimate, estimate)
    call = CallSettings("m", "chat/completions", {"max_tokens": 1500}, False, 100, prompt, 1500)
    refused = ContextLengthError("at least", context_tokens=4000)
    lowered = with_room(call, refused)
    assert lowered is not None
    assert (lowered.body, lowered.max_tokens) == ({"max_tokens": room}, room)
    assert with_room(lowered, refused) is None, "a second refusal is the client's"


async def test_an_answer_gets_all_the_room_that_the_engine_says_there_is(tmp_path: Path) -> None:
    """The estimate of this prompt is too high, as for most prose."""
    pool, engine = a_pool("sim-fast", "fast", replicas=0), HearingEngine()
    pool.add(engine)
    prompt = "word " * 2000
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        ask = {"model": "fast", "prompt": prompt, "max_tokens": 5000, "stream": True}
        await http.post("/v1/completions", json=ask)
    real = engine.bodies[-1]["max_tokens"]
    assert isinstance(real, int)
    assert real == 4096 - a_profile().count_tokens(prompt)


class HearingEngine(SimulatedEngine):
    """Keeps the bodies that it gets, and like vLLM generates one token if none is asked for."""

    def __init__(self) -> None:
        super().__init__(a_profile(), EngineSpec(kind="simulated"), "sim-fast")
        self.bodies: list[dict[str, object]] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self.bodies.append(dict(request.body))
        body = {**request.body, "max_tokens": request.body.get("max_tokens") or 1}
        async for chunk in super().generate(replace(request, body=body)):
            yield chunk


async def test_a_completion_may_ask_for_its_prompt_alone(tmp_path: Path) -> None:
    pool, engine = a_pool("sim-fast", "fast", replicas=0), HearingEngine()
    pool.add(engine)
    echo = {"echo": True, "max_tokens": 0, "logprobs": 1}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        ask = {"model": "fast", "prompt": "def f("}
        for stream in (False, True):
            answer = await http.post("/v1/completions", json={**ask, **echo, "stream": stream})
            assert answer.status_code == 200, answer.text
        for wrong in ({"max_tokens": 0}, {**echo, "echo": False}, {**echo, "max_tokens": False}):
            answer = await http.post("/v1/completions", json={**ask, **wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert [(body["echo"], body["max_tokens"]) for body in engine.bodies] == [(True, 0)] * 2


SHORT = COMPLETION.replace("max_tokens: 12", 'max_tokens: 12\n    token_limit: "4"')


async def test_the_least_tokens_are_no_more_than_the_limit_that_a_node_computes(
    tmp_path: Path,
) -> None:
    pool, engine = a_pool("sim-fast", "fast", replicas=0), HearingEngine()
    pool.add(engine)
    async with running(tmp_path, pool, workflows=(SHORT,)) as kit, kit.http() as http:
        ask = {"model": "cato-completion", "prompt": "def f(", "min_tokens": 9}
        assert (await http.post("/v1/completions", json=ask)).status_code == 200
    assert [(body["min_tokens"], body["max_tokens"]) for body in engine.bodies] == [(4, 4)]


@pytest.mark.parametrize("prompt", [[7] * 2500, [[7] * 2500, [7] * 2000]])
async def test_prompts_of_tokens_leave_all_the_room_beside_the_longest(
    tmp_path: Path, prompt: list[object]
) -> None:
    pool, engine = a_pool("sim-fast", "fast", replicas=0), HearingEngine()
    pool.add(engine)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        ask = {"model": "fast", "prompt": prompt, "max_tokens": 5000, "stream": True}
        await http.post("/v1/completions", json=ask)
    assert [body["max_tokens"] for body in engine.bodies] == [4096 - 2500]


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
