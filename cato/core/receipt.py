"""The SLA receipt of a run: what was promised, what was achieved, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from cato.core.ids import NodeId, RunId, TaskName
from cato.core.record import record

WITHHELD = "not kept: it may quote the request"

SUPERSEDED = "a newer request of the same buffer replaced it"
"""The problem of a run that was superseded by the next one of its editor buffer."""

CLIENT_LEFT = "the client left"
"""The problem of a run whose client closed its connection."""

DEADLINE_EXCEEDED = "deadline_exceeded"
"""The status of a run that passed its hard deadline."""


class NodeStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    SKIPPED = "skipped"
    ABSENT = "absent"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Placement(StrEnum):
    """Where a turn was routed, relative to its session's home: the replica of its last call."""

    NONE = ""
    """Not a turn of a session."""
    HOME = "home"
    MOVED = "moved"
    NEW = "new"
    """The session had no home: first call, home replica gone, or not used for a long time."""


class Excuse(StrEnum):
    """Why a run without an answer in time is not an SLO miss.

    Nobody waited for it, or it asked for something impossible. Our own refusals and failures are no
    excuse.
    """

    NONE = ""
    SUPERSEDED = "superseded"
    CLIENT_LEFT = "client_left"
    CLIENT_ERROR = "client_error"


class TrafficArm(StrEnum):
    """Which of a rollout's models served a run; a `shadow` run answers a copy that nobody reads."""

    STABLE = "stable"
    CANARY = "canary"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A run's part in a rollout: in step `stage` of the rollout `name`.

    `fell_back`: the canary could not answer, and the stable model did.
    """

    name: str
    id: int
    stage: int
    arm: TrafficArm
    fell_back: bool = False


@record
class LlmFacts:
    """How an invocation was served. `reasons` holds one decision per attempt.

    Predicted on arrival: `expected_prompt_tokens`, `expected_tokens` and `length_bound_tokens` (0:
    no belief). Predicted at the lease: queueing, service and `expected_cached_tokens` (of its
    prompt, in the replica's KV cache). `queue_s` and `service_s`, from the dispatch to the last
    token, are sums over its attempts; `engine_ttft_s` is of the attempt with the first token, and
    `first_token_s` what it waited and was served until then. Both are None without a stream.
    `uncached_prompt_tokens` of the prompt were computed. `home` is the replica of the session's
    last call, or empty; the last of `reasons` explains `placement`. `reused` names the source of an
    answer without an engine call: a call in flight, or memory. `features`: numbers from which
    the length was predicted (`cato.estimators.prompt_features.NAMES`). Of `calls` answers to one
    request, `output_tokens` is the sum, and what was expected holds for each.
    """

    model: str
    pool: str
    replica: str
    deployment: str
    queue_s: float
    priority: int
    slack_s: float
    predicted_s: float
    engine_ttft_s: float | None
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    finish_reason: str
    attempts: int
    simulated: bool
    reasons: tuple[str, ...]
    expected_tokens: int = 0
    length_bound_tokens: int = 0
    predicted_queue_s: float = 0.0
    service_s: float = 0.0
    predicted_service_s: float = 0.0
    expected_prompt_tokens: int = 0
    expected_cached_tokens: int = 0
    uncached_prompt_tokens: int = 0
    placement: Placement = Placement.NONE
    home: str = ""
    reused: str = ""
    features: tuple[float, ...] = ()
    calls: int = 1
    first_token_s: float | None = None

    @property
    def tokens_of_each(self) -> int:
        """Output tokens of one of its answers: they are written at the same time."""
        return -(-self.output_tokens // max(1, self.calls))


@record
class NodeReceipt:
    """One execution of one node; times are seconds since the task arrived.

    `budget_s` is the node's share of the SLO at its start (None off the SLO's path), `limit_s` the
    longest it was allowed, `spent_s` the time it took, including queueing.
    """

    node: NodeId
    kind: str
    round: int
    item: int | None
    status: str
    started_s: float
    spent_s: float
    budget_s: float | None
    limit_s: float | None
    problem: str = ""
    llm: LlmFacts | None = None


@record
class SlaReceipt:
    """The receipt of a whole run.

    `achieved_s` is None if the SLO's event never happened (a miss). `tpot_target_s` is a second
    objective, on the pace of the stream; None without one. `output_tokens` are those of the answer:
    of the output node, or of the streamed node so far if the run ended early.

    `path` names the executions, as indices into `nodes`, whose consecutive spans make up the E2E
    latency; `overhead_s` is the rest. `key` is the id of the API key, and `tenant` its owner; empty
    without one. `passed` says why the request went to a model without a workflow although it named
    none; empty when a workflow ran, or a model was named. A run with an `excuse` counts neither as
    met nor as missed.

    For conversations, `session` names the session, `turn` counts its calls from 1 and `parent`
    names the session that started it (`cato.core.session.Turn`); `changes` lists what was made
    stable in its prompt. `think_s` is the time since the previous turn, None without one. For a
    session with a target, `session_slack_s` is its spare time when the turn ended: the time left
    less the expected time of later turns. `rollouts` are those that chose its models.
    """

    request_id: RunId
    task: TaskName
    status: str
    metric: str
    target_s: float
    achieved_s: float | None
    met: bool
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    output_tokens: int
    queue_s: float
    overhead_s: float
    simulated: bool
    nodes: tuple[NodeReceipt, ...]
    path: tuple[int, ...]
    problem: str = ""
    notes: tuple[str, ...] = ()
    tenant: str = ""
    key: str = ""
    passed: str = ""
    session: str = ""
    turn: int = 0
    parent: str = ""
    client: str = ""
    turn_kind: str = ""
    changes: tuple[str, ...] = ()
    tpot_target_s: float | None = None
    excuse: Excuse = Excuse.NONE
    think_s: float | None = None
    session_target_s: float | None = None
    session_slack_s: float | None = None
    rollouts: tuple[Drawn, ...] = ()

    @property
    def is_shadow(self) -> bool:
        """Whether it is a copy of a run whose answer nobody reads."""
        return any(drawn.arm is TrafficArm.SHADOW for drawn in self.rollouts)

    def as_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        plain = _plain(self)
        plain["nodes"] = tuple(
            {**_plain(node), "llm": None if node.llm is None else _plain(node.llm)}
            for node in self.nodes
        )
        plain["rollouts"] = tuple(map(_plain, self.rollouts))
        return plain

    def without_text(self) -> SlaReceipt:
        """A copy to store, without problems and notes: errors may quote a prompt or answer."""
        nodes = tuple(replace(n, problem=WITHHELD) if n.problem else n for n in self.nodes)
        return replace(
            self,
            nodes=nodes,
            problem=WITHHELD if self.problem else "",
            notes=tuple(WITHHELD for _ in self.notes[:1]),
        )


def _plain(value: SlaReceipt | NodeReceipt | LlmFacts | Drawn) -> dict[str, object]:
    """Its fields as plain values.

    `dataclasses.asdict`, which also copies values, takes ten times as long.

    Every run's receipt passes through here.
    """
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
