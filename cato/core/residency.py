"""Residency: which model is loaded on which replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cato.core.ids import DeploymentName, HostId, ModelName, PoolName, ReplicaId
from cato.core.tenancy import CardTime

# The state of a copy that can serve (`cato.engines.base.EngineState.READY`).
READY = "ready"


@dataclass(frozen=True, slots=True)
class Resident:
    """One loaded copy of a model.

    `load_s` is how long it took to load, `pid` its engine's process, `lost` how the previous one
    ended.
    """

    replica_id: ReplicaId
    pool: PoolName
    deployment: DeploymentName
    model: ModelName
    host: HostId
    accelerator: str
    cards: int
    state: str
    load_s: float
    pid: int | None = None
    restarts: int = 0
    lost: str = ""


def card_time(residents: Iterable[Resident], day: str, held_s: float) -> tuple[CardTime, ...]:
    """Accelerator time of `residents` over the last `held_s`, by model."""
    cards: Counter[ModelName] = Counter()
    for resident in residents:
        cards[resident.model] += resident.cards
    return tuple(CardTime(day, model, n * held_s) for model, n in sorted(cards.items()) if n)


class Residency:
    """The loaded models; the newest report of a replica counts."""

    def __init__(self) -> None:
        self._residents: dict[ReplicaId, tuple[float, Resident]] = {}

    def report(self, now_s: float, resident: Resident) -> None:
        known = self._residents.get(resident.replica_id)
        if known is None or known[0] <= now_s:
            self._residents[resident.replica_id] = (now_s, resident)

    def remove(self, replica_id: ReplicaId) -> None:
        self._residents.pop(replica_id, None)

    def forget_silent(self, now_s: float, silence_s: float) -> None:
        """Drop replicas that have not reported for `silence_s`."""
        for id, (seen_at_s, _) in list(self._residents.items()):
            if now_s - seen_at_s > silence_s:
                del self._residents[id]

    def all(self) -> tuple[Resident, ...]:
        return tuple(r for _, r in sorted(self._residents.values(), key=lambda x: x[1].replica_id))

    def why_not_unload(self, replica_id: ReplicaId, min_copies: int) -> str | None:
        """Why the copy on `replica_id` must stay; None when it may go."""
        if replica_id not in self._residents:
            return f"replica {replica_id!r} holds no model"
        deployment = self._residents[replica_id][1].deployment
        left = sum(
            r.deployment == deployment and r.state == READY and r.replica_id != replica_id
            for r in self.all()
        )
        if left < min_copies:
            return f"{left} ready copies would be left in {deployment!r}; {min_copies} must stay"
        return None
