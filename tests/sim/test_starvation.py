"""Nobody waits without end: late calls age into service, and what its client will not see is
refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pytest

from cato.core.ids import PoolName, TaskName
from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.core.snapshot import READING_S
from cato.core.topology import PATIENCE_S
from cato.lab.studies import completions, matrix_cells
from cato.lab.studies.matrix import Scene
from cato.policies import schedulers
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.mixed import POOL as MIXED_POOL
from cato.sim.mixed import capacity_per_s
from cato.sim.tasks import Outcome, SimNode, SimTask, task_metrics
from cato.sim.workloads import SABER_ENGINE, belief, poisson, saber_tasks

POOL = PoolName("engine")
OVERLOAD = 3.0
# A card so slow that minutes of overload are a few thousand calls.
SLOW_CARD = completions.ENGINE.slowed(10.0)
SABER_CARD = replace(SABER_ENGINE, max_running=16)
SPEEDS = (1.0, 2.5, 6.0)


@dataclass(frozen=True)
class Cell:
    fleet: tuple[Profile, ...]
    tasks: Sequence[SimTask]

    def run(self, policies: Policies) -> list[Outcome]:
        pool = self.tasks[0].nodes[0].pool
        return Fleet([PoolSetup(pool, self.fleet, policies)]).run(self.tasks)


def short_completions() -> Cell:
    """200/20 tokens for two and a half minutes."""
    rate_per_s = OVERLOAD * completions.rate_per_s(200, 20) / 10.0
    times = poisson(np.random.default_rng(1), rate_per_s, round(150 * rate_per_s))
    node = SimNode(POOL, 200, 20, 20, belief(20))
    name = TaskName("completion")
    tasks = [
        SimTask(f"c{i}", name, at_s, SloMetric.TTFT, 3.0, (node,), (0.5,))
        for i, at_s in enumerate(times)
    ]
    return Cell((SLOW_CARD,), tasks)


def saber(fleet: tuple[Profile, ...], seconds: float) -> Cell:
    each_per_s = capacity_per_s("W3") / (2 + 4 / 2.5)  # of a card as fast as the first
    speed = sum(SABER_CARD.typical_call_s / card.typical_call_s for card in fleet)
    rate_per_s = OVERLOAD * each_per_s * speed
    tasks = saber_tasks("W3", rate_per_s, round(seconds * rate_per_s), 1, MIXED_POOL)
    return Cell(fleet, tasks)


CELLS = {
    "short completions": short_completions,
    "W3": lambda: saber((SABER_CARD,), 120.0),
    "W3 on cards of three speeds": lambda: saber(tuple(SABER_CARD.slowed(s) for s in SPEEDS), 90.0),
}


@pytest.mark.parametrize("cell", CELLS)
def test_in_threefold_overload_calls_wait_a_minute_or_are_refused(cell: str) -> None:
    work = CELLS[cell]()
    outcomes = work.run(schedulers.foresight())
    for o in outcomes:
        longest_s = max(PATIENCE_S, 10 * o.task.target_s)
        assert o.refused or o.queue_s <= longest_s, f"{o.task.id} waited for {o.queue_s:.0f} s"
    fcfs = task_metrics(work.run(schedulers.ray_serve()))
    ours = task_metrics(outcomes)
    gain = ours["slo_attainment"] - fcfs["slo_attainment"]
    assert gain >= 0.05 or ours["ttft_s_p95"] <= 2 * fcfs["ttft_s_p95"]


def test_without_a_bound_of_patience_calls_would_wait_for_minutes() -> None:
    """What the test above holds is held by the rule, and costs nothing."""
    work = saber((SABER_CARD,), 120.0)
    patient = work.run(replace(schedulers.foresight(), patience_s=inf))
    assert max(o.queue_s for o in patient) > 120.0
    without, ours = task_metrics(patient), task_metrics(work.run(schedulers.foresight()))
    assert ours["slo_attainment"] >= without["slo_attainment"] - 0.01


def test_late_calls_do_not_wait_for_minutes_while_an_engine_has_free_places() -> None:
    """SABER's W3 at 4 requests/s never fills the engine's 100 places."""
    tasks = saber_tasks("W3", 4.0, 2000, 1, POOL)
    outcomes = Cell((SABER_ENGINE,), tasks).run(schedulers.foresight())
    assert max(o.queue_s for o in outcomes) <= PATIENCE_S
    ours = task_metrics(outcomes)
    assert ours["refused"] <= 0.001
    fcfs = task_metrics(Cell((SABER_ENGINE,), tasks).run(schedulers.ray_serve()))
    assert ours["slo_attainment"] >= fcfs["slo_attainment"] - 0.005
    assert ours["ttft_s_p95"] <= 2 * fcfs["ttft_s_p95"]


def test_a_stream_that_has_begun_is_not_given_up_in_an_overload() -> None:
    """One slot each, so streams rest for others."""
    scene = Scene("64/20", 1.5, 4, speeds="1/2.5/6", places=1)
    pool = matrix_cells.cell_of(scene, None).with_policies(schedulers.FORESIGHT)
    outcomes = Fleet([pool]).run(matrix_cells.calls(scene, 1))
    begun = [o for o in outcomes if o.ttft_s <= o.task.target_s]
    assert len(begun) > len(outcomes) / 2
    assert all(o.is_finished for o in begun)
    # Four seconds behind its reader it goes before all others, as soon as a slot is free.
    behind_s = [
        o.ended_at_s - o.first_token_at_s - READING_S * o.task.nodes[0].output_tokens for o in begun
    ]
    assert max(behind_s) < 6.0


def test_a_client_that_leaves_counts_as_missed() -> None:
    """By its own word: the published scheduler under it knows nothing of it."""
    one = replace(SABER_ENGINE, max_running=1)
    node = SimNode(POOL, 100, 2000, 2000)
    first = SimTask("a", TaskName("t"), 0.0, SloMetric.E2E, 100.0, (node,), (0.5,))
    second = replace(first, id="b", arrived_at_s=1.0, patience_s=5.0)
    outcomes = Cell((one,), [first, second]).run(schedulers.ray_serve())
    assert [(o.is_finished, o.refused) for o in outcomes] == [(True, False), (False, False)]
    assert task_metrics(outcomes)["slo_attainment"] == 0.5
