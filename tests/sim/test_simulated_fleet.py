"""Simulated fleets replay, repeat themselves, and lose neither tasks nor tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from fleet_kit import POOL, PROFILE, SCHEDULERS, Scribe, a_fleet, a_task, random_tasks
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import a_profile

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    ReplicaLost,
)
from cato.core.ids import ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.policies import Policies
from cato.lab.experiments import coding_mixes
from cato.lab.registry import experiment
from cato.sim.experiment import Options, silent
from cato.sim.fleet import Fleet, SimPool
from cato.sim.tasks import SimNode, SimTask, task_metrics

GOLDEN = Path(__file__).parent / "golden" / "fleet.json"
FIRST, SECOND = ReplicaId("p-0001"), ReplicaId("p-0002")


@dataclass(slots=True)
class Run:
    """A run of one pool, with all that its orchestrator was told and ordered."""

    fleet: Fleet
    told: list[Event]
    scribe: Scribe
    # Tokens that dead replicas had sent in the stretch in which they died.
    cut_off: int = 0

    @property
    def pool(self) -> SimPool:
        return self.fleet.pools[POOL]

    @property
    def orders(self) -> list[Command]:
        return [c for commands in self.scribe.orders for c in commands]

    def lose(self, id: ReplicaId) -> None:
        if id in self.pool.replicas:
            engine, now_s = self.pool.replicas[id].engine, self.fleet.kernel.now_s
            at_boundary = sum(n for _, n in engine.tokens(0.0))
            self.cut_off += sum(n for _, n in engine.tokens(now_s)) - at_boundary
            self.pool.lose_replica(id)

    def drain(self, id: ReplicaId) -> None:
        if id in self.pool.replicas:
            self.pool.drain_replica(id)


def prepared(
    policies: Policies,
    *,
    replicas: int = 3,
    chunk_tokens: int | None = None,
    latency_s: float = 0.0,
    dispatch_s: float = 0.0,
    news_s: float = 0.0,
) -> Run:
    told: list[Event] = []
    fleet = a_fleet(
        policies,
        replicas=replicas,
        max_running=6,
        profile=replace(PROFILE, latency_s=latency_s),
        chunk_tokens=chunk_tokens,
        cold_start_s=2.0,
        dispatch_s=dispatch_s,
        news_s=news_s,
        recorder=lambda _, event: told.append(event),
    )
    pool = fleet.pools[POOL]
    scribe = Scribe(pool.orchestrator, [()] * len(told))
    pool.orchestrator = scribe
    return Run(fleet, told, scribe)


def troubled(
    policies: Policies,
    tasks: Sequence[SimTask],
    *,
    chunk_tokens: int | None = None,
    latency_s: float = 0.0,
    dispatch_s: float = 0.0,
    news_s: float = 0.0,
) -> Run:
    """Of three replicas one dies and one drains; one more is ordered, ready two seconds later."""
    run = prepared(
        policies,
        chunk_tokens=chunk_tokens,
        latency_s=latency_s,
        dispatch_s=dispatch_s,
        news_s=news_s,
    )
    at = run.fleet.kernel.at
    at(0.5, lambda: run.pool.start_replica(PROFILE))
    at(1.003, lambda: run.lose(FIRST))
    at(1.5, lambda: run.drain(SECOND))
    run.fleet.run(tasks)
    return run


def check_nothing_is_lost(run: Run) -> None:
    """Every task has ended, every token was generated once, and all books are empty.

    Only the step that runs when a call is taken back may still give it a token.
    """
    fleet = run.fleet
    assert all(o.is_finished != o.refused for o in fleet.outcomes)
    assert fleet.unfinished == 0
    assert not fleet.calls
    assert not run.pool.leased
    picture = run.scribe.picture(fleet.kernel.now_s)
    assert picture.queued == 0
    assert all((r.held, r.prefilling, r.queued) == (0, 0, 0) for r in picture.replicas)
    assert all(h.engine.held == 0 for h in run.pool.replicas.values())
    assert 0 < fleet.utilization() <= 1
    ended = Counter(e.invocation_id for e in run.told if isinstance(e, InvocationEnded))
    for outcome in fleet.outcomes:
        task = outcome.task
        for i in range(len(task.nodes)):
            id = f"{task.id}/{i}"
            assert ended[id] == 1 or outcome.refused, f"{id} ended {ended[id]} times"
            assert ended[id] <= 1
    if not any(o.refused for o in fleet.outcomes):
        engines = [h.engine for h in (*run.pool.replicas.values(), *run.pool.retired)]
        generated = sum(e.tokens_out for e in engines) + run.cut_off
        wanted = sum(n.output_tokens for o in fleet.outcomes for n in o.task.nodes)
        wasted = sum(isinstance(c, Preempt) for c in run.orders)
        assert wanted <= generated <= wanted + wasted
    for event in run.told:
        if isinstance(event, InvocationEnded):
            task_id, index = event.invocation_id.split("/")
            task = next(o.task for o in fleet.outcomes if o.task.id == task_id)
            whole = task.nodes[int(index)].output_tokens
            assert 0 < event.output_tokens <= whole
            assert event.output_tokens == whole or event.attempt > 1


def check_leases(run: Run) -> None:
    """One at a time per invocation: given, then ended, taken back, withdrawn or lost."""
    leases: dict[str, ReplicaId] = {}
    begun: set[str] = set()
    for event, commands in zip(run.told, run.scribe.orders, strict=True):
        match event:
            case InvocationEnded(_, id) | InvocationWithdrawn(_, id):
                leases.pop(id, None)
            case ReplicaLost(_, replica_id):
                leases = {i: r for i, r in leases.items() if r != replica_id}
            case FirstTokenSent(_, id):
                assert id in leases
                assert id not in begun, "two first tokens of one attempt"
                begun.add(id)
            case _:
                pass
        for command in commands:
            id = command.invocation_id
            if isinstance(command, Dispatch):
                assert id not in leases, f"{id} is dispatched twice"
                leases[id] = command.replica_id
                begun.discard(id)
            elif isinstance(command, Preempt):
                assert leases.pop(id) == command.replica_id
    assert not leases


@pytest.mark.parametrize(("chunk_tokens", "latency_s"), [(None, 0.0), (64, 0.0), (64, 0.05)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_with_troubles_loses_nothing_and_its_events_replay(
    name: str, chunk_tokens: int | None, latency_s: float
) -> None:
    tasks = random_tasks(5, 60, 25.0)
    run = troubled(SCHEDULERS[name], tasks, chunk_tokens=chunk_tokens, latency_s=latency_s)
    check_nothing_is_lost(run)
    check_leases(run)
    assert {h.id for h in run.pool.retired} == {FIRST, SECOND}
    again = PoolOrchestrator(POOL, SCHEDULERS[name])
    assert [again.handle(event) for event in run.told] == run.scribe.orders


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_with_troubles_and_late_news_loses_nothing_and_its_events_replay(name: str) -> None:
    """Ends, losses and orders to take back cross on their way; long delays make that common."""
    run = troubled(SCHEDULERS[name], random_tasks(5, 60, 25.0), dispatch_s=0.05, news_s=0.08)
    check_nothing_is_lost(run)
    again = PoolOrchestrator(POOL, SCHEDULERS[name])
    assert [again.handle(event) for event in run.told] == run.scribe.orders


def test_a_call_is_at_its_engine_after_the_dispatch_delay_and_the_router_hears_later() -> None:
    run = prepared(SCHEDULERS["foresight"], replicas=1, dispatch_s=0.005, news_s=0.008)
    (outcome,) = run.fleet.run([a_task("t", prompt=100, output=2)])
    first_s = 0.005 + PROFILE.prefill_s(100)
    assert outcome.first_token_at_s == pytest.approx(first_s)
    told = {type(e): e.now_s for e in run.told}
    assert told[FirstTokenSent] == pytest.approx(first_s + 0.008)
    assert told[InvocationEnded] == pytest.approx(outcome.ended_at_s + 0.008)


def test_the_router_learns_the_delay_of_messages() -> None:
    run = prepared(SCHEDULERS["foresight"], replicas=1, dispatch_s=0.005, news_s=0.008)
    run.fleet.run([a_task(f"t{i}", 1.0 * i) for i in range(400)])
    (replica,) = run.scribe.picture(400.0).replicas
    assert replica.dispatch_s == pytest.approx(0.013, rel=0.05)


def test_the_troubles_of_these_tests_are_some() -> None:
    """Otherwise the test above would say little."""
    runs = [troubled(policies, random_tasks(5, 60, 25.0)) for policies in SCHEDULERS.values()]
    orders = [c for run in runs for c in run.orders]
    hosts = [h for run in runs for h in (*run.pool.replicas.values(), *run.pool.retired)]
    assert sum(run.cut_off > 0 for run in runs) >= 3
    assert sum(isinstance(c, Preempt) for c in orders) >= 10
    assert sum(h.engine.preemptions for h in hosts) >= 10
    assert sum(isinstance(c, Dispatch) and c.attempt > 1 for c in orders) >= 10


# Tasks as graphs of calls


def random_graphs(seed: int, n: int, rate_per_s: float) -> list[SimTask]:
    """Up to five calls each, with needs among earlier ones and pauses before some."""
    rng = np.random.default_rng(seed)
    tasks, at_s = [], 0.0
    for i in range(n):
        at_s += float(rng.exponential(1 / rate_per_s))
        nodes = []
        for k in range(int(rng.integers(1, 6))):
            needs = tuple(j for j in range(k) if rng.random() < 0.4)
            prompt, output = int(rng.integers(1, 400)), int(rng.integers(1, 60))
            pause_s = float(rng.choice([0.0, 0.0, 0.05]))
            nodes.append(SimNode(POOL, prompt, output, 30, None, needs, pause_s))
        target_s = float(rng.uniform(0.2, 4.0)) if rng.random() < 0.9 else inf
        task = a_task(f"g{i:03d}", at_s, nodes=nodes, target_s=target_s)
        tasks.append(replace(task, draws=tuple(rng.random(len(nodes)).tolist())))
    return tasks


names = st.sampled_from(sorted(SCHEDULERS))
moments_s = st.floats(0.0, 3.0)
troubles = st.lists(
    st.tuples(moments_s, st.sampled_from(["lose", "drain", "start"]), st.integers(1, 4)), max_size=4
)


@settings(max_examples=60)
@given(
    names,
    st.integers(0, 10_000),
    troubles,
    st.sampled_from([None, 32]),
    st.sampled_from([3, 999]),
    st.sampled_from([0.0, 0.05]),
)
def test_graphs_of_calls_end_or_fail_as_a_whole_whatever_happens_to_replicas(
    name: str,
    seed: int,
    troubles: list[tuple[float, str, int]],
    chunk_tokens: int | None,
    max_queued: int,
    latency_s: float,
) -> None:
    policies = replace(SCHEDULERS[name], max_queued=max_queued)
    run = prepared(policies, replicas=2, chunk_tokens=chunk_tokens, latency_s=latency_s)
    for at_s, what, i in troubles:
        id = ReplicaId(f"p-{i:04d}")
        action = {
            "lose": lambda id=id: run.lose(id),
            "drain": lambda id=id: run.drain(id),
            "start": lambda: run.pool.start_replica(PROFILE),
        }[what]
        run.fleet.kernel.at(at_s, action)
    # In the end there is a replica, however many were lost.
    run.fleet.kernel.at(5.0, lambda: run.pool.add_replica(PROFILE))
    run.fleet.run(random_graphs(seed, 20, 15.0))
    check_nothing_is_lost(run)
    check_leases(run)
    refused = {c.invocation_id.split("/")[0] for c in run.orders if isinstance(c, Refuse)}
    assert refused == {o.task.id for o in run.fleet.outcomes if o.refused}
    first_offer_s: dict[str, float] = {}
    for event in run.told:
        if isinstance(event, InvocationOffered):
            first_offer_s.setdefault(event.invocation.id, event.now_s)
    ended_s = {e.invocation_id: e.now_s for e in run.told if isinstance(e, InvocationEnded)}
    for outcome in run.fleet.outcomes:
        task = outcome.task
        for k, node in enumerate(task.nodes):
            if (id := f"{task.id}/{k}") in first_offer_s:
                needs_s = [ended_s[f"{task.id}/{need}"] for need in node.needs]
                start_s = max(needs_s, default=task.arrived_at_s) + node.before_s
                assert first_offer_s[id] == start_s


# Replicas


def test_a_cold_start_delays_the_first_request_of_a_replica() -> None:
    run = prepared(SCHEDULERS["foresight"], replicas=0)
    run.fleet.kernel.at(1.0, lambda: run.pool.start_replica(PROFILE))
    (outcome,) = run.fleet.run([a_task("t")])
    assert outcome.queue_s == 3.0
    assert run.fleet.utilization() == pytest.approx(1.0)


def test_what_is_sent_to_a_replica_arrives_after_its_latency() -> None:
    near, far = (prepared(SCHEDULERS["least-wait"], replicas=1, latency_s=s) for s in (0.0, 0.3))
    (soon,), (late,) = (run.fleet.run([a_task("t")]) for run in (near, far))
    assert late.first_token_at_s == pytest.approx(soon.first_token_at_s + 0.3)
    assert (late.queue_s, late.ended_at_s) == (0.0, pytest.approx(soon.ended_at_s + 0.3))


def test_what_is_under_way_when_its_replica_drains_still_runs_there() -> None:
    run = prepared(SCHEDULERS["least-wait"], replicas=1, latency_s=0.3)
    run.fleet.kernel.at(0.1, lambda: run.drain(FIRST))
    (outcome,) = run.fleet.run([a_task("t")])
    assert outcome.is_finished
    assert [h.ended_s for h in run.pool.retired] == [outcome.ended_at_s]


def test_a_lost_replica_costs_the_stream_a_pause_and_no_token() -> None:
    alone = prepared(SCHEDULERS["foresight"], replicas=1)
    (before,) = alone.fleet.run([a_task("t", output=80)])
    run = prepared(SCHEDULERS["foresight"], replicas=2)
    run.fleet.kernel.at(0.5, lambda: run.lose(FIRST))
    (after,) = run.fleet.run([a_task("t", output=80)])
    assert after.first_token_at_s == before.first_token_at_s
    offers = [e.invocation for e in run.told if isinstance(e, InvocationOffered)]
    sent = offers[1].generated
    assert 30 < sent < 60
    assert (offers[1].prompt_tokens, offers[1].expected_tokens) == (100 + sent, 80 - sent)
    # The token that was under way is generated again, by the prefill of all before it.
    step_s = PROFILE.decode_step_s(1, 100 + sent)
    pause_s = after.ended_at_s - before.ended_at_s
    assert 0 < pause_s - PROFILE.prefill_s(100 + sent) + step_s < step_s


def test_a_draining_replica_finishes_what_it_has_and_goes() -> None:
    run = prepared(SCHEDULERS["cato"], replicas=2)
    run.fleet.kernel.at(0.1, lambda: run.drain(FIRST))
    tasks = [a_task(f"t{i}", 0.09 * i, output=50) for i in range(6)]
    outcomes = run.fleet.run(tasks)
    assert all(o.is_finished for o in outcomes)
    (gone,) = run.pool.retired
    given_to_it = [
        c.invocation_id for c in run.orders if isinstance(c, Dispatch) and c.replica_id == FIRST
    ]
    ended_s = {e.invocation_id: e.now_s for e in run.told if isinstance(e, InvocationEnded)}
    assert 0 < len(given_to_it) < 6
    assert gone.ended_s == max(ended_s[id] for id in given_to_it)


@pytest.mark.parametrize("max_running", [1, 4])
def test_work_without_an_slo_gets_its_reserve_in_lasting_overload(max_running: int) -> None:
    """Twice what fits, each in time if it is served at once; the rest waits from the start.

    Alone a task takes 1 s, so that one in twenty of the 170 that fit after 30 s is for those
    without an SLO.
    """
    profile = a_profile(prefill_s=0.0, token_s=0.1)
    urgent = [
        a_task(f"u{i}", at_s=0.5 * i / max_running, prompt=1, output=11, target_s=3.0)
        for i in range(400 * max_running)
    ]
    patient = [a_task(f"p{i}", prompt=1, output=11, target_s=inf) for i in range(400)]
    fleet = a_fleet(SCHEDULERS["foresight"], replicas=1, max_running=max_running, profile=profile)
    outcomes = fleet.run([*patient, *urgent], until_s=200.0)
    served = {True: 0, False: 0}
    for outcome in outcomes:
        served[outcome.task.target_s < inf] += outcome.is_finished
    assert 0.03 <= served[False] / (served[True] + served[False]) <= 0.1


def test_utilization_counts_the_stretch_that_runs() -> None:
    run = prepared(SCHEDULERS["cato"], replicas=2)
    run.fleet.run([a_task("t", output=100)], until_s=0.5)
    assert run.fleet.utilization() == pytest.approx(0.5)
    run.fleet.kernel.run()
    check_nothing_is_lost(run)


# The same again


def test_the_same_seed_gives_a_byte_equal_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_mixes, "TASKS", 15)
    chosen = experiment("coding-small-first")
    options = Options(seeds=(1,), policies=("foresight", "cato"))
    first, second = (chosen.run(options, silent).to_json() for _ in range(2))
    assert first == second
    assert chosen.run(replace(options, seeds=(2,)), silent).to_json() != first


def golden() -> str:
    """Metrics of one run a scheduler; ten digits, for the last ones differ between processors."""
    found = {}
    for name, policies in SCHEDULERS.items():
        run = troubled(policies, random_tasks(11, 80, 20.0))
        metrics = task_metrics(run.fleet.outcomes) | {
            "utilization": run.fleet.utilization(),
            "preempted": run.pool.preempted,
        }
        found[name] = {k: float(f"{v:.10g}") for k, v in metrics.items()}
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def test_a_small_run_of_every_scheduler_is_the_golden_one() -> None:
    """A change that is meant: `python tests/sim/test_simulated_fleet.py` renews the file."""
    assert golden() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(golden())
