"""Small builders of core values: a test mentions only what matters to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from cato.core.errors import ExpressionError
from cato.core.events import ReplicaReported
from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, RunId, TaskName
from cato.core.profile import Profile
from cato.core.receipt import LlmFacts
from cato.core.slo import Slo, SloMetric
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaSnapshot
from cato.core.tenancy import CardTime, Usage
from cato.core.usage_outbox import UsageParcel
from cato.core.workflow import (
    Expression,
    LlmSettings,
    Node,
    NodeKind,
    Repeat,
    TransformSettings,
    Workflow,
)


def a_profile(
    *,
    prefill_s: float = 0.1,
    token_s: float = 0.01,
    prefill_token_s: float = 0.0,
    batch_token_s: float = 0.0,
    slots: int = 8,
) -> Profile:
    """`prefill_s` and `token_s` are constants of a batch of one unless the others say more."""
    return Profile(
        model="m",
        accelerator="cpu",
        engine="simulated",
        prefill_per_batch_token_s=0.0,
        prefill_per_request_s=0.0,
        prefill_per_token_s=prefill_token_s,
        prefill_base_s=prefill_s,
        decode_per_context_token_s=0.0,
        decode_per_request_s=batch_token_s,
        decode_base_s=token_s,
        kv_capacity_tokens=100_000,
        max_running=slots,
        context_tokens=8192,
        load_s=10.0,
    )


def an_invocation(
    id: str = "i",
    *,
    prompt: int = 100,
    tokens: int = 50,
    arrived_at_s: float = 0.0,
    deadline_s: float = 10.0,
    downstream_s: float = 0.0,
    until_first_token: bool = False,
    draw: float = 0.0,
    attempt: int = 1,
) -> Invocation:
    return Invocation(
        id=InvocationId(id),
        run_id=RunId(f"run-{id}"),
        task=TaskName("t"),
        node=NodeId("n"),
        prompt_tokens=prompt,
        expected_tokens=tokens,
        arrived_at_s=arrived_at_s,
        deadline_s=deadline_s,
        downstream_s=downstream_s,
        until_first_token=until_first_token,
        draw=draw,
        attempt=attempt,
    )


def a_replica(
    id: str = "r",
    *,
    held: int = 0,
    slots: int = 8,
    standby: int = 0,
    queued: int = 0,
    wait_s: float = 0.0,
    serial_s: float | None = None,
    profile: Profile | None = None,
    accepting: bool = True,
) -> ReplicaSnapshot:
    """`serial_s` is the wait unless it says more."""
    return ReplicaSnapshot(
        id=ReplicaId(id),
        deployment=DeploymentName("d"),
        profile=profile or a_profile(),
        held=held,
        max_running=slots,
        standby=standby,
        queued=queued,
        wait_s=wait_s,
        serial_s=wait_s if serial_s is None else serial_s,
        accepting=accepting,
    )


def a_pool(*replicas: ReplicaSnapshot, now_s: float = 0.0, dispatched: int = 0) -> PoolSnapshot:
    return PoolSnapshot(PoolName("p"), now_s, replicas, dispatched)


def a_report(
    id: str = "r",
    *,
    now_s: float = 0.0,
    slots: int = 1,
    standby: int = 0,
    accepting: bool = True,
    held: Sequence[str] = (),
    profile: Profile | None = None,
) -> ReplicaReported:
    return ReplicaReported(
        now_s=now_s,
        replica_id=ReplicaId(id),
        deployment=DeploymentName("d"),
        profile=profile or a_profile(),
        max_running=slots,
        standby=standby,
        accepting=accepting,
        held=tuple(InvocationId(h) for h in held),
    )


@dataclass(frozen=True, slots=True)
class Says:
    """An `Expression` that is a Python function of the names."""

    function: Callable[[Mapping[str, object]], object]
    source: str = "a test's own"
    names: frozenset[str] = frozenset()

    def evaluate(self, names: Mapping[str, object]) -> object:
        return self.function(names)


def always(value: object) -> Says:
    return Says(lambda _: value, repr(value))


def broken(problem: str = "broken") -> Says:
    def fail(_: Mapping[str, object]) -> object:
        raise ExpressionError("broken()", problem)

    return Says(fail, "broken()")


@dataclass(frozen=True, slots=True)
class Text:
    """A `Template` that renders as it stands."""

    source: str = "text"

    def render(self, names: Mapping[str, object]) -> str:
        return self.source


def a_node(
    id: str,
    *needs: str,
    kind: NodeKind = NodeKind.LLM,
    when: Expression | None = None,
    each: Expression | None = None,
    max_items: int = 8,
    until: Expression | None = None,
    max_rounds: int = 2,
    redo: Sequence[str] = (),
    optional: bool = False,
    budget_s: float | None = None,
) -> Node:
    """A node that needs `needs`; `until` makes it repeat."""
    is_llm = kind is NodeKind.LLM
    return Node(
        id=NodeId(id),
        kind=kind,
        settings=LlmSettings("m", 64, 32, prompt=Text()) if is_llm else TransformSettings(Text()),
        needs=tuple(NodeId(n) for n in needs),
        when=when,
        each=each,
        max_items=max_items,
        repeat=Repeat(until, max_rounds, tuple(NodeId(n) for n in redo)) if until else None,
        optional=optional,
        budget_s=budget_s,
    )


def a_workflow(
    *nodes: Node,
    slo: Slo | None = None,
    output: Sequence[str] = (),
    stream: Sequence[str] = (),
    hard_deadline_s: float = 1000.0,
) -> Workflow:
    """`nodes` in a topological order; the last is the output unless `output` says otherwise."""
    return Workflow(
        name=TaskName("t"),
        description="",
        slo=slo or Slo(SloMetric.E2E, 10.0),
        hard_deadline_s=hard_deadline_s,
        inputs=(),
        nodes=nodes,
        output=tuple(NodeId(n) for n in output) or (nodes[-1].id,),
        stream=tuple(NodeId(n) for n in stream),
    )


def llm_facts(*, tokens: int = 10, queue_s: float = 0.0, ttft_s: float | None = 0.1) -> LlmFacts:
    return LlmFacts(
        model="m",
        pool="p",
        replica="r",
        deployment="d",
        queue_s=queue_s,
        priority=0,
        slack_s=0.0,
        predicted_s=0.0,
        engine_ttft_s=ttft_s,
        first_token_s=None if ttft_s is None else queue_s + ttft_s,
        prompt_tokens=100,
        cached_prompt_tokens=0,
        output_tokens=tokens,
        finish_reason="stop",
        attempts=1,
        simulated=True,
        reasons=(),
    )


def prompt_blocks(number: int, blocks: int, family: int, shared: int) -> tuple[int, ...]:
    """Hashes of a prompt's blocks: the first `shared` are those of its family, the rest its own."""
    shared = min(blocks, shared)
    own = [100_000 * (number + 1) + i for i in range(shared, blocks)]
    return (*(1000 * family + i for i in range(shared)), *own)


_senders = count(1)


def a_parcel(*usage: Usage, held: tuple[CardTime, ...] = ()) -> UsageParcel:
    """The first parcel of a new sender."""
    return UsageParcel(f"sender {next(_senders)}", 1, usage, held)
