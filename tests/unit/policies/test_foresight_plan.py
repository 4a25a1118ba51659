"""How many queued calls the default order keeps: all, until more work comes than can be done."""

from __future__ import annotations

import pytest

from cato.core.ids import InvocationId
from cato.policies.ordering.foresight import ForesightOrdering

# Each takes a second of the one replica; the last of ten may start nine seconds from now.
QUEUED = [(9.0, 1.0, InvocationId(f"{n}")) for n in range(10)]


@pytest.mark.parametrize(
    ("offered_load", "missed", "kept"),
    [
        pytest.param(0.0, 0.0, 10, id="nothing else comes"),
        pytest.param(0.9, 0.5, 10, id="less comes than can be done, although calls were missed"),
        pytest.param(1.5, 0.0, 5, id="half of the slack goes to what comes on top"),
        pytest.param(3.0, 0.0, 2, id="all of it does"),
        pytest.param(1.125, 0.0, 8, id="a light overload that may end"),
        pytest.param(1.125, 0.05, 5, id="one that lasts"),
        pytest.param(1.125, 0.5, 5, id="one that lasts, whatever it costs"),
    ],
)
def test_the_more_comes_the_fewer_are_kept(offered_load: float, missed: float, kept: int) -> None:
    plan = ForesightOrdering().plan(QUEUED, 1.0, 0.0, offered_load, missed)
    assert len(plan.start_by_s) == kept
