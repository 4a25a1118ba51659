"""What users did with completions: shown, taken or dismissed, each counted once."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from cato.core.receipt import Drawn, SlaReceipt
from cato.core.rollout_book import SHOWN, TAKEN, RolloutBook
from cato.serve.ingress.feedback import Feedback
from cato.serve.ingress.feedback import Reaction as Kind
from cato.store.records import Reaction

# Runs that users may still react to; about 300 bytes each, as most get no reaction.
KEPT_RUNS = 4_000
# Reactions kept per request: a few choices, each shown, taken or dismissed.
KEPT_REACTIONS = 32


@dataclass(slots=True)
class _Shown:
    """What is known of a run whose answer users may react to, and their reactions."""

    task: str
    model: str
    e2e_s: float
    rollouts: tuple[Drawn, ...] = ()
    reactions: tuple[tuple[str, int, str], ...] = ()


class Reactions:
    """Matches feedback with the runs of its tenant, and counts it for their `rollouts`."""

    def __init__(self, rollouts: RolloutBook) -> None:
        self._rollouts = rollouts
        self._shown: OrderedDict[tuple[str, str], _Shown] = OrderedDict()

    def expect(self, receipt: SlaReceipt) -> None:
        """A run has ended: users may react to its answer."""
        name = (receipt.tenant, receipt.request_id)
        models = [n.llm.model for n in receipt.nodes if n.llm is not None]
        model = models[-1] if models else ""
        self._shown.pop(name, None)
        self._shown[name] = _Shown(receipt.task, model, receipt.e2e_s, receipt.rollouts)
        if len(self._shown) > KEPT_RUNS:
            self._shown.popitem(last=False)

    def take(self, feedback: Feedback) -> Reaction | None:
        """The reaction to keep; None for feedback to be dropped.

        Clients invent ids and repeat themselves. Feedback is dropped if it names no run of the
        same tenant, repeats earlier feedback, or exceeds `KEPT_REACTIONS`.
        """
        shown = self._shown.get((feedback.tenant, feedback.request_id))
        if shown is None:
            return None
        name = (feedback.reaction.value, feedback.choice, feedback.view_id)
        if name in shown.reactions or len(shown.reactions) >= KEPT_REACTIONS:
            return None
        self._count(shown, feedback.reaction)
        shown.reactions = (*shown.reactions, name)
        return Reaction(
            feedback.request_id, *name, feedback.select_kind, feedback.after_s, shown.task,
            shown.model, shown.e2e_s, time.time(), feedback.tenant,
        )  # fmt: skip

    def _count(self, shown: _Shown, kind: Kind) -> None:
        """Count each completion once as shown and once as taken."""
        counts = {Kind.VIEW: SHOWN, Kind.SELECT: TAKEN}.get(kind)
        if counts is not None and all(name != kind.value for name, _, _ in shown.reactions):
            for drawn in shown.rollouts:
                self._rollouts.count(drawn, counts)
