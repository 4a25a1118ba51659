"""Limits of tenants: what is refused, and when it is true that one may try again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_kit import COMPLETION, a_fast_pool, an_access, running
from test_keys import a_key, bearer

from cato.core.errors import QuotaError
from cato.core.session import Prompt
from cato.core.tenancy import Access, ApiKey, Tenant
from cato.core.workflow import CallSettings
from cato.serve.access.caller import Caller
from cato.serve.access.control import AccessControl
from cato.serve.access.keys import new_key
from cato.serve.access.limits import BURST_S, TenantLimits, TokenBucket, until_next_month_s
from cato.serve.prompts import most_output_tokens
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
    control.learn(Access((), (tenant,), {tenant.name: spent}))
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
        control.learn(Access(access.keys, access.tenants, {"a": 50}))
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
    access = an_access(Access((key, other), (tenant,)))
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
