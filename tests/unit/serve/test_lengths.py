"""What an ingress replica believes about lengths, and from whom it learns."""

from __future__ import annotations

from math import log

import pytest
from store_kit import NODE, TASK, a_receipt, an_execution, facts

from cato.core.ids import ModelName, NodeId, TaskName
from cato.core.length import LengthBelief
from cato.engines.base import Endpoint
from cato.estimators.prompt_features import NAMES
from cato.serve.lengths import Asker, LengthPredictor
from cato.serve.prompts import EngineCall

BELIEF = LengthBelief((1.0, 2.0))
ASKED = Asker("s", turn=3)


def a_call(endpoint: Endpoint = Endpoint.COMPLETIONS) -> EngineCall:
    return EngineCall(endpoint, {"prompt": "x = 1"}, 7, 10, 100, ModelName("m"))


def test_a_belief_comes_from_the_features_that_the_receipt_keeps() -> None:
    given: list[object] = []

    def believed(
        task: TaskName, node: NodeId, model: str, features: tuple[float, ...], max_tokens: int
    ) -> LengthBelief:
        given.append((task, node, model, features, max_tokens))
        return BELIEF

    predicted = LengthPredictor(believed).predicted(ASKED, TASK, NODE, a_call())
    assert predicted.length is BELIEF
    assert given == [(TASK, NODE, "m", predicted.features, 100)]
    assert dict(zip(NAMES, predicted.features, strict=True))["turn"] == 3


def test_earlier_answers_of_a_session_are_known_to_its_next_call_alone() -> None:
    predictor = LengthPredictor(lambda *_: None)
    stopped = an_execution(llm=facts(tokens=5, reason=""), status="cancelled")
    predictor.learn(ASKED, a_receipt(an_execution(llm=facts(tokens=20)), stopped))
    at = NAMES.index("log_earlier_last")
    same, other, of_other_task = (
        predictor.predicted(asker, task, NODE, a_call()).features[at]
        for asker, task in ((ASKED, TASK), (Asker("t", turn=3), TASK), (ASKED, TaskName("u")))
    )
    assert same == pytest.approx(log(20), abs=1e-3)
    assert other == of_other_task == -1.0


def test_calls_that_generate_nothing_have_no_length() -> None:
    predicted = LengthPredictor(lambda *_: BELIEF).predicted(
        ASKED, TASK, NODE, a_call(Endpoint.EMBEDDINGS)
    )
    assert predicted.features == ()
    assert predicted.length is None
