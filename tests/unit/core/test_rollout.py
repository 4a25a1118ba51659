"""Rollouts: who gets the canary, what is compared, and what the rule makes of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.errors import InputError, UnknownNameError
from cato.core.ids import RunId, TaskName
from cato.core.receipt import Drawn, Excuse, SlaReceipt, TrafficArm
from cato.core.rollout import Phase, Rollout
from cato.core.rollout_book import (
    SHOWN,
    PromoteRollout,
    RollBackRollout,
    RolloutBook,
    StartRollout,
)
from cato.core.rollout_rule import (
    Advance,
    ArmCounts,
    RollBack,
    RolloutRule,
    Stay,
    compared,
    counted,
    judged,
)

QUICK = RolloutRule(shadow_share=0.0, hold_s=0.0)


def a_receipt(*, ttft_s: float | None = 0.2, **changed: object) -> SlaReceipt:
    plain = SlaReceipt(
        request_id=RunId("r"), task=TaskName("model:coder"), status="done", metric="ttft",
        target_s=1.0, achieved_s=ttft_s, met=True, ttft_s=ttft_s, tpot_s=0.01, e2e_s=1.0,
        output_tokens=9, queue_s=0.0, overhead_s=0.0, simulated=True, nodes=(), path=(),
    )  # fmt: skip
    return replace(plain, **changed)


def an_arm(
    calls: int, *, missed: int = 0, failed: int = 0, ttft_s: float = 0.2, spread: float = 0.3
) -> ArmCounts:
    """So many calls; their TTFTs lie evenly around `ttft_s`."""
    logs = [math.log(ttft_s) + spread * (2 * i / max(1, calls - 1) - 1) for i in range(calls)]
    return ArmCounts(
        calls, failed, calls, calls - missed, calls, sum(logs), sum(x * x for x in logs)
    )


def a_rollout(rule: RolloutRule = QUICK) -> Rollout:
    return Rollout.started("coder", "coder-1", "coder-2", rule, now_s=100.0)


def all_ready(_: str) -> bool:
    return True


# Who gets it


@given(st.text(max_size=30))
def test_a_session_that_has_the_canary_keeps_it_while_the_share_grows(session: str) -> None:
    small = a_rollout()
    large = small.promoted(200.0, "")
    if small.draw(session, all_ready)[0] == "coder-2":
        assert large.draw(session, all_ready)[0] == "coder-2"
    assert large.promoted(300.0, "").draw(session, all_ready) == ("coder-2", None)


def test_the_canary_has_its_share_of_the_sessions() -> None:
    drawn = [a_rollout().draw(f"s{i}", all_ready)[0] for i in range(20_000)]
    assert abs(drawn.count("coder-2") / 20_000 - 0.05) < 0.005


def test_every_ingress_draws_alike_from_what_the_store_kept() -> None:
    one, other = a_rollout(), a_rollout()
    sessions = [f"s{i}" for i in range(200)]
    assert [one.draw(s, all_ready) for s in sessions] == [
        other.draw(s, all_ready) for s in sessions
    ]


def test_a_canary_that_is_not_there_leaves_its_sessions_to_the_stable_model() -> None:
    rollout = a_rollout(replace(QUICK, shares=(0.999,)))
    assert rollout.draw("s", lambda m: m != "coder-2") == ("coder-1", None)
    states = {"coder": True, "coder-2": False}
    assert rollout.draw("s", states.get) == ("coder", None)


def test_a_rollout_that_was_rolled_back_serves_the_stable_model_alone() -> None:
    back = a_rollout().rolled_back(200.0, "")
    assert {back.draw(f"s{i}", all_ready) for i in range(100)} == {("coder-1", None)}


def test_shadow_traffic_changes_nobodys_model() -> None:
    rollout = a_rollout(replace(QUICK, shadow_share=0.5))
    assert rollout.phase is Phase.SHADOW
    drawn = [rollout.draw(f"s{i}", all_ready) for i in range(100)]
    assert {(m, d.arm) for m, d in drawn if d} == {("coder-1", TrafficArm.STABLE)}
    copies = sum(rollout.is_shadowed(f"call {i}") for i in range(10_000))
    assert abs(copies / 10_000 - 0.5) < 0.02


# What is counted


def test_a_run_that_nobody_waited_for_counts_nothing() -> None:
    drawn = Drawn("coder", 1, 0, TrafficArm.CANARY)
    gone = a_receipt(status="cancelled", met=False, excuse=Excuse.CLIENT_LEFT)
    assert counted(gone, drawn) == ArmCounts()


def test_an_answer_of_the_stable_model_is_the_canarys_error() -> None:
    drawn = Drawn("coder", 1, 0, TrafficArm.CANARY, fell_back=True)
    assert counted(a_receipt(), drawn) == ArmCounts(calls=1, errors=1, promised=1)


def test_a_refused_body_is_an_error_but_no_miss() -> None:
    drawn = Drawn("coder", 1, 0, TrafficArm.CANARY)
    refused = a_receipt(status="failed", met=False, ttft_s=None, excuse=Excuse.CLIENT_ERROR)
    assert counted(refused, drawn) == ArmCounts(calls=1, errors=1)


def test_runs_of_an_earlier_step_say_nothing_of_this_one() -> None:
    first = a_rollout()
    late = Drawn("coder", first.id, 0, TrafficArm.CANARY)
    second = first.promoted(200.0, "")
    assert second.seen(late, an_arm(5)) == second
    assert first.seen(late, an_arm(5)).canary_counts.calls == 5


# The rule


def test_a_canary_that_is_as_good_goes_on() -> None:
    assert isinstance(judged(QUICK, an_arm(8000), an_arm(420), 0.0), Advance)


def test_too_few_calls_decide_nothing() -> None:
    assert isinstance(judged(QUICK, an_arm(8000), an_arm(20), 0.0), Stay)
    assert isinstance(judged(QUICK, an_arm(50), an_arm(420), 0.0), Stay)
    assert isinstance(judged(QUICK, ArmCounts(), ArmCounts(), 0.0), Stay)


def test_a_good_step_is_held_for_its_time() -> None:
    rule = replace(QUICK, hold_s=600.0)
    assert isinstance(judged(rule, an_arm(8000), an_arm(420), 599.0), Stay)
    assert isinstance(judged(rule, an_arm(8000), an_arm(420), 600.0), Advance)


@pytest.mark.parametrize(
    ("canary", "word"),
    [
        (an_arm(40, missed=18), "SLO misses"),
        (an_arm(40, failed=18), "errors"),
        (an_arm(20, ttft_s=0.4), "TTFT"),
        (ArmCounts(8, errors=8), "errors"),
    ],
)
def test_a_canary_that_is_surely_worse_is_rolled_back_before_it_has_many_calls(
    canary: ArmCounts, word: str
) -> None:
    found = judged(replace(QUICK, hold_s=600.0), an_arm(800), canary, 1.0)
    assert isinstance(found, RollBack)
    assert word in found.reason


def test_a_better_canary_is_not_rolled_back() -> None:
    found = judged(QUICK, an_arm(2000, missed=400, failed=100), an_arm(420, ttft_s=0.1), 0.0)
    assert isinstance(found, Advance)


def test_completions_that_are_taken_less_often_are_a_reason() -> None:
    stable = replace(an_arm(8000), shown=1000, taken=400)
    worse = replace(an_arm(600), shown=400, taken=80)
    assert isinstance(judged(QUICK, stable, worse, 0.0), RollBack)
    few = replace(an_arm(600), shown=QUICK.min_shown - 1, taken=0)
    assert isinstance(judged(QUICK, stable, few, 0.0), Advance)


def test_a_canary_that_is_never_known_to_be_as_good_is_rolled_back() -> None:
    rule = replace(QUICK, max_calls=500, error_limit=0.001)
    assert isinstance(judged(rule, an_arm(8000), an_arm(499), 0.0), Stay)
    found = judged(rule, an_arm(8000), an_arm(500), 0.0)
    assert isinstance(found, RollBack)
    assert "not known to be as good" in found.reason


def test_an_equal_canary_is_seldom_rolled_back_though_every_call_is_looked_at() -> None:
    rule, wrong = replace(QUICK, max_calls=10**9), 0
    for seed in range(20):
        draw = random.Random(seed)
        stable = canary = ArmCounts()
        for _ in range(300):
            for _ in range(9):
                stable = stable.plus(_a_call(draw))
            canary = canary.plus(_a_call(draw))
            found = judged(rule, stable, canary, 0.0)
            wrong += isinstance(found, RollBack)
            if not isinstance(found, Stay):
                break
    assert wrong <= 1


def _a_call(draw: random.Random) -> ArmCounts:
    ttft_s = draw.lognormvariate(math.log(0.2), 0.5)
    status = "failed" if draw.random() < 0.01 else "done"
    receipt = a_receipt(ttft_s=ttft_s, met=draw.random() < 0.95, status=status)
    return counted(receipt, Drawn("coder", 1, 0, TrafficArm.STABLE))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw, held = random.Random(5), 0
    for _ in range(300):
        misses = [sum(draw.random() < p for _ in range(150)) for p in (0.1, 0.15)]
        stable, canary = (an_arm(150, missed=n) for n in misses)
        (measure,) = (m for m in compared(stable, canary, QUICK) if m.name == "SLO misses")
        held += measure.low <= 0.05 <= measure.high
    assert held / 300 > 0.92


# Steps


def test_steps_lead_from_the_shadow_to_all_sessions() -> None:
    rollout = a_rollout(replace(QUICK, shadow_share=0.1))
    seen = [(rollout.phase, rollout.share)]
    for n in range(3):
        rollout = rollout.promoted(200.0 + n, "as good")
        seen.append((rollout.phase, rollout.share))
    assert seen == [
        (Phase.SHADOW, 0.0), (Phase.CANARY, 0.05), (Phase.CANARY, 0.25), (Phase.PROMOTED, 1.0),
    ]  # fmt: skip
    assert [c.share for c in rollout.history] == [0.0, 0.05, 0.25, 1.0]


def test_the_book_moves_a_rollout_by_its_rule_and_once() -> None:
    book = RolloutBook()
    started = book.order(StartRollout("coder", "coder-1", "coder-2", QUICK), 100.0)
    arms = (TrafficArm.STABLE, an_arm(8000)), (TrafficArm.CANARY, an_arm(420))
    for arm, counts in arms:
        book.count(Drawn("coder", started.id, 0, arm), counts)
    assert [r.share for r in book.judge(101.0)] == [0.25]
    assert book.judge(102.0) == ()
    assert book.all["coder"].canary_counts == ArmCounts()


def test_a_rollout_on_top_of_a_promoted_one_keeps_what_is_stable_now() -> None:
    book = RolloutBook()
    book.order(StartRollout("coder", "coder-1", "coder-2", QUICK), 100.0)
    with pytest.raises(InputError, match="under way"):
        book.order(StartRollout("coder", "coder-1", "coder-3", QUICK), 101.0)
    for n in range(2):
        book.order(PromoteRollout("coder"), 102.0 + n)
    with pytest.raises(InputError, match="promoted already"):
        book.order(PromoteRollout("coder"), 105.0)
    with pytest.raises(InputError, match="served by 'coder-2' already"):
        book.order(StartRollout("coder", "coder-1", "coder-2", QUICK), 106.0)
    third = book.order(StartRollout("coder", "coder-1", "coder-3", QUICK), 107.0)
    assert (third.stable, third.canary) == ("coder-2", "coder-3")
    back = book.order(RollBackRollout("coder"), 108.0)
    assert back.draw("s", all_ready)[0] == "coder-2"
    with pytest.raises(UnknownNameError):
        book.order(RollBackRollout("other"), 109.0)


def test_a_promoted_rollout_can_still_be_taken_back() -> None:
    book = RolloutBook()
    book.order(StartRollout("coder", "coder-1", "coder-2", replace(QUICK, shares=(0.5,))), 100.0)
    assert book.order(PromoteRollout("coder"), 101.0).share == 1.0
    assert book.order(RollBackRollout("coder"), 102.0).draw("s", all_ready)[0] == "coder-1"


def test_an_order_that_comes_again_goes_one_step_only() -> None:
    """HAProxy sends a request again whose ingress died before its answer."""
    book = RolloutBook()
    started = book.order(StartRollout("coder", "coder-1", "coder-2", QUICK), 100.0)
    order = PromoteRollout("coder", stage=started.stage)
    promoted = book.order(order, 101.0)
    assert (promoted.stage, promoted.share) == (started.stage + 1, QUICK.shares[1])
    assert book.order(order, 102.0) is promoted


def test_what_is_restored_does_not_overwrite_what_is_newer() -> None:
    book = RolloutBook()
    newer = book.order(StartRollout("coder", "coder-1", "coder-2", QUICK), 100.0)
    other = replace(newer, name="other")
    book.restore([replace(newer, canary="old"), other])
    assert book.all == {"coder": newer, "other": other}
    book.count(Drawn("coder", newer.id, 0, TrafficArm.CANARY), SHOWN)
    assert book.all["coder"].canary_counts.shown == 1
