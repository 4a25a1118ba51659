"""Replica counts of deployments, and whether the cluster has room for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cato.core.ids import DeploymentName, ReplicaId
from cato.core.profile import Profile
from cato.core.topology import DeploymentSpec

# A replica without a process after this long is no longer requested: its room may never come. Long,
# because a busy host takes most of a minute to start a process.
PENDING_LIMIT_S = 300.0
# Amount of the accelerator-type resource that Ray gives each host.
_ACCELERATOR_TYPE_UNITS = 0.001
# Free resources are sums and differences of floats.
_ROUNDING = 1e-6
# A typical call, for comparing the cost of replicas.
_PROMPT_TOKENS, _OUTPUT_TOKENS = 300, 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """Allowed replica counts of a deployment; `wanted` is the count last requested."""

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
    """Resources of one host, by Ray's names: total and unused."""

    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServedDeployment:
    """A deployment's state in Ray Serve.

    `pending` replicas wait for a process on a host with room; `starting` ones have it and are not
    running yet. `draining` ones take no new work, finish their calls, and no longer count towards
    `target`.
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
class ServedFleet:
    """An application in Ray Serve: its deployments, and what is wrong with the last deployment.

    While Serve reads a new deployment file, and after it has refused one, it lists no deployments
    but keeps the replicas of the earlier file and takes new targets for them: `unlisted` are those
    that run, by deployment. `problems` tell why a last deployment file is not in use; the first
    line of each may be shown to everybody.
    """

    deployments: Mapping[DeploymentName, ServedDeployment] = field(default_factory=dict)
    unlisted: Mapping[DeploymentName, frozenset[ReplicaId]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def running(self, name: DeploymentName) -> frozenset[ReplicaId]:
        if (served := self.deployments.get(name)) is not None:
            return served.running
        return self.unlisted.get(name, frozenset())


@dataclass(frozen=True, slots=True)
class Room:
    """How many replicas a deployment may have now, and the cost of a call there."""

    deployment: DeploymentName
    low: int
    high: int
    price: float


def reconcile(
    bounds: Mapping[DeploymentName, Bounds], targets: Mapping[DeploymentName, int]
) -> tuple[ScaleTo, ...]:
    """Align Serve's targets with the wanted counts, within the bounds.

    A redeploy resets Serve's counts to those of the file; this restores them. Deployments unknown
    to Serve are left alone.
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
    """Why no host can ever hold a replica that needs `needs`; None when one can.

    Serve waits forever on an impossible request, so this is checked first. `hosts` holds the total
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
    """How many more replicas fit, up to `most`; each takes all it needs on one host."""
    found = 0
    for host in hosts:
        each = [(host.free.get(r, 0.0) + _ROUNDING) / n for r, n in needs.items() if n > 0]
        found += min([most, *(int(n) for n in each)])
    return min(most, found)


def ceiling(spec: DeploymentSpec, served: ServedDeployment, fit: int, pending_s: float) -> int:
    """The most replicas to request now, within the bounds of the file.

    `fit` more would fit. Earlier requests stand until replicas have been `pending` for too long:
    `pending_s`. The minimum is always requested: Serve starts it when it can.
    """
    most = served.placed + fit
    if pending_s < PENDING_LIMIT_S:
        most = max(most, served.target)
    return max(spec.min_replicas, min(spec.max_replicas, most))


def call_price(spec: DeploymentSpec, profile: Profile) -> float:
    """Cost of a typical call on a full replica of `spec`: its time there × the replica's cost."""
    places = max(1, min(spec.engine.max_num_seqs, profile.max_running))
    return spec.cost * profile.service_s(_PROMPT_TOKENS, _OUTPUT_TOKENS, places) / places


def allot(
    replicas: int, wanted: Mapping[DeploymentName, int], rooms: Sequence[Room]
) -> dict[DeploymentName, int]:
    """Bring the sum of `wanted` as close to `replicas` as the rooms allow.

    Missing replicas are added where a call is cheapest; excess ones are removed where it is most
    expensive. Otherwise nothing moves: starting a replica costs more than a better place saves.
    """
    by_price = sorted(rooms, key=lambda r: (r.price, r.deployment))
    goal = {r.deployment: max(r.low, min(r.high, wanted[r.deployment])) for r in rooms}
    missing = replicas - sum(goal.values())
    for room in by_price if missing > 0 else reversed(by_price):
        had = goal[room.deployment]
        goal[room.deployment] = max(room.low, min(room.high, had + missing))
        missing -= goal[room.deployment] - had
    return goal
