"""The provisioner's books: what Serve and the routers tell in, orders out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_profile
from virtual_time_kit import VirtualLoop

from cato.control import actors, provisioner
from cato.control.provisioner import ResourceProvisioner
from cato.core.demand import CallKind, PoolDemand
from cato.core.deployment_state import HISTORY_LOOKS
from cato.core.errors import UnknownNameError
from cato.core.fleet import PENDING_LIMIT_S, HostResources, ScaleTo, ServedDeployment, ServedFleet
from cato.core.ids import DeploymentName, ModelName, NodeId, PoolName, ReplicaId, TaskName
from cato.core.provisioning import FleetOrchestrator
from cato.core.scaling import Arrivals, PoolLoad, ReplicaLoad, Scale
from cato.core.topology import (
    RAY_SERVE,
    AdapterSpec,
    DeploymentSpec,
    EngineSpec,
    ModelSpec,
    PoolPolicies,
    PoolScaling,
    PoolSpec,
    Topology,
)
from cato.policies.scaling.registry import SCALING, scaling_policy
from cato.store.records import AddedAdapter

P, Q = PoolName("p"), PoolName("q")
D, E = DeploymentName("d"), DeploymentName("e")
LOAD_S = 10.0
HOSTS = (HostResources({"CPU": 64.0}, {"CPU": 64.0}),)
FULL = (HostResources({"CPU": 64.0}, {"CPU": 0.0}),)


@dataclass(frozen=True)
class Wants:
    """A policy that wants what the test says; it keeps the loads it was told."""

    replicas: list[int]
    told: list[PoolLoad] = field(default_factory=list)

    def initial(self) -> None:
        return None

    def decide(self, load: PoolLoad, state: None) -> tuple[Scale, None]:
        self.told.append(load)
        return Scale(self.replicas[-1], "the test wants it"), None


def a_deployment(
    name: DeploymentName = D,
    *,
    low: int = 1,
    initial: int = 1,
    high: int = 4,
    cost: float = 1.0,
) -> DeploymentSpec:
    return DeploymentSpec(
        name,
        "cpu",
        EngineSpec("simulated"),
        min_replicas=low,
        initial_replicas=initial,
        max_replicas=high,
        cost=cost,
    )


def a_fleet(
    *deployments: DeploymentSpec,
    policy: Any = None,
    scaling: PoolScaling = PoolScaling(),  # noqa: B008  a frozen value
    others: Mapping[PoolName, tuple[DeploymentSpec, ...]] | None = None,
) -> FleetOrchestrator:
    """A pool P of `deployments`, scaled by `policy`; the pools of `others` are not scaled."""
    pools = {P: deployments or (a_deployment(),), **(others or {})}
    topology = Topology(
        tuple(PoolSpec(n, ModelSpec(ModelName(n), "m", "qwen"), ds) for n, ds in pools.items())
    )
    fleet = FleetOrchestrator(topology, {d.name: a_profile() for ds in pools.values() for d in ds})
    fleet.configure(P, scaling, policy)
    return fleet


def ids(prefix: str, n: int) -> frozenset[ReplicaId]:
    return frozenset(ReplicaId(f"{prefix}{i}") for i in range(n))


def served(n: int, *, name: str = "d", target: int | None = None, **more: Any) -> ServedDeployment:
    """`n` replicas that run."""
    return ServedDeployment(n if target is None else target, running=ids(name, n), **more)


def a_demand(
    *ready: str, queued: int = 0, running: int = 0, arrived: Arrivals | None = None
) -> PoolDemand:
    kind = CallKind(TaskName("t"), NodeId("n"))
    return PoolDemand(
        now_s=77.0,  # the router's clock is another
        arrived={} if arrived is None else {kind: arrived},
        unfinished={},
        queued=queued,
        running=running,
        queued_s=0.0,
        places=1,
        ready=tuple(ReplicaLoad(ReplicaId(r), 0, 0.0) for r in ready),
        finished=(),
    )


def look(
    fleet: FleetOrchestrator,
    now_s: float,
    serve: Mapping[DeploymentName, ServedDeployment],
    demand: PoolDemand | None,
    hosts: tuple[HostResources, ...] = HOSTS,
) -> list[tuple[DeploymentName, int]]:
    demands = {} if demand is None else {P: demand}
    orders = fleet.look(now_s, 1e9 + now_s, ServedFleet(serve), hosts, demands)
    return [(o.deployment, o.replicas) for o in orders]


def test_what_the_policy_wants_is_ordered_with_its_reason() -> None:
    fleet = a_fleet(policy=Wants([3]))
    orders = fleet.look(0.0, 0.0, ServedFleet({D: served(1)}), HOSTS, {P: a_demand("d0")})
    assert orders == (ScaleTo(D, 3, "1 replicas; 3 wanted within 1..4; the test wants it"),)
    assert look(fleet, 1.0, {D: served(1, target=3)}, a_demand("d0")) == []


def test_replicas_that_start_count_for_the_policy() -> None:
    policy = Wants([3])
    fleet = a_fleet(policy=policy)
    look(fleet, 0.0, {D: served(1)}, a_demand("d0"))
    look(fleet, 1.0, {D: served(1, target=3, pending=ids("new", 2))}, a_demand("d0"))
    assert [(len(x.ready), x.starting) for x in policy.told] == [(1, 0), (1, 2)]
    assert fleet.state()[D].starting == 2


def test_replicas_that_drain_do_not_count() -> None:
    policy = Wants([3, 1])
    fleet = a_fleet(policy=policy)
    three = {D: served(3)}
    assert look(fleet, 0.0, three, a_demand("d0", "d1", "d2")) == [(D, 1)]
    # Serve has not said yet which go; then it has, and their router still lists one.
    look(fleet, 1.0, {D: served(3, target=1)}, a_demand("d0", "d1", "d2"))
    draining = ServedDeployment(1, running=ids("d", 1), draining=ids("d", 3) - ids("d", 1))
    look(fleet, 2.0, {D: draining}, a_demand("d0", "d1"))
    assert [x.provisioned for x in policy.told] == [3, 1, 1]
    assert [r.id for r in policy.told[-1].ready] == ["d0"]


def test_a_start_takes_what_the_profile_says_until_one_was_seen() -> None:
    policy = Wants([2])
    fleet = a_fleet(policy=policy)
    look(fleet, 0.0, {D: served(1)}, a_demand("d0"))
    look(fleet, 1.0, {D: served(1, target=2, pending=ids("d", 2) - ids("d", 1))}, a_demand("d0"))
    look(fleet, 9.0, {D: served(1, target=2, starting=ids("d", 2) - ids("d", 1))}, a_demand("d0"))
    assert [x.start_s for x in policy.told] == [LOAD_S] * 3
    look(fleet, 27.0, {D: served(2)}, a_demand("d0", "d1"))
    look(fleet, 28.0, {D: served(2)}, a_demand("d0", "d1"))
    assert policy.told[-1].start_s == 26.0


def test_a_wait_for_room_is_no_part_of_a_start() -> None:
    fleet = a_fleet(policy=Wants([2]))
    new = ids("d", 2) - ids("d", 1)
    look(fleet, 0.0, {D: served(1)}, a_demand("d0"))
    look(fleet, 1.0, {D: served(1, target=2, pending=new)}, a_demand("d0"), FULL)
    look(fleet, 31.0, {D: served(1, target=2, pending=new)}, a_demand("d0"), FULL)
    look(fleet, 32.0, {D: served(1, target=2, starting=new)}, a_demand("d0"), FULL)
    look(fleet, 36.0, {D: served(2)}, a_demand("d0", "d1"), FULL)
    assert fleet.state()[D].start_s == 5.0


def test_replicas_that_were_there_before_teach_nothing_of_starts() -> None:
    fleet = a_fleet(policy=Wants([2]))
    look(fleet, 0.0, {D: served(2)}, a_demand("d0", "d1"))
    look(fleet, 5.0, {D: served(2)}, a_demand("d0", "d1"))
    assert fleet.state()[D].start_s == LOAD_S


def test_arrivals_before_the_first_look_are_not_told() -> None:
    policy = Wants([1])
    fleet = a_fleet(policy=policy)
    for now_s in (0.0, 1.0):
        look(fleet, now_s, {D: served(1)}, a_demand("d0", arrived=Arrivals(5, 9.0)))
    assert [x.arrived for x in policy.told] == [Arrivals(), Arrivals(5, 9.0)]
    assert [x.now_s for x in policy.told] == [0.0, 1.0]


def test_a_policy_is_asked_at_its_own_period_and_told_all_that_came() -> None:
    policy = Wants([1])
    fleet = a_fleet(policy=policy, scaling=PoolScaling(every_s=2.0))
    for half_s in range(9):
        look(fleet, half_s / 2, {D: served(1)}, a_demand("d0", arrived=Arrivals(1, 1.0)))
    assert [x.now_s for x in policy.told] == [0.0, 2.0, 4.0]
    assert [x.arrived.count for x in policy.told] == [0, 4, 4]


def test_the_fleet_is_looked_at_as_often_as_its_most_eager_pool() -> None:
    fleet = a_fleet(others={Q: (a_deployment(E),)})
    fleet.configure(P, PoolScaling(every_s=0.5), None)
    assert fleet.every_s == 0.5


def test_what_does_not_fit_is_not_asked_for_and_said() -> None:
    fleet = a_fleet(policy=Wants([4]))
    one_more = (HostResources({"CPU": 8.0}, {"CPU": 1.0}),)
    assert look(fleet, 0.0, {D: served(1)}, a_demand("d0"), one_more) == [(D, 2)]
    two = {D: served(2)}
    assert look(fleet, 1.0, two, a_demand("d0", "d1"), FULL) == []
    assert fleet.state()[D].problem == "no host has 1 CPU free"
    assert look(fleet, 2.0, two, a_demand("d0", "d1"), HOSTS) == [(D, 4)]
    assert fleet.state()[D].problem == ""


def test_what_no_host_can_ever_hold_is_said() -> None:
    fleet = a_fleet(policy=Wants([4]))
    small = (HostResources({"CPU": 0.5}, {"CPU": 0.5}),)
    look(fleet, 0.0, {D: served(0, target=1, pending=ids("d", 1))}, a_demand(), small)
    state = fleet.state()[D]
    assert (state.wanted, "the most any host has is 0.5 CPU" in state.problem) == (1, True)


def test_a_replica_that_never_finds_room_is_ordered_no_longer() -> None:
    fleet = a_fleet(policy=Wants([2]))
    short = {D: served(1, target=2, pending=ids("x", 1))}
    assert look(fleet, 0.0, short, a_demand("d0"), FULL) == []
    assert look(fleet, PENDING_LIMIT_S - 1, short, a_demand("d0"), FULL) == []
    assert fleet.state()[D].problem == "no host has 1 CPU free"
    assert look(fleet, PENDING_LIMIT_S + 1, short, a_demand("d0"), FULL) == [(D, 1)]


def test_the_cheaper_deployment_grows_first_and_shrinks_last() -> None:
    wants = [1]
    cheap, dear = a_deployment(low=0, high=2), a_deployment(E, low=0, high=3, cost=3.0)
    fleet = a_fleet(dear, cheap, policy=Wants(wants))
    serve = {D: served(1), E: served(0, name="e")}
    look(fleet, 0.0, serve, a_demand("d0"))
    wants.append(4)
    assert look(fleet, 1.0, serve, a_demand("d0")) == [(D, 2), (E, 2)]
    wants.append(1)
    serve = {D: served(2), E: served(2, name="e")}
    assert look(fleet, 2.0, serve, a_demand("d0", "d1", "e0", "e1")) == [(D, 1), (E, 0)]


def test_a_restart_takes_over_the_targets_of_serve() -> None:
    fleet = a_fleet(policy=None)
    assert look(fleet, 0.0, {D: served(3)}, a_demand("d0", "d1", "d2")) == []
    assert fleet.state()[D].wanted == 3


@pytest.mark.parametrize("name", list(SCALING))
def test_a_restart_changes_no_count(name: str) -> None:
    fleet = a_fleet(policy=scaling_policy(PoolScaling(name)))
    busy = a_demand("d0", "d1", "d2", running=3)
    for second in range(10):
        assert look(fleet, float(second), {D: served(3)}, busy) == []


def test_a_redeploy_that_resets_the_counts_is_undone() -> None:
    fleet = a_fleet(policy=Wants([3]))
    look(fleet, 0.0, {D: served(3)}, a_demand("d0", "d1", "d2"))
    assert look(fleet, 1.0, {}, a_demand()) == []  # while it is replaced
    assert look(fleet, 2.0, {D: served(1)}, a_demand("d0")) == [(D, 3)]


def test_counts_outside_the_bounds_are_brought_back() -> None:
    fleet = a_fleet(a_deployment(low=2, initial=2, high=3))
    assert look(fleet, 0.0, {D: served(5)}, None) == [(D, 3)]
    assert look(a_fleet(a_deployment(low=2, initial=2)), 0.0, {D: served(0)}, None) == [(D, 2)]


def test_a_pool_whose_router_is_silent_stays_as_it_is() -> None:
    policy = Wants([4])
    fleet = a_fleet(policy=policy)
    assert look(fleet, 0.0, {D: served(2)}, None) == []
    assert policy.told == []


def test_without_a_policy_a_pool_keeps_what_was_asked_for() -> None:
    fleet = a_fleet(policy=None)
    assert fleet.ask("d", 99) == 4
    assert look(fleet, 0.0, {D: served(1)}, a_demand("d0")) == [(D, 4)]
    assert look(fleet, 1.0, {D: served(4)}, a_demand("d0")) == []
    with pytest.raises(UnknownNameError, match="known: d"):
        fleet.ask("dd", 1)


def unlisted(n: int) -> ServedFleet:
    """Serve has refused a deployment file: it tells no more than which `n` replicas run."""
    return ServedFleet(unlisted={D: ids("d", n)})


def test_a_pool_is_scaled_on_while_serve_lists_no_deployments() -> None:
    policy = Wants([2])
    fleet = a_fleet(policy=policy)
    demand = {P: a_demand("d0", "d1")}
    fleet.look(0.0, 0.0, ServedFleet({D: served(2)}), HOSTS, demand)
    policy.replicas.append(3)
    (order,) = fleet.look(1.0, 1.0, unlisted(2), HOSTS, demand)
    assert (order.deployment, order.replicas) == (D, 3)
    assert fleet.look(2.0, 2.0, unlisted(2), HOSTS, demand) == (order,), "Serve has not taken it"
    fleet.ordered(D, 3)
    assert fleet.look(3.0, 3.0, unlisted(2), HOSTS, demand) == ()
    state = fleet.state()[D]
    assert (state.wanted, state.target, state.running, state.starting) == (3, 3, 2, 1)
    policy.replicas.append(1)
    (order,) = fleet.look(4.0, 4.0, unlisted(3), HOSTS, {P: a_demand("d0", "d1", "d2")})
    assert order.replicas == 1


def test_a_provisioner_that_starts_while_serve_lists_no_deployments_adopts_what_runs() -> None:
    fleet = a_fleet(policy=None)
    assert fleet.look(0.0, 0.0, unlisted(3), HOSTS, {P: a_demand("d0")}) == ()
    assert fleet.state()[D].wanted == 3


def test_a_pool_that_is_left_to_serve_is_not_scaled() -> None:
    policy = Wants([3])
    spec = PoolSpec(
        P, ModelSpec(ModelName("m"), "m", "qwen"), (a_deployment(),), PoolPolicies(RAY_SERVE)
    )
    fleet = FleetOrchestrator(Topology((spec,)), {D: a_profile()})
    fleet.configure(P, PoolScaling(), policy)
    for now_s, n in enumerate((1, 9, 2)):
        assert look(fleet, float(now_s), {D: served(n)}, a_demand("d0", queued=9)) == []
        assert fleet.state()[D].wanted == n
    assert (policy.told, fleet.state()[D].policy) == ([], RAY_SERVE)


def test_another_policy_begins_at_once_and_the_same_again_changes_nothing() -> None:
    first, second = Wants([1]), Wants([2])
    fleet = a_fleet(policy=first, scaling=PoolScaling(every_s=60.0))
    look(fleet, 0.0, {D: served(1)}, a_demand("d0"))
    fleet.configure(P, PoolScaling(every_s=60.0), first)
    assert look(fleet, 1.0, {D: served(1)}, a_demand("d0")) == []
    fleet.configure(P, PoolScaling("cato", every_s=60.0), second)
    assert look(fleet, 2.0, {D: served(1)}, a_demand("d0")) == [(D, 2)]
    assert (len(first.told), fleet.state()[D].policy) == (1, "cato")


def test_calls_of_one_pool_announce_calls_of_another() -> None:
    policy = Wants([1])
    fleet = a_fleet(policy=policy, others={Q: (a_deployment(E),)})
    draft, refine = NodeId("draft"), NodeId("refine")
    fleet.announce({TaskName("t"): {draft: (), refine: (draft,)}})
    serve = {D: served(1), E: served(1, name="e")}

    def came(node: NodeId, n: int) -> dict[CallKind, Arrivals]:
        return {CallKind(TaskName("t"), node): Arrivals(n, float(n))}

    for now_s in range(4):
        demands = {
            P: replace(a_demand("d0"), arrived=came(refine, 5)),
            Q: replace(a_demand("e0"), arrived=came(draft, 10)),
        }
        fleet.look(float(now_s), 0.0, ServedFleet(serve), HOSTS, demands)
    # Half of the drafts are refined, for a second each.
    assert policy.told[-1].begun == Arrivals(10, 5.0)


def test_the_history_is_kept_for_plots_and_bounded() -> None:
    fleet = a_fleet(policy=Wants([2]))
    for second in range(HISTORY_LOOKS + 5):
        look(fleet, float(second), {D: served(2)}, a_demand("d0", queued=3, running=1))
    history = fleet.state()[D].history
    assert len(history) == HISTORY_LOOKS
    assert history[-1] == (1e9 + HISTORY_LOOKS + 4, 1, 2, 3, 1)


# Any course of events


@dataclass
class Cluster:
    """Serve as the provisioner sees it: replicas start after some looks, and drain at once."""

    cpus: int
    targets: dict[DeploymentName, int]
    replicas: dict[DeploymentName, list[tuple[str, int]]] = field(default_factory=dict)
    births: int = 0

    def obey(self, orders: tuple[ScaleTo, ...]) -> None:
        for order in orders:
            self.targets[order.deployment] = order.replicas

    def pass_time(self, looks_to_start: int) -> None:
        for name, target in self.targets.items():
            mine = [(id, age + 1) for id, age in self.replicas.get(name, [])][:target]
            while len(mine) < target:
                self.births += 1
                mine.append((f"{name}{self.births}", -looks_to_start))
            self.replicas[name] = mine

    def seen(self) -> tuple[dict[DeploymentName, ServedDeployment], tuple[HostResources, ...]]:
        free, found = self.cpus, {}
        for name, mine in self.replicas.items():
            here = mine[:free]
            free -= len(here)
            found[name] = ServedDeployment(
                self.targets[name],
                running=frozenset(ReplicaId(r) for r, age in here if age >= 0),
                starting=frozenset(ReplicaId(r) for r, age in here if age < 0),
                pending=frozenset(ReplicaId(r) for r, _ in mine[len(here) :]),
            )
        cpus = float(self.cpus)
        return found, (HostResources({"CPU": cpus}, {"CPU": float(free)}),)


some_demand = st.builds(
    lambda queued, running, count: (queued, running, count),
    st.integers(0, 40),
    st.integers(0, 9),
    st.integers(0, 9),
)


@pytest.mark.parametrize("name", list(SCALING))
@given(
    st.lists(some_demand, min_size=1, max_size=40),
    st.integers(0, 2),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_orders_stay_within_the_bounds_and_the_cluster(
    name: str, course: list[tuple[int, int, int]], low: int, cpus: int, looks_to_start: int
) -> None:
    specs = (a_deployment(low=low, initial=2, high=3), a_deployment(E, low=0, high=4, cost=2.0))
    fleet = a_fleet(*specs, policy=scaling_policy(PoolScaling(name, idle_timeout_s=5.0)))
    cluster = Cluster(cpus, {D: min(2, cpus), E: 0})
    for second, (queued, running, count) in enumerate(course):
        cluster.pass_time(looks_to_start)
        serve, hosts = cluster.seen()
        before = dict(cluster.targets)
        ready = sorted(r for s in serve.values() for r in s.running)
        demand = a_demand(
            *ready, queued=queued, running=running, arrived=Arrivals(count, 2.0 * count)
        )
        cluster.obey(fleet.look(float(second), 0.0, ServedFleet(serve), hosts, {P: demand}))
        for spec in specs:
            target = cluster.targets[spec.name]
            assert spec.min_replicas <= target <= spec.max_replicas
            if target > max(before[spec.name], spec.min_replicas):
                assert target <= serve[spec.name].placed + hosts[0].free["CPU"]
        if queued > 0 and sum(before.values()) == 0 and hosts[0].free["CPU"] > 0:
            assert sum(cluster.targets.values()) > 0


def test_an_idle_pool_sleeps_and_wakes_for_the_first_call() -> None:
    fleet = a_fleet(
        a_deployment(low=0), policy=scaling_policy(PoolScaling("cato", idle_timeout_s=5.0))
    )
    cluster = Cluster(4, {D: 1})
    targets = []
    for second in range(30):
        cluster.pass_time(looks_to_start=2)
        serve, hosts = cluster.seen()
        ready = sorted(serve[D].running)
        # A call comes at 15 s; it waits until it has a replica, and then ends.
        waits = second >= 15 and not ready and second < 20
        demand = a_demand(*ready, queued=int(waits))
        cluster.obey(fleet.look(float(second), 0.0, ServedFleet(serve), hosts, {P: demand}))
        targets.append(cluster.targets[D])
    assert targets[:5] == [1] * 5
    assert targets[6:15] == [0] * 9
    assert targets[15:20] == [1] * 5
    assert targets[-1] == 0


async def test_a_topology_without_pools_to_scale_is_looked_at_until_one_has_some(
    tmp_path: Path,
) -> None:
    topology = Topology((), store=str(tmp_path / "metadata.db"))
    scaler = ResourceProvisioner()
    await scaler.register(topology, {}, {})
    looking = scaler._looking
    assert looking is not None
    await asyncio.wait((looking,), timeout=0.05)
    assert not looking.done(), "shared pools alone do not end it"
    looking.cancel()


def test_a_router_that_hangs_keeps_no_other_from_hearing_who_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[str, frozenset[ReplicaId]] = {}

    class Router:
        def __init__(self, name: str) -> None:
            self.left, self._name = self, name

        async def remote(self, gone: frozenset[ReplicaId]) -> None:
            if self._name == actors.router_name(P):
                await asyncio.Event().wait()
            told[self._name] = gone

    async def fleet(app: str) -> ServedFleet:
        return ServedFleet({D: served(1)})

    monkeypatch.setattr(actors, "get", Router)
    monkeypatch.setattr(provisioner.ray_private, "fleet", fleet)
    pool = PoolSpec(P, ModelSpec(ModelName("m"), "m", "qwen"), (a_deployment(),), router_shards=2)
    orders, before = [ScaleTo(D, 1, "less work")], ServedFleet({D: served(2)})
    telling = provisioner._tell_who_leaves(Topology((pool,)), orders, before)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(telling)
    assert told == {actors.router_name(P, 1): ids("d", 2) - ids("d", 1)}


class Reads:
    """Reads of the added adapters: each tells what the store held when it began."""

    def __init__(self) -> None:
        self.adapters: tuple[AddedAdapter, ...] = ()
        self.answers: list[asyncio.Event] = []

    async def __call__(self, store: str | None) -> tuple[AddedAdapter, ...]:
        found = self.adapters
        self.answers.append(asyncio.Event())
        await self.answers[-1].wait()
        return found


@pytest.mark.parametrize("is_first", [True, False])
async def test_an_adapter_added_during_a_read_is_served_whichever_read_ends_last(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    monkeypatch.setattr(provisioner, "_adapters_in", reads := Reads())
    monkeypatch.setattr(ResourceProvisioner, "_look", lambda *_: asyncio.sleep(0))
    model = ModelName("m")
    spec = ModelSpec(model, "m", "qwen", adapter_places=1)
    pool = PoolSpec(P, spec, (a_deployment(),))
    scaler = ResourceProvisioner()
    asked = [asyncio.create_task(scaler.register(Topology((pool,)), {D: a_profile()}, {}))]
    await asyncio.sleep(0)
    if not is_first:
        reads.answers[-1].set()
        await asked[0]
        asked.append(asyncio.create_task(scaler.read_adapters()))
        await asyncio.sleep(0)
    reads.adapters = (AddedAdapter(model, AdapterSpec(ModelName("team"), "acme/lora")),)
    asked.append(asyncio.create_task(scaler.read_adapters()))
    await asyncio.sleep(0)
    while not all(task.done() for task in asked):
        for answer in reversed(reads.answers):
            answer.set()
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    topology = await scaler.topology()
    assert topology is not None
    assert [a.name for p in topology.pools for a in p.model.adapters] == ["team"]
    assert scaler._looking is not None
    scaler._looking.cancel()
