"""Late calls age into service: they do not wait for minutes beside free places."""

from __future__ import annotations

from cato.core.ids import PoolName
from cato.policies import schedulers
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.workloads import SABER_ENGINE, saber_tasks

POOL = PoolName("engine")


def test_late_calls_do_not_wait_for_minutes_while_an_engine_has_free_places() -> None:
    """SABER's W3 at 4 requests/s never fills the engine's 100 places."""
    setup = PoolSetup(POOL, (SABER_ENGINE,), schedulers.foresight())
    outcomes = Fleet([setup]).run(saber_tasks("W3", 4.0, 3000, 1, POOL))
    starved = [o for o in outcomes if o.queue_s > 60.0]
    assert len(starved) <= 0.01 * len(outcomes)
