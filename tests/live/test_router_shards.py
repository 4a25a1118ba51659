"""A pool with two router shards on Ray: who owns which replica, and what a killed one costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.live.conftest import App

pytestmark = pytest.mark.live

POOL, SHARDS = "sharded", ("router:sharded", "router:sharded#1")


def owned(shard: str) -> set[str]:
    """The replicas of a shard that take work; none while it is being restarted."""
    import ray
    from ray.exceptions import RayError

    from cato.control import actors

    try:
        picture: Any = ray.get(actors.get(shard).picture.remote(), timeout=10)
    except RayError:
        return set()
    return {r.id for r in picture.replicas if r.accepting}


def until(is_so: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def ask(app: App) -> int:
    body = {"model": "sim-sharded", "prompt": "def f(", "max_tokens": 8}
    return app.post("/v1/completions", body).status_code


def test_a_killed_shard_hands_its_replicas_to_the_other_and_gets_them_back(app: App) -> None:
    import ray

    from cato.control import actors

    until(lambda: [len(owned(s)) for s in SHARDS] == [1, 1], "each shard owns one of two replicas")
    first, second = (owned(s) for s in SHARDS)
    assert not first & second
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(ask, app) for _ in range(30)]
        ray.kill(actors.get(SHARDS[1]), no_restart=False)
        asked += [threads.submit(ask, app) for _ in range(30)]
        until(lambda: owned(SHARDS[0]) == first | second, "the first shard owns both replicas")
        assert [a.result() for a in asked] == [200] * 60
    until(lambda: (owned(SHARDS[0]), owned(SHARDS[1])) == (first, second), "they went home")
    assert ask(app) == 200
