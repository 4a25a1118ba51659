"""Limits of tenants: what is refused, and when it is true that one may try again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_kit import (
    COMPLETION,
    Kit,
    a_fast_pool,
    a_model_call,
    a_pool,
    a_profile,
    a_slow_pool,
    running,
    until,
    until_busy,
)
from test_keys import a_key, bearer

from cato.core.commands import Dispatch
from cato.core.errors import CatoError, EngineError, QuotaError
from cato.core.ids import (
    DeploymentName,
    InvocationId,
    ModelName,
    NodeId,
    ReplicaId,
)
from cato.core.runs import StartNode
from cato.core.session import Prompt
from cato.core.tenancy import Access, ApiKey, Tenant, Usage
from cato.core.topology import EngineSpec
from cato.core.workflow import CallSettings, Node, NodeKind
from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.lab.chaos.local_pools import LocalPool
from cato.serve.access.caller import Caller
from cato.serve.access.control import AccessControl
from cato.serve.access.keys import new_key
from cato.serve.access.limits import BURST_S, TenantLimits, TokenBucket, until_next_month_s
from cato.serve.attempts import Attempts
from cato.serve.prompts import EngineCall, most_output_tokens
from cato.serve.service import Origin
from cato.store.keys import month_of
from cato.wire.endpoint import Endpoint
from cato.wire.limits import COMPLETION_TOKENS

PROMPT = {"model": "cato-completion", "prompt": "def f("}


class Clock:
    """Seconds since the epoch that pass only when told."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def a_control(tenant: Tenant, clock: Clock, *, share: float = 1.0, spent: int = 0) -> AccessControl:
    control = AccessControl(share=share, clock=clock)
    control.learn(Access((), (tenant,), {tenant.name: spent}, month=month_of(clock.now_s)))
    return control


def begun(control: AccessControl, tenant: str = "a", tries: int = 1000) -> int:
    """How many requests may begin at this moment."""
    for n in range(tries):
        try:
            control.begin(Caller("k", tenant))
        except QuotaError:
            return n
    return tries


@given(
    per_minute=st.integers(1, 100_000),
    steps=st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=60),
)
def test_no_more_passes_than_the_rate_and_one_burst(
    per_minute: int, steps: list[tuple[float, bool]]
) -> None:
    bucket, now_s, passed = TokenBucket.of(per_minute, 0.0), 0.0, 0
    for gap_s, _ in steps:
        now_s += gap_s
        if bucket.wait_s(now_s, 1.0) == 0:
            bucket.take(now_s, 1.0)
            passed += 1
    assert passed <= bucket.capacity + now_s * per_minute / 60 + 1e-6


@given(per_minute=st.integers(1, 10_000), taken=st.floats(0, 10_000), gap_s=st.floats(0, 100))
def test_the_wait_is_true(per_minute: int, taken: float, gap_s: float) -> None:
    bucket = TokenBucket.of(per_minute, 0.0)
    bucket.take(gap_s, taken)
    wait_s = bucket.wait_s(gap_s, 1.0)
    if wait_s > 0:
        assert bucket.wait_s(gap_s + 0.9 * wait_s, 1.0) > 0
    assert bucket.wait_s(gap_s + wait_s + 1e-6, 1.0) == pytest.approx(0, abs=1e-6)


def test_requests_beyond_the_rate_wait_for_their_turn() -> None:
    clock = Clock()
    control = a_control(Tenant("a", requests_per_minute=60), clock)
    assert begun(control) == BURST_S
    with pytest.raises(QuotaError) as refused:
        control.begin(Caller("k", "a"))
    assert refused.value.retry_after_s == pytest.approx(1.0)
    clock.now_s += refused.value.retry_after_s
    assert begun(control) == 1


def test_tokens_are_taken_beforehand_and_a_debt_is_waited_for() -> None:
    clock = Clock()
    control = a_control(Tenant("a", tokens_per_minute=600), clock)
    control.reserve(Caller("k", "a"), 400, 4000)  # of a burst of 100
    with pytest.raises(QuotaError) as refused:
        control.begin(Caller("k", "a"))
    assert refused.value.limit == "tokens per minute"
    assert refused.value.retry_after_s == pytest.approx(30.0)
    clock.now_s += 30.0
    assert begun(control, tries=5) == 5


def test_tokens_that_were_not_used_are_given_back_and_others_are_taken() -> None:
    clock = Clock()
    control = a_control(Tenant("a", tokens_per_minute=600), clock)
    settle = control.reserve(Caller("k", "a"), 400, 4000)
    assert begun(control) == 0
    settle(10)
    assert begun(control, tries=5) == 5
    control.reserve(Caller("k", "a"), 1, 4000)(700)
    with pytest.raises(QuotaError) as refused:
        control.begin(Caller("k", "a"))
    assert refused.value.retry_after_s == pytest.approx(61.0)


def test_what_runs_may_not_use_more_than_is_left_of_a_months_budget() -> None:
    clock = Clock()
    control = a_control(Tenant("a", tokens_per_month=1_000), clock)
    settle = [control.reserve(Caller("k", "a"), 10, 400) for _ in range(3)]
    with pytest.raises(QuotaError) as refused:
        control.begin(Caller("k", "a"))
    assert (refused.value.is_budget, refused.value.retry_after_s) == (False, 5.0)
    settle[0](50)
    assert begun(control, tries=1) == 1
    settle[1](900)  # counts until the store has told of it
    assert begun(control, tries=1) == 0
    clock.now_s += 6.0
    assert begun(control, tries=1) == 1
    assert begun(control, "b", tries=1) == 1


def test_replicas_share_what_is_left_of_a_months_budget() -> None:
    clock = Clock()
    replicas = [a_control(Tenant("a", tokens_per_month=1_000), clock, share=0.5) for _ in range(2)]
    most = 0
    for replica in replicas:
        while begun(replica, tries=1):
            replica.reserve(Caller("k", "a"), 10, 400)
            most += 400
    assert most < 1_000 + 2 * 400, "each may exceed its share by one request"


def test_a_replica_serves_one_request_however_little_its_share_is() -> None:
    clock = Clock()
    control = a_control(Tenant("a", tokens_per_month=1_000), clock, share=0.01, spent=999)
    assert begun(control, tries=1) == 1


def test_replicas_share_a_tenants_rate() -> None:
    clock = Clock()
    tenant = Tenant("a", requests_per_minute=120)
    replicas = [a_control(tenant, clock, share=0.5) for _ in range(2)]
    assert sum(map(begun, replicas)) == 2 * BURST_S


def test_a_tenant_without_limits_has_none_and_one_tenant_costs_another_nothing() -> None:
    clock = Clock()
    control = a_control(Tenant("a", requests_per_minute=6), clock)
    assert begun(control, "a") == 1
    assert begun(control, "b", tries=50) == 50


def test_limits_that_stay_the_same_are_not_filled_up_by_a_refresh() -> None:
    clock = Clock()
    control = a_control(Tenant("a", requests_per_minute=6), clock)
    assert begun(control) == 1
    control.learn(Access((), (Tenant("a", requests_per_minute=6),)))
    assert begun(control) == 0
    control.learn(Access((), (Tenant("a", requests_per_minute=60),)))
    assert begun(control) == BURST_S


def test_a_budget_that_is_used_up_comes_back_with_the_month() -> None:
    now = datetime(2026, 12, 31, 23, 0, tzinfo=UTC)
    clock = Clock(now.timestamp())
    control = a_control(Tenant("a", tokens_per_month=1000), clock, spent=1000)
    with pytest.raises(QuotaError) as refused:
        control.begin(Caller("k", "a"))
    assert refused.value.is_budget
    assert refused.value.retry_after_s == 3600.0
    assert begun(a_control(Tenant("a", tokens_per_month=1000), clock, spent=999), tries=3) == 3
    clock.now_s += refused.value.retry_after_s  # and the store has not told of the new month yet
    assert begun(control, tries=3) == 3


@given(st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)))
def test_a_month_ends_where_the_next_begins(now: datetime) -> None:
    end = datetime.fromtimestamp(now.timestamp() + until_next_month_s(now.timestamp()), UTC)
    assert (end.day, end.hour, end.minute) == (1, 0, 0)
    assert (end.month - now.month) % 12 == 1


async def test_a_refusal_says_when_to_come_back_and_what_may_not_be_repeated(
    tmp_path: Path,
) -> None:
    clock = Clock()
    secret, id, digest = new_key()
    key = ApiKey(id, digest, "a")
    control = AccessControl(clock=clock)
    access = Access((key,), (Tenant("a", requests_per_minute=6, tokens_per_month=50),))
    control.learn(access)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=control) as kit,
        kit.http() as http,
    ):
        http.headers["api-key"] = secret
        first = await http.post("/v1/completions", json=PROMPT)
        listed = await http.get("/v1/models")  # asks nothing of an engine
        refused = await http.post("/v1/completions", json=PROMPT)
        fill = await http.post("/infill", json={"prompt": "x"})
        clock.now_s += float(refused.headers["Retry-After"])
        again = await http.post("/v1/completions", json=PROMPT)
        clock.now_s += 60
        month = month_of(clock.now_s)
        control.learn(Access(access.keys, access.tenants, {"a": 50}, month=month))
        over = await http.post("/v1/completions", json=PROMPT)
    assert [first.status_code, listed.status_code, again.status_code] == [200, 200, 200]
    assert (refused.status_code, fill.status_code) == (429, 429)
    assert refused.headers["Retry-After"] == "10"
    assert refused.headers["retry-after-ms"] == "10000"
    assert "x-should-retry" not in refused.headers
    assert over.status_code == 429
    assert over.json()["error"]["code"] == "insufficient_quota"
    assert over.headers["x-should-retry"] == "false"
    assert float(over.headers["Retry-After"]) > 3600


# What answers tell of limits


async def test_answers_tell_what_is_left_and_when_it_is_back(tmp_path: Path) -> None:
    secret, key = a_key("red")
    free, other = a_key("blue")
    tenant = Tenant("red", requests_per_minute=12, tokens_per_minute=60_000)
    access = AccessControl(clock=Clock())
    access.learn(Access((key, other), (tenant,)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        asked = [
            await http.post("/v1/completions", json=PROMPT, headers=bearer(secret))
            for _ in range(3)
        ]
        models = await http.get("/v1/models", headers=bearer(secret))
        unlimited = await http.get("/v1/models", headers=bearer(free))
    assert [a.status_code for a in asked] == [200, 200, 429]
    left = [int(a.headers["x-ratelimit-remaining-requests"]) for a in asked]
    assert left == [1, 0, 0], "a burst is what comes within 10 s"
    for answer in (*asked, models):
        assert answer.headers["x-ratelimit-limit-requests"] == "12"
        assert answer.headers["x-ratelimit-limit-tokens"] == "60000"
        assert answer.headers["x-ratelimit-reset-requests"].endswith("ms")
    assert int(asked[1].headers["x-ratelimit-remaining-tokens"]) < 10_000
    assert 3 <= int(asked[2].headers["retry-after"]) <= 10
    assert not any(name.startswith("x-ratelimit") for name in unlimited.headers)


def test_what_is_left_is_told_of_all_replicas_together() -> None:
    limits = TenantLimits(Tenant("red", requests_per_minute=60), 0.5, 0.0)
    limits.begin(0.0, 2)
    left = limits.left(0.0)
    assert left.requests == (60, 6, 4.0)
    assert left.tokens is None


def test_a_clock_that_is_set_back_does_not_stop_a_tenant() -> None:
    bucket = TokenBucket.of(60, 1_000.0)
    bucket.take(1_000.0, 1.0)
    assert bucket.wait_s(400.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("endpoint", "limit", "most"),
    [
        ("chat/completions", None, 3_000),
        ("chat/completions", 50, 50),
        ("completions", None, COMPLETION_TOKENS),
        ("embeddings", None, 1),
    ],
)
def test_an_answer_without_a_limit_reserves_all_that_it_may_take(
    endpoint: str, limit: int | None, most: int
) -> None:
    prompt = Prompt(1_000, 1_000)
    settings = CallSettings("m", endpoint, {}, True, 1, prompt, limit)
    assert most_output_tokens(settings, 4_000) == most


# What is used


class OddEngine(SimulatedEngine):
    """Answers every endpoint of no generation, and raises `error` if it has one."""

    error: CatoError | None = None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        if self.error is not None:
            raise self.error
        if not request.endpoint.generates:
            yield EngineChunk("", 0, 7, 0, "stop", b"{}")
            return
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


def an_odd_pool(error: CatoError | None = None) -> LocalPool:
    engine = OddEngine(a_profile(), EngineSpec(kind="simulated", max_num_seqs=64), "sim-fast")
    engine.error = error
    pool = a_pool("sim-fast", "fast", replicas=0)
    pool.add(engine)
    return pool


@asynccontextmanager
async def limited_kit(
    folder: Path, pool: LocalPool, tenant: Tenant
) -> AsyncIterator[tuple[Kit, httpx.AsyncClient, AccessControl]]:
    """A server with one key of `tenant`, whose clock stands still, and a client that has it."""
    secret, key = a_key(tenant.name)
    control = AccessControl(clock=Clock())
    control.learn(Access((key,), (tenant,)))
    async with (
        running(folder, pool, workflows=(COMPLETION,), access=control) as kit,
        kit.http() as http,
    ):
        http.headers.update(bearer(secret))
        yield kit, http, control


def tokens_of(used: list[Usage]) -> tuple[int, int]:
    return sum(u.prompt_tokens for u in used), sum(u.output_tokens for u in used)


LIMITED = Tenant("a", requests_per_minute=60, tokens_per_minute=600, tokens_per_month=10_000)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "word " * 3_000, "max_tokens": 2}, 400),
        ("/v1/completions", {"prompt": "word " * 1_000, "temperature": -1}, 400),
        ("/v1/completions", {"prompt": "word " * 1_000, "temperature": -1, "stream": True}, 400),
        ("/v1/embeddings", {"input": "word " * 3_000}, 404),
    ],
)
async def test_what_an_engine_refuses_costs_nothing_and_gives_back_what_was_reserved(
    tmp_path: Path, path: str, body: dict[str, Any], status: int
) -> None:
    async with limited_kit(tmp_path, a_fast_pool(), LIMITED) as (kit, http, control):
        asked = [await http.post(path, json={"model": "fast", **body}) for _ in range(5)]
        used = list(await kit.records.usage("a"))
        left = control.left(Caller("k", "a"))
    assert [a.status_code for a in asked] == [status] * 5
    assert tokens_of(used) == (0, 0)
    assert left is not None
    assert left.tokens is not None
    assert left.tokens[1] == 100, "a burst is what comes within 10 s"
    assert left.requests is not None
    assert left.requests[1] == 5


@pytest.mark.parametrize(
    ("error", "is_charged"),
    [
        (EngineError("bad", 400), False),
        (EngineError("no such path", 404), False),
        (EngineError("full", 429), False),
        (EngineError("broke", 502), True),
    ],
)
async def test_only_what_an_engine_worked_on_is_counted(
    tmp_path: Path, error: CatoError, is_charged: bool
) -> None:
    async with running(tmp_path, an_odd_pool(error), workflows=(COMPLETION,)) as kit:
        async with kit.http() as http:
            body = {"model": "fast", "prompt": "word " * 100, "max_tokens": 2}
            await http.post("/v1/completions", json=body)
        prompt, output = tokens_of(list(await kit.records.usage(None)))
    assert (prompt > 0, output) == (is_charged, 0)


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x " * 900}]}, 0),
        ("/tokenize", {"prompt": "x " * 900}, 0),
        ("/detokenize", {"tokens": [1] * 900}, 0),
        ("/v1/embeddings", {"input": "x"}, 7),
        ("/v1/score", {"text_1": "x", "text_2": ["y"]}, 7),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, 7),
    ],
)
async def test_tokenizing_is_a_request_without_tokens(
    tmp_path: Path, path: str, body: dict[str, Any], tokens: int
) -> None:
    async with limited_kit(tmp_path, an_odd_pool(), LIMITED) as (kit, http, control):
        asked = await http.post(path, json={"model": "fast", **body})
        used = list(await kit.records.usage("a"))
        left = control.left(Caller("k", "a"))
    assert asked.status_code == 200, asked.text
    assert tokens_of(used) == (tokens, 0)
    assert [u.requests for u in used] == [1]
    assert left is not None
    assert left.tokens is not None
    assert left.tokens[1] == 100 - tokens
    assert left.requests is not None
    assert left.requests[1] == 9


@pytest.mark.parametrize(
    ("endpoint", "reserved"),
    [
        (Endpoint.COUNT_TOKENS, (0, 0)),
        (Endpoint.TOKENIZE, (0, 0)),
        (Endpoint.DETOKENIZE, (0, 0)),
        (Endpoint.EMBEDDINGS, (74, 74)),  # the prompt, and the prior for an output
        (Endpoint.COMPLETIONS, (74, 26)),
    ],
)
async def test_tokenizing_reserves_no_tokens(
    tmp_path: Path, endpoint: Endpoint, reserved: tuple[int, int]
) -> None:
    seen: list[tuple[int, int]] = []
    origin = Origin(reserve=lambda expected, most: seen.append((expected, most)))
    body: dict[str, object] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    call = a_model_call("fast", endpoint, body, is_streamed=False)
    async with running(tmp_path, an_odd_pool(), workflows=(COMPLETION,)) as kit:
        await kit.service.run_model(call, request_id="r", origin=origin).wait()
    assert seen == [reserved]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_whole_answer_that_is_cut_off_is_counted_by_its_time(
    tmp_path: Path, leaves: bool
) -> None:
    pool = a_slow_pool()
    body = {"model": "slow", "prompt": "x y z", "max_tokens": 400, "ignore_eos": True}
    deadline = {} if leaves else {"X-CATO-Deadline-Ms": "300"}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=body, headers=deadline))
        await until_busy(pool)
        if leaves:
            asked.cancel()
        else:
            assert (await asked).status_code == 504
        await until(lambda: len(kit.records.receipts) == 1, within_s=10)
        (receipt,) = kit.records.receipts.values()
        (used,) = await kit.records.usage(None)
    llm = receipt.nodes[0].llm
    assert llm is not None
    alone = 1 + llm.service_s / pool.profile.decode_step_s(1)
    assert 0 < used.output_tokens <= min(400, alone + 1)
    assert used.prompt_tokens > 0


def a_cut_call(served_s: float, *, calls: int = 1, stream: bool = False) -> Attempts:
    """A chat of at most 50 tokens that was cut off after `served_s` at an engine; a token takes
    20 ms."""
    prompt, body = Prompt(10, 10), {"max_tokens": 50, "n": calls}
    settings = CallSettings("slow", Endpoint.CHAT.value, body, stream, 20, prompt, 50, calls)
    node = Node(NodeId("call"), NodeKind.LLM, settings)
    start = StartNode(node, 1, None, {}, None, None, 1.0, 0.0, until_first_token=True)
    call = EngineCall(
        Endpoint.CHAT, body, 10, 20, 50, ModelName("slow"), calls=calls, stream=stream, raw=True
    )
    attempts = Attempts(start, InvocationId("i"))
    attempts.pool, attempts.cut_s = a_slow_pool().info, served_s
    replica, deployment = ReplicaId("r"), DeploymentName("d")
    lease = Dispatch(attempts.id, 1, replica, deployment, 0, 0.0, 1.0, 1.0, "it has room")
    attempts.is_leased(lease, call)
    return attempts


def test_the_facts_of_a_call_tell_how_many_answers_it_asked_for() -> None:
    attempts = a_cut_call(0.1, calls=3)
    attempts.count = 1
    facts = attempts.facts()
    assert facts is not None
    assert facts.calls == 3


def test_the_estimate_of_a_cut_answer_stays_below_its_limit() -> None:
    assert a_cut_call(0.1).output_tokens == pytest.approx(5, abs=1)
    assert a_cut_call(100.0).output_tokens == 50
    assert a_cut_call(100.0, calls=3).output_tokens == 150
    assert a_cut_call(100.0, stream=True).output_tokens == 0, "a stream counts as it goes"
    assert a_cut_call(0.0).output_tokens == 0
