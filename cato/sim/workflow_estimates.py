"""Estimates that a profiler would have learned of a workflow before its simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cato.core.budgets import NodeEstimate, expected_runs
from cato.core.ids import NodeId, PoolName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.receipt import NodeStatus, SlaReceipt
from cato.core.workflow import Node
from cato.estimators.stages import KEPT_RUNS, finished_stages, past_runs
from cato.policies import schedulers
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.workflow_tasks import (
    LlmWork,
    WorkflowClass,
    WorkflowOutcome,
    drawn_task,
    known_length,
    llm_settings,
)

# As many runs as a growing run is compared with; node frequencies are then accurate to 0.04.
LEARNT_RUNS = KEPT_RUNS
_LEARN_SEED = 20_240_601


def with_estimates(kind: WorkflowClass, profiles: Mapping[PoolName, Profile]) -> WorkflowClass:
    """`kind` with estimates from runs that have their replicas to themselves.

    Node times are those of mean lengths. Where conditions and loops decide the path, simulated
    runs without load give how often a node runs, and how the time of a run is divided.
    """
    nodes = kind.workflow.nodes
    prior = {n.id: _estimate(n, kind, profiles) for n in nodes}
    if not kind.workflow.is_dynamic:
        return replace(kind, estimates=prior)
    receipts = _alone(replace(kind, estimates=prior), profiles)
    runs = _mean_rounds(receipts)
    learnt = {id: replace(e, runs=runs.get(id, e.runs)) for id, e in prior.items()}
    stages = [found.graph for r in receipts if (found := finished_stages(r)) is not None]
    past = past_runs({kind.name: stages} if stages else {}, 1)
    return replace(kind, estimates=learnt, past=past)


def _estimate(
    node: Node, kind: WorkflowClass, profiles: Mapping[PoolName, Profile]
) -> NodeEstimate:
    runs = expected_runs(node)
    work = kind.work[node.id]
    if not isinstance(work, LlmWork):
        return NodeEstimate(work.takes_s, work.takes_s, runs)
    profile, prompt_tokens = profiles[work.pool], round(work.prompt_tokens)
    known: LengthBelief = known_length(work, llm_settings(node).max_tokens)
    return NodeEstimate(
        profile.service_s(prompt_tokens, max(1, round(known.mean))),
        profile.first_token_s(prompt_tokens),
        runs,
    )


def _alone(kind: WorkflowClass, profiles: Mapping[PoolName, Profile]) -> list[SlaReceipt]:
    """Receipts of consecutive runs without load."""
    rule = schedulers.early("round-robin")
    # No token reports: nothing reads them, and they take time.
    setups = [PoolSetup(p, (f,), rule, report_steps=1_000_000) for p, f in profiles.items()]
    fleet = Fleet(setups)
    rng = np.random.default_rng(_LEARN_SEED)
    gap_s = kind.workflow.hard_deadline_s + 1
    outcomes = fleet.run([drawn_task(f"r{i}", kind, i * gap_s, rng) for i in range(LEARNT_RUNS)])
    return [o.receipt for o in outcomes if isinstance(o, WorkflowOutcome) and o.receipt]


def _mean_rounds(receipts: Sequence[SlaReceipt]) -> Mapping[NodeId, float]:
    """Mean rounds of each node in successful runs, as the profiler counts; empty without any."""
    done = [r for r in receipts if r.status == "done"]
    ended = Counter(
        node
        for r in done
        for node, _ in {(x.node, x.round) for x in r.nodes if x.status == NodeStatus.DONE.value}
    )
    return {node: n / len(done) for node, n in ended.items()}
