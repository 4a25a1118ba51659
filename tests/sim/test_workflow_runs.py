"""Workflow files in virtual time: the same `Run` as live, on the same pools as tasks of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from fleet_kit import POOL, PROFILE, SCHEDULERS, Scribe, a_task, random_tasks
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import Says, a_node, a_workflow, always, broken

import cato
from cato.core.errors import ConfigError
from cato.core.events import (
    Event,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
)
from cato.core.ids import NodeId, ReplicaId, RunId
from cato.core.policies import Policies
from cato.core.receipt import LlmFacts, NodeReceipt, SlaReceipt
from cato.core.runs import NodeDone, NodeFailed, Run, RunEvent, StartNode
from cato.core.slo import Slo, SloMetric
from cato.core.snapshot import Invocation
from cato.core.workflow import Expression, NodeKind, Workflow
from cato.policies import schedulers
from cato.sim.experiment import Options, silent
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.scenario import DrawnTraffic, Scenario
from cato.sim.scenario_file import example_text, load_scenario
from cato.sim.scenario_runs import as_experiment, run_once
from cato.sim.scenario_tasks import tasks_of
from cato.sim.tasks import Outcome, SimNode, SimTask, task_metrics
from cato.sim.workflow_estimates import with_estimates
from cato.sim.workflow_tasks import (
    TEXT,
    Drawn,
    LlmWork,
    LocalWork,
    Work,
    WorkflowClass,
    WorkflowOutcome,
    WorkflowTask,
    drawn_task,
    local_result,
)
from cato.workflows.load import load_workflow

SHIPPED = Path(cato.__file__).parent.parent / "workflows"
E2E, TTFT, TPOT = SloMetric.E2E, SloMetric.TTFT, SloMetric.TPOT
FIRST = ReplicaId("p-0001")
# 100 tokens of prompt and 10 of output, always.
CALL = LlmWork(POOL, 100, 10, 0.0)
CHECK_OK = Says(lambda names: names["check"]["ok"], "check.ok")  # type: ignore[index]
CHECK_NOT_OK = Says(lambda names: not names["check"]["ok"], "not check.ok")  # type: ignore[index]


@dataclass(slots=True)
class Driven:
    """A fleet of one pool that runs workflows, and all that was told of it."""

    fleet: Fleet
    told: list[Event] = field(default_factory=list)
    receipts: dict[str, SlaReceipt] = field(default_factory=dict)

    @property
    def offered(self) -> list[Invocation]:
        return [e.invocation for e in self.told if isinstance(e, InvocationOffered)]

    def receipt(self, id: str = "a") -> SlaReceipt:
        return self.receipts[id]

    def story(self, id: str = "a") -> list[tuple[str, int, str]]:
        return [(n.node, n.round, n.status) for n in self.receipts[id].nodes]


def prepared(
    policies: Policies | None = None, *, replicas: int = 1, max_running: int = 8
) -> Driven:
    told: list[Event] = []
    receipts: dict[str, SlaReceipt] = {}

    def ended(outcome: Outcome) -> None:
        if isinstance(outcome, WorkflowOutcome) and outcome.receipt is not None:
            receipts[outcome.task.id] = outcome.receipt

    setup = PoolSetup(
        POOL, (PROFILE,) * replicas, policies or schedulers.foresight(), max_running, report_steps=5
    )
    fleet = Fleet(
        [setup],
        lambda _, event: told.append(event),
        ended,
    )
    return Driven(fleet, told, receipts)


def driven(*tasks: SimTask, policies: Policies | None = None, max_running: int = 8) -> Driven:
    run = prepared(policies, max_running=max_running)
    run.fleet.run(tasks)
    check_nothing_is_left(run)
    return run


def a_class(
    workflow: Workflow, work: Mapping[str, Work] | None = None, *, tpot_target_s: float = inf
) -> WorkflowClass:
    """LLM nodes cost `CALL` and others nothing, unless `work` says otherwise."""
    given = {NodeId(id): w for id, w in (work or {}).items()}
    usual = {n.id: CALL if n.kind is NodeKind.LLM else LocalWork() for n in workflow.nodes}
    kind = WorkflowClass(1.0, workflow, workflow.slo, {}, usual | given, {}, tpot_target_s)
    return with_estimates(kind, {POOL: PROFILE})


def a_run(kind: WorkflowClass, id: str = "a", at_s: float = 0.0, seed: int = 0) -> WorkflowTask:
    return drawn_task(id, kind, at_s, np.random.default_rng(seed))


def a_check(*needs: str) -> object:
    node = a_node("check", *needs, kind=NodeKind.VALIDATE, max_items=1)
    settings = load_workflow(SHIPPED / "code-generation.yaml").node(NodeId("check")).settings
    return replace(node, settings=settings)


def refining(target_s: float, rounds: int = 5, metric: SloMetric = E2E) -> Workflow:
    return a_workflow(
        a_node("draft"),
        a_check("draft"),  # type: ignore[arg-type]
        a_node(
            "refine", "check", when=CHECK_NOT_OK, until=CHECK_OK, max_rounds=rounds, redo=["check"]
        ),
        slo=Slo(metric, target_s),
        output=["refine", "draft"],
        stream=["refine", "draft"],
    )


def check_nothing_is_left(run: Driven) -> None:
    """All runs are over, the pool is empty, and no alarm prolonged the run."""
    fleet = run.fleet
    pool = fleet.pools[POOL]
    assert fleet.unfinished == 0
    assert not fleet.calls
    assert not fleet.alarms._waiting
    assert not fleet.kernel._heap
    assert not pool.leased
    assert all(h.engine.held == 0 for h in pool.replicas.values())
    picture = pool.orchestrator.picture(fleet.kernel.now_s)
    assert picture.queued == 0
    assert all((r.held, r.prefilling, r.queued) == (0, 0, 0) for r in picture.replicas)
    for outcome in fleet.outcomes:
        if isinstance(outcome.task, WorkflowTask):
            receipt = run.receipts[outcome.task.id]
            assert outcome.is_finished == (receipt.status == "done")
            assert outcome.queue_s >= 0
            assert all(n.status != "running" for n in receipt.nodes)


# Shipped workflows

SCENARIO = """
name: flows
seeds: 2
duration: 60s
pools:
  small: {profile: tempo, replicas: 2, max_running: 16, chunk_tokens: 512}
  large: {profile: saber, replicas: 2, max_running: 16, chunk_tokens: 512}
traffic:
  rate_per_s: 2.0
  tasks:
    completion:
      workflow: WORKFLOWS/code-completion.yaml
      nodes:
        complete: {pool: small, prompt_tokens: 400, output_tokens: 24}
        scope: {takes: 5ms}
        snippets: {takes: 100ms}
    generation:
      workflow: WORKFLOWS/code-generation.yaml
      sla: {metric: ttft, target: 8s}
      nodes:
        draft: {pool: large, prompt_tokens: 500, output_tokens: 120}
        refine: {pool: large, prompt_tokens: 600, output_tokens: 120}
        check: {passes: 0.7, takes: 5ms}
        examples: {takes: 40ms}
    summary:
      workflow: WORKFLOWS/code-summarization.yaml
      inputs: {code: "def f(): pass"}
      nodes:
        split: {takes: 20ms, chunks: 4}
        parts: {pool: small, prompt_tokens: 300, output_tokens: 40}
        summary: {pool: large, prompt_tokens: 400, output_tokens: 48}
    translation:
      workflow: WORKFLOWS/code-translation.yaml
      nodes:
        translate: {pool: large, prompt_tokens: 500, output_tokens: 180}
        repair: {pool: large, prompt_tokens: 600, output_tokens: 180}
        check: {passes: 0.5, takes: 5ms}
    plain:
      sla: {metric: e2e, target: 10s}
      calls:
        only: {pool: large, prompt_tokens: 100, output_tokens: 50}
""".replace("WORKFLOWS", str(SHIPPED))


def load(folder: Path, text: str = SCENARIO) -> Scenario:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(path)


def test_the_shipped_workflows_run_beside_tasks_of_calls(tmp_path: Path) -> None:
    scenario = load(tmp_path)
    run = run_once(scenario, "foresight", tasks_of(scenario, 0))
    assert run.metrics["finished"] == 1.0
    assert set(run.by_class) == {"completion", "generation", "summary", "translation", "plain"}
    assert all(m["slo_attainment"] > 0.6 for m in run.by_class.values())
    assert all(m["tokens_per_s"] > 0 for m in run.by_class.values())


def test_a_class_takes_the_sla_of_its_workflow_unless_it_has_one(tmp_path: Path) -> None:
    traffic = load(tmp_path).traffic
    assert isinstance(traffic, DrawnTraffic)
    slos = {c.name: c.slo for c in traffic.classes if isinstance(c, WorkflowClass)}
    assert slos["translation"] == Slo(E2E, 45.0)
    assert slos["generation"] == Slo(TTFT, 8.0)
    # Checks pass 7 times of 10; then the loop runs once, or twice.
    generation = next(c for c in traffic.classes if c.name == "generation")
    assert isinstance(generation, WorkflowClass)
    assert generation.estimates[NodeId("refine")].runs == pytest.approx(0.3 * 1.3, abs=0.1)
    assert generation.estimates[NodeId("check")].runs == pytest.approx(1.39, abs=0.1)
    assert generation.estimates[NodeId("examples")].mean_s == 0.04


def test_the_same_seeds_give_the_same_report(tmp_path: Path) -> None:
    scenario = load(tmp_path)
    first, again = (as_experiment(load(tmp_path)).run(Options((0, 1)), silent) for _ in range(2))
    assert first == again
    larger = scenario.with_replicas({p.name: 3 for p in scenario.pools})
    assert tasks_of(scenario, 1) == tasks_of(larger, 1)
    assert tasks_of(scenario, 1) != tasks_of(scenario, 2)


def test_the_workflow_of_the_printed_example_is_right(tmp_path: Path) -> None:
    lines = example_text().splitlines()
    first = lines.index("    # mended:")
    for i in range(first, lines.index("", first)):
        lines[i] = lines[i].replace("    # ", "    ", 1)
    scenario = load(tmp_path, "\n".join(lines))
    run = run_once(scenario, "foresight", tasks_of(scenario, 0))
    assert run.by_class["mended"]["finished"] == 1.0


# The live core's decisions


def hand_driven(
    task: WorkflowTask, receipt: SlaReceipt
) -> tuple[dict[tuple[NodeId, int, int | None], StartNode], SlaReceipt]:
    """`Run` told of the ends in `receipt` by hand; what it started, and its own receipt."""
    kind = task.kind
    run = Run(
        RunId(task.id), kind.workflow, kind.slo, kind.inputs, kind.estimates, 0.0, kind.next_share
    )
    commands = list(run.start(0.0))
    for x in sorted(receipt.nodes, key=lambda x: x.started_s + x.spent_s):
        commands += run.handle(the_end_of(task, x))
    starts = {(c.node.id, c.round, c.item): c for c in commands if isinstance(c, StartNode)}
    return starts, commands[-1].receipt  # type: ignore[union-attr]


def the_end_of(task: WorkflowTask, x: NodeReceipt) -> RunEvent:
    where = (x.started_s + x.spent_s, x.node, x.round, x.item)
    if x.status != "done":
        return NodeFailed(*where, x.problem, x.llm)
    node = task.kind.workflow.node(x.node)
    work = task.kind.work[x.node]
    if isinstance(work, LlmWork):
        return NodeDone(*where, {"text": TEXT}, x.llm)
    is_ok = task.execution(node, x.round, x.item).is_ok
    return NodeDone(*where, local_result(node, work, is_ok))


@pytest.mark.parametrize("name", ["code-generation", "code-translation", "code-summarization"])
def test_the_pool_sees_what_a_run_driven_by_hand_says(name: str) -> None:
    workflow = load_workflow(SHIPPED / f"{name}.yaml")
    others = {"check": LocalWork(0.005, passes=0.4), "examples": LocalWork(0.3)}
    work = others | {"split": LocalWork(0.02, chunks=3)}
    kind = a_class(workflow, {k: w for k, w in work.items() if NodeId(k) in _ids(workflow)})
    for seed in range(8):
        task = a_run(kind, seed=seed)
        run = driven(task)
        starts, again = hand_driven(task, run.receipt())
        assert len(run.receipt().nodes) == len(again.nodes)
        for mine, theirs in zip(run.receipt().nodes, again.nodes, strict=True):
            assert (mine.budget_s, mine.limit_s) == (theirs.budget_s, theirs.limit_s)
        llm = [key for key, s in starts.items() if s.node.kind is NodeKind.LLM]
        assert len(run.offered) == len(llm)
        for offered, key in zip(run.offered, llm, strict=True):
            start = starts[key]
            assert offered.node == start.node.id
            assert offered.deadline_s == start.deadline_s
            assert offered.downstream_s == start.downstream_s
            assert offered.until_first_token == start.until_first_token


def test_a_run_with_an_open_path_is_budgeted_by_the_runs_before_it() -> None:
    work = {"check": LocalWork(passes=0.4)}
    kind = a_class(load_workflow(SHIPPED / "code-translation.yaml"), work)
    run = driven(a_run(kind))
    first = run.offered[0]
    assert (share := kind.next_share(())) is not None
    assert 0 < share <= 1
    translate = next(n for n in run.receipt().nodes if n.node == "translate")
    assert translate.budget_s == pytest.approx(share * (45.0 - translate.started_s))
    own_s = kind.estimates[NodeId("translate")].mean_s
    assert first.downstream_s == pytest.approx(own_s * (1 / share - 1))


def _ids(workflow: Workflow) -> set[NodeId]:
    return {n.id for n in workflow.nodes}


def test_what_a_node_leaves_unused_is_split_among_those_that_follow() -> None:
    workflow = a_workflow(a_node("a"), a_node("b", "a"), slo=Slo(E2E, 2.0))
    run = driven(a_run(a_class(workflow)))
    first, second = run.receipt().nodes
    assert first.budget_s == pytest.approx(1.0)
    assert second.budget_s == pytest.approx(2.0 - first.spent_s)
    assert [i.downstream_s > 0 for i in run.offered] == [True, False]
    assert run.offered[1].served_s == pytest.approx(first.spent_s)


def test_a_loop_ends_when_the_slack_does_not_cover_another_round() -> None:
    never = {"check": LocalWork(passes=0.0)}
    alone_s = driven(a_run(a_class(a_workflow(a_node("a"))))).receipt().e2e_s
    rounds = {}
    for target_s in (2.5 * alone_s, 4.5 * alone_s, 20.0):
        run = driven(a_run(a_class(refining(target_s), never)))
        rounds[target_s] = sum(n == "refine" for n, _, _ in run.story())
        assert run.receipt().met
        stopped = [n for n in run.receipt().notes if n.startswith("refine")]
        assert ("gave up" in stopped[0]) == (target_s == 20.0)
    assert list(rounds.values()) == [1, 3, 5]


def test_an_optional_node_that_is_late_is_left_out() -> None:
    def took(examples_s: float) -> Driven:
        workflow = a_workflow(
            a_node("examples", kind=NodeKind.TRANSFORM, optional=True, budget_s=0.15),
            a_node("draft", "examples"),
        )
        return driven(a_run(a_class(workflow, {"examples": LocalWork(examples_s)})))

    late, ready = took(0.3), took(0.1)
    assert late.story() == [("examples", 1, "absent"), ("draft", 1, "done")]
    assert late.receipt().nodes[1].started_s == 0.15
    assert late.receipt().notes == ("examples left out: not ready within its 0.150 s",)
    assert ready.receipt().nodes[1].started_s == 0.1


def test_an_optional_call_that_is_late_leaves_its_replica() -> None:
    workflow = a_workflow(a_node("hint", optional=True, budget_s=0.05), a_node("draft", "hint"))
    run = driven(a_run(a_class(workflow)))
    assert run.story() == [("hint", 1, "absent"), ("draft", 1, "done")]
    assert run.receipt().nodes[1].started_s == 0.05
    assert [type(e) for e in run.told if isinstance(e, InvocationWithdrawn | InvocationEnded)] == [
        InvocationWithdrawn,
        InvocationEnded,
    ]


def test_a_hard_deadline_cancels_and_frees_the_replica() -> None:
    workflow = a_workflow(a_node("story"), hard_deadline_s=0.4)
    rule = schedulers.early("round-robin")
    slow = a_run(a_class(workflow, {"story": LlmWork(POOL, 100, 60, 0.0)}))
    run = driven(
        slow, a_run(a_class(a_workflow(a_node("a"))), "b", 0.2), policies=rule, max_running=1
    )
    assert run.receipt("a").status == "deadline_exceeded"
    assert run.receipt("a").problem == "the hard deadline passed"
    assert run.receipt("a").e2e_s == 0.4
    assert not run.fleet.outcomes[0].is_finished
    assert run.fleet.outcomes[0].lost_tokens > 0
    assert run.receipt("b").status == "done"
    assert run.receipt("b").nodes[0].llm.queue_s == pytest.approx(0.2, abs=0.05)  # type: ignore[union-attr]


def test_a_node_that_must_not_take_longer_fails_its_run() -> None:
    workflow = a_workflow(a_node("a", budget_s=0.05), a_node("b"), output=["a"], stream=["b"])
    run = driven(a_run(a_class(workflow)))
    assert run.receipt().status == "failed"
    assert run.receipt().nodes[0].spent_s == 0.05
    assert [n.status for n in run.receipt().nodes] == ["failed", "cancelled"]
    assert not run.fleet.outcomes[0].refused
    assert run.fleet.kernel.now_s < 0.2


def test_a_client_that_leaves_frees_the_replica() -> None:
    run = prepared()
    run.fleet.kernel.at(0.05, run.fleet.leave, "a")
    run.fleet.run([a_run(a_class(a_workflow(a_node("a"))))])
    check_nothing_is_left(run)
    assert run.receipt().status == "cancelled"
    assert run.receipt().e2e_s == 0.05


def test_a_draft_that_passes_is_streamed_when_that_is_known() -> None:
    def ended(passes: float) -> Driven:
        work = {"check": LocalWork(0.005, passes)}
        return driven(a_run(a_class(refining(10.0, 1, TTFT), work)))

    good, bad = ended(1.0), ended(0.0)
    draft, check = good.receipt().nodes
    assert good.receipt().ttft_s == pytest.approx(draft.spent_s + check.spent_s)
    assert good.fleet.outcomes[0].ttft_s == good.receipt().ttft_s
    # The last round is the answer whatever the check says: it is streamed as it is written.
    refine = bad.receipt().nodes[2]
    assert refine.llm is not None
    assert refine.llm.engine_ttft_s is not None
    assert bad.receipt().ttft_s == pytest.approx(refine.started_s + refine.llm.engine_ttft_s)
    assert bad.receipt().ttft_s < bad.receipt().e2e_s  # type: ignore[operator]


def test_text_that_was_kept_goes_out_once_it_is_known_to_be_the_answer() -> None:
    workflow = a_workflow(
        a_node("draft"),
        a_node("gate", kind=NodeKind.TRANSFORM),
        a_node("refine", "gate", when=always(False)),
        a_node("tail", "draft"),
        output=["tail"],
        stream=["refine", "draft"],
        slo=Slo(TTFT, 5.0),
    )
    run = driven(a_run(a_class(workflow, {"gate": LocalWork(0.06)})))
    draft = run.receipt().nodes[0].llm
    assert draft is not None
    assert draft.engine_ttft_s is not None
    assert draft.engine_ttft_s < 0.06
    assert run.receipt().ttft_s == 0.06
    assert run.receipt().e2e_s > 0.2
    assert run.fleet.outcomes[0].answer_tokens == 10


def test_calls_that_wait_leave_before_those_whose_places_they_would_get() -> None:
    run = prepared(schedulers.early("round-robin"), max_running=1)
    run.fleet.kernel.at(0.05, run.fleet.leave, "a")
    run.fleet.run([a_run(a_class(a_workflow(a_node("a"), a_node("b"), output=["a", "b"])))])
    check_nothing_is_left(run)
    assert len(run.offered) == 2
    assert run.fleet.outcomes[0].queue_s == 0.0


def test_items_run_side_by_side_with_lengths_of_their_own() -> None:
    workflow = load_workflow(SHIPPED / "code-summarization.yaml")
    parts = {"parts": LlmWork(POOL, 100, 30, 0.5), "split": LocalWork(chunks=12)}
    run = driven(a_run(a_class(workflow, parts)))
    items = [n for n in run.receipt().nodes if n.node == "parts"]
    assert [n.item for n in items] == list(range(8))
    assert len({n.started_s for n in items}) == 1
    assert len({n.llm.output_tokens for n in items if n.llm}) > 3


def test_a_pace_binds_the_stream() -> None:
    workflow = a_workflow(a_node("plan"), a_node("a", "plan"), stream=["a"], slo=Slo(TPOT, 0.02))
    run = driven(a_run(a_class(workflow)))
    plan, answer = run.offered
    assert (plan.tpot_target_s, plan.until_first_token) == (inf, False)
    assert (answer.tpot_target_s, answer.until_first_token) == (0.02, True)
    outcome = run.fleet.outcomes[0]
    assert outcome.tpot_s == pytest.approx(run.receipt().tpot_s)
    assert outcome.is_met == run.receipt().met
    assert task_metrics([outcome])["service_gain"] > 0
    # Beside a TTFT objective it is a second one.
    kind = a_class(replace(workflow, slo=Slo(TTFT, 5.0)), tpot_target_s=0.03)
    run = driven(a_run(kind))
    assert [i.tpot_target_s for i in run.offered] == [inf, 0.03]
    assert run.fleet.outcomes[0].sent


def test_an_answer_ends_at_the_limit_of_its_tokens() -> None:
    long = {"a": LlmWork(POOL, 100, 500, 0.0)}
    run = driven(a_run(a_class(a_workflow(a_node("a")), long)))
    facts = run.receipt().nodes[0].llm
    assert isinstance(facts, LlmFacts)
    assert (facts.output_tokens, facts.finish_reason, facts.expected_tokens) == (64, "length", 64)


def test_a_refused_call_fails_its_run_unless_it_is_optional() -> None:
    full = replace(schedulers.foresight(), max_queued=0)
    hint = a_workflow(a_node("hint", optional=True), a_node("b", "hint", kind=NodeKind.TRANSFORM))
    tasks = [
        a_run(a_class(a_workflow(a_node("a"))), "a"),
        a_run(a_class(a_workflow(a_node("a"))), "b", 0.01),
        a_run(a_class(hint), "c", 0.02),
    ]
    run = driven(*tasks, policies=full, max_running=1)
    assert [o.refused for o in run.fleet.outcomes] == [False, True, False]
    assert [run.receipt(id).status for id in "abc"] == ["done", "failed", "done"]
    assert run.story("c") == [("hint", 1, "absent"), ("b", 1, "done")]


def test_a_lost_replica_is_replaced_by_another_that_goes_on() -> None:
    run = prepared(replicas=2)
    run.fleet.kernel.at(0.1, run.fleet.pools[POOL].lose_replica, FIRST)
    kind = a_class(a_workflow(a_node("a")), {"a": LlmWork(POOL, 100, 40, 0.0)})
    run.fleet.run([a_run(kind, id) for id in ("a", "b", "c")])
    check_nothing_is_left(run)
    again = [i for i in run.offered if i.attempt > 1]
    assert again
    assert all(i.generated > 0 for i in again)
    assert {r.status for r in run.receipts.values()} == {"done"}
    facts = [n.llm for r in run.receipts.values() for n in r.nodes]
    assert {f.output_tokens for f in facts if f} == {40}


# Beside tasks of calls


def test_a_workflow_of_calls_fares_as_the_same_calls() -> None:
    workflow = a_workflow(a_node("a"), a_node("b", "a"), slo=Slo(E2E, 10.0), stream=["b"])
    runs = [a_run(a_class(workflow), f"t{i}", 0.05 * i, i) for i in range(20)]
    nodes = (SimNode(POOL, 100, 10, 10), SimNode(POOL, 100, 10, 10, needs=(0,)))
    tasks = [a_task(f"t{i}", 0.05 * i, nodes=nodes) for i in range(20)]
    rule = schedulers.early("round-robin")

    def fared(tasks: Sequence[SimTask]) -> list[tuple[float, float, float]]:
        outcomes = Fleet([PoolSetup(POOL, (PROFILE,) * 2, rule, 4)]).run(tasks)
        return [(o.first_token_at_s, o.ended_at_s, o.queue_s) for o in outcomes]

    assert np.allclose(fared(runs), fared(tasks), rtol=0, atol=1e-9)


# Errors of scenario files


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            "        refine: {pool: large, prompt_tokens: 600, output_tokens: 120}\n",
            "",
            "generation.nodes.refine: say what this LLM node costs: "
            "refine: {pool: ..., prompt_tokens: ..., output_tokens: ...}",
        ),
        ("examples: {t", "exmples: {t", "no such node (did you mean 'examples'?)"),
        ("passes: 0.7", "chunks: 3", "check.chunks: does not go with a node of type validate"),
        ("takes: 40ms", "pool: large", "examples.pool: does not go with a node of type retrieve"),
        ("pool: large, prompt_tokens: 600,", "pool: large,", "refine.prompt_tokens: this key is"),
        (
            "{pool: large, prompt_tokens: 600",
            "{pool: lrge, prompt_tokens: 600",
            "unknown pool (did",
        ),
        ("output_tokens: 24", "output_tokens: 65", "at most 64 (max_tokens of the node)"),
        ("code-generation.yaml", "code-gen.yaml", "workflow: not found; tried"),
        (f"{SHIPPED}/code-gen", "~nobody-of-that-name/code-gen", "workflow: not a usable path"),
        ("target: 8s", "target: 500s", "runs of the workflow end after 120 s"),
        ("inputs: {code:", "inputs: {cod:", "summary.inputs: unknown input 'cod'"),
        ("      calls:\n", "      calls: {}\n      call:\n", "plain.call: unknown key"),
        ("plain:\n", "plain:\n      nodes: {}\n", "plain.nodes: goes with `workflow`"),
        ("plain:\n      sla: {metric: e2e, target: 10s}\n", "plain:\n", "plain.sla: this key is"),
        (
            "      sla: {metric: ttft, target: 8s}\n",
            "      calls: {}\n",
            "generation.calls: a workflow brings its own",
        ),
    ],
)
def test_what_does_not_fit_a_workflow_is_named(
    tmp_path: Path, old: str, new: str, found: str
) -> None:
    assert old in SCENARIO
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, SCENARIO.replace(old, new))
    problems = [f"{p.path}: {p.rule}" for p in caught.value.problems]
    assert any(found in p for p in problems), problems
    assert all(p.startswith("traffic.tasks.") for p in problems)


def test_a_workflow_lies_beside_the_file_and_its_own_problems_are_named(tmp_path: Path) -> None:
    text = (SHIPPED / "code-translation.yaml").read_text("utf-8")
    text = text.replace("prompts/translate.j2", "translate {{ code }}").replace(
        "prompts/repair.j2", "repair {{ code }}"
    )
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    scenario = SCENARIO.replace(f"{SHIPPED}/code-translation.yaml", "mine.yaml")
    assert len(load(tmp_path, scenario).traffic.classes) == 5
    (tmp_path / "mine.yaml").write_text(text.replace("needs: [check]", "needs: [chek]"), "utf-8")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, scenario)
    assert {Path(p.file).name for p in caught.value.problems} == {"mine.yaml"}
    assert "did you mean 'check'?" in caught.value.problems[0].rule


# Anything else


@st.composite
def workflows(draw: st.DrawFn) -> Workflow:
    n = draw(st.integers(1, 5))
    ids = [f"n{i}" for i in range(n)]
    plain: set[str] = set()  # neither `when` nor `repeat`, and in no loop yet
    nodes = []
    needs = {
        id: draw(st.lists(st.sampled_from(ids[:i]), unique=True, max_size=3)) if i else []
        for i, id in enumerate(ids)
    }
    for id in ids:
        until: Expression | None = None
        redo: list[str] = []
        if draw(st.integers(0, 2)) == 0:
            until = draw(st.sampled_from([always(True), always(False), broken()]))
            redo = [
                m
                for m in needs[id]
                if m in plain and not any(m in needs[o] for o in ids if o != id)
            ]
            plain.difference_update(redo)
        each = draw(st.sampled_from([None, None, None, always([1, 2, 3]), always([]), broken()]))
        when = draw(st.sampled_from([None, None, always(True), always(False), broken()]))
        if when is None and until is None:
            plain.add(id)
        nodes.append(
            a_node(
                id,
                *needs[id],
                kind=draw(st.sampled_from([NodeKind.LLM, NodeKind.LLM, NodeKind.TRANSFORM])),
                when=when,
                each=None if until is not None else each,
                max_items=2,
                until=until,
                max_rounds=draw(st.integers(1, 3)),
                redo=sorted(redo),
                optional=draw(st.booleans()),
                budget_s=draw(st.sampled_from([None, None, 0.05, 0.3])),
            )
        )
    output = draw(st.lists(st.sampled_from(ids), unique=True, min_size=1, max_size=3))
    slo = Slo(draw(st.sampled_from(list(SloMetric))), draw(st.sampled_from([0.01, 0.5, 3.0])))
    return a_workflow(
        *nodes,
        slo=slo,
        output=output,
        stream=draw(st.sampled_from([[], output, [ids[-1]]])),
        hard_deadline_s=draw(st.sampled_from([0.2, 1.0, 60.0])),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(workflows(), min_size=1, max_size=3),
    st.sampled_from(sorted(SCHEDULERS)),
    st.integers(0, 2**16),
    st.sampled_from([0, 2, 1000]),
    st.booleans(),
)
def test_nothing_is_left_running_or_leased(
    flows: list[Workflow], name: str, seed: int, most_queued: int, is_troubled: bool
) -> None:
    rng = np.random.default_rng(seed)
    works = [
        {n.id: _random_work(rng, n.kind is NodeKind.LLM) for n in workflow.nodes}
        for workflow in flows
    ]
    kinds = [
        WorkflowClass(1.0, flow, flow.slo, {}, work, {})
        for flow, work in zip(flows, works, strict=True)
    ]
    tasks = [drawn_task(f"w{i:02d}", kinds[i % len(kinds)], 0.03 * i, rng) for i in range(25)] + [
        replace(t, id=f"c{t.id}") for t in random_tasks(seed, 15, 20.0)
    ]
    policies = SCHEDULERS[name]
    if policies.late_binding:
        policies = replace(policies, max_queued=most_queued)
    run = prepared(policies, replicas=2, max_running=3)
    pool = run.fleet.pools[POOL]
    before = len(run.told)
    pool.orchestrator = scribe = Scribe(pool.orchestrator)  # type: ignore[assignment]
    if is_troubled:
        run.fleet.kernel.at(0.3, lambda: pool.start_replica(PROFILE))
        run.fleet.kernel.at(0.4, lambda: pool.lose_replica(FIRST))
        run.fleet.kernel.at(0.25, run.fleet.leave, "w03")
    run.fleet.run(sorted(tasks, key=lambda t: t.arrived_at_s))
    check_nothing_is_left(run)
    assert len(run.receipts) == 25
    assert len(run.told) - before == len(scribe.orders)
    offered = {i.id for i in run.offered}
    ends = Counter(
        e.invocation_id for e in run.told if isinstance(e, InvocationEnded | InvocationWithdrawn)
    )
    assert all(n == 1 for n in ends.values())
    assert set(ends) <= offered
    for outcome in run.fleet.outcomes:
        if isinstance(outcome.task, WorkflowTask):
            receipt = run.receipts[outcome.task.id]
            is_close = receipt.achieved_s == pytest.approx(receipt.target_s, rel=1e-6)
            assert outcome.is_met == receipt.met or is_close
            assert receipt.e2e_s <= outcome.task.kind.workflow.hard_deadline_s + 1e-9


def _random_work(rng: np.random.Generator, is_llm: bool) -> Work:
    if not is_llm:
        return LocalWork(float(rng.choice([0.0, 0.02, 0.2])))
    return LlmWork(POOL, float(rng.integers(1, 400)), float(rng.integers(1, 60)), 0.5)


def test_draws_are_made_beforehand_for_all_rounds_and_items() -> None:
    task = a_run(a_class(refining(10.0, rounds=3), {"check": LocalWork(passes=0.5)}))
    assert {id: len(d) for id, d in task.drawn.items()} == {"draft": 8, "check": 4, "refine": 24}
    assert task == a_run(task.kind)
    assert isinstance(task.execution(task.kind.workflow.node(NodeId("check")), 4, None), Drawn)
