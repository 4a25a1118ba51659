"""A pool's decisions follow what replicas tell of their KV caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kits.builders import a_profile, an_invocation

from cato.core.commands import Dispatch
from cato.core.events import CacheChanged, InvocationEnded, InvocationOffered, ReplicaReported
from cato.core.ids import DeploymentName, PoolName, ReplicaId
from cato.core.kv_events import NodeNews
from cato.core.orchestrator import PoolOrchestrator
from cato.core.snapshot import PREFIX_BLOCK_TOKENS
from cato.policies.schedulers import foresight

A, B = ReplicaId("a"), ReplicaId("b")
LOAD_TOKEN_S = 0.0001
PROFILE = replace(a_profile(prefill_token_s=0.01), host_load_token_s=LOAD_TOKEN_S)
PREFIX = tuple(range(1, 11))
TOKENS = 10 * PREFIX_BLOCK_TOKENS + 20


class Pool:
    """Both replicas cache prompts and have host memory; the session is at home on A."""

    def __init__(self) -> None:
        self.core = PoolOrchestrator(PoolName("p"), foresight())
        self._calls = 0
        for id in (B, A):
            self.core.handle(
                ReplicaReported(
                    0.0, id, DeploymentName("d"), PROFILE, 8, 0, id == A, (),
                    prefix_caching=True, host_tokens=50_000,
                )
            )  # fmt: skip
        self.end(self.ask())
        report = ReplicaReported(
            0.0, B, DeploymentName("d"), PROFILE, 8, 0, True, (),
            prefix_caching=True, host_tokens=50_000,
        )  # fmt: skip
        self.core.handle(report)

    def ask(self) -> Dispatch:
        self._calls += 1
        call = an_invocation(f"i{self._calls}", prompt=TOKENS, tokens=1, deadline_s=100.0)
        call = replace(call, prefix=PREFIX, session="s", until_first_token=True)
        (command,) = self.core.handle(InvocationOffered(0.0, call))
        assert isinstance(command, Dispatch)
        return command

    def end(self, command: Dispatch) -> None:
        id = command.invocation_id
        self.core.handle(InvocationEnded(0.0, id, command.attempt, 1, "done"))

    def hear(self, news: NodeNews) -> None:
        assert self.core.handle(CacheChanged(0.0, A, news)) == ()


def test_evicted_nodes_are_computed_again() -> None:
    pool = Pool()
    pool.hear(NodeNews(gone=PREFIX[4:]))
    assert pool.ask().cached_tokens == 4 * PREFIX_BLOCK_TOKENS


def test_nodes_in_host_memory_are_cached_and_take_their_time_to_load() -> None:
    pool = Pool()
    warm = pool.ask()
    pool.end(warm)
    pool.hear(NodeNews(moved=PREFIX[4:]))
    moved = pool.ask()
    assert (moved.replica_id, moved.cached_tokens) == (A, warm.cached_tokens)
    load_s = 6 * PREFIX_BLOCK_TOKENS * LOAD_TOKEN_S
    assert moved.service_s - warm.service_s == pytest.approx(load_s)
    pool.end(moved)
    assert pool.ask().service_s == pytest.approx(warm.service_s)  # they were loaded


def test_a_session_moves_when_its_home_has_evicted_it_and_another_replica_has_it() -> None:
    pool = Pool()
    assert pool.core.handle(CacheChanged(0.0, B, NodeNews(held=(PREFIX,)))) == ()
    at_home = pool.ask()
    assert at_home.replica_id == A
    pool.end(at_home)
    pool.hear(NodeNews(gone=PREFIX))
    assert pool.ask().replica_id == B


def test_prompts_of_running_calls_survive_lost_events() -> None:
    pool = Pool()
    running = pool.ask()
    pool.hear(NodeNews(cleared=True))
    pool.end(running)
    assert pool.ask().cached_tokens == 10 * PREFIX_BLOCK_TOKENS
