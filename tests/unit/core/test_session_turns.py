"""Turns of sessions through a pool's orchestrator, with the default scheduler."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import inf

import pytest
from kits.builders import an_invocation

from cato.core.commands import Command, Dispatch
from cato.core.events import (
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    ReplicaLost,
    ReplicaReported,
    StreamLost,
    Ticked,
)
from cato.core.ids import DeploymentName, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.replicas import Replicas
from cato.core.profile import Profile
from cato.core.snapshot import PREFIX_BLOCK_TOKENS, Invocation
from cato.lab.studies.agent_fleet import card_profile
from cato.policies.schedulers import foresight

LARGE = card_profile("large")
NODES = 1000


def a_pool(replicas: int = 2, kv_nodes: int = 9000, host_nodes: int = 0) -> PoolOrchestrator:
    pool = PoolOrchestrator(PoolName("p"), foresight())
    host_tokens = host_nodes * PREFIX_BLOCK_TOKENS
    profile = replace(LARGE, kv_capacity_tokens=kv_nodes * PREFIX_BLOCK_TOKENS)
    for i in range(replicas):
        pool.handle(a_report(ReplicaId(f"r{i}"), profile, host_tokens))
    return pool


def a_report(id: ReplicaId, profile: Profile, host_tokens: int = 0) -> ReplicaReported:
    return ReplicaReported(
        0.0,
        id,
        DeploymentName("d"),
        profile,
        256,
        0,
        True,
        (),
        prefix_caching=True,
        step_tokens=2048,
        host_tokens=host_tokens,
    )


def a_turn(session: str, number: int, nodes: int = NODES, at_s: float = 0.0) -> Invocation:
    first = 10_000 * int(session)
    turn = an_invocation(
        f"{session}-{number}",
        prompt=nodes * PREFIX_BLOCK_TOKENS + 10,
        deadline_s=at_s + 2.0,
        arrived_at_s=at_s,
        until_first_token=True,
    )
    return replace(turn, session=session, prefix=tuple(range(first, first + nodes)))


def the_dispatch(commands: tuple[Command, ...]) -> Dispatch:
    (command,) = commands
    assert isinstance(command, Dispatch)
    return command


def served(
    pool: PoolOrchestrator, turn: Invocation, counts: tuple[int, int] | None = None
) -> Dispatch:
    """`counts`: cached tokens and prompt tokens, as the engine counts them."""
    now_s = turn.arrived_at_s
    dispatch = the_dispatch(pool.handle(InvocationOffered(now_s, turn)))
    pool.handle(FirstTokenSent(now_s + 0.5, turn.id))
    pool.handle(InvocationEnded(now_s + 1.0, turn.id, 1, 50, "done", *(counts or ())))
    return dispatch


def test_turns_of_a_session_stay_together_and_their_service_counts_what_is_cached() -> None:
    pool = a_pool()
    cold = served(pool, a_turn("1", 1))
    other = served(pool, a_turn("2", 1, at_s=5.0))
    warm = served(pool, a_turn("1", 2, NODES + 10, at_s=10.0))
    assert other.replica_id != cold.replica_id  # new sessions are spread
    assert warm.replica_id == cold.replica_id
    assert warm.remaining_s < cold.remaining_s / 20


def test_an_answer_with_less_cached_than_believed_corrects_the_picture() -> None:
    half = (32 * NODES, 32 * NODES + 5)  # of an engine that counts half of what was estimated
    for reported, believed in ((None, True), (half, True), ((0, half[1]), False)):
        pool = a_pool(replicas=1)
        served(pool, a_turn("1", 1))
        served(pool, a_turn("2", 1, at_s=5.0))
        served(pool, a_turn("2", 2, at_s=10.0), reported)
        again = the_dispatch(pool.handle(InvocationOffered(20.0, a_turn("1", 2, at_s=20.0))))
        assert (again.remaining_s < 1.0) is believed


def test_tokens_of_what_is_cached_follow_the_engines_count() -> None:
    pool = a_pool(replicas=1)
    for number, counted in enumerate((50 * NODES, 110 * NODES)):
        session = str(number + 1)
        served(pool, a_turn(session, 1), (0, counted))
        turn = replace(a_turn(session, 2, NODES + 10, at_s=10.0), prompt_tokens=counted + 900)
        again = served(pool, turn)
        assert abs(again.cached_tokens - counted) < 2 * PREFIX_BLOCK_TOKENS


def test_what_left_the_kv_cache_for_the_hosts_memory_counts_as_cached() -> None:
    for host_nodes, is_kept in ((0, False), (3 * NODES, True)):
        pool = a_pool(replicas=1, kv_nodes=NODES + NODES // 2, host_nodes=host_nodes)
        for number in (1, 2, 3):
            served(pool, a_turn(str(number), 1, at_s=5.0 * number))
        again = served(pool, a_turn("1", 2, at_s=30.0))
        assert (again.cached_tokens > NODES) is is_kept


def test_a_turn_waits_for_its_replica_and_its_prompt_counts_there_meanwhile() -> None:
    pool = a_pool()
    home = served(pool, a_turn("1", 1)).replica_id
    served(pool, a_turn("2", 1, at_s=5.0))
    # A prompt of 300 nodes fills the window for a second; the session's turn fits behind it.
    other = a_turn("1", 2, NODES + 300, at_s=10.0)
    assert the_dispatch(pool.handle(InvocationOffered(10.0, other))).replica_id == home
    turn = a_turn("1", 3, NODES + 330, at_s=10.1)
    turn = replace(turn, prefix=(*turn.prefix[:NODES], *range(1, 331)))
    assert pool.handle(InvocationOffered(10.1, turn)) == ()
    waited = {r.id: r.awaited_s for r in pool.picture(10.1).replicas}
    assert waited[home] > 0.5
    assert sum(waited.values()) == waited[home]
    command = the_dispatch(pool.handle(FirstTokenSent(11.0, other.id)))
    assert (command.invocation_id, command.replica_id) == (turn.id, home)
    assert all(r.awaited_s == 0.0 for r in pool.picture(11.0).replicas)


def test_a_waiting_turn_that_is_withdrawn_no_longer_counts() -> None:
    pool = a_pool(replicas=1)
    first = a_turn("1", 1)
    pool.handle(InvocationOffered(0.0, first))
    waiting = a_turn("2", 1)
    assert pool.handle(InvocationOffered(0.0, waiting)) == ()
    assert pool.picture(0.0).replicas[0].awaited_s > 1.0
    pool.handle(InvocationWithdrawn(0.1, waiting.id, 1, "left"))
    assert pool.picture(0.1).replicas[0].awaited_s == 0.0


def test_turns_in_time_and_late_are_counted_for_all_replicas_of_a_profile() -> None:
    pool = a_pool()

    def answer(number: int, at_s: float, first_s: float, end_s: float, **target: float) -> None:
        turn = replace(a_turn(str(number), 1, at_s=at_s), until_first_token=True, **target)
        the_dispatch(pool.handle(InvocationOffered(at_s, turn)))
        pool.handle(FirstTokenSent(first_s, turn.id))
        pool.handle(InvocationEnded(end_s, turn.id, 1, 101, "done"))

    answer(1, 0.0, 1.0, 2.0, deadline_s=3.0)
    answer(2, 2.0, 3.0, 6.0, deadline_s=5.0, tpot_target_s=0.04)
    assert [round(n, 1) for n in pool.picture(6.0).replicas[1].turns] == [2.0, 0.0]
    answer(3, 6.0, 8.0, 9.0, deadline_s=7.0)  # the first token is late
    answer(4, 9.0, 10.0, 15.0, deadline_s=12.0, tpot_target_s=0.04)  # 0.05 s a token
    answer(5, 15.0, 17.0, 18.0, deadline_s=inf)  # has no SLO
    answer(6, 15.0, 16.0, 17.0, deadline_s=14.0)  # was refused, and late when it came again
    for replica in pool.picture(18.0).replicas:
        in_time, late = replica.turns
        assert 1.4 < in_time < 2.0
        assert 1.8 < late < 2.0
    # They are forgotten.
    assert max(pool.picture(2000.0).replicas[0].turns) < 1e-6


def test_the_share_of_late_turns_is_that_of_all_profiles() -> None:
    replicas, versions = Replicas(), count()
    for name, profile in (("a", LARGE), ("b", LARGE), ("c", LARGE.slowed(2.0))):
        replicas.place(replicas.report(a_report(ReplicaId(name), profile), versions))
    a, b, c = replicas.accepting
    assert a.pace is b.pace is not c.pace
    assert replicas.share_late(1.0) == 0.0
    a.pace.turns.add(3.0, 1.0, is_lost=False)
    c.pace.turns.add(1.0, 1.0, is_lost=True)
    assert replicas.share_late(1.0) == 0.25


def test_sessions_of_a_lost_replica_begin_anew_elsewhere() -> None:
    pool = a_pool()
    home = served(pool, a_turn("1", 1)).replica_id
    pool.handle(ReplicaLost(5.0, home, "died"))
    moved = served(pool, a_turn("1", 2, at_s=10.0))
    assert moved.replica_id != home
    assert moved.remaining_s > 1.0


def late_left_s(pool: PoolOrchestrator) -> float:
    return pool._dispatcher._late_share.left_s(0.0, 2, 1.0)


def test_what_sessions_lose_with_a_replica_is_no_part_of_the_share_of_late_turns() -> None:
    pool = a_pool()
    home = served(pool, a_turn("1", 1)).replica_id
    assert served(pool, a_turn("2", 1)).replica_id != home
    before_s = late_left_s(pool)
    again_s = LARGE.prefill_s(NODES * PREFIX_BLOCK_TOKENS + 10)
    profile = pool._replicas.known[home].profile
    draining = replace(a_report(home, profile), accepting=False)
    for _ in range(2):
        pool.handle(draining)
        assert late_left_s(pool) - before_s == pytest.approx(again_s, rel=0.01)
    pool.handle(replace(draining, accepting=True))  # it stays after all
    assert late_left_s(pool) == before_s
    pool.handle(draining)
    pool.handle(ReplicaLost(0.0, home, "drained"))
    assert late_left_s(pool) - before_s == pytest.approx(again_s, rel=0.01)


def test_a_replica_that_dies_leaves_its_sessions_time_and_one_without_cache_none() -> None:
    for has_cache in (True, False):
        pool = a_pool()
        home = served(pool, a_turn("1", 1)).replica_id
        profile = pool._replicas.known[home].profile
        pool.handle(replace(a_report(home, profile), prefix_caching=has_cache))
        before_s = late_left_s(pool)
        pool.handle(ReplicaLost(0.0, home, "died"))
        assert (late_left_s(pool) > before_s) == has_cache


def test_sessions_find_their_cache_again_at_a_replica_that_was_silent_for_a_while() -> None:
    """Its process was held up; the engine, another process, has kept its cache."""
    for back_s, is_lost, is_kept in ((8.0, False, True), (8.0, True, False), (700.0, False, False)):
        pool = a_pool()
        home = served(pool, a_turn("1", 1)).replica_id
        reports = {r.id: a_report(r.id, r.profile) for r in pool.picture(0.0).replicas}
        for id, report in reports.items():
            if id != home:
                pool.handle(replace(report, now_s=6.0))
        pool.handle(Ticked(6.0))
        assert home not in pool.replicas
        if is_lost:
            pool.handle(ReplicaLost(7.0, home, "its link ended"))
        for report in reports.values():
            pool.handle(Ticked(back_s))
            pool.handle(replace(report, now_s=back_s))
        pool.check_invariants()
        again = served(pool, a_turn("1", 2, NODES + 10, at_s=back_s + 1.0))
        assert (again.cached_tokens > 0) is is_kept
        assert again.replica_id == home or not is_kept


def test_a_broken_stream_costs_no_other_call_its_lease_and_no_session_its_cache() -> None:
    pool = a_pool()
    home = served(pool, a_turn("1", 1)).replica_id
    other, broken = a_turn("1", 2, at_s=4.0), a_turn("1", 3, at_s=4.0)
    assert the_dispatch(pool.handle(InvocationOffered(4.0, other))).replica_id == home
    assert the_dispatch(pool.handle(InvocationOffered(4.0, broken))).replica_id == home
    pool.handle(StreamLost(5.0, home, broken.id, 1, "its answer ended early"))
    assert pool.leased == {other.id}
    again = the_dispatch(pool.handle(InvocationOffered(5.0, replace(broken, attempt=2))))
    assert again.replica_id != home, "it goes elsewhere until the replica has reported"
    pool.handle(InvocationEnded(6.0, other.id, 1, 50, "done"))
    profile = replace(LARGE, kv_capacity_tokens=9000 * PREFIX_BLOCK_TOKENS)
    pool.handle(replace(a_report(home, profile), now_s=6.0))
    later = served(pool, a_turn("1", 4, at_s=8.0))
    assert later.replica_id == home
    assert later.cached_tokens > 0.9 * NODES * PREFIX_BLOCK_TOKENS
