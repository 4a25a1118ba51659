"""The prompt window: how much prefill work to send ahead to a replica.

A router can still reorder prompts that it holds back. It should hold back only what the engine's
next steps cannot take. News of a first token comes a step and a message later, so an engine that
gets one prompt at a time idles in between (ALGORITHMS.md, section 6b).
"""

from __future__ import annotations

from math import inf

from cato.core.profile import Profile
from cato.core.snapshot import Invocation, ReplicaView

# A prompt waits for the current step to end, and its first token is reported after its own step.
# With four decode steps' worth of prompts ahead an engine does not run dry. If one step takes more
# than that, the next step's prompts should be there when the first are reported. More than eight
# gives the order away. Measured on the traffic of Azure, SABER and Tempo and on short completions;
# see `cato/core/decisions/0013-prompt-window.md`.
LEAST_STEPS, MOST_STEPS = 4.0, 8.0
BUDGETS_AHEAD = 2
# A longer delay comes from a wrong profile, not from messages.
MAX_DISPATCH_S = 0.25
# Only the smallest delays count: later messages waited for a step or were predicted badly.
SHORTER_WEIGHT, LONGER_WEIGHT = 0.25, 0.01
# Of how much later than predicted first tokens come, the mean counts, within these bounds.
MOST_LATE_S, LATE_WEIGHT = 0.5, 0.1


def prompt_window_tokens(
    profile: Profile,
    running: int,
    context_tokens: int,
    step_tokens: int = 0,
    dispatch_s: float = 0.0,
) -> float:
    """Prompt tokens that the next steps of a batch of `running` can take.

    `context_tokens` are held by the whole batch, `step_tokens` is the engine's own limit of prompt
    tokens per step (0: none), `dispatch_s` the message delay between router and engine.
    """
    token_s = profile.prompt_token_s
    if token_s <= 0.0:
        return inf
    batch = max(1, running)
    step_s = profile.decode_step_s(batch, context_tokens / batch)
    steps_s = min(BUDGETS_AHEAD * step_tokens * token_s, MOST_STEPS * step_s)
    window_s = max(steps_s, LEAST_STEPS * step_s) + profile.latency_s + dispatch_s
    return window_s / token_s


def takes_prompt(replica: ReplicaView, invocation: Invocation) -> bool:
    """Whether the invocation's prompt fits into the window.

    A first prompt always fits. So does a session's turn where the engine computes short prompts
    beside long ones: its context is nowhere else.
    """
    ahead_tokens = replica.prompt_tokens_ahead
    if not ahead_tokens or (replica.mixes_prompts and invocation.session):
        return True
    uncached_tokens = invocation.prompt_tokens - replica.usable_tokens(invocation)
    if replica.mixes_prompts:
        ahead_tokens = min(ahead_tokens, replica.prefilling * uncached_tokens)
    window_tokens = prompt_window_tokens(
        replica.profile,
        replica.held,
        replica.context_tokens,
        replica.step_tokens,
        replica.dispatch_s,
    )
    return ahead_tokens + uncached_tokens <= window_tokens


def wait_for_prompts_s(replica: ReplicaView, own_s: float) -> float:
    """How long the prompts ahead delay a prompt that takes `own_s`: engines that compute prompts
    beside each other give each as much time."""
    if not replica.mixes_prompts:
        return replica.prompts_ahead_s
    return min(replica.prompts_ahead_s, replica.prefilling * own_s)


def learnt_dispatch_s(known_s: float, sample_s: float) -> float:
    """The message delay after a first token that came `sample_s` later than predicted."""
    sample_s = min(MAX_DISPATCH_S, max(0.0, sample_s))
    weight = SHORTER_WEIGHT if sample_s < known_s else LONGER_WEIGHT
    return known_s + weight * (sample_s - known_s)


def learnt_late_s(known_s: float, sample_s: float) -> float:
    """How much later than predicted first tokens come, after one that was late by `sample_s`.

    Negative if they come sooner. Includes what a prompt's own time does not: the step that runs
    when it arrives, prompts beside it, and messages.
    """
    sample_s = min(MOST_LATE_S, max(-MOST_LATE_S, sample_s))
    return known_s + LATE_WEIGHT * (sample_s - known_s)
