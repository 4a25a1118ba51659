"""Where simple rules beat the default before: wrong profiles, and work without an SLO."""

from __future__ import annotations

from math import log

import pytest

from cato.core.pool.pace import PACE_STEP
from cato.lab.studies.matrix import Scene
from cato.lab.studies.matrix_cells import POOL, calls, cell_of
from cato.policies.schedulers import FORESIGHT
from cato.sim.fleet import Fleet


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_a_profile_that_is_wrong_by_a_factor_is_corrected_in_time(slowness: float) -> None:
    scene = Scene("8000/500", 0.3, 1, arrivals="gamma", slowness=slowness, places=16)
    cell = cell_of(scene, None)
    ours, simple = (
        cell.sample(arm, 6).metrics["slo_attainment"] for arm in (FORESIGHT, "sjf-bounded")
    )
    assert ours >= simple + 0.03


def test_a_corrected_pace_is_not_corrected_further_by_what_was_predicted_before() -> None:
    scene = Scene("64/20", 3.0, 1, arrivals="gamma", slowness=2.0, sla="x 3")
    fleet = Fleet([cell_of(scene, None).with_policies(FORESIGHT)])
    steps = set()
    fleet.recorder = lambda pool, event: steps.update(
        r.pace.step for r in fleet.pools[POOL].orchestrator.accepting
    )
    fleet.run(calls(scene, 6))
    right = round(log(0.5) / log(PACE_STEP))
    assert 0 in steps
    assert abs(min(steps) - right) <= 4


def test_work_without_an_slo_leaves_places_to_the_rest() -> None:
    cell = cell_of(Scene("200/20", 1.1, 1, arrivals="gamma", sla="half without"), None)
    ours, simple = (
        cell.sample(arm, 7).metrics["slo_attainment"] for arm in (FORESIGHT, "edf-bounded")
    )
    assert ours >= simple + 0.03
