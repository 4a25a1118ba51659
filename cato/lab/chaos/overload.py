"""Open-loop clients that overload a pool, and the pool's promises under overload."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from cato.lab.chaos.clients import Clients, Outcome
from cato.lab.chaos.plan import Overload

# A refusal this late was an admission first.
EARLY_S = 1.0
AFTERWARDS = 0.5
# Promises of a pool: attainment of admitted calls, use of capacity, and time to recover.
LEAST_ATTAINMENT = 0.9
LEAST_USE = 0.75
USUAL_WITHIN_S = 30.0


class ArrivingClients(Clients):
    """Poisson arrivals: `factor` of `capacity_per_s` while the overload lasts, then half of it."""

    def __init__(self, overload: Overload, capacity_per_s: float, seed: int, **fields: Any) -> None:
        super().__init__(seed=seed, **fields)
        self._overload = overload
        self._capacity_per_s = capacity_per_s
        self._gaps = random.Random(f"{seed} gaps")
        self.began_s = 0.0

    async def _begin(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        next_s = self.began_s = time.monotonic()
        self.begun.set()
        while not self._is_stopping:
            is_over = next_s - self.began_s > self._overload.lasts_s
            factor = AFTERWARDS if is_over else self._overload.factor
            next_s += self._gaps.expovariate(factor * self._capacity_per_s)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            group.create_task(self._ask(session))

    def report(self, longest_queue: int) -> dict[str, Any]:
        return judged(
            self.outcomes, self._overload, self._capacity_per_s, self.began_s, longest_queue
        )


def judged(
    outcomes: Sequence[Outcome],
    overload: Overload,
    capacity_per_s: float,
    began_s: float,
    longest_queue: int,
) -> dict[str, Any]:
    """Judge the calls; `broken` names each broken promise."""
    over_s = began_s + overload.lasts_s
    during = [o for o in outcomes if o.began_s < over_s]
    admitted = [o for o in during if not _refused_early(o)]
    attainment = _share([_met(o, overload) for o in admitted])
    used = sum(o.kind == "ok" and o.began_s + o.took_s < over_s for o in during)
    use = used / (capacity_per_s * overload.lasts_s)
    after = [o for o in outcomes if o.began_s >= over_s]
    unusual = [o.began_s - over_s for o in after if not _met(o, overload)]
    usual_after_s = max(unusual, default=0.0)
    waits = [o.retry_after_s for o in outcomes if o.retry_after_s is not None]
    promises = {
        f"attainment of what was admitted: {attainment:.3f}": attainment >= LEAST_ATTAINMENT,
        f"use of the capacity: {use:.2f}": use >= LEAST_USE,
        f"the queue: {longest_queue}": longest_queue <= overload.max_queued,
        f"as usual only after {usual_after_s:.0f} s": usual_after_s <= USUAL_WITHIN_S,
    }
    return {
        "factor": overload.factor,
        "offered": len(during),
        "admitted": len(admitted),
        "refused_late": sum(o.kind == "refused" for o in admitted),
        "attainment_of_admitted": round(attainment, 4),
        "use": round(use, 3),
        "longest_queue": longest_queue,
        "retry_after_s": [min(waits), max(waits)] if waits else [],
        "usual_after_s": round(usual_after_s, 1),
        "broken": [what for what, is_kept in promises.items() if not is_kept],
    }


def _refused_early(outcome: Outcome) -> bool:
    return outcome.kind == "refused" and outcome.took_s < EARLY_S


def _met(outcome: Outcome, overload: Overload) -> bool:
    return outcome.kind == "ok" and outcome.took_s <= overload.slo_s


def _share(kept: Sequence[bool]) -> float:
    """0 for no values: a pool that refuses everything has kept no promise."""
    return sum(kept) / len(kept) if kept else 0.0
