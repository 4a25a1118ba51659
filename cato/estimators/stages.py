"""A run's LLM calls as stages for `dag_match`, and a history of past runs to match."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cato.core.ids import TaskName
from cato.core.receipt import LlmFacts, NodeReceipt, NodeStatus, SlaReceipt
from cato.estimators.dag_match import FROM_USER, DagHistory, StageShare, SuperGraph, SuperNode

KEPT_RUNS = 200
"""Newest runs of a task to compare with: 0.1 ms per match."""


@dataclass(frozen=True, slots=True)
class FinishedStages:
    """The stages of a successful run."""

    task: TaskName
    graph: SuperGraph


def stages_of(executions: Iterable[NodeReceipt]) -> SuperGraph:
    """Successful LLM calls, grouped by stage: a call belongs to the stage that it overlaps.

    Tokens are summed over the calls of a stage. Its time is that of its longest call, without
    queueing, because budgets cover service only. All input counts as the user's: the part of a
    prompt that an earlier stage wrote is not recorded.
    """
    calls = sorted(
        (
            (x.started_s, x.started_s + x.spent_s, x.llm)
            for x in executions
            if x.llm is not None and x.status == NodeStatus.DONE.value
        ),
        key=lambda call: call[:2],
    )
    stages: list[list[tuple[float, LlmFacts]]] = []
    busy_until_s = 0.0
    for started_s, ended_s, facts in calls:
        if not stages or started_s >= busy_until_s:
            stages.append([])
        stages[-1].append((ended_s - started_s - facts.queue_s, facts))
        busy_until_s = max(busy_until_s, ended_s)
    return SuperGraph(tuple(_super_node(stage) for stage in stages))


def finished_stages(receipt: SlaReceipt) -> FinishedStages | None:
    """The stages to learn from; None for a failed run, or one stage, which gets all the time."""
    graph = stages_of(receipt.nodes)
    if any(node.llm is not None and node.llm.reused for node in receipt.nodes):
        return None  # no engine computed it
    if receipt.status != "done" or len(graph.stages) < 2:
        return None
    return FinishedStages(receipt.task, graph)


@dataclass(frozen=True, slots=True)
class PastRuns:
    """Past runs by task. Picklable and pure; a higher `version` is newer."""

    version: int = 0
    tasks: Mapping[TaskName, DagHistory] = field(default_factory=dict)

    def share(self, task: TaskName, executions: Iterable[NodeReceipt]) -> StageShare | None:
        """The share of a run's remaining time that its next stage should get.

        `executions` are those of the run so far; unfinished ones are skipped. None when no past run
        of the task went on from here.
        """
        history = self.tasks.get(task)
        return None if history is None else history.match(stages_of(executions))

    def warm_up(self) -> None:
        """Compile or load the code that `share` runs: seconds in a fresh process."""
        for history in self.tasks.values():
            history.match(SuperGraph(()))


class RunHistory:
    """The newest multi-stage runs of each task. Mutable; one owner."""

    def __init__(self) -> None:
        self._runs: dict[TaskName, deque[SuperGraph]] = {}

    def add(self, runs: Iterable[FinishedStages]) -> None:
        for run in runs:
            self._runs.setdefault(run.task, deque(maxlen=KEPT_RUNS)).append(run.graph)

    def restore(self, earlier: Iterable[FinishedStages]) -> None:
        """Put runs learnt earlier, oldest first, before those that came since."""
        since = [FinishedStages(task, g) for task, graphs in self._runs.items() for g in graphs]
        self._runs.clear()
        self.add(earlier)
        self.add(since)

    def by_task(self) -> dict[TaskName, tuple[SuperGraph, ...]]:
        return {task: tuple(graphs) for task, graphs in self._runs.items()}


def past_runs(by_task: Mapping[TaskName, Sequence[SuperGraph]], version: int) -> PastRuns:
    return PastRuns(version, {task: DagHistory.of(graphs) for task, graphs in by_task.items()})


def _super_node(calls: Sequence[tuple[float, LlmFacts]]) -> SuperNode:
    return SuperNode(
        input_tokens=((FROM_USER, sum(facts.prompt_tokens for _, facts in calls)),),
        output_tokens=sum(facts.output_tokens for _, facts in calls),
        time_s=max(0.0, max(time_s for time_s, _ in calls)),
    )
