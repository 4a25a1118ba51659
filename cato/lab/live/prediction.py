"""The simulator's prediction for live tasks: the same fleet and policies in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cato.core.ids import DeploymentName, PoolName
from cato.core.profile import Profile
from cato.core.topology import PoolSpec, Topology
from cato.lab.live.experiment import Arm, LiveExperiment
from cato.policies.registry import policies_of
from cato.policies.scaling.registry import scaling_policy
from cato.sim.autoscale import AutoscaledFleet, ScaledPool, follow_ups_of
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.tasks import Outcome, SimTask


@dataclass(frozen=True, slots=True)
class Prediction:
    """Outcomes in the order of the tasks; `replicas`: mean of all pools while tasks arrived (None:
    fixed)."""

    outcomes: Sequence[Outcome]
    replicas: float | None = None


def router_profiles(
    topology: Topology, engines: Mapping[DeploymentName, Profile]
) -> dict[PoolName, Profile]:
    """The profile given to the router of each pool."""
    return {p.name: p.fastest(engines) for p in topology.pools}


def simulated(
    tasks: Sequence[SimTask],
    arm: Arm,
    experiment: LiveExperiment,
    topology: Topology,
    engines: Mapping[DeploymentName, Profile],
) -> Prediction:
    """Outcomes of `tasks`; `engines` by deployment, as they run."""
    used = {node.pool for task in tasks for node in task.nodes}
    pools = {p.name: p for p in topology.pools if p.name in used}
    profiles = router_profiles(topology, engines)
    setups = {n: setup_of(p, arm, profiles[n], engines, experiment) for n, p in pools.items()}
    if experiment.cold_start_s is None:
        return Prediction(Fleet(list(setups.values())).run(tasks))
    scaled = [
        ScaledPool(
            setup,
            scaling_policy(arm.scaling),
            min(d.min_replicas for d in pools[n].deployments),
            sum(d.max_replicas for d in pools[n].deployments),
        )
        for n, setup in setups.items()
    ]
    fleet = AutoscaledFleet(scaled, follow_ups_of(tasks, profiles, 1), arm.scaling.every_s)
    until_s = tasks[-1].arrived_at_s
    return Prediction(fleet.run(tasks, until_s), fleet.mean_provisioned(until_s))


def setup_of(
    pool: PoolSpec,
    arm: Arm,
    profile: Profile,
    engines: Mapping[DeploymentName, Profile],
    experiment: LiveExperiment,
) -> PoolSetup:
    """The pool in virtual time; `engines` by deployment, as they run."""
    replicas = tuple(
        replace(
            engines[d.name], max_running=min(engines[d.name].max_running, d.engine.max_num_seqs)
        )
        for d in pool.deployments
        for _ in range(d.initial_replicas)
    )
    return PoolSetup(
        pool.name,
        replicas,
        policies_of(arm.pool_policies(), profile),
        chunk_tokens=experiment.chunk_tokens,
        prompt_cap_tokens=experiment.prompt_cap_tokens,
        cold_start_s=experiment.cold_start_s or 0.0,
        host_memory=any(d.engine.host_memory for d in pool.deployments),
    )
