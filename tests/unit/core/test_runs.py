"""Runs of workflows in virtual time: order, loops, streams, budgets and failure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import Says, a_node, a_workflow, always, broken, llm_facts

from cato.core.budgets import NodeEstimate
from cato.core.ids import NodeId, RunId
from cato.core.runs import (
    AbandonNode,
    FinishRun,
    NodeDone,
    NodeFailed,
    Run,
    RunCancelled,
    RunCommand,
    RunEvent,
    StartNode,
    StreamNode,
    TextSent,
)
from cato.core.slo import Slo, SloMetric
from cato.core.workflow import Expression, NodeKind, Workflow

E2E, TTFT, TPOT = SloMetric.E2E, SloMetric.TTFT, SloMetric.TPOT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one execution does: it takes `spent_s`, then gives `result` or fails.

    An LLM call has `answers` of 11 tokens each.
    """

    spent_s: float = 1.0
    result: Mapping[str, object] = field(default_factory=dict)
    fails: str = ""
    answers: int = 1


Plan = Callable[[StartNode], Outcome]


@dataclass(slots=True)
class Driver:
    """Performs a run's commands in virtual time and keeps all that happened."""

    run: Run
    plan: Plan
    now_s: float = 0.0
    commands: list[tuple[float, RunCommand]] = field(default_factory=list)
    open: dict[tuple[NodeId, int, int | None], StartNode] = field(default_factory=dict)
    ended: dict[tuple[NodeId, int], Mapping[str, object] | None] = field(default_factory=dict)
    events: list[tuple[float, int, RunEvent]] = field(default_factory=list)
    reported: int = 0
    check: Callable[[Driver, RunCommand], None] = lambda driver, command: None

    def go(self, *extra: RunEvent) -> FinishRun:
        """Drive to the end; `extra` are events of the test's own."""
        self.now_s = self.run.arrived_at_s
        for event in extra:
            self._later(event)
        self._perform(self.run.start(self.now_s))
        while self.events:
            self.now_s, _, event = heapq.heappop(self.events)
            if isinstance(event, NodeDone | NodeFailed):
                self.open.pop((event.node, event.round, event.item), None)
            if isinstance(event, NodeDone):
                self.ended[event.node, event.round] = event.result
            commands = self.run.handle(event)
            self._perform(commands)
            if isinstance(event, NodeDone | NodeFailed):
                assert self.run.handle(event) == (), "a repeated report is ignored"
        return self.finish

    @property
    def finish(self) -> FinishRun:
        (finish,) = [c for _, c in self.commands if isinstance(c, FinishRun)]
        return finish

    def starts(self, id: str | None = None) -> list[tuple[float, StartNode]]:
        return [
            (at_s, c)
            for at_s, c in self.commands
            if isinstance(c, StartNode) and (id is None or c.node.id == id)
        ]

    def story(self) -> list[tuple[float, str]]:
        """When each execution started and each node was streamed, in words."""
        words = []
        for at_s, c in self.commands:
            match c:
                case StartNode():
                    item = "" if c.item is None else f".{c.item}"
                    words.append((at_s, f"{c.node.id}{item}#{c.round}"))
                case StreamNode(node, round):
                    words.append((at_s, f"stream {node}#{round}"))
                case AbandonNode(node):
                    words.append((at_s, f"abandon {node}"))
                case FinishRun():
                    words.append((at_s, c.status))
        return words

    def _later(self, event: RunEvent) -> None:
        self.reported += 1
        heapq.heappush(self.events, (event.now_s, self.reported, event))

    def _perform(self, commands: tuple[RunCommand, ...]) -> None:
        for command in commands:
            self.commands.append((self.now_s, command))
            self.check(self, command)
            match command:
                case StartNode():
                    self._start(command)
                case StreamNode(node, round):
                    self._stream(node, round)
                case AbandonNode() | FinishRun():
                    pass

    def _start(self, command: StartNode) -> None:
        key = (command.node.id, command.round, command.item)
        assert key not in self.open
        self.open[key] = command
        outcome = self.plan(command)
        if command.limit_s is not None and outcome.spent_s > command.limit_s:
            end_s = self.now_s + command.limit_s
            self._later(NodeFailed(end_s, *key, "too slow"))
            return
        end_s = self.now_s + outcome.spent_s
        if outcome.fails:
            self._later(NodeFailed(end_s, *key, outcome.fails))
        else:
            llm = None
            if command.node.kind is NodeKind.LLM:
                n = outcome.answers
                llm = replace(llm_facts(tokens=11 * n), calls=n)
            self._later(NodeDone(end_s, *key, outcome.result, llm))

    def _stream(self, node: NodeId, round: int) -> None:
        """The first text is there half-way through; at once when the node has ended."""
        ends = [e for _, _, e in self.events if isinstance(e, NodeDone) and e.node == node]
        at_s = self.now_s if not ends else (self.now_s + ends[0].now_s) / 2
        self._later(TextSent(at_s))


def a_run(
    workflow: Workflow,
    *,
    estimates: Mapping[str, NodeEstimate] | None = None,
    inputs: Mapping[str, object] | None = None,
    arrived_at_s: float = 0.0,
) -> Run:
    known = {NodeId(id): e for id, e in (estimates or {}).items()}
    return Run(RunId("run"), workflow, workflow.slo, inputs or {}, known, arrived_at_s)


def drive(
    workflow: Workflow,
    plan: Plan | Mapping[str, Outcome] | None = None,
    *extra: RunEvent,
    estimates: Mapping[str, NodeEstimate] | None = None,
    inputs: Mapping[str, object] | None = None,
) -> Driver:
    """Run `workflow` to its end; a mapping gives each node one outcome (1 s and {} by default)."""
    outcomes = plan or {}
    chosen = outcomes if callable(outcomes) else lambda c: outcomes.get(c.node.id, Outcome())
    driver = Driver(a_run(workflow, estimates=estimates, inputs=inputs), chosen)
    driver.go(*extra)
    return driver


def mean(s: float, first_token_s: float = 0.0, runs: float = 1.0) -> NodeEstimate:
    return NodeEstimate(s, first_token_s, runs)


def is_ok(node: str) -> Says:
    """Holds when the result of `node` says so; a node without a result is not ok."""

    def ok(names: Mapping[str, object]) -> object:
        result = names.get(node)
        return isinstance(result, Mapping) and result.get("ok")

    return Says(ok)


def not_ok(node: str) -> Says:
    return Says(lambda names: not is_ok(node).evaluate(names))


# Any workflow


@dataclass(frozen=True, slots=True)
class Scene:
    """A workflow, what is expected of its nodes, and what they do."""

    workflow: Workflow
    estimates: dict[str, NodeEstimate]
    seconds: tuple[float, ...]
    failing: frozenset[tuple[str, int]]
    cancel_at_s: float | None


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    n = draw(st.integers(1, 6))
    ids = [f"n{i}" for i in range(n)]
    needs = {
        id: draw(st.lists(st.sampled_from(ids[:i]), unique=True, max_size=3)) if i else []
        for i, id in enumerate(ids)
    }
    in_a_loop: set[str] = set()
    nodes = []
    for id in ids:
        redo: list[str] = []
        until: Expression | None = None
        each = draw(st.sampled_from([None, None, None, 0, 1, 2, 5, "broken"]))
        if draw(st.integers(0, 3)) == 0:
            until = draw(st.sampled_from([always(True), always(False), is_ok(id), broken()]))
            mine = [
                m
                for m in needs[id]
                if m not in in_a_loop and not any(m in needs[o] for o in ids if o != id)
            ]
            redo = [m for m in mine if draw(st.booleans())]
            in_a_loop.update(redo)
        items: Expression | None = None
        if each is not None:
            items = broken() if each == "broken" else always(list(range(int(each))))
        nodes.append(
            a_node(
                id,
                *needs[id],
                kind=draw(st.sampled_from([NodeKind.LLM, NodeKind.TRANSFORM])),
                when=draw(
                    st.sampled_from([None, None, None, always(True), always(False), broken()])
                ),
                each=items,
                max_items=3,
                until=until,
                max_rounds=draw(st.integers(1, 3)),
                redo=sorted(redo),
                optional=draw(st.booleans()),
                budget_s=draw(st.sampled_from([None, None, 0.5, 3.0])),
            )
        )
    output = draw(st.lists(st.sampled_from(ids), unique=True, min_size=1, max_size=3))
    stream = draw(st.sampled_from([[], output, output[:1], [ids[-1]]]))
    metric = draw(st.sampled_from(list(SloMetric)))
    seconds = st.sampled_from([0.0, 0.3, 1.0, 2.5])
    return Scene(
        a_workflow(
            *nodes,
            slo=Slo(metric, draw(st.sampled_from([0.01, 2.0, 8.0]))),
            output=output,
            stream=stream,
        ),
        {id: mean(draw(seconds), 0.1, draw(st.sampled_from([0.5, 1.0, 2.0]))) for id in ids[::2]},
        tuple(draw(st.lists(seconds, min_size=4, max_size=4))),
        frozenset(draw(st.lists(st.tuples(st.sampled_from(ids), st.integers(1, 3)), max_size=2))),
        draw(st.sampled_from([None, None, None, 0.0, 1.5])),
    )


def play(scene: Scene, check: Callable[[Driver, RunCommand], None] | None = None) -> Driver:
    def plan(command: StartNode) -> Outcome:
        turn = command.round + (command.item or 0) + int(command.node.id[1:])
        fails = "it broke" if (command.node.id, command.round) in scene.failing else ""
        result = {"node": command.node.id, "round": command.round, "ok": command.round > 1}
        return Outcome(scene.seconds[turn % 4], result, fails)

    driver = Driver(a_run(scene.workflow, estimates=scene.estimates), plan)
    if check is not None:
        driver.check = check
    extra = [] if scene.cancel_at_s is None else [RunCancelled(scene.cancel_at_s, "left")]
    driver.go(*extra)
    return driver


@settings(max_examples=60)
@given(scenes())
def test_every_run_finishes_once_and_abandons_just_what_is_open(scene: Scene) -> None:
    def check(driver: Driver, command: RunCommand) -> None:
        assert not any(isinstance(c, FinishRun) for _, c in driver.commands[:-1])
        if isinstance(command, FinishRun):
            abandoned = {c.node for _, c in driver.commands if isinstance(c, AbandonNode)}
            assert abandoned == {id for id, _, _ in driver.open}

    driver = play(scene, check)
    assert driver.finish.status in ("done", "failed", "cancelled")
    assert driver.run.is_finished
    if driver.finish.status == "cancelled":
        assert scene.cancel_at_s is not None


@settings(max_examples=40)
@given(scenes())
def test_a_node_starts_only_after_all_its_needs_are_settled(scene: Scene) -> None:
    redone = {r for n in scene.workflow.nodes if n.repeat for r in n.repeat.redo}
    started: set[NodeId] = set()

    def check(driver: Driver, command: RunCommand) -> None:
        if not isinstance(command, StartNode):
            return
        node = command.node
        assert not {id for id, _, _ in driver.open} & set(node.needs)
        dependents = {n.id for n in scene.workflow.nodes if node.id in n.needs}
        if command.round == 1 and node.id not in redone:
            assert not dependents & started
        started.add(node.id)

    play(scene, check)


@settings(max_examples=40)
@given(scenes())
def test_only_a_required_node_or_a_missing_output_fails_a_run(scene: Scene) -> None:
    finish = play(scene).finish
    required = {n.id for n in scene.workflow.nodes if not n.optional}
    if finish.status == "failed":
        problem = finish.receipt.problem
        assert problem.startswith("no output node") or any(f"'{id}'" in problem for id in required)
    if finish.status == "done":
        failed = [x for x in finish.receipt.nodes if x.status == "failed"]
        assert failed == []
        assert finish.output_node in scene.workflow.output


@settings(max_examples=60)
@given(scenes())
def test_the_streamed_text_is_that_of_the_answer(scene: Scene) -> None:
    driver = play(scene)
    streamed = [c for _, c in driver.commands if isinstance(c, StreamNode)]
    assert len(streamed) <= 1
    finish = driver.finish
    if finish.status != "done":
        return
    if scene.workflow.stream == scene.workflow.output:
        assert [s.node for s in streamed] == [finish.output_node]
    for s in streamed:
        node = scene.workflow.node(s.node)
        assert s.round <= 1 or node.repeat is not None or s.node in redo_members(scene.workflow)
        if s.node == finish.output_node and node.each is None:
            assert isinstance(finish.output, Mapping)
            assert finish.output["round"] == s.round


def redo_members(workflow: Workflow) -> set[NodeId]:
    return {r for n in workflow.nodes if n.repeat for r in n.repeat.redo}


@settings(max_examples=40)
@given(scenes())
def test_loops_are_bounded_and_redo_goes_in_order(scene: Scene) -> None:
    driver = play(scene)
    for node in scene.workflow.nodes:
        rounds = [c.round for _, c in driver.starts(node.id) if c.item in (None, 0)]
        assert rounds == list(range(1, len(rounds) + 1))
        if node.repeat is None:
            continue
        if node.id not in redo_members(scene.workflow):  # else the outer loop bounds it
            assert len(rounds) <= node.repeat.max_rounds
        loop = [c.node.id for _, c in driver.starts() if c.node.id in (node.id, *node.repeat.redo)]
        if node.id in loop:
            after = loop[loop.index(node.id) :]
            for part in " ".join(after).split(node.id)[1:]:
                places = [node.repeat.redo.index(NodeId(id)) for id in part.split()]
                assert places == sorted(places)


@settings(max_examples=40)
@given(scenes())
def test_an_optional_node_is_never_given_the_time_that_the_rest_needs(scene: Scene) -> None:
    def check(driver: Driver, command: RunCommand) -> None:
        if not isinstance(command, StartNode):
            return
        assert command.deadline_s <= driver.run.hard_deadline_s
        if command.budget_s is not None:
            left_s = max(0.0, scene.workflow.slo.target_s - driver.now_s)
            assert 0.0 <= command.budget_s <= left_s + 1e-9
        if not command.node.optional:
            assert command.limit_s == command.node.budget_s
            return
        assert command.limit_s is not None
        assert command.limit_s > 0
        if command.node.budget_s is not None:
            assert command.limit_s <= command.node.budget_s
        if not command.until_first_token:
            spare_s = command.deadline_s - driver.now_s - command.downstream_s
            assert command.limit_s <= spare_s + 1e-9

    play(scene, check)


@settings(max_examples=60)
@given(scenes())
def test_the_receipt_accounts_for_every_second(scene: Scene) -> None:
    receipt = play(scene).finish.receipt
    path = [receipt.nodes[i] for i in receipt.path]
    spent_s = sum(x.spent_s for x in path)
    assert spent_s + receipt.overhead_s == pytest.approx(receipt.e2e_s, abs=1e-9)
    assert receipt.overhead_s == pytest.approx(0.0, abs=1e-9)  # this driver wastes no time
    for before, after in pairwise(path):
        assert before.started_s + before.spent_s <= after.started_s + 1e-9
    slo = scene.workflow.slo
    pace_s = receipt.tpot_s or 0.0  # None: nothing was streamed
    achieved = {TTFT: receipt.ttft_s, TPOT: pace_s, E2E: receipt.e2e_s}[slo.metric]
    if receipt.status == "done":
        assert receipt.achieved_s == achieved
        assert receipt.met == (achieved is not None and achieved <= slo.target_s)
        assert receipt.ttft_s is not None
        assert 0 <= receipt.ttft_s <= receipt.e2e_s
    else:
        assert receipt.achieved_s is None
        assert not receipt.met


def test_the_pace_is_that_of_the_streamed_node_whatever_runs_after_it() -> None:
    draft = a_node("draft")
    after = a_node("final", "draft", kind=NodeKind.TRANSFORM)
    for target_s, is_met in ((0.06, True), (0.04, False)):
        workflow = a_workflow(
            draft, after, slo=Slo(TPOT, target_s), stream=["draft"], output=["final"]
        )
        took = {"draft": Outcome(1.0), "final": Outcome(5.0)}
        receipt = drive(workflow, took).finish.receipt
        # 11 tokens: the first at 0.5 s, the last at 1 s. The output has none of its own.
        assert (receipt.ttft_s, receipt.e2e_s, receipt.output_tokens) == (0.5, 6.0, 0)
        assert receipt.tpot_s == pytest.approx(0.05)
        assert (receipt.achieved_s, receipt.met) == (receipt.tpot_s, is_met)


def test_the_pace_of_several_answers_is_that_of_each() -> None:
    for answers in (1, 4):
        workflow = a_workflow(a_node("call"), slo=Slo(TPOT, 0.04), stream=["call"])
        receipt = drive(workflow, {"call": Outcome(1.0, answers=answers)}).finish.receipt
        assert receipt.tpot_s == pytest.approx(0.05)
        assert (receipt.output_tokens, receipt.met) == (11 * answers, False)


# Time: CATO's example


def a_chain(slo: Slo, stream: Sequence[str] = ()) -> Workflow:
    return a_workflow(a_node("a"), a_node("b", "a"), a_node("c", "b"), slo=slo, stream=stream)


BASELINES = {"a": mean(5.0), "b": mean(15.0), "c": mean(5.0, 1.0)}


def test_fifty_seconds_over_baselines_of_5_15_and_5_give_10_30_and_10() -> None:
    took = {"a": Outcome(10.0), "b": Outcome(30.0), "c": Outcome(10.0)}
    driver = drive(a_chain(Slo(E2E, 50.0)), took, estimates=BASELINES)
    starts = [c for _, c in driver.starts()]
    assert [c.budget_s for c in starts] == pytest.approx([10.0, 30.0, 10.0])
    assert [c.downstream_s for c in starts] == pytest.approx([20.0, 5.0, 0.0])
    assert [c.deadline_s for c in starts] == [50.0, 50.0, 50.0]
    assert [c.until_first_token for c in starts] == [False, False, False]
    assert driver.finish.receipt.met


def test_slack_that_a_node_leaves_goes_to_those_after_it() -> None:
    took = {"a": Outcome(2.0), "b": Outcome(10.0)}
    driver = drive(a_chain(Slo(E2E, 50.0)), took, estimates=BASELINES)
    budgets = [c.budget_s for _, c in driver.starts()]
    assert budgets == pytest.approx([10.0, 48.0 * 15 / 20, 38.0])


def test_slack_that_is_overspent_comes_out_of_what_follows_and_never_below_zero() -> None:
    took = {"a": Outcome(20.0), "b": Outcome(40.0)}
    driver = drive(a_chain(Slo(E2E, 50.0)), took, estimates=BASELINES)
    assert [c.budget_s for _, c in driver.starts()] == pytest.approx([10.0, 22.5, 0.0])
    assert not driver.finish.receipt.met


def test_a_ttft_objective_counts_up_to_the_first_token_of_the_streamed_node() -> None:
    driver = drive(a_chain(Slo(TTFT, 42.0), stream=["c"]), {}, estimates=BASELINES)
    starts = [c for _, c in driver.starts()]
    assert starts[0].budget_s == pytest.approx(42.0 * 5 / 21)
    assert [c.downstream_s for c in starts] == pytest.approx([16.0, 1.0, 0.0])
    assert [c.until_first_token for c in starts] == [False, False, True]
    assert driver.finish.receipt.ttft_s == pytest.approx(2.5)
    assert driver.finish.receipt.e2e_s == pytest.approx(3.0)


def test_what_comes_after_the_first_token_has_until_the_hard_deadline() -> None:
    workflow = a_workflow(
        a_node("draft"),
        a_node("summary", "draft"),
        slo=Slo(TTFT, 2.0),
        stream=["draft"],
        hard_deadline_s=60.0,
    )
    first, second = (c for _, c in drive(workflow).starts())
    assert (first.deadline_s, first.until_first_token) == (2.0, True)
    assert (second.deadline_s, second.budget_s, second.downstream_s) == (60.0, None, 0.0)


def test_a_pace_has_no_instant_so_its_deadline_is_the_hard_one_for_the_last_token() -> None:
    workflow = a_workflow(a_node("call"), slo=Slo(TPOT, 0.2), stream=["call"], hard_deadline_s=60.0)
    driver = drive(workflow, {"call": Outcome(2.0)})
    ((_, start),) = driver.starts()
    assert (start.deadline_s, start.budget_s) == (60.0, None)
    assert not start.until_first_token
    receipt = driver.finish.receipt
    assert (receipt.ttft_s, receipt.e2e_s, receipt.output_tokens) == (1.0, 2.0, 11)
    assert receipt.achieved_s == pytest.approx(0.1)
    assert receipt.met


def test_a_conditional_node_counts_by_how_often_it_runs() -> None:
    workflow = a_workflow(
        a_node("draft"), a_node("refine", "draft", when=always(True)), slo=Slo(E2E, 15.0)
    )
    known = {"draft": mean(1.0), "refine": mean(2.0, runs=0.25)}
    starts = [c for _, c in drive(workflow, estimates=known).starts()]
    assert starts[0].budget_s == pytest.approx(10.0)
    assert starts[0].downstream_s == pytest.approx(0.5)
    assert starts[1].budget_s == pytest.approx(14.0)  # now it does run


def test_a_first_guess_of_a_node_never_seen_is_its_budget() -> None:
    workflow = a_workflow(a_node("a", budget_s=3.0), a_node("b", "a"), slo=Slo(E2E, 8.0))
    starts = [c for _, c in drive(workflow, estimates={"b": mean(1.0)}).starts()]
    assert starts[0].budget_s == pytest.approx(6.0)


def test_times_count_from_the_arrival() -> None:
    run = a_run(a_workflow(a_node("a"), slo=Slo(E2E, 5.0)), arrived_at_s=100.0)
    driver = Driver(run, lambda _: Outcome(2.0))
    receipt = driver.go().receipt
    assert driver.starts()[0][1].deadline_s == 105.0
    assert (receipt.e2e_s, receipt.nodes[0].started_s, receipt.nodes[0].spent_s) == (2.0, 0.0, 2.0)


# Optional nodes


def with_examples(slo_s: float = 4.0, budget_s: float | None = None) -> Workflow:
    retrieve = a_node("examples", kind=NodeKind.RETRIEVE, optional=True, budget_s=budget_s)
    return a_workflow(retrieve, a_node("draft", "examples"), slo=Slo(E2E, slo_s))


def test_an_optional_node_that_is_too_slow_is_left_out() -> None:
    driver = drive(with_examples(), {"examples": Outcome(9.0)}, estimates={"draft": mean(3.0)})
    assert driver.story() == [(0.0, "examples#1"), (1.0, "draft#1"), (2.0, "done")]
    receipt = driver.finish.receipt
    assert [x.status for x in receipt.nodes] == ["absent", "done"]
    assert receipt.notes == ("examples left out: too slow",)
    assert "examples" not in driver.starts("draft")[0][1].names


def test_an_optional_node_without_time_is_not_even_started() -> None:
    driver = drive(with_examples(), estimates={"draft": mean(6.0)})
    assert driver.story() == [(0.0, "draft#1"), (1.0, "done")]
    assert driver.finish.receipt.notes == ("examples left out: no time left for it",)


def test_an_optional_node_takes_at_most_its_own_budget() -> None:
    driver = drive(with_examples(budget_s=0.15), {"examples": Outcome(0.2)})
    assert driver.starts("examples")[0][1].limit_s == pytest.approx(0.15)
    assert driver.starts("draft")[0][0] == pytest.approx(0.15)


@pytest.mark.parametrize("broken_part", ["when", "each"])
def test_an_optional_node_whose_expression_breaks_is_left_out(broken_part: str) -> None:
    when = broken() if broken_part == "when" else None
    each = broken() if broken_part == "each" else None
    workflow = a_workflow(
        a_node("hints", optional=True, when=when, each=each), a_node("d", "hints")
    )
    driver = drive(workflow)
    assert driver.finish.status == "done"
    assert driver.finish.receipt.notes == ("hints left out: expression 'broken()': broken",)


@pytest.mark.parametrize("broken_part", ["when", "each", "until"])
def test_a_required_node_whose_expression_breaks_fails_the_run(broken_part: str) -> None:
    when, each, until = (
        broken() if part == broken_part else None for part in ("when", "each", "until")
    )
    node = a_node("a", when=when, each=each, until=until)
    driver = drive(a_workflow(a_node("side"), node))
    assert driver.finish.status == "failed"
    assert driver.finish.receipt.problem == "node 'a': expression 'broken()': broken"
    assert driver.finish.output is None


def test_an_optional_streamed_node_is_not_cut_off_once_its_first_token_was_in_time() -> None:
    workflow = a_workflow(
        a_node("a", optional=True), slo=Slo(TTFT, 1.0), stream=["a"], hard_deadline_s=60.0
    )
    driver = drive(workflow, {"a": Outcome(1.8)})
    assert driver.finish.status == "done"
    assert driver.finish.receipt.ttft_s == pytest.approx(0.9)


# Conditions and fan-out


def test_a_node_whose_condition_does_not_hold_is_skipped_and_frees_those_after_it() -> None:
    workflow = a_workflow(
        a_node("a"), a_node("b", "a", when=always(False)), a_node("c", "b", when=always(1))
    )
    assert drive(workflow).story() == [(0.0, "a#1"), (1.0, "c#1"), (2.0, "done")]


def test_a_run_without_any_result_for_its_output_fails_at_once() -> None:
    workflow = a_workflow(a_node("a", when=always(False)), a_node("b"), output=["a"])
    driver = drive(workflow)
    assert driver.story() == [(0.0, "b#1"), (0.0, "abandon b"), (0.0, "failed")]
    assert driver.finish.receipt.problem == "no output node has a result: all skipped"


def test_a_fan_out_runs_once_per_item_and_keeps_their_order() -> None:
    items = Says(lambda names: names["files"])
    workflow = a_workflow(a_node("a", each=items, max_items=3), a_node("b", "a"))
    driver = drive(
        workflow,
        lambda c: Outcome(3.0 - (c.item or 0), {"item": c.names.get("item")}),
        inputs={"files": ["x", "y", "z", "w"]},
    )
    assert [words for _, words in driver.story()] == ["a.0#1", "a.1#1", "a.2#1", "b#1", "done"]
    assert driver.starts("b")[0][0] == 3.0
    assert driver.starts("b")[0][1].names["a"] == [{"item": "x"}, {"item": "y"}, {"item": "z"}]
    assert driver.finish.receipt.notes == ("a: only the first 3 of 4 items",)


@pytest.mark.parametrize("nothing", [[], None, ()])
def test_a_fan_out_over_nothing_is_done_at_once_with_an_empty_list(nothing: object) -> None:
    driver = drive(a_workflow(a_node("a", each=always(nothing)), a_node("b", "a")))
    assert driver.story() == [(0.0, "b#1"), (1.0, "done")]
    assert driver.starts("b")[0][1].names["a"] == []


def test_a_fan_out_over_something_that_is_no_list_fails() -> None:
    driver = drive(a_workflow(a_node("a", each=always(7))))
    assert driver.finish.receipt.problem == "node 'a': expression '7': is not a list but int"


def test_items_of_an_optional_fan_out_that_fail_are_missing_from_the_list() -> None:
    workflow = a_workflow(a_node("a", each=always([0, 1, 2]), optional=True), a_node("b", "a"))
    driver = drive(
        workflow, lambda c: Outcome(1.0, {} if c.item == 0 else {"i": c.item}, "x" * (c.item == 1))
    )
    assert driver.starts("b")[0][1].names["a"] == [{}, {"i": 2}]


# Loops


def refining(
    *, optional_check: bool = False, optional_refine: bool = False, when: Expression | None = None
) -> Workflow:
    return a_workflow(
        a_node("draft"),
        a_node("check", "draft", kind=NodeKind.VALIDATE, optional=optional_check, when=when),
        a_node(
            "refine",
            "check",
            when=not_ok("check"),
            until=is_ok("check"),
            max_rounds=3,
            redo=["check"],
            optional=optional_refine,
        ),
        output=["refine", "draft"],
        stream=["refine", "draft"],
        slo=Slo(E2E, 100.0),
    )


def ok_at(round: int) -> Plan:
    """The check finds the text of that round good."""
    return lambda c: Outcome(1.0, {"ok": c.node.id == "check" and c.round >= round})


def test_nothing_streams_before_it_is_known_which_and_a_skipped_refinement_frees_the_draft() -> (
    None
):
    assert drive(refining(), ok_at(1)).story() == [
        (0.0, "draft#1"),
        (1.0, "check#1"),
        (2.0, "stream draft#1"),
        (2.0, "done"),
    ]


def test_a_loop_redoes_its_check_after_each_round_and_stops_when_it_holds() -> None:
    driver = drive(refining(), ok_at(3))
    assert [words for _, words in driver.story()] == [
        "draft#1", "check#1", "refine#1", "check#2", "refine#2", "check#3",
        "stream refine#2", "done",
    ]  # fmt: skip
    assert driver.finish.output_node == "refine"


def test_the_last_round_streams_at_once_and_the_loop_gives_up_after_it() -> None:
    driver = drive(refining(), ok_at(9))
    assert driver.story()[-5:] == [
        (5.0, "check#3"),
        (6.0, "refine#3"),
        (6.0, "stream refine#3"),
        (7.0, "check#4"),
        (8.0, "done"),
    ]
    assert driver.finish.receipt.ttft_s == pytest.approx(6.5)
    assert driver.finish.receipt.notes == ("refine gave up after 3 rounds",)


def test_only_the_tokens_of_the_answer_count_not_those_of_earlier_rounds() -> None:
    assert drive(refining(), ok_at(9)).finish.receipt.output_tokens == 11


def test_a_redone_node_that_is_left_out_does_not_pass_for_the_one_before() -> None:
    """The check says no, then cannot be run again: what it said of the older text is gone."""
    plan = ok_at(9)

    def failing_check(command: StartNode) -> Outcome:
        fails = "parser died" if command.node.id == "check" and command.round == 2 else ""
        outcome = plan(command)
        return Outcome(outcome.spent_s, outcome.result, fails)

    driver = drive(refining(optional_check=True), failing_check)
    assert driver.finish.status == "done"
    second = next(c for _, c in driver.starts("refine") if c.round == 2)
    assert "check" not in second.names


def test_a_redone_node_keeps_its_own_condition() -> None:
    only_once = Says(lambda names: "refine" not in names)
    driver = drive(refining(when=only_once), ok_at(9))
    assert [c.round for _, c in driver.starts("check")] == [1]
    assert [c.round for _, c in driver.starts("refine")] == [1, 2, 3]


def test_a_redone_optional_node_whose_expression_breaks_is_left_out() -> None:
    breaks_later = Says(lambda names: broken().evaluate(names) if "refine" in names else True)
    driver = drive(refining(optional_check=True, when=breaks_later), ok_at(9))
    assert driver.finish.status == "done"
    driver = drive(refining(when=breaks_later), ok_at(9))
    assert driver.finish.receipt.problem.startswith("node 'check': expression")


def test_a_later_round_that_fails_or_has_no_time_leaves_the_result_of_the_one_before() -> None:
    def failing(command: StartNode) -> Outcome:
        fails = "engine" if (command.node.id, command.round) == ("refine", 2) else ""
        return Outcome(1.0, {"round": command.round}, fails)

    def slow(command: StartNode) -> Outcome:
        return Outcome(45.0 if command.node.id == "refine" else 5.0, {"round": command.round})

    for plan in (failing, slow):
        driver = drive(refining(optional_refine=True), plan)
        assert driver.finish.output_node == "refine"
        assert driver.finish.output == {"round": 1}
        assert tuple(w for _, w in driver.story())[-2:] == ("stream refine#1", "done")


def test_a_required_later_round_that_fails_fails_the_run() -> None:
    driver = drive(
        refining(), lambda c: Outcome(1.0, {}, "engine" * ((c.node.id, c.round) == ("refine", 2)))
    )
    assert driver.finish.receipt.problem == "node 'refine': engine"


def test_a_draft_that_may_be_redone_is_neither_streamed_nor_the_answer_before_its_check() -> None:
    workflow = a_workflow(
        a_node("draft"),
        a_node("check", "draft", until=is_ok("check"), max_rounds=3, redo=["draft"]),
        output=["draft"],
        stream=["draft"],
    )
    driver = drive(workflow, lambda c: Outcome(1.0, {"ok": c.round == 2, "round": c.round}))
    assert [words for _, words in driver.story()] == [
        "draft#1", "check#1", "draft#2", "check#2", "draft#3", "stream draft#3", "done",
    ]  # fmt: skip
    assert driver.finish.output == {"ok": False, "round": 3}


# Streams


def test_a_single_streamed_node_streams_from_its_start() -> None:
    workflow = a_workflow(a_node("a"), a_node("b", "a"), stream=["b"])
    assert drive(workflow).story() == [
        (0.0, "a#1"), (1.0, "b#1"), (1.0, "stream b#1"), (2.0, "done"),
    ]  # fmt: skip


def test_an_optional_first_choice_streams_only_when_it_is_there() -> None:
    def workflow(optional: bool) -> Workflow:
        return a_workflow(
            a_node("draft"),
            a_node("polish", "draft", optional=optional),
            output=["polish", "draft"],
            stream=["polish", "draft"],
        )

    required = drive(workflow(optional=False))
    assert (1.0, "stream polish#1") in required.story()
    kept = drive(workflow(optional=True))
    assert kept.story()[-2:] == [(2.0, "stream polish#1"), (2.0, "done")]
    lost = drive(workflow(optional=True), {"polish": Outcome(0.5, fails="refused")})
    assert lost.story()[-2:] == [(1.5, "stream draft#1"), (1.5, "done")]


def test_a_run_does_not_end_before_its_streamed_text() -> None:
    workflow = a_workflow(a_node("code"), a_node("story"), output=["code"], stream=["story"])
    driver = drive(workflow, {"story": Outcome(4.0)})
    assert driver.story()[-1] == (4.0, "done")
    assert driver.finish.output_node == "code"


def test_a_run_that_streams_nothing_has_its_first_token_with_its_last() -> None:
    receipt = drive(a_workflow(a_node("a"), slo=Slo(TTFT, 1.0))).finish.receipt
    assert (receipt.ttft_s, receipt.e2e_s, receipt.met) == (1.0, 1.0, True)


# Failure and cancelling


def test_a_required_node_that_fails_ends_the_run_and_what_else_runs() -> None:
    workflow = a_workflow(a_node("a"), a_node("b"), a_node("c", "a", "b"))
    driver = drive(workflow, {"a": Outcome(1.0, fails="no GPU"), "b": Outcome(5.0)})
    assert driver.story()[2:] == [(1.0, "abandon b"), (1.0, "failed")]
    receipt = driver.finish.receipt
    assert receipt.problem == "node 'a': no GPU"
    assert [(x.status, x.spent_s) for x in receipt.nodes] == [("failed", 1.0), ("cancelled", 1.0)]
    assert (receipt.achieved_s, receipt.met, receipt.path) == (None, False, (0,))


def test_a_failed_item_of_a_required_fan_out_ends_the_other_items() -> None:
    driver = drive(
        a_workflow(a_node("a", each=always([1, 2]))),
        lambda c: Outcome(2.0 - (c.item or 0), {}, "bad" * (c.item == 1)),
    )
    assert driver.story()[-2:] == [(1.0, "abandon a"), (1.0, "failed")]


def test_a_required_node_over_its_own_budget_fails_the_run() -> None:
    driver = drive(a_workflow(a_node("a", budget_s=0.5)))
    assert driver.finish.receipt.problem == "node 'a': too slow"
    assert driver.finish.receipt.e2e_s == 0.5


def test_a_cancelled_run_is_a_miss_and_hears_nothing_more() -> None:
    driver = drive(a_workflow(a_node("a"), a_node("b", "a")), {}, RunCancelled(1.5, "tab closed"))
    assert driver.story()[-2:] == [(1.5, "abandon b"), (1.5, "cancelled")]
    receipt = driver.finish.receipt
    assert (receipt.problem, receipt.met, receipt.e2e_s) == ("tab closed", False, 1.5)
    assert driver.run.handle(RunCancelled(2.0, "again")) == ()


def test_a_run_that_ends_early_counts_the_tokens_of_its_stream_so_far() -> None:
    workflow = a_workflow(a_node("a"), a_node("b", "a"), stream=["b"])
    so_far = {(NodeId("b"), 1, None): llm_facts(tokens=301)}
    cancelled = drive(workflow, {"b": Outcome(5.0)}, RunCancelled(2.0, "left", llm=so_far))
    assert cancelled.finish.receipt.output_tokens == 301
    early = drive(workflow, {}, RunCancelled(0.5, "left"))
    assert early.finish.receipt.output_tokens == 0
    failed = NodeFailed(1.5, NodeId("b"), 1, None, "lost", llm=llm_facts(tokens=7))
    assert drive(workflow, {}, failed).finish.receipt.output_tokens == 7


def test_the_output_ends_the_run_and_abandons_what_nobody_needs() -> None:
    workflow = a_workflow(a_node("a"), a_node("slow"), output=["a"])
    driver = drive(workflow, {"slow": Outcome(9.0)})
    assert driver.story()[-2:] == [(1.0, "abandon slow"), (1.0, "done")]
    receipt = driver.finish.receipt
    assert [receipt.nodes[i].node for i in receipt.path] == ["a"]


def test_reports_of_rounds_that_were_never_started_are_ignored() -> None:
    run = a_run(a_workflow(a_node("a")))
    run.start(0.0)
    assert run.handle(NodeDone(1.0, NodeId("a"), 2, None, {})) == ()
    assert run.handle(NodeDone(1.0, NodeId("a"), 1, 0, {})) == ()
    assert not run.is_finished


@settings(max_examples=40)
@given(scenes())
def test_the_same_facts_give_the_same_commands(scene: Scene) -> None:
    assert play(scene).commands == play(scene).commands
