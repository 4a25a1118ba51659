"""Fleet state for operators, collected from the control actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ray.exceptions import RayError

from cato.control import actors
from cato.core.ids import PoolName
from cato.telemetry.decisions import PoolDecisions, all_decisions
from cato.telemetry.overview import DeploymentOverview, FleetState

log = logging.getLogger("cato.fleet")

# A slower control actor is probably restarting: it is listed as missing.
ANSWER_WITHIN_S = 2.0

# A look-up blocks for a millisecond; a handle stays valid when its actor restarts.
_handles: dict[str, Any] = {}

_STATE_FIELDS = tuple(f.name for f in fields(DeploymentOverview) if f.name != "name")


async def fleet_state(pools: Mapping[PoolName, int]) -> FleetState:
    """Ask all control actors at once; those that do not answer are listed as missing. `pools` maps
    pools to their number of router shards."""
    routers = [(pool, name) for pool, n in pools.items() for name in actors.router_names(pool, n)]
    provisioned, warnings, resident, shared, shared_decided, *decided = await asyncio.gather(
        _answer(actors.PROVISIONER, "state"),
        _answer(actors.PROVISIONER, "warnings"),
        _answer(actors.EVICTION_MANAGER, "residents"),
        _answer(actors.EVICTION_MANAGER, "pictures"),
        _answer(actors.EVICTION_MANAGER, "decisions"),
        *(_answer(name, "decisions") for _, name in routers),
    )
    asked = (actors.PROVISIONER, actors.EVICTION_MANAGER, *(name for _, name in routers))
    of_pools: dict[PoolName, list[PoolDecisions]] = {}
    for (pool, _), told in zip(routers, decided, strict=True):
        if told is not None:
            of_pools.setdefault(pool, []).append(told)
    answers = (provisioned, resident, *decided)
    return FleetState(
        decisions={
            **{pool: all_decisions(told) for pool, told in of_pools.items()},
            **(shared_decided or {}),
        },
        residents=tuple(resident or ()),
        deployments=tuple(
            DeploymentOverview(name, **{f: state[f] for f in _STATE_FIELDS})
            for name, state in sorted((provisioned or {}).items())
        ),
        shared_pools=tuple(shared or ()),
        missing=tuple(n for n, a in zip(asked, answers, strict=True) if a is None),
        warnings=tuple(warnings or ()),
    )


async def _answer(actor: str, method: str) -> Any:
    try:
        if actor not in _handles:
            _handles[actor] = actors.get(actor)
        call = getattr(_handles[actor], method).remote()
        return await asyncio.wait_for(call, ANSWER_WITHIN_S)
    except (ValueError, TimeoutError, RayError) as error:
        log.info("%s did not answer `%s`: %r", actor, method, error)
        _handles.pop(actor, None)  # it may have been removed and created again
        return None
