"""The study of router shards, and the fleet that it runs on."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

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


def test_shards_get_equal_parts_of_the_calls() -> None:
    """The largest part, in parts of four shards with 66 calls each: one call is 0.015."""

    def largest(arm: str) -> list[float]:
        return [measured(0.8, 8, arm, seed)["largest_share"] for seed in range(5)]

    ours, at_random = largest("4-shards"), largest("4-shards-at-random")
    assert max(ours) < 1.07 < min(at_random)
    assert fmean(ours) < 1.05 < 1.1 < fmean(at_random)
