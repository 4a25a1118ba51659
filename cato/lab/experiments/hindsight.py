"""Search with hindsight: attainment of a scheduler that knows every arrival and length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cato.core.decision import Rank
from cato.core.length import LengthBelief
from cato.core.policies import OrderingPolicy, Policies, Work
from cato.core.snapshot import Invocation
from cato.policies import schedulers
from cato.policies.admission.foresight import ForesightAdmission
from cato.policies.ordering.foresight import HOPELESS
from cato.policies.routing.foresight import ForesightRouting
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.metrics import metrics_of
from cato.sim.tasks import Outcome, SimNode, SimTask

CLAIRVOYANT = "clairvoyant search"
PRICES = (1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """One run of the search: its metrics and the ids of the missed tasks."""

    metrics: Mapping[str, float]
    missed: frozenset[str]
    known: Sequence[SimTask]
    price: float


def missed_of(outcomes: Sequence[Outcome]) -> frozenset[str]:
    return frozenset(o.task.id for o in outcomes if not o.is_met)


def clairvoyant(
    tasks: Sequence[SimTask], setup: Callable[[Policies], PoolSetup], seed: int, rounds: int
) -> Hindsight:
    """The best of many runs with hindsight: over the knowledge of lengths (exact, or the class's),
    the caution of admission, and, by a hill climb of `rounds`, the set of tasks given up. `tasks`
    have one call each; `setup` makes their pool.
    """
    base = schedulers.foresight()
    exact = [replace(t, nodes=(_with_known_length(t),)) for t in tasks]

    def outcome(given_up: frozenset[str], known: Sequence[SimTask], price: float) -> Hindsight:
        policies = replace(
            base,
            routing=ForesightRouting(price=price),
            ordering=_GivenUp(base.ordering, given_up),
            admission=ForesightAdmission(price=price),
        )
        fleet = Fleet([setup(policies)])
        outcomes = fleet.run(known)
        return Hindsight(metrics_of(fleet, outcomes), missed_of(outcomes), known, price)

    best = max(
        (outcome(frozenset(), known, price) for known in (tasks, exact) for price in PRICES),
        key=lambda h: h.metrics["slo_attainment"],
    )
    rng = np.random.default_rng([seed, 88])
    for _ in range(rounds):
        # Give up the tasks that missed; retry some of those given up, and drop a few others.
        given_up = {t for t in sorted(best.missed) if rng.random() > 0.2}
        met = [t.id for t in tasks if t.id not in best.missed]
        given_up |= {t for t in met if rng.random() < 0.003}
        tried = outcome(frozenset(given_up), best.known, best.price)
        if tried.metrics["slo_attainment"] >= best.metrics["slo_attainment"]:
            best = tried
    return best


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """The default order, with some tasks behind all others from the start."""

    order: OrderingPolicy
    given_up: frozenset[str]

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        if invocation.run_id in self.given_up:
            return Rank(HOPELESS, "given up", key=work.service_s)
        return self.order.rank(invocation, work, now_s)


def _with_known_length(task: SimTask) -> SimNode:
    node = task.nodes[0]
    return replace(
        node,
        expected_tokens=node.output_tokens,
        length=LengthBelief((float(node.output_tokens),)),
    )
