"""Tasks of the papers' experiments in the form sent live.

Pools are named as in the deployment files, and all calls of a class share one length belief: live,
nothing is predicted for a single call.
"""

from __future__ import annotations

from dataclasses import replace

from cato.core.ids import PoolName
from cato.lab.experiments import cato_rq, printed, slo_sa_queues, tempo_variants
from cato.sim.cato_workload import CATO_PRINTED_CLASSES, MODEL_A, MODEL_B, cato_tasks
from cato.sim.tasks import SimTask
from cato.sim.tempo_workload import TEMPO_CALL, tempo_tasks
from cato.sim.workloads import belief

# The paper's models, by the deployment's pool names.
_POOL_OF = {MODEL_A: PoolName("small"), MODEL_B: PoolName("large")}


def coding_tasks(shares: printed.Shares, rate_per_s: float, seed: int, n: int) -> list[SimTask]:
    made = cato_tasks(
        shares,
        rate_per_s,
        n,
        seed,
        profile=cato_rq.PROFILE,
        classes=CATO_PRINTED_CLASSES,
        judged=printed.JUDGED,
    )
    return [
        replace(t, nodes=tuple(replace(c, pool=_POOL_OF[c.pool]) for c in t.nodes)) for t in made
    ]


BURST, BURST_EVERY_S = 40, 60.0
SLO_SA_POOL = PoolName("engine")


def burst_tasks(seed: int, n: int) -> list[SimTask]:
    """The paper's half chat, half code; 40 of them arrive at once every minute."""
    times = [i // BURST * BURST_EVERY_S for i in range(n)]
    return slo_sa_queues.arriving("chat-code", times, seed, SLO_SA_POOL)


def mixed_tasks(load: float, seed: int, n: int) -> list[SimTask]:
    """Tempo's mix at a fraction of the engine's capacity."""
    mean = TEMPO_CALL[1]
    known = belief(mean)
    return [
        replace(t, nodes=tuple(replace(c, expected_tokens=mean, length=known) for c in t.nodes))
        for t in tempo_tasks(load, n, seed, tempo_variants.POOL)
    ]
