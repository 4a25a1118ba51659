"""Where simple rules beat the default before: wrong profiles, and work without an SLO."""

from __future__ import annotations

import pytest

from cato.lab.studies.matrix import Scene
from cato.lab.studies.matrix_cells import cell_of
from cato.policies.schedulers import FORESIGHT


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_a_profile_that_is_wrong_by_a_factor_is_corrected_in_time(slowness: float) -> None:
    scene = Scene("8000/500", 0.3, 1, arrivals="gamma", slowness=slowness, places=16)
    cell = cell_of(scene, None)
    ours, simple = (
        cell.sample(arm, 6).metrics["slo_attainment"] for arm in (FORESIGHT, "sjf-bounded")
    )
    assert ours >= simple + 0.03


def test_work_without_an_slo_leaves_places_to_the_rest() -> None:
    cell = cell_of(Scene("200/20", 1.1, 1, arrivals="gamma", sla="half without"), None)
    ours, simple = (
        cell.sample(arm, 7).metrics["slo_attainment"] for arm in (FORESIGHT, "edf-bounded")
    )
    assert ours >= simple + 0.03
