"""When the last token of a running call is due, and the time per token beside others."""

from __future__ import annotations

from cato.core.snapshot import Invocation, ReplicaView, Running, due_s


def running_due_s(running: Running) -> float:
    """The same for a running invocation, with its currently expected length."""
    invocation = running.invocation
    tokens = invocation.generated + running.tokens + running.left_tokens
    return due_s(invocation, running.first_token_at_s, tokens)


def step_beside_s(invocation: Invocation, replica: ReplicaView) -> float:
    """Predicted time per token of the invocation once it has joined the replica's batch."""
    batch = replica.batch
    context_tokens: float = invocation.prompt_tokens + invocation.expected_tokens
    if batch > replica.held:
        context_tokens = (replica.context_tokens + context_tokens) / batch
    return replica.profile.decode_step_s(batch, context_tokens)
