"""What is left of a call's SLO once it has lost its slot or its replica."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from kits.builders import an_invocation

from cato.core.length import LengthBelief
from cato.core.snapshot import READING_S, Invocation

STREAM = replace(
    an_invocation(tokens=100, deadline_s=10.0, until_first_token=True),
    tpot_target_s=0.05,
    length=LengthBelief((100.0,)),
)


def test_the_tokens_become_part_of_the_prompt() -> None:
    rest = STREAM.continued(2, 30)
    assert (rest.attempt, rest.prompt_tokens, rest.expected_tokens) == (2, 130, 70)
    assert rest.generated == 30
    assert rest.continued(3, 70).expected_tokens == 1


@pytest.mark.parametrize(
    ("call", "began_at_s", "due_s"),
    [
        pytest.param(STREAM, 8.0, 8.0 + 0.05 * 99, id="its pace, from its start"),
        pytest.param(replace(STREAM, tpot_target_s=inf), 8.0, 8.0 + READING_S * 99, id="a reader"),
        pytest.param(replace(STREAM, tpot_target_s=1.0), 8.0, 8.0 + 1.0 * 99, id="a slow one"),
        pytest.param(STREAM, 10.5, 10.0, id="it began too late"),
        pytest.param(replace(STREAM, deadline_s=inf), 8.0, inf, id="no SLO"),
    ],
)
def test_a_stream_that_has_begun_must_end_at_its_pace(
    call: Invocation, began_at_s: float, due_s: float
) -> None:
    rest = call.continued(2, 30, began_at_s)
    assert not rest.until_first_token
    assert rest.deadline_s == pytest.approx(due_s)
    again = rest.continued(3, 20, began_at_s + 3.0)  # of the second attempt
    assert (again.generated, again.deadline_s) == (50, rest.deadline_s)


def test_a_stream_that_has_not_begun_keeps_its_deadline() -> None:
    rest = STREAM.continued(2, 0)
    assert rest.until_first_token
    assert rest.deadline_s == 10.0


def test_an_output_of_unknown_length_that_has_outgrown_its_guess_goes_on() -> None:
    call = replace(STREAM, length=None)
    assert (call.left_tokens(), call.left_tokens(80), call.left_tokens(200)) == (100, 100, 200)
