"""Snapshots for policies: one invocation, and its pool's replicas at one instant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, RunId, TaskName
from cato.core.length import LengthBelief
from cato.core.pool.prefill import CallTarget
from cato.core.profile import Profile
from cato.core.record import changed, record

T = TypeVar("T")

READING_S = 0.1
"""Pace of a stream without a target: ten tokens a second, faster than people read."""

PREFIX_BLOCK_TOKENS = 64
"""Tokens per prefix hash; engines cache blocks of 16 to 128 tokens."""


def due_at_pace_s(began_at_s: float, pace_s: float, tokens: float) -> float:
    """When the last of a stream's `tokens` is due: TPOT = (E2E - TTFT)/(tokens - 1)."""
    return began_at_s + pace_s * max(0.0, tokens - 1)


def node_tokens(
    tokens: float, nodes: int, known_nodes: int = 0, known_tokens: float = 0.0
) -> float:
    """Mean tokens per node of a prompt, after its first nodes with `known_tokens`.

    Nodes are cut by characters. Half a node accounts for the text after the last one.
    """
    is_exact = known_tokens == known_nodes * PREFIX_BLOCK_TOKENS
    if is_exact and 0 <= tokens - nodes * PREFIX_BLOCK_TOKENS < PREFIX_BLOCK_TOKENS:
        return PREFIX_BLOCK_TOKENS
    return max(0.0, tokens - known_tokens) / (nodes - known_nodes + 0.5)


@record
class StageCall:
    """What is believed of the output of one call of a stage: see `Invocation.length`.

    It is expected to have `expected_tokens` in all, of which it has `generated`.
    """

    length: LengthBelief | None
    expected_tokens: int
    generated: int


@record
class Invocation:
    """One LLM call of one node, as offered to a pool.

    `deadline_s` is the instant of the run's SLO event (its hard deadline if the SLO sets none; inf
    if there is no SLO). `until_first_token`: this invocation's first token is that event; otherwise
    its last token is on the path to it. `downstream_s` is the expected time of the nodes between
    this one and the event. `draw` is a uniform number in [0, 1) for randomized policies. `attempt`
    counts from 1; a higher one replaces the lease of the previous one.

    `tpot_target_s` is the pace that a stream must keep (inf: none). `length` is the belief about
    the whole output; `expected_tokens` is what this attempt has still to generate after the
    `generated` tokens of earlier attempts. `served_s` is the service that earlier invocations of
    the run received. `resumable`: after losing its replica it can continue elsewhere from its
    prompt and text; only such calls are preempted. `prefix` holds hashes of the prompt's prefixes:
    the i-th value covers `PREFIX_BLOCK_TOKENS` × (i + 1) tokens. `session` is the conversation or
    agent that it belongs to, across tenants (empty: none); the first `shared_blocks` values of
    `prefix` equal those of its previous call, as far as known. Under load the pool is shared by
    `tenant`, in proportion to `weight`.

    `buffer` names the editor buffer of the run (empty: none), `began_at_s` the start of the run: a
    later run of a buffer supersedes an earlier one. `user` distinguishes callers. `was_taken`: the
    pool's router accepted it before a restart, so it is not refused as a new call. It asks for
    `calls` answers at once: it takes that many batch slots, and its tenant pays for as many.
    `leaves_at_s` is when its client gives up without a first token (inf: the client did not say).
    `begun_in_time`: a stream whose first token was in time goes on after a preemption or the loss
    of its replica; `deadline_s` is then when it would end at its pace.

    `stage`: all calls of the run in this pool whose last tokens are waited for, this one among
    them. Its router sets it where policies ask for it and they are several; see
    `cato.core.pool.stages`.
    """

    id: InvocationId
    run_id: RunId
    task: TaskName
    node: NodeId
    prompt_tokens: int
    expected_tokens: int
    arrived_at_s: float
    deadline_s: float
    downstream_s: float = 0.0
    until_first_token: bool = False
    draw: float = 0.0
    attempt: int = 1
    tpot_target_s: float = inf
    length: LengthBelief | None = None
    generated: int = 0
    served_s: float = 0.0
    resumable: bool = True
    prefix: tuple[int, ...] = ()
    session: str = ""
    shared_blocks: int = 0
    tenant: str = ""
    weight: float = 1.0
    buffer: str = ""
    user: str = ""
    began_at_s: float = 0.0
    was_taken: bool = False
    calls: int = 1
    leaves_at_s: float = inf
    begun_in_time: bool = False
    stage: tuple[StageCall, ...] = ()

    def as_stage_call(self, tokens: int = 0) -> StageCall:
        """Once this attempt has generated `tokens`."""
        expected = self.generated + self.expected_tokens
        return StageCall(self.length, expected, self.generated + tokens)

    def continued(self, attempt: int, tokens: int, began_at_s: float | None = None) -> Invocation:
        """The rest of the call once this attempt's `tokens` are part of the prompt.

        A stream whose first token came at `began_at_s`, in time, now has to keep its target pace;
        without one that of a reader.
        """
        rest = changed(
            self,
            attempt=attempt,
            prompt_tokens=self.prompt_tokens + tokens,
            expected_tokens=max(1, self.expected_tokens - tokens),
            generated=self.generated + tokens,
        )
        if not self.until_first_token or began_at_s is None:
            return rest
        due_s = self.deadline_s
        in_time = began_at_s <= due_s < inf
        if in_time:
            pace_s = self.tpot_target_s if self.tpot_target_s < inf else READING_S
            due_s = due_at_pace_s(began_at_s, pace_s, rest.generated + rest.left_tokens())
        return changed(rest, until_first_token=False, deadline_s=due_s, begun_in_time=in_time)

    @property
    def is_paced_rest(self) -> bool:
        """Whether it is the rest of a stream that began in time and whose pace is an SLO."""
        return self.begun_in_time and self.tpot_target_s < inf

    def on_clock(self, now_s: float) -> Invocation:
        """With times of a clock that shows `now_s`, where they were relative to now."""
        return changed(
            self,
            arrived_at_s=now_s + self.arrived_at_s,
            deadline_s=now_s + self.deadline_s,
            began_at_s=now_s + self.began_at_s,
            leaves_at_s=now_s + self.leaves_at_s,
        )

    def engine_target(self, now_s: float) -> CallTarget:
        """The target for an engine that gets the call at `now_s`."""
        return CallTarget(
            target_s=self.deadline_s - self.downstream_s - self.arrived_at_s,
            waited_s=now_s - self.arrived_at_s,
            tokens=1 if self.until_first_token else self.expected_tokens,
            tpot_s=self.tpot_target_s,
            has_begun=self.generated > 0,
        )

    def of_each(self, tokens: int) -> int:
        """Tokens of one of its answers, from the sum that replicas report."""
        return -(-tokens // self.calls)

    def left_tokens(self, tokens: int = 0) -> float:
        """Expected tokens still to come once this attempt has generated `tokens`.

        An output of which only the expected length is known goes on for as long, or for as long as
        it already has: after 1,000 tokens the answers of coding agents have 1,400 more, after 4,000
        2,400, of a mean of 470 (recorded sessions, tuning half).
        """
        generated = self.generated + tokens
        if self.length is not None:
            return self.length.left_mean(generated)
        return max(1.0, self.generated + self.expected_tokens, generated)

    def own_s(self, profile: Profile, batch: int = 1) -> float:
        """Expected time from start to this invocation's part of the SLO event."""
        if self.until_first_token:
            return profile.first_token_s(self.prompt_tokens, batch)
        return profile.service_s(self.prompt_tokens, self.expected_tokens, batch)

    def remaining_s(self, profile: Profile, batch: int = 1) -> float:
        """Expected time from start to the SLO event: own execution plus downstream nodes."""
        return self.own_s(profile, batch) + self.downstream_s


def due_s(invocation: Invocation, first_token_at_s: float | None, output_tokens: float) -> float:
    """The deadline; inf when the last token does not matter.

    A deadline on the last token includes the downstream time. One on the first token constrains the
    rest only by the pace, from the first token on.
    """
    if not invocation.until_first_token:
        return invocation.deadline_s - invocation.downstream_s
    if invocation.tpot_target_s == inf:
        return inf
    started_s = invocation.deadline_s if first_token_at_s is None else first_token_at_s
    return due_at_pace_s(started_s, invocation.tpot_target_s, output_tokens)


@dataclass(slots=True)
class Running:
    """An invocation on a replica. Policies read it; only the orchestrator mutates it.

    `tokens` were generated as last reported; of several answers to one request each has so many.
    `first_token_at_s` is None while the prompt waits in the engine or is processed.
    """

    invocation: Invocation
    at_s: float
    _end_s: float
    tokens: int = 0
    first_token_at_s: float | None = None
    _derived: object = None
    # From the latest report, for predicting the end: its time, and the time of a step.
    seen_at_s: float = 0.0
    _step_s: float | None = None
    # The corresponding step time, and the prefill time of the replica's other prompts until then.
    pace_step_s: float = 0.0
    prompts_seen_s: float = 0.0
    # How long it was queued.
    waited_s: float = 0.0

    @property
    def expected_end_s(self) -> float:
        """When the last token is expected; computed on demand, because it is rarely needed."""
        if self._step_s is not None:
            left_tokens = self.invocation.left_tokens(self.tokens)
            self._end_s = self.seen_at_s + left_tokens * self._step_s
            self._step_s = None
        return self._end_s

    def saw(self, tokens: int, now_s: float, step_s: float) -> None:
        """Record `tokens` generated by `now_s`; the next step is predicted to take `step_s`."""
        if tokens > self.tokens:
            self.tokens = tokens
        self._derived = None
        self.seen_at_s = now_s
        self._step_s = self.pace_step_s = step_s

    def derived(self, derive: Callable[[Running], T]) -> T:
        """`derive(self)`, cached until the tokens change; use one `derive` for all callers."""
        value = self._derived
        if value is None:
            value = self._derived = derive(self)
        return value  # type: ignore[return-value]

    @property
    def left_tokens(self) -> float:
        return self.invocation.left_tokens(self.tokens)

    @property
    def context_tokens(self) -> int:
        return self.invocation.prompt_tokens + self.invocation.calls * self.tokens


class ReplicaView(Protocol):
    """One replica for policies, as the router knows it.

    `held` counts leases (running in the engine, or standing by before it), `queued` the calls bound
    to it but not sent (early binding only), with prompts of `queued_tokens`, of which
    `queued_uncached_tokens` were not cached there when they were bound. `wait_s` is the expected
    queueing delay of a new call, `serial_s` the delay if all its calls ran alone, one after
    another. `prefilling` counts its calls without a token, `prompt_tokens_ahead` the uncached
    tokens of their prompts, as far as known, and `prompts_ahead_s` the engine's expected time for
    them from now on. `context_tokens` are those of all its calls. `step_tokens` is the engine's own
    limit of prompt tokens per step (0: none), `host_tokens` the capacity of its host's memory
    beside the KV cache (0: none); `mixes_prompts`: it computes short prompts beside long ones that
    came before. `dispatch_s` is the measured delay between router and engine, `first_late_s` how
    much later than their prompts' predicted ends first tokens have come.
    `running` lists the leases; leases from before a restart of the router count in `held` only.
    `sessions` were there lately, with contexts of `working_set_tokens`; `awaited_s` is the prompt
    work that waits in the pool for this replica. `turns`: how many turns of sessions with an SLO
    were in time lately on replicas of its profile, and how many were late.
    """

    @property
    def id(self) -> ReplicaId: ...
    @property
    def deployment(self) -> DeploymentName: ...
    @property
    def profile(self) -> Profile: ...
    @property
    def held(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def standby(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...
    @property
    def queued_uncached_tokens(self) -> int: ...
    @property
    def wait_s(self) -> float: ...
    @property
    def serial_s(self) -> float: ...
    @property
    def accepting(self) -> bool: ...
    @property
    def batch(self) -> int: ...
    @property
    def prefilling(self) -> int: ...
    @property
    def prompt_tokens_ahead(self) -> int: ...
    @property
    def prompts_ahead_s(self) -> float: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def step_tokens(self) -> int: ...
    @property
    def host_tokens(self) -> int: ...
    @property
    def mixes_prompts(self) -> bool: ...
    @property
    def dispatch_s(self) -> float: ...
    @property
    def first_late_s(self) -> float: ...
    @property
    def running(self) -> Collection[Running]: ...
    @property
    def sessions(self) -> int: ...
    @property
    def working_set_tokens(self) -> int: ...
    @property
    def awaited_s(self) -> float: ...
    @property
    def turns(self) -> tuple[float, float]: ...

    def is_home(self, invocation: Invocation) -> bool:
        """Whether the last call of its session went there."""
        ...

    def cached_tokens(self, invocation: Invocation) -> int:
        """Tokens of the prompt that the engine has probably cached."""
        ...

    def loaded_tokens(self, invocation: Invocation) -> int:
        """How many of the cached tokens the engine loads from host memory, as far as it tells."""
        ...

    def usable_tokens(self, invocation: Invocation) -> int:
        """The cached tokens, plus those that the engine can fetch from another replica's memory."""
        ...

    def derived(self, derive: Callable[[ReplicaView, float], T], now_s: float) -> T:
        """`derive(self, now_s)`, cached while neither argument changes."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A frozen `ReplicaView`, for operators' pictures of a pool and for tests of policies."""

    id: ReplicaId
    deployment: DeploymentName
    profile: Profile
    held: int
    max_running: int
    standby: int
    queued: int = 0
    wait_s: float = 0.0
    serial_s: float = 0.0
    accepting: bool = True
    prefilling: int = 0
    running: tuple[Running, ...] = ()
    prompt_tokens_ahead: int = 0
    prompts_ahead_s: float = 0.0
    context_tokens: int = 0
    step_tokens: int = 0
    host_tokens: int = 0
    mixes_prompts: bool = False
    dispatch_s: float = 0.0
    first_late_s: float = 0.0
    sessions: int = 0
    working_set_tokens: int = 0
    awaited_s: float = 0.0
    turns: tuple[float, float] = (0.0, 0.0)
    queued_tokens: int = 0
    queued_uncached_tokens: int = 0
    # For tests of policies: sessions whose home it is, and cached tokens of any prompt, those of
    # them in host memory, and fetchable ones.
    homes: frozenset[str] = frozenset()
    cached_prompt_tokens: int = 0
    loaded_prompt_tokens: int = 0
    elsewhere_tokens: int = 0

    @property
    def has_room(self) -> bool:
        return self.accepting and self.held < self.max_running + self.standby

    @property
    def batch(self) -> int:
        """Batch size in which a new call would run."""
        return min(self.held + 1, max(1, self.max_running))

    def is_home(self, invocation: Invocation) -> bool:
        return invocation.session in self.homes

    def cached_tokens(self, invocation: Invocation) -> int:
        return min(self.cached_prompt_tokens, invocation.prompt_tokens - 1)

    def loaded_tokens(self, invocation: Invocation) -> int:
        return min(self.loaded_prompt_tokens, self.cached_tokens(invocation))

    def usable_tokens(self, invocation: Invocation) -> int:
        most = max(self.cached_prompt_tokens, self.elsewhere_tokens)
        return min(most, invocation.prompt_tokens - 1)

    def derived(self, derive: Callable[[ReplicaView, float], T], now_s: float) -> T:
        return derive(self, now_s)


@record
class PoolSnapshot:
    """The candidate replicas at `now_s`, ordered by id; `dispatched` counts since start.

    `is_uniform`: all known ones have the same profile. `accepting` are all that take work, with
    room or not: a call may wait for one of them. `with_room` counts those with room, candidates or
    not. `in_time` is the share of all replicas' time used lately by work that started in time, and
    `late_share_s` the replica-seconds that late turns of sessions may still use.
    """

    name: PoolName
    now_s: float
    replicas: Sequence[ReplicaView]
    dispatched: int = 0
    is_uniform: bool = False
    accepting: Sequence[ReplicaView] = ()
    with_room: int = 0
    in_time: float = 0.0
    late_share_s: float = inf
