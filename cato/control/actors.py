"""Create, find and end the control plane's actors.

They are named, detached and restart without limit: usable 1.5 s after a kill under the same handle.
All but the host agents run on the head node, so losing another host takes none down; without
the head there is no cluster anyway. They survive `serve shutdown`, so `remove_all` ends them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cato.control.memory import free_large_blocks, spare_collector
from cato.control.ray_private import ON_HEAD_NODE
from cato.core.topology import PoolSpec
from cato.telemetry import logs

NAMESPACE = "cato"
PROFILER = "profiler"
PROVISIONER = "provisioner"
EVICTION_MANAGER = "eviction-manager"
ENGINES_APP = "engines"
INGRESS_APP = "cato"
# Concurrent calls of an actor. Calls that wait long (offers, orders) use links instead.
MAX_CALLS = 1_000
# Time for the Profiler to flush its pending writes.
CLOSE_S = 5.0


def router_name(pool: str, shard: int = 0) -> str:
    """The router of a pool, or of one of its additional shards."""
    return f"router:{pool}#{shard}" if shard else f"router:{pool}"


def router_names(pool: str, shards: int) -> list[str]:
    """All shards of a pool's router."""
    return [router_name(pool, shard) for shard in range(shards)]


def routers_of(pool: PoolSpec) -> list[str]:
    """All shards of the pool's router, with the one that stands by."""
    return router_names(pool.name, pool.shards.count)


def host_agent_name(node_id: str) -> str:
    return f"host-agent:{node_id}"


def create(cls: type, name: str, *args: object, host: str | None = None) -> Any:
    """The actor `name`, created from `cls` if it does not exist. Returns its handle.

    It runs on the Ray node `host`, or on the head node.
    """
    place: dict[str, Any] = {"resources": ON_HEAD_NODE}
    if host is not None:
        place = {"scheduling_strategy": NodeAffinitySchedulingStrategy(host, soft=False)}
    return (
        ray.remote(_prepared(cls))
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=MAX_CALLS,
            **place,
        )
        .remote(*args)
    )


def _prepared(cls: type) -> type:
    """A class with the public methods of `cls`, which it makes in a process that it sets up: CATO's
    log format, and Python's garbage collector.

    It names the module of `cls` only: Ray loads the class of an actor in every process that looks
    the actor up, on its event loop, and with the actors come SciPy, Numba and SQLAlchemy (1.2 s and
    100 MB for each engine replica).
    """
    module, name = cls.__module__, cls.__qualname__

    class Prepared:
        def __init__(self, *args: object) -> None:
            logs.set_up()
            self._actor = getattr(importlib.import_module(module), name)(*args)
            spare_collector()
            free_large_blocks()

    for method, function in inspect.getmembers(cls, inspect.isfunction):
        if not method.startswith("_"):
            setattr(Prepared, method, _passing_on(method, inspect.iscoroutinefunction(function)))
    Prepared.__name__, Prepared.__qualname__ = cls.__name__, cls.__qualname__
    return Prepared


def _passing_on(method: str, is_async: bool) -> Callable[..., Any]:
    def call(self: Any, *args: object, **kwargs: object) -> Any:
        return getattr(self._actor, method)(*args, **kwargs)

    async def awaited(self: Any, *args: object, **kwargs: object) -> Any:
        return await getattr(self._actor, method)(*args, **kwargs)

    return awaited if is_async else call


def get(name: str) -> Any:
    """The handle of a control actor; raise ValueError when it does not exist."""
    return ray.get_actor(name, namespace=NAMESPACE)


def _names() -> list[str]:
    """Names of all control actors of this cluster."""
    return [
        a["name"]
        for a in ray.util.list_named_actors(all_namespaces=True)
        if a["namespace"] == NAMESPACE
    ]


def remove_routers_but(kept: Collection[str]) -> None:
    """End all routers except those named: their pools were removed, or have fewer shards."""
    for name in _names():
        if name.startswith(router_name("")) and name not in kept:
            with contextlib.suppress(ValueError):  # it ended between the listing and now
                ray.kill(get(name), no_restart=True)


def remove_all() -> list[str]:
    """End every control actor of this cluster; return their names."""
    names = _names()
    if PROFILER in names:
        with contextlib.suppress(ValueError, RayError):  # it is gone or does not answer
            ray.get(get(PROFILER).close.remote(), timeout=CLOSE_S)
    for name in names:
        try:
            ray.kill(get(name), no_restart=True)
        except ValueError:
            continue  # it ended between the listing and now
    return names
