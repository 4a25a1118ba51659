"""The study of router shards, and the fleet that it runs on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cato.lab.studies.router_shards import TTFT_S, measured, still_wanted, tasks


def test_a_call_counts_unless_its_editor_asks_again_before_the_target() -> None:
    first, second, third, other = tasks(0.95, 1, seed=0)[:4]
    some = [
        replace(first, arrived_at_s=0.0, buffer="b"),
        replace(other, arrived_at_s=0.0, buffer=""),
        replace(second, arrived_at_s=0.5 * TTFT_S, buffer="b"),
        replace(third, arrived_at_s=2.0 * TTFT_S, buffer="b"),
    ]
    assert still_wanted(some) == [False, True, True, True]


@pytest.mark.parametrize("seed", range(5))
def test_shards_get_equal_parts_of_the_calls(seed: int) -> None:
    """Each of the four has some 130 calls, so one call more or less is 0.008."""
    ours, at_random = (measured(0.8, 16, arm, seed) for arm in ("4-shards", "4-shards-at-random"))
    assert ours["largest_share"] < 1.05 < at_random["largest_share"]
