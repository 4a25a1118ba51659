"""The Resource Provisioner actor: how many replicas each deployment has.

In this version it enforces the bounds of the deployment file and asserts its targets again after
a redeploy; scaling policies ask through `scale`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import ray

from cato.control import actors, ray_private
from cato.core.errors import UnknownNameError
from cato.core.fleet import Bounds, reconcile, why_infeasible
from cato.core.ids import DeploymentName
from cato.core.topology import DeploymentSpec, Topology

log = logging.getLogger("cato.provisioner")
RECONCILE_S = 2.0


def resource_needs(spec: DeploymentSpec) -> dict[str, float]:
    """Ray resources of one replica of `spec`, all on one host."""
    needs = {"CPU": spec.cpus, **spec.resources}
    if spec.accelerator == "gpu":
        needs["GPU"] = float(spec.cards)
    elif spec.accelerator == "npu":
        needs["NPU"] = float(spec.cards)
    return needs


class ResourceProvisioner:
    """Targets of all deployments, within bounds, through Serve's external scaler."""

    def __init__(self) -> None:
        self._topology: Topology | None = None
        self._bounds: dict[DeploymentName, Bounds] = {}
        self._targets: dict[str, tuple[int, int]] = {}
        self._problems: dict[str, str] = {}
        self._loop: asyncio.Task[None] | None = None

    async def register(self, topology: Topology) -> None:
        """The deployment file's pools. A changed file resets what was wanted."""
        if topology != self._topology:
            self._topology = topology
            self._bounds = {
                d.name: Bounds(d.min_replicas, d.max_replicas, d.initial_replicas)
                for p in topology.pools
                for d in p.deployments
            }
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._reconcile_forever())

    async def topology(self) -> Topology | None:
        return self._topology

    async def scale(self, deployment: str, replicas: int) -> int:
        """Ask for `replicas`; returns what the bounds allow."""
        name = DeploymentName(deployment)
        if name not in self._bounds:
            raise UnknownNameError("deployment", deployment, tuple(sorted(self._bounds)))
        bounds = self._bounds[name]
        goal = bounds.clamp(replicas)
        self._bounds[name] = replace(bounds, wanted=goal)
        await ray_private.scale(actors.ENGINES_APP, deployment, goal)
        return goal

    async def state(self) -> dict[str, dict[str, object]]:
        """Per deployment: bounds, target, running replicas and what stands in the way."""
        return {
            name: {
                "min": b.min_replicas,
                "max": b.max_replicas,
                "wanted": b.clamp(b.wanted),
                "target": self._targets.get(name, (0, 0))[0],
                "running": self._targets.get(name, (0, 0))[1],
                "problem": self._problems.get(name, ""),
            }
            for name, b in sorted(self._bounds.items())
        }

    async def _reconcile_forever(self) -> None:
        while True:
            try:
                await self._reconcile()
            except Exception:
                # Serve restarts its controller now and then; the next round sees it again.
                log.exception("could not reconcile; trying again in %.0f s", RECONCILE_S)
            await asyncio.sleep(RECONCILE_S)

    async def _reconcile(self) -> None:
        self._targets = await ray_private.replica_counts(actors.ENGINES_APP)
        self._problems = self._find_problems()
        targets = {DeploymentName(n): t for n, (t, _) in self._targets.items()}
        for command in reconcile(self._bounds, targets):
            log.info("scale %s: %s", command.deployment, command.reason)
            await ray_private.scale(actors.ENGINES_APP, command.deployment, command.replicas)

    def _find_problems(self) -> dict[str, str]:
        hosts = [n["Resources"] for n in ray.nodes() if n["Alive"]]
        problems: dict[str, str] = {}
        for pool in self._topology.pools if self._topology else ():
            for spec in pool.deployments:
                why = why_infeasible(resource_needs(spec), hosts)
                if why is not None and spec.max_replicas > 0:
                    problems[spec.name] = why
        return problems
