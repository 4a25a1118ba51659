"""The engine in virtual time with a prefix cache."""

from __future__ import annotations

import math
from dataclasses import replace

from kits.builders import a_profile

from cato.core.ids import InvocationId
from cato.core.prefix_cache import PrefixCache
from cato.core.profile import Profile
from cato.sim.replica import FactKind, Sequence, SimReplica

BLOCK = 16
PROFILE = replace(
    a_profile(prefill_s=0.0, token_s=0.01, prefill_token_s=0.001), kv_capacity_tokens=1600
)


def an_engine(profile: Profile = PROFILE, chunk_tokens: int | None = 128) -> SimReplica:
    return SimReplica(
        profile, 8, chunk_tokens, cache=PrefixCache(profile.kv_capacity_tokens, BLOCK)
    )


def a_request(id: str, prompt: int, first_block: int = 0, output: int = 2) -> Sequence:
    blocks = tuple(range(first_block, first_block + prompt // BLOCK))
    return Sequence(InvocationId(id), prompt, output, blocks=blocks)


def played(engine: SimReplica, until_s: float = math.inf) -> dict[str, float]:
    """When each request ended; what is submitted before runs first."""
    ends: dict[str, float] = {}
    while engine.wake_s < until_s:
        now_s = engine.wake_s
        facts, _ = engine.wake(now_s)
        ends |= {s.id: now_s for kind, s in facts if kind is FactKind.DONE}
        engine.go_on(now_s)
    return ends


def test_a_prompt_seen_before_costs_only_what_is_new() -> None:
    engine = an_engine()
    engine.submit(0.0, a_request("cold", 800))
    cold_s = played(engine)["cold"]
    warm = a_request("warm", 832)
    engine.submit(10.0, warm)
    warm_s = played(engine)["warm"] - 10.0
    assert warm.cached_tokens == 800
    assert warm_s < cold_s / 5


def test_what_is_idle_longest_loses_its_blocks_first_and_its_end_before_its_beginning() -> None:
    engine = an_engine()
    for at_s, id, first in ((0.0, "a", 0), (10.0, "b", 1000), (20.0, "c", 2000)):
        engine.submit(at_s, a_request(id, 640, first))
        played(engine)
    again = a_request("b again", 640, 1000)
    engine.submit(30.0, again)
    played(engine)
    rest = a_request("a again", 640, 0)
    engine.submit(40.0, rest)
    played(engine)
    assert again.cached_tokens == 624  # the last token is always computed
    assert 0 < rest.cached_tokens < 624


def test_a_prompt_waits_while_those_that_run_hold_the_memory() -> None:
    engine = an_engine()
    engine.submit(0.0, a_request("long", 800, 0, output=400))
    engine.submit(0.0, a_request("late", 800, 1000))
    ends = played(engine)
    assert ends["late"] > ends["long"]
    assert engine.preemptions == 0


def test_a_cancelled_request_gives_its_blocks_back_but_leaves_what_it_computed() -> None:
    engine = an_engine()
    engine.submit(0.0, a_request("gone", 800, 0, output=400))
    played(engine, until_s=1.0)
    engine.cancel(1.0, InvocationId("gone"))
    played(engine)
    assert engine.cache is not None
    assert engine.cache.held_blocks == 0
    again = a_request("again", 800)
    engine.submit(20.0, again)
    played(engine)
    assert again.cached_tokens > 600


def test_a_prompt_in_pieces_takes_as_long_as_its_steps_one_by_one() -> None:
    card = replace(
        PROFILE,
        kv_capacity_tokens=100_000,
        prefill_per_attended_token_s=1e-6,
        weights_read_s=0.2,
        kv_read_token_s=1e-6,
    )
    engine = an_engine(card)
    engine.submit(0.0, Sequence(InvocationId("one"), 4096, 1))
    expected_s = sum(
        card.step_s(0, at, 128, at == 4096 - 128, 128 * (at + 64)) for at in range(0, 4096, 128)
    )
    assert math.isclose(played(engine)["one"], expected_s)


def test_without_a_cache_blocks_mean_nothing() -> None:
    ends = []
    for blocks in ((), tuple(range(50))):
        engine = SimReplica(PROFILE, 8, 128)
        for id in ("a", "b"):
            engine.submit(0.0, Sequence(InvocationId(id), 800, 5, blocks=blocks))
        ends.append(played(engine))
    assert ends[0] == ends[1]


def test_retained_blocks_outlive_a_prompt_that_would_have_taken_their_space() -> None:
    for retain_s, cached in ((0.0, 400), (60.0, 800)):
        engine = an_engine()
        first = replace(a_request("first", 800), session="s", retain_s=retain_s)
        engine.submit(0.0, first)
        played(engine)
        # With what `first` left there are more blocks than the cache has, unless one gives way.
        engine.submit(10.0, a_request("other", 600, 1000))
        engine.submit(10.0, a_request("another", 600, 2000))
        played(engine)
        again = replace(a_request("again", 816), session="s")
        engine.submit(30.0, again)
        played(engine)
        assert again.cached_tokens == cached


def test_a_request_waits_for_retained_blocks_until_their_time_is_over() -> None:
    engine = an_engine()
    engine.submit(0.0, replace(a_request("first", 1200), session="s", retain_s=1.0))
    ended_s = played(engine)["first"]
    engine.submit(ended_s, a_request("beside it", 160, 1000, output=200))
    long = a_request("long", 1200, 2000)
    alone_s = PROFILE.service_s(long.prompt_tokens, long.output_tokens)
    engine.submit(ended_s, long)
    ends = played(engine)
    assert ended_s + 1.0 + alone_s < ends["long"] < ends["beside it"] + alone_s


def test_retained_blocks_give_way_when_nothing_else_runs() -> None:
    engine = an_engine()
    engine.submit(0.0, replace(a_request("first", 1200), session="s", retain_s=1000.0))
    ended_s = played(engine)["first"]
    engine.submit(ended_s, a_request("long", 1200, 1000))
    assert played(engine)["long"] < ended_s + 10.0


def test_blocks_of_a_neighbour_are_fetched_instead_of_computed() -> None:
    """A prompt of 800 tokens, 48 of them nowhere: 752 are fetched at 0.1 ms each."""
    card = replace(PROFILE, fetch_token_s=1e-4)
    cold = an_engine(card)
    cold.submit(0.0, a_request("cold", 800))
    cold_s = played(cold)["cold"]
    engine = an_engine(card)
    engine.fetchable = lambda sequence: 760
    fetched = a_request("fetched", 800)
    engine.submit(0.0, fetched)
    fetched_s = played(engine)["fetched"]
    assert fetched.cached_tokens == 752
    assert fetched_s < cold_s / 5
    assert fetched_s > 752 * card.fetch_token_s
    again = a_request("again", 800)
    engine.submit(50.0, again)  # now they are here
    assert played(engine)["again"] - 50.0 < fetched_s - 752 * card.fetch_token_s + 1e-9
    assert again.cached_tokens == 784


def test_a_request_that_leaves_while_its_blocks_are_fetched_leaves_nothing_held() -> None:
    engine = an_engine(replace(PROFILE, fetch_token_s=1e-2))
    engine.fetchable = lambda sequence: 800
    engine.submit(0.0, a_request("gone", 800))
    played(engine, until_s=1.0)
    engine.cancel(1.0, InvocationId("gone"))
    played(engine)
    assert engine.cache is not None
    assert (engine.cache.held_blocks, engine.held) == (0, 0)


def test_what_is_here_already_is_not_fetched() -> None:
    card = replace(PROFILE, fetch_token_s=1.0)
    engine = an_engine(card)
    engine.submit(0.0, a_request("first", 800))
    played(engine)
    engine.fetchable = lambda sequence: 640
    second = a_request("second", 800)
    engine.submit(50.0, second)
    assert played(engine)["second"] < 51.0
    assert second.cached_tokens == 784
