"""Where turns of sessions go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

from kits.builders import a_replica, an_invocation

from cato.core.decision import Admit, Defer, Hold, Route
from cato.core.ids import PoolName
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaSnapshot, Running
from cato.lab.studies.agent_fleet import card_profile
from cato.policies.admission.working_set import WorkingSetAdmission
from cato.policies.routing.block_cost import AGENTIC, BlockCost
from cato.policies.routing.foresight import ForesightRouting
from cato.policies.routing.lateness import LEAVES_ROOM, LeastLateness
from cato.policies.routing.prefix_affinity import PrefixAffinity
from cato.policies.routing.prefix_score import PrefixScore
from cato.policies.routing.sticky import SessionHash, SmallestWorkingSet, Sticky

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


def test_a_turn_that_is_late_anyway_moves_only_to_an_idle_replica() -> None:
    warm = a_card("b", cached=99_000, is_home=True, prompts_ahead_s=40.0)
    busy = a_card("a", held=1, context_tokens=PROMPT)
    assert chosen(LeastLateness().route(a_turn(), a_pool_of(busy, warm))) == "b"
    short = replace(a_turn(), prompt_tokens=1_000)  # in time there
    warm = replace(warm, cached_prompt_tokens=500)
    assert chosen(LeastLateness().route(short, a_pool_of(busy, warm))) == "a"


def test_a_new_session_goes_where_its_answers_keep_their_pace() -> None:
    slow = a_card("a", profile=LARGE.slowed(4.0))
    fast = a_card("b", prompts_ahead_s=60.0)
    in_no_hurry = replace(a_turn(), deadline_s=100.0)
    for tpot_s, expected in ((0.1, "a"), (0.04, "b")):
        turn = replace(in_no_hurry, tpot_target_s=tpot_s)
        assert chosen(LeastLateness().route(turn, a_pool_of(slow, fast))) == expected


def test_a_new_session_goes_where_it_leaves_others_their_pace() -> None:
    """Two answers beside it take 25 ms a token at "a", nearly twice their target; at "b" its prompt
    waits."""
    waits = a_card("b", prompts_ahead_s=5.0)
    turn = replace(a_turn(), deadline_s=100.0)
    for tpot_s, expected in ((0.1, "a"), (0.012, "b")):
        calls = [
            replace(a_turn("other", id), tpot_target_s=tpot_s, expected_tokens=1_000)
            for id in ("c", "d")
        ]
        running = tuple(Running(c, 0.0, 20.0) for c in calls)
        busy = a_card("a", held=2, running=running, context_tokens=2 * PROMPT)
        pool = a_pool_of(busy, waits)
        assert chosen(LeastLateness(harm_weight=0.0).route(turn, pool)) == expected


def test_a_new_session_leaves_fast_accelerators_alone_that_begin_to_miss_the_pace() -> None:
    slow = replace(a_card("slow"), profile=LARGE.slowed(2.5))
    turn = replace(a_turn("new"), tpot_target_s=0.028)
    for turns, expected in (((20.0, 0.0), "fast"), ((20.0, 4.0), "slow"), ((0.0, 0.0), "fast")):
        pool = a_pool_of(a_card("fast", turns=turns), slow)
        assert chosen(LeastLateness().route(turn, pool)) == expected
    crowded = a_pool_of(a_card("fast", turns=(20.0, 4.0)), slow)
    # Where all have the same profile there is nothing to choose by it.
    uniform = replace(crowded, is_uniform=True)
    assert chosen(LeastLateness().route(turn, uniform)) == "fast"
    # Sessions that have begun stay, also those that began before a restart of the router.
    begun = replace(turn, shared_blocks=100)
    assert chosen(LeastLateness().route(begun, crowded)) == "fast"
    home = replace(turn, session="s")
    at_home = a_card("fast", turns=(20.0, 4.0), is_home=True, cached=99_000)
    assert chosen(LeastLateness().route(home, a_pool_of(at_home, slow))) == "fast"


def test_where_all_miss_the_pace_a_new_session_goes_to_the_fastest() -> None:
    slow = replace(a_card("slow", turns=(0.0, 20.0)), profile=LARGE.slowed(2.5))
    turn = replace(a_turn("new"), tpot_target_s=0.001)
    assert chosen(LeastLateness().route(turn, a_pool_of(a_card("fast"), slow))) == "fast"


def test_a_late_turn_leaves_the_room_to_turns_in_time_once_its_like_had_their_share() -> None:
    home = a_card("b", cached=10_000, is_home=True)
    pool = replace(a_pool_of(a_card("a"), home), in_time=0.5, late_share_s=-1.0)
    rule = LeastLateness()
    assert rule.route(a_turn(), pool) == Hold(LEAVES_ROOM)
    assert chosen(rule.route(a_turn(), replace(pool, late_share_s=1.0))) == "b"
    assert chosen(rule.route(a_turn(), replace(pool, in_time=0.0))) == "b"
    assert chosen(rule.route(replace(a_turn(), deadline_s=inf), pool)) == "b"
    warm = replace(pool, replicas=(a_card("a"), replace(home, cached_prompt_tokens=99_000)))
    assert chosen(rule.route(a_turn(), replace(warm, accepting=warm.replicas))) == "b"


def test_a_turn_moves_sooner_where_its_blocks_can_be_fetched() -> None:
    """The prompts ahead of it at home take 3 s; its own 12 s elsewhere, or half a second."""
    fetching = replace(LARGE, fetch_token_s=LARGE.host_load_token_s)
    warm = a_card("b", cached=99_000, is_home=True, prompts_ahead_s=3.0)
    cold = a_card("a", elsewhere_tokens=99_000)
    assert chosen(LeastLateness().route(a_turn(), a_pool_of(cold, warm))) == "b"
    pool = a_pool_of(*(replace(r, profile=fetching) for r in (cold, warm)))
    assert chosen(LeastLateness().route(a_turn(), pool)) == "a"


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


def test_the_block_cost_weighs_what_is_cached_against_what_is_held() -> None:
    # 90,000 tokens less to prefill against 150,000 more that are held.
    pool = a_pool_of(a_card("a"), a_card("b", cached=90_000, context_tokens=150_000))
    assert chosen(BlockCost().route(a_turn(), pool)) == "a"
    assert chosen(BlockCost(prefill_scale=8.0).route(a_turn(), pool)) == "b"


def test_the_block_cost_saves_less_by_blocks_in_host_memory() -> None:
    loaded = a_card("a", cached=80_000, loaded_prompt_tokens=80_000)  # saves 60,000
    pool = a_pool_of(loaded, a_card("b", cached=60_001))
    assert chosen(BlockCost().route(a_turn(), pool)) == "b"
    assert chosen(BlockCost(host_credit=1.0).route(a_turn(), pool)) == "a"


def test_the_agentic_block_cost_prefers_a_warm_replica_and_charges_its_calls() -> None:
    # Cached tokens also pay for prompts ahead; twelve calls cost 12,288 tokens.
    warm = a_card("b", cached=90_000, prompt_tokens_ahead=80_000, context_tokens=90_000)
    pool = a_pool_of(a_card("a"), warm)
    assert chosen(BlockCost().route(a_turn(), pool)) == "a"
    assert chosen(AGENTIC.route(a_turn(), pool)) == "b"
    even = a_pool_of(a_card("a", held=12), a_card("b", context_tokens=12_000))
    assert chosen(BlockCost().route(a_turn(), even)) == "a"
    assert chosen(AGENTIC.route(a_turn(), even)) == "b"


def test_the_block_cost_counts_prompts_that_are_ahead_and_those_bound_but_not_sent() -> None:
    ahead = a_card("a", prompt_tokens_ahead=1_000)
    assert chosen(BlockCost().route(a_turn(), a_pool_of(ahead, a_card("b")))) == "b"
    # 90,000 tokens warm at "a"; what waits there is cached, too, or is not.
    warm = a_card("a", cached=90_000, queued_tokens=50_000, queued_uncached_tokens=1_000)
    cold = replace(warm, queued_uncached_tokens=50_000)
    assert chosen(BlockCost().route(a_turn(), a_pool_of(warm, a_card("b")))) == "a"
    assert chosen(BlockCost().route(a_turn(), a_pool_of(cold, a_card("b")))) == "b"
    bound = a_card("a", queued_tokens=1_000)
    assert chosen(BlockCost().route(a_turn(), a_pool_of(bound, a_card("b")))) == "b"


def test_prefix_affinity_takes_the_longest_match_and_the_shorter_queue_among_equals() -> None:
    warm, warm_too = a_card("b", cached=90_000, held=3), a_card("c", cached=90_000, held=2)
    pool = a_pool_of(a_card("a"), warm, warm_too)
    assert chosen(PrefixAffinity().route(a_turn(), pool)) == "c"


def test_prefix_affinity_takes_the_smallest_tree_where_less_than_a_tenth_matches() -> None:
    warm = a_card("b", cached=9_000, working_set_tokens=9_000)
    assert chosen(PrefixAffinity().route(a_turn(), a_pool_of(a_card("a", held=5), warm))) == "a"


def test_prefix_affinity_gives_way_to_power_of_two_when_loads_are_apart() -> None:
    warm = a_card("b", cached=90_000, held=10)
    assert chosen(PrefixAffinity().route(a_turn(), a_pool_of(a_card("a"), warm))) == "b"
    crowded = replace(warm, held=11)
    assert chosen(PrefixAffinity().route(a_turn(), a_pool_of(a_card("a"), crowded))) == "a"


def test_a_new_session_waits_while_its_context_does_not_fit_beside_the_working_set() -> None:
    admission = WorkingSetAdmission(most_wait_s=60.0)
    crowded = a_card("a", sessions=5, working_set_tokens=550_000)
    new = a_turn(session="new")
    assert isinstance(admission.admit(new, crowded, 0.0), Defer)
    assert isinstance(admission.admit(new, replace(crowded, working_set_tokens=1_000), 0.0), Admit)
    assert isinstance(admission.admit(new, replace(crowded, host_tokens=500_000), 0.0), Admit)
    assert isinstance(admission.admit(a_turn(), replace(crowded, homes=frozenset("s")), 0.0), Admit)
    assert isinstance(admission.admit(a_turn(session=""), crowded, 0.0), Admit)
    assert isinstance(admission.admit(new, crowded, new.arrived_at_s + 60.0), Admit)


def test_one_session_larger_than_the_memory_may_start_alone() -> None:
    small = replace(a_card("a"), profile=replace(LARGE, kv_capacity_tokens=50_000))
    assert isinstance(WorkingSetAdmission().admit(a_turn(), small, 0.0), Admit)


def test_sessions_wait_for_room_at_home_and_new_ones_take_the_smallest_working_set() -> None:
    home = a_card("a", is_home=True, working_set_tokens=1)
    rule = SmallestWorkingSet()
    assert chosen(rule.route(a_turn(), a_pool_of(home, a_card("b")))) == "a"
    waits = rule.route(a_turn(), a_pool_of(a_card("b"), full=(home,)))
    assert waits == Hold("waits for its home a", home.id)
    assert chosen(rule.route(a_turn(session="new"), a_pool_of(home, a_card("b")))) == "b"


def test_without_replicas_a_turn_is_held() -> None:
    rules = (LeastLateness(), Sticky(), SessionHash(), PrefixScore(), BlockCost(), PrefixAffinity())
    for policy in (*rules, SmallestWorkingSet()):
        assert isinstance(policy.route(a_turn(), a_pool_of()), Hold)
