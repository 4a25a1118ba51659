"""Where a model is loaded: urgent ones on fast accelerators."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from cato.core.eviction import Fit, FleetSnapshot, ModelFacts, ModelState, Site, in_units
from cato.core.ids import DeploymentName, HostId, ModelName
from cato.policies.eviction.sites import ShapeBlind, UrgentOnFast

FAST, SLOW = DeploymentName("a100"), DeploymentName("l4")
HOST = HostId("h")


def a_state(
    name: str, slo_s: float, call_s: dict[DeploymentName, float], rate_per_s: float = 0.1
) -> ModelState:
    fits = {
        shape: Fit(ModelFacts(ModelName(name), 4.0, 1.0, 10**9, slo_s, call_s=time_s), 4.0)
        for shape, time_s in call_s.items()
    }
    fastest = min(fits.values(), key=lambda fit: fit.facts.call_s)
    return ModelState(
        fastest.facts, fastest.load_s, 0.0, 0, rate_per_s, 1.0, 10.0, None, (), 0, fits
    )


def a_fleet(*states: ModelState, fast: int = 2, slow: int = 2) -> FleetSnapshot:
    return FleetSnapshot(0.0, {s.facts.name: s for s in states}, {FAST: fast, SLOW: slow})


BOTH = {FAST: 1.0, SLOW: 3.0}
URGENT, RELAXED = a_state("urgent", 1.0, BOTH), a_state("relaxed", 10.0, BOTH)


def best(model: ModelState, fleet: FleetSnapshot, *sites: Site) -> Site:
    name = model.facts.name
    return min(sites, key=lambda site: UrgentOnFast().rank(name, site, fleet).key)


def test_of_empty_accelerators_the_urgent_model_takes_a_fast_one_and_the_other_a_slow_one() -> None:
    fleet = a_fleet(URGENT, RELAXED)
    sites = Site(HOST, FAST), Site(HOST, SLOW)
    assert best(URGENT, fleet, *sites).deployment == FAST
    assert best(RELAXED, fleet, *sites).deployment == SLOW
    rank = UrgentOnFast().rank(RELAXED.facts.name, sites[1], fleet)
    assert rank.reason == "on l4, for the most urgent 50% to 100% of the work; relaxed is at 75%"


def test_an_empty_accelerator_comes_first_whatever_its_speed() -> None:
    fleet = a_fleet(URGENT, RELAXED)
    used = Site(HOST, FAST, worth=0.1, victims=1)
    assert best(URGENT, fleet, used, Site(HOST, SLOW)).deployment == SLOW


def test_a_copy_of_more_value_is_evicted_for_the_right_speed() -> None:
    fleet = a_fleet(URGENT, RELAXED)
    sites = Site(HOST, FAST, worth=9.0, victims=1), Site(HOST, SLOW, worth=0.1, victims=1)
    assert best(URGENT, fleet, *sites).deployment == FAST
    blind = [ShapeBlind().rank(URGENT.facts.name, site, fleet).key for site in sites]
    assert blind[1] < blind[0]


def test_models_share_the_accelerators_by_the_time_that_they_need() -> None:
    """Equal SLOs: the model with more calls is nearer to the fast accelerators."""
    busy, rare = a_state("busy", 1.0, BOTH, 0.9), a_state("rare", 1.0, BOTH, 0.1)
    sites = Site(HOST, FAST), Site(HOST, SLOW)
    fleet = a_fleet(busy, rare)
    assert best(busy, fleet, *sites).deployment == FAST
    assert best(rare, fleet, *sites).deployment == SLOW
    mostly_fast = a_fleet(busy, rare, fast=99, slow=1)
    assert best(rare, mostly_fast, *sites).deployment == FAST


def test_models_without_any_calls_share_equally() -> None:
    fleet = a_fleet(replace(URGENT, rate_per_s=0.0), replace(RELAXED, rate_per_s=0.0))
    assert best(URGENT, fleet, Site(HOST, FAST), Site(HOST, SLOW)).deployment == FAST


def test_a_shape_is_not_slow_because_large_models_run_there() -> None:
    """Speeds are compared on models that fit both."""
    large = a_state("large", 0.5, {FAST: 30.0})
    fleet = a_fleet(large, URGENT, RELAXED)
    rank = UrgentOnFast().rank(ModelName("large"), Site(HOST, FAST), fleet)
    assert "on a100, for the most urgent 0%" in rank.reason


@given(
    st.floats(-1e6, 1e6) | st.just(-inf), st.booleans(), st.integers(0, 3), st.floats(0.001, 10.0)
)
def test_with_one_shape_both_rules_agree_and_give_no_reason(
    worth: float, is_cold: bool, victims: int, unit_s: float
) -> None:
    state = a_state("a", 1.0, {FAST: 1.0})
    fleet = in_units(FleetSnapshot(0.0, {ModelName("a"): state}, {FAST: 4}), unit_s)
    site = Site(HOST, FAST, worth, victims, is_cold)
    rank = UrgentOnFast().rank(ModelName("a"), site, fleet)
    assert rank == ShapeBlind().rank(ModelName("a"), site, fleet)


def test_a_snapshot_seen_from_a_shape_has_its_load_times() -> None:
    fits = {FAST: URGENT.fits[FAST], SLOW: Fit(replace(URGENT.facts, load_s=9.0), 9.0)}
    fleet = a_fleet(replace(URGENT, fits=fits))
    assert fleet.models[URGENT.facts.name].load_s == 4.0
    seen = in_units(fleet, 2.0).on(SLOW).models[URGENT.facts.name]
    assert (seen.load_s, seen.facts.load_s) == (4.5, 4.5)
