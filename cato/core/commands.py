"""Commands of a pool's orchestrator to its driver."""

from __future__ import annotations

from cato.core.ids import DeploymentName, InvocationId, ReplicaId
from cato.core.record import record


@record
class Dispatch:
    """Lease `replica_id` to the invocation. `slack_s` is the slack at the decision.

    `predicted_queue_s` is the predicted queueing delay before the engine, `service_s` the predicted
    service time. `cached_tokens` of its prompt are believed to be in that replica's KV cache.
    `home` is the replica of its session's last call, if that is known and still there.
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
    """Turn the invocation away.

    The queue is full, the client would leave before the first token, or a newer run of the same
    buffer has `superseded` this one.
    """

    invocation_id: InvocationId
    reason: str
    retry_after_s: float
    superseded: bool = False


@record
class Preempt:
    """Take the invocation back from its replica.

    It returns to the queue as attempt `attempt` + 1, unless its run was `superseded`.
    """

    invocation_id: InvocationId
    attempt: int
    replica_id: ReplicaId
    reason: str
    superseded: bool = False


Command = Dispatch | Refuse | Preempt
