"""Events that reach a pool's orchestrator. `now_s` is the router's clock."""

from __future__ import annotations

from cato.core.ids import DeploymentName, InvocationId, ReplicaId
from cato.core.kv_events import NodeNews
from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.snapshot import Invocation


@record
class ReplicaReported:
    """A replica reports its properties and contents; its first report registers it.

    `held` are its invocations; a lease that it does not name after a grace time ends.
    `prefix_caching`: its engine caches prefixes. `step_tokens`: the most prompt tokens per engine
    step (0: whole prompts, or unknown). `mixes_prompts`: its engine computes short prompts beside
    long ones that came before (by a cap per prompt, or by due date). `host_tokens`: tokens of host
    memory that hold KV blocks evicted from the KV cache.
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
    mixes_prompts: bool = False


@record
class ReplicaLost:
    """The replica is gone or cannot be reached; its leases end."""

    now_s: float
    replica_id: ReplicaId
    reason: str


@record
class StreamLost:
    """A call's stream from the replica broke; the replica itself may be well.

    The lease of that attempt ends, and the replica gets no new calls until its next report.
    """

    now_s: float
    replica_id: ReplicaId
    invocation_id: InvocationId
    attempt: int
    reason: str


@record
class InvocationOffered:
    """An ingress requests a lease. Offering an id again is harmless."""

    now_s: float
    invocation: Invocation


@record
class InvocationWithdrawn:
    """The ingress gave up waiting, or its stream ended without an end reported by the replica.

    `attempt` is the attempt given up: a newer attempt offered since is not affected.
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


# Replicas, live and simulated, report a stream every so many tokens.
REPORT_STEPS = 20


@record
class ReplicaProgressed:
    """How many tokens each invocation of the replica has generated in its present attempt."""

    now_s: float
    replica_id: ReplicaId
    tokens: tuple[tuple[InvocationId, int], ...]


@record
class InvocationEnded:
    """The replica no longer holds the invocation: finished, failed or cancelled.

    `output_tokens` are those of this attempt. `cached_tokens` of `prompt_tokens` were cached, as
    the engine counted (None: it did not report).
    """

    now_s: float
    invocation_id: InvocationId
    attempt: int
    output_tokens: int
    outcome: str
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


@record
class CacheChanged:
    """The replica's KV cache changed, as its engine told."""

    now_s: float
    replica_id: ReplicaId
    news: NodeNews


@record
class TurnCame:
    """A parked call may start now (see `Policies.by_turns`)."""

    now_s: float
    invocation_id: InvocationId


@record
class TurnsEnded:
    """The room behind the current turns is gone: calls wait for their turns again."""

    now_s: float


@record
class PoliciesChanged:
    """The pool's policies changed, by the operator or a new measurement.

    Also sent to distribute early-bound calls again.
    """

    now_s: float
    policies: Policies


@record
class Ticked:
    """Time passed; replicas that were silent for too long are lost."""

    now_s: float


Event = (
    ReplicaReported
    | ReplicaLost
    | StreamLost
    | InvocationOffered
    | InvocationWithdrawn
    | FirstTokenSent
    | ReplicaProgressed
    | InvocationEnded
    | CacheChanged
    | TurnCame
    | TurnsEnded
    | PoliciesChanged
    | Ticked
)
