"""Where turns of sessions go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cato.core.decision import Hold, Route
from cato.core.ids import PoolName
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaSnapshot
from cato.lab.agents import card_profile
from cato.policies.routing.foresight import ForesightRouting
from cato.policies.routing.lateness import LeastLateness
from cato.policies.routing.prefix_score import PrefixScore
from cato.policies.routing.sticky import SessionHash, Sticky
from cato.testing.builders import a_replica, an_invocation

LARGE = card_profile("large")
PROMPT = 100_000


def a_card(id: str, *, cached: int = 0, is_home: bool = False, **more: object) -> ReplicaSnapshot:
    bare = replace(a_replica(id), profile=LARGE, max_running=256, cached_prompt_tokens=cached)
    homes = frozenset({"s"}) if is_home else frozenset()
    return replace(bare, homes=homes, **more)  # type: ignore[arg-type]


def a_turn(session: str = "s", id: str = "i") -> Invocation:
    invocation = an_invocation(
        id, prompt=PROMPT, tokens=200, deadline_s=2.0, until_first_token=True
    )
    return replace(invocation, session=session)


def a_pool_of(*replicas: ReplicaSnapshot, full: tuple[ReplicaSnapshot, ...] = ()) -> PoolSnapshot:
    everyone = sorted((*replicas, *full), key=lambda r: r.id)
    return PoolSnapshot(PoolName("p"), 0.0, replicas, accepting=everyone)


def chosen(decision: Route | Hold) -> str:
    assert isinstance(decision, Route)
    return decision.replica_id


def test_a_turn_goes_where_its_context_is_though_others_are_idle() -> None:
    warm = a_card("b", cached=99_000, is_home=True, prompts_ahead_s=1.0, working_set_tokens=300_000)
    assert chosen(LeastLateness().route(a_turn(), a_pool_of(a_card("a"), warm))) == "b"


def test_a_turn_moves_when_computing_it_anew_is_sooner_than_its_turn_at_home() -> None:
    warm = a_card("b", cached=99_000, is_home=True, prompts_ahead_s=40.0)
    assert chosen(LeastLateness().route(a_turn(), a_pool_of(a_card("a"), warm))) == "a"


def test_what_waits_in_the_pool_for_a_replica_counts_as_well() -> None:
    warm = a_card("b", cached=99_000, is_home=True, awaited_s=40.0)
    assert chosen(LeastLateness().route(a_turn(), a_pool_of(a_card("a"), warm))) == "a"


def test_a_turn_waits_for_its_replica_when_that_has_no_room_now() -> None:
    warm = a_card("b", cached=99_000, is_home=True)
    decision = LeastLateness().route(a_turn(), a_pool_of(a_card("a"), full=(warm,)))
    assert isinstance(decision, Hold)
    assert decision.replica_id == "b"


def test_a_full_batch_at_home_counts_as_long_as_its_next_place_takes() -> None:
    full = {"cached": 99_000, "is_home": True, "held": 256}
    soon, late = a_card("b", **full, wait_s=1.0), a_card("b", **full, wait_s=100.0)  # type: ignore[arg-type]
    assert isinstance(LeastLateness().route(a_turn(), a_pool_of(a_card("a"), full=(soon,))), Hold)
    assert chosen(LeastLateness().route(a_turn(), a_pool_of(a_card("a"), full=(late,)))) == "a"


def test_a_new_session_goes_where_the_working_set_leaves_room() -> None:
    crowded = a_card("a", working_set_tokens=590_000)
    roomy = a_card("b", working_set_tokens=400_000, prompts_ahead_s=0.5)
    assert chosen(LeastLateness().route(a_turn(), a_pool_of(crowded, roomy))) == "b"


def test_a_prompt_for_which_memory_is_short_counts_the_wait_for_it() -> None:
    crowded = a_card("a", held=6, context_tokens=590_000)
    assert chosen(LeastLateness().route(a_turn(), a_pool_of(crowded, a_card("b")))) == "b"


def test_the_default_routes_turns_so_and_other_calls_as_before() -> None:
    warm = a_card("b", cached=99_000, is_home=True, held=1)
    pool = a_pool_of(a_card("a"), warm)
    assert chosen(ForesightRouting().route(a_turn(), pool)) == "b"
    assert chosen(ForesightRouting().route(a_turn(session=""), pool)) == "a"


def test_sticky_sessions_stay_and_new_ones_go_where_fewest_are() -> None:
    home = a_card("a", is_home=True, sessions=9)
    pool = a_pool_of(home, a_card("b", sessions=1), a_card("c", sessions=2))
    assert chosen(Sticky().route(a_turn(), pool)) == "a"
    assert chosen(Sticky().route(a_turn(session="new"), pool)) == "b"


def test_the_hash_spreads_sessions_and_moves_only_those_of_a_replica_that_left() -> None:
    cards = tuple(a_card(id) for id in "abcd")
    turns = [a_turn(session=f"s{i}") for i in range(400)]
    before = [chosen(SessionHash().route(t, a_pool_of(*cards))) for t in turns]
    after = [chosen(SessionHash().route(t, a_pool_of(*cards[:3]))) for t in turns]
    assert min(Counter(before).values()) > 60
    assert all(a == b for a, b in zip(before, after, strict=True) if b != "d" and a != "d")
    assert [b for b, a in zip(before, after, strict=True) if b != a] == ["d"] * Counter(before)["d"]


def test_the_prefix_score_weighs_what_is_cached_against_queue_and_memory() -> None:
    warm = a_card("b", cached=90_000, prefilling=1, context_tokens=100_000)
    assert chosen(PrefixScore().route(a_turn(), a_pool_of(a_card("a"), warm))) == "b"
    half = a_card("b", cached=50_000, prefilling=3, context_tokens=500_000)
    assert chosen(PrefixScore().route(a_turn(), a_pool_of(a_card("a"), half))) == "a"


def test_without_replicas_a_turn_is_held() -> None:
    for policy in (LeastLateness(), Sticky(), SessionHash(), PrefixScore()):
        assert isinstance(policy.route(a_turn(), a_pool_of()), Hold)
