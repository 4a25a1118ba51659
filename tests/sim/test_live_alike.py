"""The pool that decides in virtual time is the one that decides in real time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from fleet_kit import POOL, SCHEDULERS, a_task
from kits.builders import a_node, a_profile, a_workflow, always

from cato.core.commands import Command, Dispatch
from cato.core.errors import CatoError
from cato.core.events import Event, InvocationOffered
from cato.core.ids import InvocationId, ModelName, RunId
from cato.core.orchestrator import PoolOrchestrator, PoolPicture
from cato.core.policies import Policies
from cato.core.retries import RetryBudget
from cato.core.runs import FinishRun, Run
from cato.core.slo import Slo, SloMetric
from cato.core.snapshot import Invocation
from cato.core.topology import ModelSpec
from cato.core.workflow import NodeKind
from cato.engines.base import Endpoint, EngineRequest
from cato.lab.chaos.local_pools import LocalPool, LocalPools
from cato.policies import schedulers
from cato.serve.executor import RunningTask
from cato.serve.lengths import Predicted
from cato.serve.nodes.runner import NodeRunner
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workflow_estimates import with_estimates
from cato.sim.workflow_tasks import LlmWork, LocalWork, WorkflowClass, WorkflowOutcome, drawn_task

# Long enough for all to be offered while the first is served, however slow the machine.
PROFILE = replace(a_profile(prefill_s=0.04, token_s=0.001), load_s=0.0)


@dataclass(slots=True)
class Recording:
    """An orchestrator, with what it was told and what it ordered."""

    orchestrator: PoolOrchestrator
    told: list[Event] = field(default_factory=list)
    orders: list[tuple[Command, ...]] = field(default_factory=list)

    def handle(self, event: Event) -> tuple[Command, ...]:
        self.told.append(event)
        self.orders.append(self.orchestrator.handle(event))
        return self.orders[-1]

    def picture(self, now_s: float) -> PoolPicture:
        return self.orchestrator.picture(now_s)

    def invocation(self, id: InvocationId) -> Invocation | None:
        return self.orchestrator.invocation(id)

    @property
    def order(self) -> list[str]:
        return [c.invocation_id for cs in self.orders for c in cs if isinstance(c, Dispatch)]


def a_live_pool(policies: Policies, *, replicas: int, slots: int) -> tuple[LocalPool, Recording]:
    spec = ModelSpec(ModelName("sim"), "demo", "starcoder")
    pool = LocalPool(spec, PROFILE, replicas=replicas, slots=slots)
    recording = Recording(PoolOrchestrator(pool.name, policies))
    pool._orchestrator = recording
    return pool, recording


async def serve(pool: LocalPool, task: SimTask, node: int = 0) -> None:
    """As the executor does: a lease, then its stream to the end."""
    invocation = replace(task.invocation(node, 0.0, 0.0), deadline_s=task.target_s)
    lease = await pool.lease(invocation)
    body = {"prompt": "x", "max_tokens": task.nodes[node].output_tokens, "ignore_eos": True}
    request = EngineRequest(f"{task.id}.{node}", Endpoint.COMPLETIONS, body, lease.priority)
    async with contextlib.aclosing(pool.stream(lease, request)) as chunks:
        async for _ in chunks:
            pass


def some_tasks() -> list[SimTask]:
    """All at once; deadlines so far apart that a slow machine changes no order."""
    targets_s = (30.0, 90.0, 40.0, 60.0, 100.0, 50.0, 80.0, 70.0)
    return [a_task(f"t{i}", prompt=1, output=5, target_s=s) for i, s in enumerate(targets_s)]


def simulated_order(policies: Policies, tasks: Sequence[SimTask]) -> list[str]:
    fleet = Fleet([PoolSetup(POOL, (PROFILE,), policies, max_running=1)])
    recording = Recording(fleet.pools[POOL].orchestrator)
    fleet.pools[POOL].orchestrator = recording
    fleet.run(tasks)
    return recording.order


@pytest.mark.parametrize(
    ("name", "expected"), [("foresight", "0 2 5 3 7 6 1 4"), ("least-wait", "0 1 2 3 4 5 6 7")]
)
async def test_live_and_simulated_pools_serve_in_the_same_order(name: str, expected: str) -> None:
    policies, tasks = SCHEDULERS[name], some_tasks()
    pool, recording = a_live_pool(policies, replicas=1, slots=1)
    await pool.start()
    await asyncio.gather(*(serve(pool, t) for t in tasks))
    await pool.stop()
    assert recording.order == simulated_order(policies, tasks)
    assert recording.order == [f"t{i}/0" for i in expected.split()]


async def test_a_stage_goes_by_its_longest_call_live_and_simulated() -> None:
    tempo = schedulers.OF_PROFILE["tempo"](PROFILE, 1)
    stage = [SimNode(POOL, 200, n, n) for n in (5, 60)]
    single = [SimNode(POOL, 200, 20, 20)]
    tasks = [
        a_task(id, nodes=nodes, target_s=90.0)
        for id, nodes in (("first", single), ("stage", stage), ("single", single))
    ]
    pool, recording = a_live_pool(tempo, replicas=1, slots=1)
    await pool.start()
    await asyncio.gather(*(serve(pool, t, n) for t in tasks for n in range(len(t.nodes))))
    await pool.stop()
    assert recording.order == simulated_order(tempo, tasks)
    assert recording.order == ["first/0", "single/0", "stage/1", "stage/0"]
    by_itself = simulated_order(replace(tempo, knows_stages=False), tasks)
    assert by_itself == ["first/0", "stage/0", "single/0", "stage/1"]


@pytest.mark.parametrize("name", ["foresight", "saber", "cato", "tempo"])
async def test_what_a_live_pool_was_told_replays_to_the_same_commands(name: str) -> None:
    """With a client that leaves and a replica that dies."""
    policies, tasks = SCHEDULERS[name], some_tasks()
    pool, recording = a_live_pool(policies, replicas=2, slots=2)
    await pool.start()
    calls = [asyncio.create_task(serve(pool, t)) for t in tasks]
    await asyncio.sleep(0)  # all are offered now
    calls[5].cancel()
    await pool.kill(next(iter(pool.replicas)))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await pool.stop()
    failed = [a for a in answers if isinstance(a, CatoError)]
    assert 0 < len(failed) <= 2, "those of the dead replica"
    assert isinstance(answers[5], asyncio.CancelledError)
    again = PoolOrchestrator(pool.name, policies)
    assert [again.handle(event) for event in recording.told] == recording.orders
    assert len(recording.order) >= len(tasks) - 1


def a_workflow_class() -> WorkflowClass:
    """An optional call that is always late, two that follow each other, and one that is skipped."""
    workflow = a_workflow(
        a_node("hint", optional=True, budget_s=0.01),
        a_node("draft"),
        a_node("tidy", "draft", kind=NodeKind.TRANSFORM),
        a_node("mend", "tidy", when=always(False)),
        a_node("answer", "hint", "tidy", "mend"),
        slo=Slo(SloMetric.TTFT, 5.0),
        stream=["answer"],
    )
    work = {
        n.id: LlmWork(POOL, 10, 8, 0.0) if n.kind is NodeKind.LLM else LocalWork()
        for n in workflow.nodes
    }
    kind = WorkflowClass(1.0, workflow, workflow.slo, {}, work, {})
    return with_estimates(kind, {POOL: PROFILE})


def what_was_offered(told: Sequence[Event]) -> list[tuple[str, bool, float, float]]:
    """Node, whether its first token is the SLO's event, what is downstream, and the deadline."""
    offered = (e.invocation for e in told if isinstance(e, InvocationOffered))
    return [
        (i.node, i.until_first_token, i.downstream_s, i.deadline_s - i.began_at_s) for i in offered
    ]


def what_ran(finish: FinishRun) -> list[tuple[str, int, str, float | None]]:
    return [(n.node, n.round, n.status, n.limit_s) for n in finish.receipt.nodes]


async def test_a_workflow_run_asks_its_pools_the_same_live_and_simulated() -> None:
    kind, policies = a_workflow_class(), SCHEDULERS["foresight"]
    pool, recording = a_live_pool(policies, replicas=1, slots=4)
    pool.model = replace(pool.model, name=ModelName("m"))
    async with LocalPools(pool) as pools:
        run = Run(RunId("a"), kind.workflow, kind.slo, {}, kind.estimates, time.monotonic(), None)
        nodes, budget = NodeRunner({}), RetryBudget()
        live = RunningTask(
            run, pools, nodes, lambda: 0.5, lambda *_: Predicted(), lambda *_: None, budget
        )
        live.start()
        live_end = await live.wait()
    told: list[Event] = []
    fleet = Fleet([PoolSetup(POOL, (PROFILE,), policies, 4)], lambda _, event: told.append(event))
    (outcome,) = fleet.run([drawn_task("a", kind, 0.0, np.random.default_rng(0))])
    assert isinstance(outcome, WorkflowOutcome)
    assert outcome.finish is not None
    assert what_ran(live_end) == what_ran(outcome.finish)
    assert [n for n, _, _, _ in what_was_offered(told)] == ["hint", "draft", "answer"]
    for there, here in zip(what_was_offered(recording.told), what_was_offered(told), strict=True):
        assert there[:3] == here[:3]
        assert there[3] == pytest.approx(here[3], abs=0.01)
