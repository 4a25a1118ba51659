"""What an ingress replica believes about the length of an answer before it begins."""

from __future__ import annotations

from collections.abc import Callable

from cato.core.ids import NodeId, TaskName
from cato.core.length import LengthBelief
from cato.core.receipt import SlaReceipt
from cato.core.record import record
from cato.estimators.output_lengths import STOPPED, samples_of
from cato.estimators.prompt_features import EarlierAnswers, asked_of, features_of
from cato.serve.prompts import EngineCall


@record
class Predicted:
    """A call's features, and the belief that they give (None: unknown)."""

    features: tuple[float, ...] = ()
    length: LengthBelief | None = None


Lengths = Callable[[TaskName, NodeId, EngineCall], Predicted]
"""Predicts the output length of a run's call."""
Belief = Callable[[TaskName, NodeId, str, tuple[float, ...], int], LengthBelief | None]
"""A belief from (task, node, model, features, max tokens)."""


@record
class Asker:
    """Who makes a run's calls: a session, or else a user; and how often it was answered before."""

    name: str = ""
    turn: int = 0


class LengthPredictor:
    """Predicts lengths from a call and from earlier answers to the same session or user.

    One per ingress replica, which knows only the answers that it has sent itself.
    """

    def __init__(self, belief: Belief) -> None:
        self._belief = belief
        self._earlier = EarlierAnswers()

    def predicted(self, asker: Asker, task: TaskName, node: NodeId, call: EngineCall) -> Predicted:
        """Raise `InputError` for a body without a valid last message."""
        if not call.endpoint.generates:
            return Predicted()
        earlier = self._earlier.of(task, node, asker.name)
        asked = asked_of(call.endpoint, call.body, call.prompt_tokens, asker.turn, earlier)
        features = features_of(asked)
        return Predicted(features, self._belief(task, node, call.model, features, call.max_tokens))

    def learn(self, asker: Asker, receipt: SlaReceipt) -> None:
        """Remember how long the answers of a run were."""
        for sample in samples_of(receipt):
            if sample.finish_reason != STOPPED:
                self._earlier.add(sample.task, sample.node, asker.name, sample.output_tokens)
