"""Prompts go where their beginning is cached, as far as that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Dispatch
from cato.core.events import InvocationEnded, InvocationOffered
from cato.core.ids import InvocationId, PoolName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.snapshot import PREFIX_BLOCK_TOKENS, Invocation
from cato.policies.schedulers import foresight
from cato.wire.prefix import block_chars, chain

# A prompt of ten blocks takes 6.4 s, a token 0.1 s.
PROFILE = replace(a_profile(prefill_s=0.0, token_s=0.1, prefill_token_s=0.01), max_running=4)
BLOCKS = 10
TOKENS = BLOCKS * PREFIX_BLOCK_TOKENS + 1


def a_pool(*replicas: str, caching: bool = True) -> PoolOrchestrator:
    pool = PoolOrchestrator(PoolName("p"), foresight())
    for id in replicas:
        report = a_report(id, slots=4, profile=PROFILE)
        pool.handle(replace(report, prefix_caching=caching))
    return pool


def a_call(
    id: str, first_block: int, *, deadline_s: float = 1000.0, draw: float = 0.0
) -> Invocation:
    call = an_invocation(id, prompt=TOKENS, tokens=20, deadline_s=deadline_s, draw=draw)
    return replace(call, prefix=tuple(range(first_block, first_block + BLOCKS)))


def lease(pool: PoolOrchestrator, call: Invocation, now_s: float = 0.0) -> Dispatch:
    (command,) = pool.handle(InvocationOffered(now_s, call))
    assert isinstance(command, Dispatch)
    return command


def end(pool: PoolOrchestrator, id: str, now_s: float) -> None:
    pool.handle(InvocationEnded(now_s, InvocationId(id), 1, 20, "done"))


def test_of_idle_replicas_that_with_the_prefix_is_taken() -> None:
    pool = a_pool("a", "b", "c")
    first = lease(pool, a_call("1", 100))
    other = lease(pool, a_call("2", 500))
    assert first.replica_id != other.replica_id
    end(pool, "1", 50.0)
    end(pool, "2", 50.0)
    again, its = lease(pool, a_call("3", 500), 51.0), lease(pool, a_call("4", 100), 51.0)
    assert (again.replica_id, its.replica_id) == (other.replica_id, first.replica_id)


def test_the_prediction_leaves_out_what_the_cache_saves() -> None:
    pool = a_pool("a")
    cold = lease(pool, a_call("1", 0))
    end(pool, "1", 50.0)
    warm = lease(pool, a_call("2", 0), 51.0)
    saved_s = PROFILE.prefill_s(TOKENS) - PROFILE.prefill_s(1)
    assert abs(cold.service_s - warm.service_s - saved_s) < 1e-9
    assert abs(cold.remaining_s - warm.remaining_s - saved_s) < 1e-9


def test_without_a_cache_nothing_is_saved() -> None:
    pool = a_pool("a", caching=False)
    cold = lease(pool, a_call("1", 0))
    end(pool, "1", 50.0)
    assert lease(pool, a_call("2", 0), 51.0).service_s == cold.service_s


def test_an_idle_replica_is_better_than_waiting_for_a_prompt_where_the_prefix_is() -> None:
    pool = a_pool("a", "b")
    first = lease(pool, a_call("1", 0))
    second = lease(pool, a_call("2", 0), 0.1)
    assert second.replica_id != first.replica_id


def test_what_was_used_longest_ago_is_forgotten_when_the_cache_is_full() -> None:
    small = replace(PROFILE, kv_capacity_tokens=2 * BLOCKS * PREFIX_BLOCK_TOKENS)
    pool = PoolOrchestrator(PoolName("p"), foresight())
    pool.handle(replace(a_report("a", slots=4, profile=small), prefix_caching=True))
    cold = lease(pool, a_call("0", 0)).service_s
    end(pool, "0", 20.0)
    for i in (1, 2):
        lease(pool, a_call(str(i), 1000 * i), 20.0 * i)
        end(pool, str(i), 20.0 * i + 19)
    assert lease(pool, a_call("x", 0), 100.0).service_s == cold


def test_prompts_with_one_beginning_share_its_numbers() -> None:
    block = block_chars(3.5)
    common = "".join(chr(97 + i % 26) for i in range(3 * block))
    one, two = (chain(common + last * block, block, "m") for last in "xy")
    assert (len(one), one[:3], one[3] == two[3]) == (4, two[:3], False)
    assert chain("x" * (block - 1), block, "m") == ()
    assert len(chain("x" * 3_000 * block, block, "m")) == 3_000  # all of a long prompt
    assert chain("\ud800" * block, block, "m") != ()


def test_of_a_full_cache_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    small = replace(PROFILE, kv_capacity_tokens=(BLOCKS + 2) * PREFIX_BLOCK_TOKENS)
    pool = PoolOrchestrator(PoolName("p"), foresight())
    pool.handle(replace(a_report("a", slots=4, profile=small), prefix_caching=True))
    cold = lease(pool, a_call("0", 0)).service_s
    end(pool, "0", 20.0)
    lease(pool, a_call("1", 1000), 20.0)  # leaves two blocks of the first
    end(pool, "1", 40.0)
    warm = lease(pool, a_call("2", 0), 41.0).service_s
    saved_s = PROFILE.prefill_s(TOKENS) - PROFILE.prefill_s(TOKENS - 2 * PREFIX_BLOCK_TOKENS)
    assert cold - warm == pytest.approx(saved_s)
