"""Dispatch orders for shared pools: which waiting call is served, and which model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.eviction import FleetSnapshot, ModelState, Want


@dataclass(frozen=True, slots=True)
class InOrder:
    """Strictly by arrival: the head of the queue first, all others behind it.

    The assumption of the published comparisons of eviction policies.
    """

    @property
    def in_order(self) -> bool:
        return True

    def wants(self, fleet: FleetSnapshot) -> tuple[Want, ...]:
        return _by_age(fleet)


@dataclass(frozen=True, slots=True)
class BatchedPerModel:
    """One load serves all waiting calls of its model; the model of the oldest is loaded next."""

    @property
    def in_order(self) -> bool:
        return False

    def wants(self, fleet: FleetSnapshot) -> tuple[Want, ...]:
        return _by_age(fleet)


@dataclass(frozen=True, slots=True)
class QueueAware:
    """Load the model with the most waiting SLO value per second of load.

    Smith's rule (1956) with the load as the work and all waiting calls of the model as its weight.
    Calls past their deadline count `late_weight`. All weights grow with waiting, by 1 every
    `patience_s`, so that a rare model with a long load is not passed over forever.
    """

    late_weight: float = 0.2
    patience_s: float = 10.0

    @property
    def in_order(self) -> bool:
        return False

    def wants(self, fleet: FleetSnapshot) -> tuple[Want, ...]:
        ranked = []
        for name, state in fleet.models.items():
            if state.waiting:
                density = self._value(state, fleet.now_s) / max(state.load_s, 1e-3)
                ranked.append((-density, name, len(state.waiting)))
        ranked.sort()
        return tuple(
            Want(name, f"{waiting} wait, value {-rank:.3g} per second of load")
            for rank, name, waiting in ranked
        )

    def _value(self, state: ModelState, now_s: float) -> float:
        ready_at_s = now_s + state.load_s
        return sum(
            w.value
            * (1.0 if ready_at_s <= w.deadline_s else self.late_weight)
            * (1.0 + (now_s - w.arrived_at_s) / self.patience_s)
            for w in state.waiting
        )


def _by_age(fleet: FleetSnapshot) -> tuple[Want, ...]:
    oldest = sorted(
        (state.waiting[0].arrived_at_s, state.waiting[0].id, name)
        for name, state in fleet.models.items()
        if state.waiting
    )
    return tuple(
        Want(name, f"oldest waits {fleet.now_s - arrived_at_s:.1f} s")
        for arrived_at_s, _, name in oldest
    )
