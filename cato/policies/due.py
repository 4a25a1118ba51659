"""Deadlines for an invocation's last token, as implied by its SLO."""

from __future__ import annotations

from math import inf

from cato.core.snapshot import Invocation, ReplicaView, Running, due_at_pace_s


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
