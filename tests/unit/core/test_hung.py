"""Which silence of an engine means that it hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cato.core.hung import HungRule, Signs, Silence
from cato.core.profile import UNMEASURED

RULE = HungRule(replace(UNMEASURED, decode_base_s=0.5, decode_per_request_s=0.0))
NO_SIGN = Signs(answered=False, counted=False, working=0.0)


def a_silence(
    silent_s: float, *, running: int = 1, prompt_tokens: int = 0, lifeless_s: float = 0.0
) -> Silence:
    return Silence(silent_s, running, prompt_tokens, lifeless_s)


@pytest.mark.parametrize(("silent_s", "due"), [(9.9, False), (10.0, True)])
def test_an_engine_is_asked_after_a_multiple_of_its_step(silent_s: float, due: bool) -> None:
    assert RULE.is_due(a_silence(silent_s)) is due


def test_an_engine_that_computes_a_long_prompt_is_given_its_time() -> None:
    prompt_s = UNMEASURED.first_token_s(30_000)
    rule = HungRule()
    assert not rule.is_due(a_silence(19 * prompt_s, prompt_tokens=30_000))
    assert rule.is_due(a_silence(21 * prompt_s, prompt_tokens=30_000))


def test_a_fast_engine_is_not_asked_at_once_and_an_idle_one_now_and_then() -> None:
    rule = HungRule(replace(UNMEASURED, decode_base_s=0.001, decode_per_request_s=0.0))
    assert not rule.is_due(a_silence(1.9))
    assert rule.is_due(a_silence(2.0))
    assert not rule.is_due(a_silence(4.9, running=0))
    assert rule.is_due(a_silence(5.0, running=0))


def test_calls_that_come_and_go_do_not_put_off_the_question() -> None:
    rule = HungRule(replace(UNMEASURED, decode_base_s=0.001, decode_per_request_s=0.0))
    assert not rule.is_due(a_silence(0.5, lifeless_s=4.9))
    hanging = a_silence(0.5, lifeless_s=6.5)
    assert rule.is_due(hanging)
    assert "no token for 6.5 s, while calls came and went" in rule.why_hung(hanging, NO_SIGN)
    assert not rule.why_hung(hanging, replace(NO_SIGN, working=0.5))
    assert rule.why_hung(replace(hanging, lifeless_s=60.0), replace(NO_SIGN, working=0.5))


def test_a_long_prompt_that_comes_after_others_were_cancelled_is_given_its_time() -> None:
    prompt_s = UNMEASURED.first_token_s(30_000)
    assert 19 * prompt_s > HungRule().idle_s
    begun = a_silence(0.5, prompt_tokens=30_000, lifeless_s=19 * prompt_s)
    assert not HungRule().is_due(begun)
    assert HungRule().is_due(replace(begun, lifeless_s=21 * prompt_s))


@pytest.mark.parametrize(
    ("signs", "silent_s", "is_hung"),
    [
        (NO_SIGN, 10.0, True),
        (replace(NO_SIGN, answered=True), 1e6, False),
        (replace(NO_SIGN, counted=True), 1e6, False),
        (replace(NO_SIGN, working=0.5), 99.0, False),
        (replace(NO_SIGN, working=0.5), 100.0, True),
        (replace(NO_SIGN, working=0.1), 10.0, True),
    ],
)
def test_only_an_engine_without_any_sign_is_given_up(
    signs: Signs, silent_s: float, is_hung: bool
) -> None:
    why = RULE.why_hung(a_silence(silent_s, running=3), signs)
    assert bool(why) is is_hung
    assert not why or "no token of 3 answers" in why


def test_an_idle_engine_that_answers_no_probe_is_given_up() -> None:
    assert "idle" in HungRule().why_hung(a_silence(6.5, running=0), NO_SIGN)
    assert not HungRule().why_hung(a_silence(6.5, running=0), replace(NO_SIGN, answered=True))


@pytest.mark.parametrize(("stopped_s", "is_hung"), [(0.9, False), (1.0, True)])
def test_a_process_that_a_signal_has_stopped_is_given_a_second(
    stopped_s: float, is_hung: bool
) -> None:
    assert bool(RULE.why_stopped(stopped_s)) is is_hung
