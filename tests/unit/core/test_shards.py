"""Which shard gets a call, and which one owns a replica."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.events import InvocationOffered
from cato.core.ids import PoolName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.shards import (
    HORIZON,
    NO_LOAD,
    ShardChoice,
    ShardLoad,
    homes_of,
    load_now,
    merged,
    shard_of,
    shares_of,
)
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies, Shards
from cato.policies.registry import policies_of

PROFILE = a_profile()


def a_load(replicas: int = 10, held: int = 0, wait_s: float = 0.0) -> ShardLoad:
    return ShardLoad(replicas, held, wait_s, 0.05 / max(1, replicas), 0.01)


def some_calls(n: int, **fields: Any) -> list[Invocation]:
    random = Random(n)
    return [replace(an_invocation(f"i{i}", draw=random.random()), **fields) for i in range(n)]


def a_choice(*loads: ShardLoad) -> ShardChoice:
    choice = ShardChoice(len(loads))
    for shard, load in enumerate(loads):
        choice.tell(shard, load)
    return choice


def chosen(choice: ShardChoice, call: Invocation, shards: int) -> int:
    return choice.choose(call, range(shards), PROFILE)


def test_calls_without_a_home_go_to_the_shard_with_less_delay() -> None:
    choice = a_choice(a_load(wait_s=2.0), a_load(wait_s=1.0))
    assert {chosen(choice, call, 2) for call in some_calls(20)} == {1}


def test_shares_even_out_the_delays_of_shards() -> None:
    behind, ahead = a_load(wait_s=0.1), a_load()  # 20 calls more in the queue
    for calls, share in ((10, 0.0), (40, 0.25), (400, 0.475)):
        assert shares_of((behind, ahead), calls)[0] == pytest.approx(share)
    assert shares_of((NO_LOAD, NO_LOAD), 1) == [0.5, 0.5]


def test_all_ingresses_together_do_not_crowd_the_better_shard() -> None:
    loads = a_load(wait_s=0.5), a_load()  # 100 calls more in the queue
    ingresses = [a_choice(*loads) for _ in range(10)]
    for choice in ingresses:
        for shard, load in enumerate(loads):
            choice.tell(shard, replace(load, offered=200 // HORIZON))
    calls = enumerate(some_calls(400))
    counts = Counter(chosen(ingresses[n % 10], call, 2) for n, call in calls)
    assert counts[0] == pytest.approx(150, abs=15), "100 more for the other one"


def test_a_burst_at_one_ingress_does_not_crowd_one_shard() -> None:
    choice = a_choice(a_load(wait_s=0.05), a_load())
    counts = Counter(chosen(choice, call, 2) for call in some_calls(1000))
    assert counts[0] == pytest.approx(500, rel=0.05)


def test_shards_get_calls_in_proportion_to_their_replicas() -> None:
    choice = a_choice(a_load(30), a_load(10), a_load(20), a_load(20))
    counts = Counter(chosen(choice, call, 4) for call in some_calls(800))
    for shard, replicas in enumerate((30, 10, 20, 20)):
        assert counts[shard] == pytest.approx(10 * replicas, rel=0.05)


def test_what_homes_take_counts_as_a_part_of_the_shards_share() -> None:
    home = shard_of("bx", (0, 1))
    choice = a_choice(a_load(), a_load())
    counts = Counter(chosen(choice, call, 2) for call in some_calls(8, buffer="x"))
    assert counts == {home: 8}
    counts = Counter(chosen(choice, call, 2) for call in some_calls(8))
    assert counts == {1 - home: 8}


@pytest.mark.parametrize("field", ["session", "buffer"])
def test_what_has_a_home_stays_there_until_that_costs_more_than_moving(field: str) -> None:
    call = replace(an_invocation("i"), **{field: "x", "shared_blocks": 4})
    key = {"session": "sx", "buffer": "bx"}[field]
    home = shard_of(key, (0, 1))
    loads = [a_load(), a_load()]
    loads[home] = a_load(wait_s=0.001)
    assert chosen(a_choice(*loads), call, 2) == home
    loads[home] = a_load(wait_s=60.0)
    assert chosen(a_choice(*loads), call, 2) == 1 - home


def test_a_tenant_has_no_home() -> None:
    choice = a_choice(a_load(), a_load())
    counts = Counter(chosen(choice, call, 2) for call in some_calls(100, tenant="x"))
    assert counts == {0: 50, 1: 50}


def test_shards_without_replicas_or_without_a_link_get_nothing() -> None:
    choice = a_choice(NO_LOAD, a_load(wait_s=9.0), a_load())
    assert choice.choose(an_invocation("i"), (0, 1), PROFILE) == 1
    assert choice.is_stranded(0)
    assert not choice.is_stranded(1)
    nothing = a_choice(NO_LOAD, NO_LOAD)
    assert not nothing.is_stranded(0), "all may wait for the first replica"
    assert chosen(nothing, an_invocation("i"), 2) in (0, 1)


def test_few_homes_move_when_a_shard_goes() -> None:
    keys = [f"s{n}" for n in range(1000)]
    before = {key: shard_of(key, range(4)) for key in keys}
    after = {key: shard_of(key, (0, 1, 3)) for key in keys}
    assert all(after[key] == home for key, home in before.items() if home != 2)
    assert min(Counter(before.values()).values()) > 150


def test_replicas_of_a_deployment_are_dealt_out_evenly() -> None:
    first = Counter(homes_of("d", rank, Shards(4))[0] for rank in range(8))
    assert first == {0: 2, 1: 2, 2: 2, 3: 2}
    assert sorted(homes_of("d", 5, Shards(4))) == [0, 1, 2, 3]


def test_a_shard_that_stands_by_is_the_first_resort_and_nobodys_home() -> None:
    homes = [homes_of("d", rank, Shards(2, standby=1)) for rank in range(4)]
    assert {h[0] for h in homes} == {0, 1}
    assert {h[1] for h in homes} == {2}


def test_a_load_says_what_a_newcomer_would_wait_for() -> None:
    core = PoolOrchestrator(
        PoolName("p"), policies_of(PoolPolicies(scheduler="power-of-two"), PROFILE)
    )
    assert load_now(core) == NO_LOAD
    core.handle(a_report("r", slots=2))
    idle = load_now(core)
    for n in range(5):
        core.handle(InvocationOffered(0.0, an_invocation(f"i{n}")))
    busy = load_now(core)
    assert (idle.replicas, idle.held, idle.wait_s) == (1, 0, 0.0)
    assert busy.held == 2
    assert busy.lost_s > idle.lost_s


def test_a_replica_that_moved_counts_once_in_the_picture_of_the_pool() -> None:
    pictures = []
    for now_s, id in ((1.0, "a"), (2.0, "a"), (2.0, "b")):
        core = PoolOrchestrator(
            PoolName("p"), policies_of(PoolPolicies(scheduler="power-of-two"), PROFILE)
        )
        core.handle(a_report(id, now_s=now_s))
        pictures.append(core.picture(now_s))
    whole = merged(PoolName("p"), pictures)
    assert [r.id for r in whole.replicas] == ["a", "b"]
    assert whole.now_s == 2.0
