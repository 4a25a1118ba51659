"""Placement rules for shared pools: on which accelerators is a model loaded?"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cato.core.eviction import FleetSnapshot, ModelState, Site, SiteRank
from cato.core.ids import DeploymentName, ModelName


@dataclass(frozen=True, slots=True)
class ShapeBlind:
    """Load where the least valuable copy is evicted, whatever the shape; then the shortest load."""

    def rank(self, model: ModelName, site: Site, fleet: FleetSnapshot) -> SiteRank:
        return SiteRank((site.worth, site.is_cold, site.victims))


@dataclass(frozen=True, slots=True)
class UrgentOnFast:
    """Load urgent models on fast accelerators, and the others on slower ones.

    Shapes are ordered by speed and models by SLO, the shortest first. The fastest shape, with a
    share x of the accelerators, is for the most urgent models that need the share x of all
    accelerator time; and so on. A model's need is its expected calls times a load and a call:
    the calls that wait, those of the next `horizon_s`, and `prior_calls`, so that a model without
    any calls yet counts too. A model goes where nothing of value is evicted, else to the shape for
    it, else to the nearest one in this order; among equal ones as in `ShapeBlind`.

    An order instead of a threshold ("the slowest shape that still meets the SLO"), because most
    cold starts miss their SLO on all shapes or on none.
    """

    horizon_s: float = 60.0
    prior_calls: float = 0.1

    def rank(self, model: ModelName, site: Site, fleet: FleetSnapshot) -> SiteRank:
        rest = (site.worth, site.is_cold, site.victims)
        if len(fleet.cards) < 2:
            return SiteRank(rest)
        place = self._place(model, fleet)
        low, high = _range(site.deployment, fleet)
        distance = max(low - place, place - high, 0.0)
        reason = (
            f"on {site.deployment}, for the most urgent {low:.0%} to {high:.0%} of the work; "
            f"{model} is at {place:.0%}"
        )
        return SiteRank((site.worth > -inf, distance, *rest), reason)

    def _place(self, model: ModelName, fleet: FleetSnapshot) -> float:
        """Where the model is in the order of urgency, from 0 (most urgent) to 1."""
        needs = {name: self._need_s(state) for name, state in fleet.models.items()}
        own = _urgency(fleet.models[model])
        before_s = sum(needs[n] for n, state in fleet.models.items() if _urgency(state) < own)
        return (before_s + needs[model] / 2) / sum(needs.values())

    def _need_s(self, state: ModelState) -> float:
        """Expected accelerator time, on its fastest shape."""
        calls = self.prior_calls + len(state.waiting) + state.rate_per_s * self.horizon_s
        return calls * max(1e-6, state.facts.load_s + state.facts.call_s)


def _urgency(state: ModelState) -> tuple[float, float, ModelName]:
    """The least is the most urgent; of models with equal SLOs the one with more calls."""
    return state.facts.slo_s, -state.rate_per_s, state.facts.name


def _range(deployment: DeploymentName, fleet: FleetSnapshot) -> tuple[float, float]:
    """The part of all accelerators that this shape is, with the fastest shape first."""
    order = sorted(fleet.cards, key=lambda shape: (_slowness(shape, fleet), shape))
    total, before = sum(fleet.cards.values()), 0
    for shape in order[: order.index(deployment)]:
        before += fleet.cards[shape]
    return before / total, (before + fleet.cards[deployment]) / total


def _slowness(shape: DeploymentName, fleet: FleetSnapshot) -> float:
    """Mean call time relative to each model's fastest shape, of models that fit several."""
    found = []
    for state in fleet.models.values():
        times_s = {name: fit.facts.call_s for name, fit in state.fits.items()}
        if shape in times_s and len(times_s) > 1 and (least_s := min(times_s.values())) > 0.0:
            found.append(times_s[shape] / least_s)
    return sum(found) / len(found) if found else 1.0
