"""Orders of a pool's orchestrator to its driver."""

from __future__ import annotations

from cato.core.ids import DeploymentName, InvocationId, ReplicaId
from cato.core.record import record


@record
class Dispatch:
    """Lease `replica_id` to the invocation. `slack_s` is what was left at the decision.

    `predicted_queue_s` is how long it was expected to wait in front of the engine, `service_s` how
    long to run there. `cached_tokens` of its prompt are believed to be in that replica's KV cache.
    `home` is the replica of its session's last call, as far as that is known and there.
    """

    invocation_id: InvocationId
    attempt: int
    replica_id: ReplicaId
    deployment: DeploymentName
    priority: int
    queue_s: float
    slack_s: float
    remaining_s: float
    reason: str
    predicted_queue_s: float = 0.0
    service_s: float = 0.0
    cached_tokens: int = 0
    home: ReplicaId = ReplicaId("")


@record
class Refuse:
    """Turn the invocation away: the queue's bound is reached, its client would leave before its
    first token, or a newer run of the same buffer has `superseded` its own."""

    invocation_id: InvocationId
    reason: str
    retry_after_s: float
    superseded: bool = False


@record
class Preempt:
    """Take the invocation back from its replica; it waits again, as attempt `attempt` + 1, unless
    its run was `superseded`."""

    invocation_id: InvocationId
    attempt: int
    replica_id: ReplicaId
    reason: str
    superseded: bool = False


Command = Dispatch | Refuse | Preempt
