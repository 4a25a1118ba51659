"""Task service: starts workflow runs and direct model calls for the HTTP dialects."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import inf

from cato.core.brownout import BrownoutStep, browned
from cato.core.budgets import NodeEstimate, expected_runs
from cato.core.errors import StartingError, UnknownNameError
from cato.core.estimates import estimates_of
from cato.core.ids import NodeId, RunId, TaskName
from cato.core.pool.buffers import MAX_HEAD_START_S
from cato.core.receipt import SUPERSEDED, Drawn, NodeReceipt, SlaReceipt, TrafficArm
from cato.core.record import changed, record
from cato.core.retries import RetryBudget
from cato.core.reuse import ReuseLimits
from cato.core.runs import FinishRun, Run
from cato.core.session import Prompt, Turn, TurnKind
from cato.core.session_slo import SessionShare
from cato.core.slo import Slo, SloMetric
from cato.core.tenancy import Usage
from cato.core.workflow import CallSettings, LlmSettings, Node, NodeKind, Workflow
from cato.engines.base import Endpoint
from cato.serve.arms import Arms
from cato.serve.executor import RunningTask
from cato.serve.invoker import CallRules, ModelUse
from cato.serve.lengths import Asker, LengthPredictor
from cato.serve.nodes.runner import NodeRunner
from cato.serve.pools import PoolInfo, Pools
from cato.serve.prompts import most_output_tokens
from cato.serve.records import Records
from cato.serve.reuse import Reuse
from cato.telemetry import logs
from cato.telemetry.tracing import RunTrace, Tracing
from cato.workflows.load import check_inputs

# Expected prompt tokens of a node until the profiler has seen runs.
PRIOR_PROMPT_TOKENS = 300
# Expected output tokens of a passed-through request: a completion without a limit (vLLM's default
# is 16), and a turn of a conversation (median of 22,944 agent turns).
PRIOR_OUTPUT_TOKENS = 64
PRIOR_TURN_TOKENS = 220
CALL_NODE = NodeId("call")
# SLO of a direct model call, whose answer streams as it is written.
CALL_SLO = Slo(SloMetric.TTFT, 1.5)
CALL_DEADLINE_S = 600.0
# Shadow calls for canaries: how many run at once, and their weight in a full pool relative to a
# client's call.
MAX_SHADOWS = 4
SHADOW_WEIGHT = 0.05
# Delay between a run's end and its trace and log line.
TELL_AFTER_S = 0.02


@record
class Origin:
    """Who asks for a task, and for which editor buffer.

    `replaces` is the run of the same buffer on this ingress replica; pools know the buffers of all
    ingresses. `weight` is the tenant's share in a full pool. `reserve` gets the expected and the
    maximum tokens before the run begins, `spend` the tokens used after it has ended. `user` is an
    opaque caller id. Prompts with the same `salt` share prefix caches. The client waits
    `patience_s` for a first token (inf: unknown). Rollouts draw by `session`; `drawn` are the draws
    that chose the model of a direct call.
    """

    key: str = ""
    tenant: str = ""
    weight: float = 1.0
    replaces: RunningTask | None = None
    buffer: str = ""
    user: str = ""
    salt: str = ""
    reserve: Callable[[int, int], None] = lambda _, __: None
    patience_s: float = inf
    spend: Callable[[int], None] = lambda _: None
    session: str = ""
    drawn: tuple[Drawn, ...] = ()


NOBODY = Origin()


@record
class ModelCall:
    """One direct call of a model, with a body in its engine's dialect.

    `passed` says why no workflow runs; `ended` gets the receipt. `calls` is the number of answers
    asked for at once. `share` is its share of the session's SLO.
    """

    model: str
    endpoint: Endpoint
    body: Mapping[str, object]
    prompt: Prompt
    is_streamed: bool = False
    expected_tokens: int = PRIOR_OUTPUT_TOKENS
    max_tokens: int | None = None
    slo: Slo = CALL_SLO
    turn: Turn | None = None
    passed: str = ""
    calls: int = 1
    share: SessionShare | None = None
    ended: Callable[[SlaReceipt], None] = lambda _: None


def _node_of(turn: Turn | None) -> NodeId:
    """Output lengths are learnt per agent and kind of turn, so each has its node id."""
    if turn is None or not turn.client:
        return CALL_NODE
    return NodeId(turn.client if turn.kind is TurnKind.MAIN else f"{turn.client}-{turn.kind}")


def _asker(origin: Origin, call: ModelCall | None) -> Asker:
    """Whose earlier answers predict the next one: its session's, or else its user's."""
    session = "" if call is None else call.prompt.session
    turn = 1 if call is None or call.turn is None else call.turn.number
    return Asker(session or f"{origin.tenant}/{origin.user}", turn - 1)


def _tell(trace: RunTrace | None, receipt: SlaReceipt) -> None:
    logs.run_ended(receipt)
    if trace is not None:
        trace.end(receipt)


def new_request_id() -> str:
    return f"req-{os.urandom(10).hex()}"


class TaskService:
    """Starts runs; one per ingress replica."""

    def __init__(
        self,
        workflows: Mapping[TaskName, Workflow],
        pools: Pools,
        nodes: NodeRunner,
        records: Records,
        seed: int | None = None,
        tracing: Tracing | None = None,
        brownout: Sequence[BrownoutStep] = (),
        reuse: ReuseLimits | None = None,
        workflow_problem: str = "",
    ) -> None:
        """With `reuse`, identical calls share answers. `workflow_problem`: see `follow`."""
        self._reuse = None if reuse is None else Reuse(reuse)
        self._workflows = workflows
        self._pools = pools
        self._nodes = nodes
        self._records = records
        self._lengths = LengthPredictor(records.length)
        self._random = random.Random(seed)
        self._tracing = tracing
        self.workflow_problem = workflow_problem
        self.arms = Arms(records, pools)
        self._retries = RetryBudget()
        self._brownout = tuple(brownout)
        self._shadows: set[asyncio.Task[FinishRun]] = set()
        self._shadow_retries = RetryBudget()

    @property
    def workflows(self) -> Mapping[TaskName, Workflow]:
        return self._workflows

    def follow(self, workflows: Mapping[TaskName, Workflow], problem: str) -> None:
        """Use `workflows` for new runs; `problem` says why newer files were not loaded."""
        self._workflows = workflows
        self.workflow_problem = problem

    @property
    def records(self) -> Records:
        return self._records

    def pools(self) -> Sequence[PoolInfo]:
        return self._pools.all()

    def pool_of(self, model: str) -> PoolInfo:
        """See `Pools.pool_of`."""
        return self._pools.pool_of(model)

    def workflow(self, task: str) -> Workflow:
        """Raise `UnknownNameError` when there is no such task."""
        try:
            return self._workflows[TaskName(task)]
        except KeyError:
            raise UnknownNameError("task", task, tuple(sorted(self._workflows))) from None

    def run_task(
        self,
        task: str,
        inputs: Mapping[str, object],
        *,
        request_id: str,
        slo: Slo | None = None,
        origin: Origin = NOBODY,
    ) -> RunningTask:
        """Start a task's workflow. Raise `UnknownNameError` or `InputError` before it starts."""
        workflow = self.workflow(task)
        return self.run_workflow(workflow, inputs, request_id=request_id, slo=slo, origin=origin)

    def run_workflow(
        self,
        workflow: Workflow,
        inputs: Mapping[str, object],
        *,
        request_id: str,
        slo: Slo | None = None,
        origin: Origin = NOBODY,
    ) -> RunningTask:
        """Start `workflow`: a task's own or one derived from it. Raise `InputError`."""
        return self._start(workflow, check_inputs(workflow, inputs), request_id, slo, origin)

    def run_model(
        self, call: ModelCall, *, request_id: str, origin: Origin = NOBODY
    ) -> RunningTask:
        """Start `call` as a workflow of one node.

        Pieces carry the engine's own bytes: SSE events when streamed, else the JSON answer.
        Raise `UnknownNameError` when no pool serves the model.
        """
        name = self._pools.pool_of(call.model).model.name
        kind = "model" if call.endpoint.generates else call.endpoint.value
        settings = CallSettings(
            call.model,
            call.endpoint.value,
            call.body,
            call.is_streamed,
            call.expected_tokens,
            call.prompt,
            call.max_tokens,
            call.calls,
        )
        node = _node_of(call.turn)
        workflow = Workflow(
            name=TaskName(f"{kind}:{name}"),
            description=f"One call of {name}.",
            slo=call.slo,
            hard_deadline_s=CALL_DEADLINE_S,
            inputs=(),
            nodes=(Node(node, NodeKind.LLM, settings),),
            output=(node,),
            stream=(node,),
        )
        return self._start(workflow, {}, request_id, call.slo, origin, call)

    def _start(
        self,
        workflow: Workflow,
        inputs: Mapping[str, object],
        request_id: str,
        slo: Slo | None,
        origin: Origin,
        call: ModelCall | None = None,
    ) -> RunningTask:
        logs.REQUEST_ID.set(request_id)
        trace = None
        if self._tracing is not None:
            trace = self._tracing.begin(workflow.name, request_id)
        if slo is not None and slo.hard_deadline_s < workflow.hard_deadline_s:
            workflow = replace(workflow, hard_deadline_s=slo.hard_deadline_s)
        copies = self.arms.copies(workflow, origin.drawn, request_id)
        workflow, drawn, instead = self.arms.chosen(workflow, origin.session, origin.drawn)
        if call is not None and not call.endpoint.generates:
            drawn = ()  # counting tokens says nothing about a model's quality
        workflow, notes = browned(workflow, self._brownout, self._fullness)
        run = Run(
            id=RunId(request_id),
            workflow=workflow,
            slo=slo or workflow.slo,
            inputs=inputs,
            estimates=self._estimates(workflow),
            arrived_at_s=time.monotonic(),
            next_share=partial(self._next_share, workflow.name),
            notes=notes,
            passed="" if call is None else call.passed,
            turn=None if call is None else call.turn,
            share=None if call is None else call.share,
        )

        asker = _asker(origin, call)

        def ended(finish: FinishRun, used: Sequence[ModelUse]) -> None:
            self._lengths.learn(asker, finish.receipt)
            parts = tuple(
                replace(d, fell_back=task.fell_back and d.arm is TrafficArm.CANARY) for d in drawn
            )
            self._on_finish(origin, trace, call, finish, used, parts)
            if finish.status == "done":
                for copied, shadow in copies:
                    self._shadow(run, inputs, copied, shadow, origin, asker)

        task = RunningTask(
            run,
            self._pools,
            self._nodes,
            self._random.random,
            partial(self._lengths.predicted, asker),
            ended,
            self._retries,
            CallRules(
                origin.tenant,
                origin.weight,
                _head_start_s(run, origin.replaces),
                origin.buffer,
                origin.user,
                origin.salt,
                origin.patience_s,
                instead,
            ),
            self._reuse,
        )
        origin.reserve(*self._tokens_of(workflow))
        _start_instead(task, origin.replaces)
        return task

    # Rollouts

    def _shadow(
        self,
        run: Run,
        inputs: Mapping[str, object],
        workflow: Workflow,
        drawn: Drawn,
        origin: Origin,
        asker: Asker,
    ) -> None:
        """Send the request of `run` to the canary and discard its answer.

        Starts after the real answer is complete, so that it never slows it, and only while fewer
        than `MAX_SHADOWS` are running.
        """
        rollout = self._records.rollouts().get(drawn.name)
        is_there = rollout is not None and self.arms.is_ready(rollout.canary)
        if not is_there or len(self._shadows) >= MAX_SHADOWS:
            return
        copy = Run(
            id=RunId(f"{run.id}.shadow"),
            workflow=workflow,
            slo=run.slo,
            inputs=inputs,
            estimates=self._estimates(workflow),
            arrived_at_s=time.monotonic(),
            next_share=lambda _: None,
        )

        def ended(finish: FinishRun, _: Sequence[ModelUse]) -> None:
            self._records.record(replace(finish.receipt, rollouts=(drawn,)), ())

        task = RunningTask(
            copy, self._pools, self._nodes, self._random.random,
            partial(self._lengths.predicted, asker), ended, self._shadow_retries,
            CallRules(tenant=origin.tenant, weight=SHADOW_WEIGHT, salt=origin.salt),
        )  # fmt: skip
        task.start()
        waiting = asyncio.get_running_loop().create_task(task.wait())
        self._shadows.add(waiting)
        waiting.add_done_callback(self._shadows.discard)

    def _fullness(self, model: str) -> float:
        try:
            return self._pools.pool_of(model).queued_per_place
        except (StartingError, UnknownNameError):
            return inf

    def _next_share(self, task: TaskName, executions: Sequence[NodeReceipt]) -> float | None:
        found = self._records.stage_share(task, executions)
        return None if found is None else found.share

    def _on_finish(
        self,
        origin: Origin,
        trace: RunTrace | None,
        call: ModelCall | None,
        finish: FinishRun,
        used: Sequence[ModelUse],
        rollouts: tuple[Drawn, ...],
    ) -> None:
        receipt = changed(finish.receipt, tenant=origin.tenant, key=origin.key, rollouts=rollouts)
        if trace is not None or logs.wants_runs():
            # Send the answer's last bytes first, then write the trace and the log line.
            asyncio.get_running_loop().call_later(TELL_AFTER_S, _tell, trace, receipt)
        day = datetime.now(UTC).date().isoformat()
        usage = [
            Usage(
                day, origin.tenant, origin.key, receipt.task, u.model, 1, u.prompt_tokens,
                u.cached_prompt_tokens, u.output_tokens,
            )
            for u in used
        ]  # fmt: skip
        self._records.record(receipt, usage)
        if call is not None:
            call.ended(receipt)
        origin.spend(sum(u.prompt_tokens + u.output_tokens for u in used))

    def measured(self, workflow: Workflow) -> dict[NodeId, NodeEstimate]:
        """Measured baselines of its nodes, with the models that it names."""
        return estimates_of(workflow, self._records.estimates(workflow.name), self._called)

    def _called(self, model: str) -> str:
        try:
            return self._pools.pool_of(model).model.called(model)
        except (StartingError, UnknownNameError):
            return model

    def _estimates(self, workflow: Workflow) -> dict[NodeId, NodeEstimate]:
        """Measured baselines; for LLM nodes never seen, the prediction of the pool's profile."""
        known = self.measured(workflow)
        for node in workflow.nodes:
            settings = node.settings
            if node.id in known or not isinstance(settings, LlmSettings | CallSettings):
                continue
            try:
                profile = self._pools.pool_of(settings.model).profile
            except UnknownNameError:
                if isinstance(settings, CallSettings):
                    raise
                continue  # this node fails if it runs; an optional one is left out
            known[node.id] = NodeEstimate(
                mean_s=profile.service_s(PRIOR_PROMPT_TOKENS, settings.expected_tokens),
                first_token_s=profile.first_token_s(PRIOR_PROMPT_TOKENS),
                runs=expected_runs(node),
            )
        return known

    def _tokens_of(self, workflow: Workflow) -> tuple[int, int]:
        """Expected and maximum tokens of one run, with each node run once; tokenizing is free."""
        expected = most = 0
        for node in workflow.nodes:
            settings = node.settings
            if isinstance(settings, CallSettings):
                if not Endpoint(settings.endpoint).computes:
                    continue
                profile = self._pools.pool_of(settings.model).profile
                expected += settings.prompt.tokens + settings.expected_tokens * settings.calls
                most += settings.prompt.tokens
                most += most_output_tokens(settings, profile.context_tokens) * settings.calls
            elif isinstance(settings, LlmSettings):
                expected += PRIOR_PROMPT_TOKENS + settings.expected_tokens
                most += PRIOR_PROMPT_TOKENS + settings.max_tokens
        return expected, most


def _head_start_s(run: Run, older: RunningTask | None) -> float:
    """A run inherits the queue position of the run that it supersedes."""
    if older is None:
        return 0.0
    gap_s = run.arrived_at_s - older.run.arrived_at_s
    return min(gap_s + older.head_start_s, MAX_HEAD_START_S)


def _start_instead(task: RunningTask, older: RunningTask | None) -> None:
    """Start `task` and end the `older` run of its buffer, if there is one.

    A queued one is cancelled first, so that it cannot fill the queue for the newer one. A running
    one is cancelled last, so that the newer one is already queued for the batch slot that it frees.
    """
    if older is not None and older.is_queued:
        older.cancel(SUPERSEDED)
    task.start()
    if older is not None:
        older.cancel(SUPERSEDED)
