"""How many replicas each deployment may have, and whether the cluster can hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cato.core.ids import DeploymentName


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


def why_infeasible(needs: Mapping[str, float], hosts: Sequence[Mapping[str, float]]) -> str | None:
    """Why no host could ever hold a replica that needs `needs`; None when one can.

    Serve waits for ever on an impossible request, so this is checked first. `hosts` holds the total
    resources of each host; a replica takes all of its resources on one host.
    """
    if any(all(h.get(r, 0.0) >= n for r, n in needs.items()) for h in hosts):
        return None
    wanted = ", ".join(f"{n:g} {r}" for r, n in sorted(needs.items()))
    best = {r: max((h.get(r, 0.0) for h in hosts), default=0.0) for r in needs}
    if hosts and all(best[r] >= n for r, n in needs.items()):
        return f"a replica needs {wanted} on one host; no host has all of it at once"
    most = ", ".join(f"{n:g} {r}" for r, n in sorted(best.items()))
    return f"a replica needs {wanted} on one host; the most any host has is {most}"
