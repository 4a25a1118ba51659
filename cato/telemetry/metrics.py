"""Metrics of pools and deployments; those of runs are in `run_metrics`."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cato.core.ids import PoolName
from cato.core.orchestrator import PoolPicture
from cato.core.residency import Resident
from cato.core.slots import SharedPoolPicture, SlotState
from cato.telemetry.decisions import PoolDecisions
from cato.telemetry.overview import DeploymentOverview, FleetState


class _FleetMetrics(Collector):
    def __init__(self, pictures: Sequence[PoolPicture], fleet: FleetState) -> None:
        self._pictures = pictures
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "cato_control_actors_silent",
            "Control actors that did not answer this scrape; their metrics are missing from it.",
            value=len(self._fleet.missing),
        )
        yield from _pool_metrics(self._pictures, self._fleet.shared_pools)
        yield _decisions(self._fleet.decisions)
        yield from _deployment_metrics(self._fleet.deployments)
        yield from _resident_metrics(self._fleet.residents)
        yield from _shared_pool_metrics(self._fleet.shared_pools)


def _pool_metrics(
    pictures: Iterable[PoolPicture], shared_pools: Iterable[SharedPoolPicture]
) -> Iterable[Metric]:
    queued = GaugeMetricFamily("cato_pool_queued", "Queued invocations.", labels=["pool"])
    dispatched = CounterMetricFamily(
        "cato_pool_dispatched", "Leases since the router started.", labels=["pool"]
    )
    refused = CounterMetricFamily(
        "cato_pool_refused", "Invocations refused since the router started.", labels=["pool"]
    )
    by_replica = ["pool", "deployment", "replica"]
    held = GaugeMetricFamily(
        "cato_replica_held", "Invocations leased to a replica.", labels=by_replica
    )
    places = GaugeMetricFamily(
        "cato_replica_places", "Invocations that a replica can run at a time.", labels=by_replica
    )
    accepting = GaugeMetricFamily(
        "cato_replica_accepting", "1 when a replica accepts work.", labels=by_replica
    )
    wait = GaugeMetricFamily(
        "cato_replica_wait_seconds", "Expected queueing delay of a new call.", labels=by_replica
    )
    sessions = GaugeMetricFamily(
        "cato_replica_sessions",
        "Sessions whose last call, within 10 minutes, went to this replica.",
        labels=by_replica,
    )
    working_set = GaugeMetricFamily(
        "cato_replica_working_set_tokens", "Context tokens of its sessions.", labels=by_replica
    )
    memory = GaugeMetricFamily(
        "cato_replica_kv_tokens",
        "Capacity of a replica's KV memory in tokens, by memory: kv (the accelerator's) and host.",
        labels=[*by_replica, "memory"],
    )
    for picture in pictures:
        queued.add_metric([picture.name], picture.queued)
        dispatched.add_metric([picture.name], picture.dispatched)
        refused.add_metric([picture.name], picture.refused)
        for replica in picture.replicas:
            labels = [picture.name, replica.deployment, replica.id]
            held.add_metric(labels, replica.held)
            places.add_metric(labels, replica.max_running)
            accepting.add_metric(labels, float(replica.accepting))
            wait.add_metric(labels, replica.wait_s)
            sessions.add_metric(labels, replica.sessions)
            working_set.add_metric(labels, replica.working_set_tokens)
            memory.add_metric([*labels, "kv"], replica.profile.kv_capacity_tokens)
            memory.add_metric([*labels, "host"], replica.host_tokens)
    for shared in shared_pools:
        refused.add_metric([shared.name], shared.counts.refused)
    by_pool = [queued, dispatched, refused]
    return [*by_pool, held, places, accepting, wait, sessions, working_set, memory]


def _decisions(decisions: Mapping[PoolName, PoolDecisions]) -> Metric:
    counter = CounterMetricFamily(
        "cato_decisions",
        "Decisions since the router started, by kind (dispatch, refuse, supersede, preempt, load, "
        "lost: a replica is gone, and left: its deployment has fewer replicas or new ones) and by "
        "reason without its numbers.",
        labels=["pool", "decision", "reason"],
    )
    for pool, decided in sorted(decisions.items()):
        for (kind, rule), count in sorted((decided.counts or {}).items()):
            counter.add_metric([pool, kind, rule], count)
    return counter


def _deployment_metrics(deployments: Iterable[DeploymentOverview]) -> Iterable[Metric]:
    replicas = GaugeMetricFamily(
        "cato_deployment_replicas",
        "Replicas of a deployment: running, starting, and the target within min and max.",
        labels=["pool", "deployment", "state"],
    )
    problem = GaugeMetricFamily(
        "cato_deployment_problem",
        "1 while a deployment cannot reach its target; `cato status` says why.",
        labels=["pool", "deployment"],
    )
    for d in deployments:
        for state in ("running", "starting", "wanted", "min", "max"):
            replicas.add_metric([d.pool, d.name, state], getattr(d, state))
        problem.add_metric([d.pool, d.name], float(bool(d.problem)))
    return [replicas, problem]


def _resident_metrics(residents: Iterable[Resident]) -> Iterable[Metric]:
    copies = GaugeMetricFamily(
        "cato_model_copies", "Copies of a model, by state.", labels=["pool", "model", "state"]
    )
    cards = GaugeMetricFamily(
        "cato_cards", "Accelerators that a model's copies occupy.", labels=["accelerator", "model"]
    )
    load = GaugeMetricFamily(
        "cato_model_load_seconds", "Load time of a copy.", labels=["pool", "model", "replica"]
    )
    restarts = CounterMetricFamily(
        "cato_engine_restarts", "Restarts of a replica's engine after it died.",
        labels=["pool", "replica"],
    )  # fmt: skip
    states: Count[tuple[str, str, str]] = Count()
    occupied: Count[tuple[str, str]] = Count()
    for r in residents:
        states[r.pool, r.model, r.state] += 1
        occupied[r.accelerator, r.model] += r.cards
        load.add_metric([r.pool, r.model, r.replica_id], r.load_s)
        restarts.add_metric([r.pool, r.replica_id], r.restarts)
    for name, count in sorted(states.items()):
        copies.add_metric(name, count)
    for place, count in sorted(occupied.items()):
        cards.add_metric(place, count)
    return [copies, cards, load, restarts]


def _shared_pool_metrics(pools: Iterable[SharedPoolPicture]) -> Iterable[Metric]:
    queued = GaugeMetricFamily(
        "cato_shared_pool_queued", "Invocations queued for a slot with their model.",
        labels=["pool", "model"],
    )  # fmt: skip
    slots = GaugeMetricFamily(
        "cato_shared_pool_slots", "Slots by state (empty, loading, ready).",
        labels=["pool", "state"],
    )  # fmt: skip
    served = CounterMetricFamily(
        "cato_shared_pool_served",
        "Invocations that got a slot, by whether their model was already loaded at dispatch.",
        labels=["pool", "hit"],
    )
    loads = CounterMetricFamily(
        "cato_shared_pool_loads", "Loads ordered, by source of the weights.",
        labels=["pool", "source"],
    )  # fmt: skip
    evictions = CounterMetricFamily(
        "cato_shared_pool_evictions", "Models unloaded to make room for another.", labels=["pool"]
    )
    prefetches = CounterMetricFamily(
        "cato_shared_pool_prefetches", "Loads ordered before a call arrived.", labels=["pool"]
    )
    failures = CounterMetricFamily(
        "cato_shared_pool_load_failures", "Loads that failed.", labels=["pool"]
    )
    load_s = CounterMetricFamily(
        "cato_shared_pool_load_seconds", "Time that slots spent loading.", labels=["pool"]
    )
    for pool in pools:
        counts = pool.counts
        for model, waiting in pool.waiting:
            queued.add_metric([pool.name, model], waiting)
        states = Count(s.state for s in pool.slots)
        for state in SlotState:
            slots.add_metric([pool.name, state.value], states[state])
        served.add_metric([pool.name, "true"], counts.hits)
        served.add_metric([pool.name, "false"], counts.served - counts.hits)
        loads.add_metric([pool.name, "host_memory"], counts.from_host_memory)
        loads.add_metric([pool.name, "storage"], counts.loads - counts.from_host_memory)
        evictions.add_metric([pool.name], counts.evictions)
        prefetches.add_metric([pool.name], counts.prefetches)
        failures.add_metric([pool.name], counts.failures)
        load_s.add_metric([pool.name], counts.load_s)
    return [queued, slots, served, loads, evictions, prefetches, failures, load_s]


def render_fleet(pictures: Sequence[PoolPicture], fleet: FleetState) -> bytes:
    """Metrics of the fleet, as its control actors see it now."""
    registry = CollectorRegistry()
    registry.register(_FleetMetrics(pictures, fleet))
    return generate_latest(registry)
