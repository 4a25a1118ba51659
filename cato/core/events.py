"""Facts that reach a pool's orchestrator. `now_s` is the router's clock."""

from __future__ import annotations

from cato.core.ids import DeploymentName, InvocationId, ReplicaId
from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.snapshot import Invocation


@record
class ReplicaReported:
    """A replica says what it is and what it holds; the first report makes it known.

    `held` are the invocations that it has; a lease it does not name after a grace time is free.
    `prefix_caching`: its engine keeps the beginnings of prompts. `step_tokens`: the prompt tokens
    that its engine processes in one step at most (0: whole prompts, or unknown). `host_tokens`:
    what leaves its KV cache stays in the host's memory, so many tokens of it.
    """

    now_s: float
    replica_id: ReplicaId
    deployment: DeploymentName
    profile: Profile
    max_running: int
    standby: int
    accepting: bool
    held: tuple[InvocationId, ...]
    prefix_caching: bool = False
    step_tokens: int = 0
    host_tokens: int = 0


@record
class ReplicaLost:
    """The replica is gone or cannot be reached; its leases end."""

    now_s: float
    replica_id: ReplicaId
    reason: str


@record
class InvocationOffered:
    """An ingress wants a lease. Offering an id again is harmless."""

    now_s: float
    invocation: Invocation


@record
class InvocationWithdrawn:
    """The ingress gave up waiting, or its stream ended without the replica saying so.

    `attempt` is the one that was given up: it says nothing of a newer one that was offered since.
    """

    now_s: float
    invocation_id: InvocationId
    attempt: int
    reason: str


@record
class FirstTokenSent:
    """The engine produced the invocation's first token."""

    now_s: float
    invocation_id: InvocationId


@record
class ReplicaProgressed:
    """How many tokens each invocation of the replica has generated in its present attempt."""

    now_s: float
    replica_id: ReplicaId
    tokens: tuple[tuple[InvocationId, int], ...]


@record
class InvocationEnded:
    """The replica no longer holds the invocation: finished, failed or cancelled.

    `output_tokens` are those of this attempt. `cached_tokens` of `prompt_tokens`: its prompt as its
    engine counted it (None: it did not say).
    """

    now_s: float
    invocation_id: InvocationId
    attempt: int
    output_tokens: int
    outcome: str
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


@record
class TurnCame:
    """A call that has waited for its turn may start (see `Policies.by_turns`)."""

    now_s: float
    invocation_id: InvocationId


@record
class TurnsEnded:
    """Room that calls were given their turns for is gone: they wait for their turns again."""

    now_s: float


@record
class PoliciesChanged:
    """The operator changed how the pool decides, or a new measurement did; or what is bound early
    is to be dealt out again."""

    now_s: float
    policies: Policies


@record
class Ticked:
    """Time passed; replicas that were silent too long are lost."""

    now_s: float


Event = (
    ReplicaReported
    | ReplicaLost
    | InvocationOffered
    | InvocationWithdrawn
    | FirstTokenSent
    | ReplicaProgressed
    | InvocationEnded
    | TurnCame
    | TurnsEnded
    | PoliciesChanged
    | Ticked
)
