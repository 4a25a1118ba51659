"""Brownout: what runs skip while their pools are full, in steps set by an operator. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cato.core.workflow import LlmSettings, Node, Workflow


@dataclass(frozen=True, slots=True)
class BrownoutStep:
    """A brownout step for runs that start with at least `queued` waiting calls per batch slot.

    They skip optional nodes, execute a repeated node at most `max_rounds` times (None: no limit),
    and call the `fallback` of a node instead of its model. Steps add up.
    """

    queued: float
    skip_optional: bool = False
    max_rounds: int | None = None
    use_fallback: bool = False


Fullness = Callable[[str], float]
"""Waiting calls per batch slot of a model's pool; infinite if no pool serves it."""


def browned(
    workflow: Workflow, steps: Sequence[BrownoutStep], fullness: Fullness
) -> tuple[Workflow, tuple[str, ...]]:
    """The reduced `workflow` for a run that starts now, and a description of each reduction.

    The fullest pool of its nodes counts; for a fallback, the pool of the node itself. A fallback
    whose own pool is as full is not used.
    """
    models = [n.settings.model for n in workflow.nodes if isinstance(n.settings, LlmSettings)]
    worst = max(map(fullness, models), default=0.0)
    reached = [step for step in steps if worst >= step.queued]
    if not reached:
        return workflow, ()
    rounds = min((s.max_rounds for s in reached if s.max_rounds is not None), default=None)
    is_skipping = any(step.skip_optional for step in reached)
    fallback_from = min((s.queued for s in steps if s.use_fallback), default=None)
    notes: list[str] = []

    def less(node: Node) -> Node:
        if is_skipping and node.optional:
            notes.append(f"brown-out: {node.id} is skipped")
            return replace(node, budget_s=0.0)
        repeat = node.repeat
        if repeat is not None and rounds is not None and rounds < repeat.max_rounds:
            notes.append(f"brown-out: {node.id} has at most {rounds} rounds")
            node = replace(node, repeat=replace(repeat, max_rounds=rounds))
        return _with_fallback(node, fallback_from, fullness, notes)

    return replace(workflow, nodes=tuple(map(less, workflow.nodes))), tuple(notes)


def _with_fallback(
    node: Node, from_queued: float | None, fullness: Fullness, notes: list[str]
) -> Node:
    settings = node.settings
    if not isinstance(settings, LlmSettings) or settings.fallback is None or from_queued is None:
        return node
    full = fullness(settings.model)
    if full < from_queued or fullness(settings.fallback) >= full:
        return node
    notes.append(f"brown-out: {node.id} asks {settings.fallback} instead of {settings.model}")
    return replace(node, settings=replace(settings, model=settings.fallback))
