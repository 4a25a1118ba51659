"""How many replicas each deployment may have, and whether the cluster can hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cato.core.ids import DeploymentName, ReplicaId
from cato.core.profile import Profile
from cato.core.topology import DeploymentSpec

# A replica that has no process after so long is ordered no longer: the room that it waits for may
# never come. Long, because a busy host takes most of a minute to start a process.
PENDING_LIMIT_S = 300.0
# Ray gives each host so much of the resource that stands for the type of its accelerators.
_ACCELERATOR_TYPE_UNITS = 0.001
# Free resources are sums and differences of floats.
_ROUNDING = 1e-6
# A typical call, for comparing what replicas cost.
_PROMPT_TOKENS, _OUTPUT_TOKENS = 300, 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """Replica counts a deployment may have; `wanted` is what was last asked for."""

    min_replicas: int
    max_replicas: int
    wanted: int

    def clamp(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))


@dataclass(frozen=True, slots=True)
class ScaleTo:
    deployment: DeploymentName
    replicas: int
    reason: str


@dataclass(frozen=True, slots=True)
class HostResources:
    """Resources of one host by Ray's names: all it has, and what nobody holds."""

    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServedDeployment:
    """A deployment as Serve has it.

    `pending` replicas wait for a process on a host with room, `starting` ones have it and are not
    running yet. `draining` ones take no new work, finish what they hold, and no longer count
    towards `target`.
    """

    target: int
    running: frozenset[ReplicaId] = frozenset()
    starting: frozenset[ReplicaId] = frozenset()
    pending: frozenset[ReplicaId] = frozenset()
    draining: frozenset[ReplicaId] = frozenset()

    @property
    def placed(self) -> int:
        return len(self.running) + len(self.starting)


@dataclass(frozen=True, slots=True)
class Room:
    """How many replicas a deployment may have now, and what a call costs there."""

    deployment: DeploymentName
    low: int
    high: int
    price: float


def reconcile(
    bounds: Mapping[DeploymentName, Bounds], targets: Mapping[DeploymentName, int]
) -> tuple[ScaleTo, ...]:
    """Bring Serve's targets to what is wanted, within the bounds.

    A redeploy resets Serve's counts to those of the file; they are asserted again here.
    Deployments that Serve does not know are left alone.
    """
    commands = []
    for name in sorted(bounds):
        b = bounds[name]
        goal = b.clamp(b.wanted)
        if name in targets and targets[name] != goal:
            reason = (
                f"{targets[name]} replicas; {goal} wanted within {b.min_replicas}..{b.max_replicas}"
            )
            commands.append(ScaleTo(name, goal, reason))
    return tuple(commands)


def resource_needs(spec: DeploymentSpec) -> dict[str, float]:
    """Ray resources of one replica of `spec`, all on one host."""
    needs = {"CPU": spec.cpus, **spec.resources}
    if spec.accelerator == "gpu":
        needs["GPU"] = float(spec.cards)
    elif spec.accelerator == "npu":
        needs["NPU"] = float(spec.cards)
    if spec.accelerator_type is not None:
        needs[f"accelerator_type:{spec.accelerator_type}"] = _ACCELERATOR_TYPE_UNITS
    return needs


def why_infeasible(needs: Mapping[str, float], hosts: Sequence[Mapping[str, float]]) -> str | None:
    """Why no host could ever hold a replica that needs `needs`; None when one can.

    Serve waits for ever on an impossible request, so this is checked first. `hosts` holds the total
    resources of each host; a replica takes all of its resources on one host.
    """
    if any(all(h.get(r, 0.0) >= n for r, n in needs.items()) for h in hosts):
        return None
    wanted = _in_words(needs)
    best = {r: max((h.get(r, 0.0) for h in hosts), default=0.0) for r in needs}
    if hosts and all(best[r] >= n for r, n in needs.items()):
        return f"a replica needs {wanted} on one host; no host has all of it at once"
    return f"a replica needs {wanted} on one host; the most any host has is {_in_words(best)}"


def why_full(needs: Mapping[str, float]) -> str:
    return f"no host has {_in_words(needs)} free"


def _in_words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{n:g} {r}" for r, n in sorted(resources.items()))


def more_that_fit(needs: Mapping[str, float], hosts: Iterable[HostResources], most: int) -> int:
    """How many more replicas find room, at most `most`; each takes all it needs on one host."""
    found = 0
    for host in hosts:
        each = [(host.free.get(r, 0.0) + _ROUNDING) / n for r, n in needs.items() if n > 0]
        found += min([most, *(int(n) for n in each)])
    return min(most, found)


def ceiling(spec: DeploymentSpec, served: ServedDeployment, fit: int, pending_s: float) -> int:
    """The most replicas that may be asked for now, within the bounds of the file.

    `fit` more would find room. What was asked for before stands, until replicas are `pending` for
    too long: `pending_s`. The minimum is asked for in any case: Serve starts it when it can.
    """
    most = served.placed + fit
    if pending_s < PENDING_LIMIT_S:
        most = max(most, served.target)
    return max(spec.min_replicas, min(spec.max_replicas, most))


def call_price(spec: DeploymentSpec, profile: Profile) -> float:
    """What a typical call costs on a replica of `spec` that is full: its time there × its cost."""
    places = max(1, min(spec.engine.max_num_seqs, profile.max_running))
    return spec.cost * profile.service_s(_PROMPT_TOKENS, _OUTPUT_TOKENS, places) / places


def allot(
    replicas: int, wanted: Mapping[DeploymentName, int], rooms: Sequence[Room]
) -> dict[DeploymentName, int]:
    """Bring the sum of `wanted` to `replicas`, as near as the rooms allow.

    What is missing goes where a call is cheapest, what is too much leaves where it is dearest.
    Nothing moves otherwise: the start of a replica costs more than a better place saves.
    """
    by_price = sorted(rooms, key=lambda r: (r.price, r.deployment))
    goal = {r.deployment: max(r.low, min(r.high, wanted[r.deployment])) for r in rooms}
    missing = replicas - sum(goal.values())
    for room in by_price if missing > 0 else reversed(by_price):
        had = goal[room.deployment]
        goal[room.deployment] = max(room.low, min(room.high, had + missing))
        missing -= goal[room.deployment] - had
    return goal
