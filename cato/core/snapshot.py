"""What a policy sees: one invocation, and its pool's replicas at one instant."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, RunId, TaskName
from cato.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Invocation:
    """One LLM call of one node, as offered to a pool.

    `deadline_s` is the instant of the run's SLO event (its hard deadline when the SLO sets none).
    `until_first_token`: this invocation's first token is that event; otherwise its last token is
    on the way to it. `downstream_s` is the expected time of the nodes between this one and the
    event. `draw` is a uniform number in [0, 1) for policies that choose at random. `attempt`
    counts from 1; a higher one replaces the lease of the one before.
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

    def own_s(self, profile: Profile, batch: int = 1) -> float:
        """Expected time from start to this invocation's part of the SLO event."""
        if self.until_first_token:
            return profile.first_token_s(self.prompt_tokens, batch)
        return profile.service_s(self.prompt_tokens, self.expected_tokens, batch)

    def remaining_s(self, profile: Profile, batch: int = 1) -> float:
        """Expected time from start to the SLO event: own execution plus what lies downstream."""
        return self.own_s(profile, batch) + self.downstream_s


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica as the router's books have it.

    `held` counts leases (running in the engine or standing by before it), `queued` what is
    bound to it but not sent (early binding only). `wait_s` is the expected queueing time of a
    newcomer.
    """

    id: ReplicaId
    deployment: DeploymentName
    profile: Profile
    held: int
    max_running: int
    standby: int
    queued: int = 0
    wait_s: float = 0.0
    accepting: bool = True

    @property
    def has_room(self) -> bool:
        return self.accepting and self.held < self.max_running + self.standby

    @property
    def batch(self) -> int:
        """Batch size a newcomer would run in."""
        return min(self.held + 1, max(1, self.max_running))


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Replicas that may be chosen at `now_s`, ordered by id; `dispatched` counts since start."""

    name: PoolName
    now_s: float
    replicas: tuple[ReplicaSnapshot, ...]
    dispatched: int = 0
