"""Who gives way under the default policy: what is lost, and what can wait for what cannot."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from kits.builders import a_profile, an_invocation

from cato.core.ids import DeploymentName, InvocationId, ReplicaId
from cato.core.length import LengthBelief
from cato.core.policies import QueueLoad
from cato.core.snapshot import Invocation, ReplicaSnapshot, Running
from cato.policies.outlook import believed
from cato.policies.preemption.foresight import ForesightPreemption

# A token takes 10 ms whatever the batch, a prompt 100 ms: 100 tokens take 1.1 s.
PROFILE = a_profile(prefill_s=0.1, token_s=0.01)
POLICY = ForesightPreemption()
NOW_S = 1.0
PLACE_S = 0.5
"""When the next place of the pool is expected to be free, from now."""


def an_exchangeable(
    id: str, *, tokens: int = 100, due_s: float, downstream_s: float = 0.0, resumable: bool = True
) -> Invocation:
    invocation = an_invocation(id, tokens=tokens, deadline_s=due_s, downstream_s=downstream_s)
    return replace(invocation, resumable=resumable)


def a_full_replica(
    *running: Invocation, slots: int | None = None, tokens: int = 0
) -> ReplicaSnapshot:
    """Each has been running since its prompt was done at 0 s, with that many tokens reported."""
    return ReplicaSnapshot(
        ReplicaId("r"),
        DeploymentName("d"),
        PROFILE,
        held=len(running),
        max_running=slots or len(running),
        standby=0,
        running=tuple(Running(i, 0.0, 1.0, tokens, 0.0) for i in running),
    )


def gives_way(
    replica: ReplicaSnapshot,
    *waiting: Invocation,
    place_s: float = PLACE_S,
    ahead_s: float = 0.0,
    rest_s: float = 0.0,
    crowded_s: float = 0.0,
    missed: float = 0.0,
    in_vain: float = 0.0,
) -> list[str]:
    load = QueueLoad(ahead_s, rest_s, crowded_s, missed, in_vain, lambda _: rest_s)
    found = POLICY.preempt(replica, waiting, NOW_S, lambda: place_s, load)
    return [id for id, _ in found]


# What runs needs 1 s more: due at 20 s it can wait, due at 2.2 s it cannot. A newcomer of
# 100 tokens needs 1.1 s: due at 2.3 s it is in time at once, but not half a second later.
PATIENT = an_exchangeable("patient", due_s=20.0)
PRESSED = an_exchangeable("pressed", due_s=2.2)
URGENT = an_exchangeable("urgent", due_s=2.3)


def test_what_can_wait_gives_its_place_to_what_cannot() -> None:
    assert gives_way(a_full_replica(PATIENT), URGENT) == ["patient"]
    (_, why), *_ = POLICY.preempt(a_full_replica(PATIENT), [URGENT], NOW_S, lambda: PLACE_S)
    assert why == "can wait 0.50 s for a place, urgent cannot: 0.78 SLOs more"


@pytest.mark.parametrize(
    ("runs", "waits", "place_s"),
    [
        pytest.param(PRESSED, URGENT, PLACE_S, id="neither can wait"),
        pytest.param(PATIENT, an_exchangeable("w", due_s=20.0), PLACE_S, id="both can wait"),
        pytest.param(PATIENT, URGENT, 0.1, id="a place is free in time"),
        pytest.param(PATIENT, URGENT, 0.0, id="a place is free now"),
        pytest.param(PATIENT, an_exchangeable("w", due_s=1.9), PLACE_S, id="late at any rate"),
        pytest.param(PATIENT, an_exchangeable("w", due_s=inf), PLACE_S, id="no SLO waits"),
        pytest.param(an_exchangeable("r", due_s=inf), URGENT, PLACE_S, id="no SLO runs"),
        pytest.param(
            an_exchangeable("r", due_s=20.0, resumable=False), URGENT, PLACE_S, id="cannot go on"
        ),
    ],
)
def test_nobody_changes_places_without_gain(
    runs: Invocation, waits: Invocation, place_s: float
) -> None:
    assert gives_way(a_full_replica(runs), waits, place_s=place_s) == []


def test_a_call_that_is_longer_than_believed_is_never_sure_to_be_in_time() -> None:
    longer = replace(URGENT, generated=1000, deadline_s=2.2, length=LengthBelief((100.0,)))
    assert gives_way(a_full_replica(PATIENT), longer) == ["patient"]


def test_what_goes_on_later_must_be_able_to_wait_once_more() -> None:
    """It needs 1.1 s after half a second, but calls that come meanwhile go first."""
    soon = an_exchangeable("soon", due_s=3.0)
    assert gives_way(a_full_replica(soon), URGENT) == []
    assert gives_way(a_full_replica(replace(soon, deadline_s=4.5)), URGENT) == ["soon"]


def test_a_context_that_takes_long_to_process_again_costs_others_their_time() -> None:
    """The newcomer needs 1.2 s, so 1.1 s of processing again is hardly less."""
    for context_s, gives in ((0.4, ["patient"]), (1.0, [])):
        profile = a_profile(token_s=0.01, prefill_token_s=context_s / PATIENT.prompt_tokens)
        newcomer = replace(URGENT, prompt_tokens=1, expected_tokens=110)
        replica = replace(a_full_replica(PATIENT), profile=profile)
        assert gives_way(replica, newcomer) == gives


def test_nobody_changes_places_while_there_is_room() -> None:
    assert gives_way(a_full_replica(PATIENT, slots=2), URGENT) == []


def test_the_most_patient_of_a_batch_gives_way() -> None:
    assert gives_way(a_full_replica(PRESSED, PATIENT), URGENT) == ["patient"]


def test_the_place_would_go_to_the_first_of_the_queue() -> None:
    can_wait = an_exchangeable("can-wait", due_s=20.0)
    assert gives_way(a_full_replica(PATIENT), URGENT, can_wait) == ["patient"]
    assert gives_way(a_full_replica(PATIENT), can_wait, URGENT) == []


def test_in_a_long_queue_only_short_calls_change_places() -> None:
    """What yields must still be served in time, and pushes out one of those that wait."""
    longer = an_exchangeable("longer", tokens=1_000, due_s=20.0)
    assert gives_way(a_full_replica(PATIENT), *[URGENT] * 7) == ["patient"]
    assert gives_way(a_full_replica(PATIENT), *[URGENT] * 8) == []
    assert gives_way(a_full_replica(PATIENT), *[URGENT] * 7, longer) == ["patient"]
    assert (
        gives_way(a_full_replica(PATIENT), *[URGENT] * 7, replace(longer, expected_tokens=120))
        == []
    )


def test_a_call_whose_task_is_decided_downstream_gains_little() -> None:
    # Its own second decides a tenth of what the task still takes.
    inner = an_exchangeable("inner", due_s=12.3, downstream_s=10.0)
    assert gives_way(a_full_replica(PATIENT), inner) == []


def test_the_first_token_counts_where_the_slo_is_on_it() -> None:
    stream = replace(an_exchangeable("stream", due_s=1.3), until_first_token=True)
    assert gives_way(a_full_replica(PATIENT), stream) == ["patient"]


STREAM = replace(an_exchangeable("stream", due_s=0.5), until_first_token=True)
# What it has still to do takes at least ten times as long as to process its context again.
LONG = replace(STREAM, expected_tokens=150)


@pytest.mark.parametrize(
    ("runs", "tokens", "queue", "is_paused"),
    [
        pytest.param(STREAM, 20, 1, True, id="reads on in time"),
        pytest.param(STREAM, 20, 8, True, id="behind a queue that its pace allows"),
        pytest.param(replace(STREAM, session="s"), 20, 1, False, id="its context would be lost"),
        pytest.param(replace(STREAM, resumable=False), 20, 1, False, id="cannot go on"),
        pytest.param(STREAM, 0, 1, False, id="has not begun"),
        pytest.param(replace(LONG, tpot_target_s=0.04), 20, 1, True, id="keeps its own pace"),
        pytest.param(replace(LONG, tpot_target_s=0.015), 20, 1, False, id="would lose its pace"),
        pytest.param(an_exchangeable("no SLO", due_s=inf), 20, 8, True, id="no SLO"),
        pytest.param(an_exchangeable("no SLO", due_s=inf), 0, 1, False, id="no SLO, not begun"),
    ],
)
def test_a_stream_that_keeps_its_pace_is_paused_for_one_that_would_begin_too_late(
    runs: Invocation, tokens: int, queue: int, *, is_paused: bool
) -> None:
    # 100 tokens at a reader's pace take 10 s; they need 1 s.
    waiting = [replace(STREAM, id=InvocationId(f"w{n}"), deadline_s=1.3) for n in range(queue)]
    found = gives_way(a_full_replica(runs, tokens=tokens), *waiting)
    assert found == ([runs.id] if is_paused else [])


def test_a_stream_with_a_reader_is_not_paused_for_long() -> None:
    """Of those that rest, it goes on halfway between the first and the last."""
    replica, waiting = a_full_replica(STREAM, tokens=20), replace(STREAM, deadline_s=1.3)
    assert gives_way(replica, waiting, rest_s=14.0) == ["stream"]
    assert gives_way(replica, waiting, rest_s=18.0) == []


def test_a_stream_whose_pace_is_an_slo_may_be_the_last_to_go_on() -> None:
    # Each token makes up for 30 ms; nine in ten answers have 85 more, so up to 2.5 s.
    replica = a_full_replica(replace(LONG, tpot_target_s=0.04), tokens=20)
    waiting = replace(STREAM, deadline_s=1.3)
    assert gives_way(replica, *[waiting] * 8, rest_s=2.1) == ["stream"]
    assert gives_way(replica, *[waiting] * 8, rest_s=2.4) == []


def test_only_what_must_go_on_sooner_goes_before_a_stream_whose_pace_is_an_slo() -> None:
    replica = a_full_replica(replace(LONG, tpot_target_s=0.04), tokens=20)
    asked_for: list[float] = []

    def rest_before_s(latest_s: float) -> float:
        asked_for.append(latest_s)
        return 2.1

    load = QueueLoad(rest_s=60.0, rest_before_s=rest_before_s)
    waiting = [replace(STREAM, deadline_s=1.3)] * 8
    ((id, _),) = POLICY.preempt(replica, waiting, NOW_S, lambda: PLACE_S, load)
    assert id == "stream"
    # After the first token, at 0 s, each has 40 ms.
    left_tokens = believed(LONG).left_mean(20)
    due_s = 0.04 * (20 + left_tokens - 1)
    assert asked_for[0] == pytest.approx(due_s - 0.01 * left_tokens)


@pytest.mark.parametrize(("due_s", "rests"), [(9.0, ["stream"]), (2.5, [])])
def test_a_stream_may_rest_again_while_it_keeps_its_pace(due_s: float, rests: list[str]) -> None:
    rest = replace(LONG, tpot_target_s=0.04).continued(2, 20, began_at_s=0.0)
    replica = a_full_replica(replace(rest, deadline_s=due_s), tokens=20)
    waiting = replace(STREAM, deadline_s=1.3)
    assert gives_way(replica, *[waiting] * 8, rest_s=0.5) == rests


def test_a_target_pace_slower_than_a_reader_is_enough() -> None:
    replica = a_full_replica(replace(LONG, tpot_target_s=0.3), tokens=20)
    waiting = replace(STREAM, deadline_s=1.3)
    assert gives_way(replica, *[waiting] * 8, rest_s=20.0) == ["stream"]
    reader = a_full_replica(LONG, tokens=20)
    assert gives_way(reader, *[waiting] * 8, rest_s=40.0) == []


@pytest.mark.parametrize(
    ("waits", "wait_s", "rests"),
    [
        pytest.param([2.0], 2.2, ["long"], id="one for the only one that waits"),
        pytest.param([2.0, 2.0, 2.0], 2.2, ["long", "short"], id="as many as wait, if they can"),
        pytest.param([2.0, 1.05], 2.2, ["long"], id="not for one that is late at any rate"),
        pytest.param([2.0], 1.8, [], id="no crowd"),
    ],
)
def test_in_a_crowd_streams_rest_even_if_the_first_could_wait_for_a_place(
    waits: list[float], wait_s: float, rests: list[str]
) -> None:
    # The first came with 2 s of slack.
    queued = [
        replace(STREAM, id=InvocationId(f"w{n}"), deadline_s=due_s, arrived_at_s=-0.1)
        for n, due_s in enumerate(waits)
    ]
    long, short, new = (
        replace(STREAM, id=InvocationId(id), expected_tokens=tokens)
        for id, tokens in (("long", 100), ("short", 60), ("new", 100))
    )
    replica = a_full_replica(long, short, new, tokens=20)
    not_begun = replace(replica.running[2], tokens=0)
    replica = replace(replica, running=(*replica.running[:2], not_begun))
    found = gives_way(replica, *queued, place_s=0.0, ahead_s=wait_s, rest_s=wait_s)
    assert found == rests
    assert gives_way(replica, *queued, place_s=0.0, ahead_s=wait_s, rest_s=18.0) == []


def test_only_streams_that_wait_make_a_crowd() -> None:
    replica = a_full_replica(STREAM, tokens=20)
    assert gives_way(replica, URGENT, place_s=0.0, ahead_s=5.0, rest_s=5.0) == []


def pauses_one(tpot_s: float, batch: int, queued: int, **load: float) -> bool:
    """Of `batch` streams with that target pace: for as many queued ones that cannot wait."""
    runs = [replace(LONG, id=InvocationId(f"r{n}"), tpot_target_s=tpot_s) for n in range(batch)]
    replica = a_full_replica(*runs, tokens=20)
    return bool(gives_way(replica, *[replace(STREAM, deadline_s=1.3)] * queued, **load))


@pytest.mark.parametrize(
    ("tpot_s", "batch", "queued", "is_paused"),
    [
        pytest.param(inf, 4, 1, True, id="no pace to keep"),
        pytest.param(0.04, 1, 1, True, id="little to compute again"),
        pytest.param(0.04, 4, 1, True, id="its context costs the batch a third of its rest"),
        pytest.param(0.04, 4, 8, True, id="a third of its rest, and a long queue"),
        pytest.param(0.04, 16, 8, False, id="more than its rest, and a long queue"),
        pytest.param(0.02, 1, 1, True, id="a risk"),
        pytest.param(0.02, 1, 8, False, id="a risk, and a long queue"),
    ],
)
def test_a_pace_that_is_an_slo_is_not_put_at_risk_in_a_long_queue(
    tpot_s: float, batch: int, queued: int, *, is_paused: bool
) -> None:
    assert pauses_one(tpot_s, batch, queued) == is_paused


@pytest.mark.parametrize(
    ("crowded_s", "batch", "rest_s", "rests"),
    [
        pytest.param(0.0, 4, 0.5, True, id="a third of its work again, in a burst"),
        pytest.param(60.0, 4, 0.5, False, id="in an overload"),
        pytest.param(60.0, 1, 0.5, True, id="a tenth of it, in an overload"),
        pytest.param(0.0, 1, 2.1, True, id="a risk, in a burst"),
        pytest.param(60.0, 1, 2.1, False, id="a risk, in an overload"),
    ],
)
def test_a_rest_may_cost_less_the_longer_calls_have_been_queued(
    crowded_s: float, batch: int, rest_s: float, *, rests: bool
) -> None:
    assert pauses_one(0.04, batch, 8, rest_s=rest_s, crowded_s=crowded_s) == rests


def how_many_give_way(tpot_s: float, **load: float) -> tuple[int, int]:
    """Of one stream with that target pace: to a single call that cannot wait, and in a crowd."""
    replica = a_full_replica(replace(LONG, tpot_target_s=tpot_s), tokens=20)
    queued = replace(STREAM, id=InvocationId("w"), deadline_s=1.3)
    to_one = gives_way(replica, queued, **load)
    crowd = replace(queued, deadline_s=2.0, arrived_at_s=-0.1)
    in_a_crowd = gives_way(replica, crowd, place_s=0.0, ahead_s=2.2, rest_s=0.5, **load)
    return len(to_one), len(in_a_crowd)


@pytest.mark.parametrize(
    ("tpot_s", "missed", "yields"), [(0.04, 0.4, 1), (0.04, 0.6, 0), (inf, 0.6, 1)]
)
def test_a_pace_that_is_an_slo_goes_on_where_most_of_the_work_is_missed(
    tpot_s: float, missed: float, yields: int
) -> None:
    """There is no time left over in which it could catch up."""
    to_one, in_a_crowd = how_many_give_way(tpot_s, missed=missed)
    assert to_one == yields
    assert in_a_crowd == yields


@pytest.mark.parametrize(
    ("tpot_s", "crowded_s", "rests"),
    [(inf, 1.0, 1), (inf, 60.0, 0), (0.04, 60.0, 1)],
)
def test_streams_do_not_rest_in_a_crowd_that_has_lasted(
    tpot_s: float, crowded_s: float, rests: int
) -> None:
    """It may last so long again that a reader would wait; a stream still yields to a single call.
    Whether rests of those with a target pace pay is measured."""
    assert how_many_give_way(tpot_s, crowded_s=crowded_s) == (1, rests)


@pytest.mark.parametrize(
    ("tpot_s", "in_vain", "rests"), [(0.04, 0.2, 1), (0.04, 0.7, 0), (inf, 0.7, 1)]
)
def test_where_rests_of_streams_with_a_target_pace_are_in_vain_these_go_on_in_a_crowd(
    tpot_s: float, in_vain: float, rests: int
) -> None:
    """The more rests were in vain, the less may the next one cost; not a rest for a single call,
    which is worth its cost."""
    assert how_many_give_way(tpot_s, in_vain=in_vain) == (1, rests)


def test_what_is_lost_gives_way_to_what_can_be_met() -> None:
    lost = an_exchangeable("lost", due_s=1.5)
    assert gives_way(a_full_replica(lost), URGENT) == ["lost"]
    assert gives_way(a_full_replica(lost), an_exchangeable("w", due_s=1.5)) == []


def test_nobody_changes_places_with_what_was_leased_before_a_restart() -> None:
    full = replace(a_full_replica(slots=1), held=1)
    assert gives_way(full, URGENT) == []


def yields_to_a_pace(*running: Invocation, tokens: int = 20, **changes: object) -> list[str]:
    """On a replica with more slots, to a stream that must keep 25 ms a token; a step takes 10 ms
    and 5 ms more for each call in it."""
    profile = replace(PROFILE, decode_per_request_s=0.005)
    replica = a_full_replica(*running, slots=64, tokens=tokens)
    replica = replace(replica, profile=profile)
    stream = replace(STREAM, id=InvocationId("s"), deadline_s=2.0, tpot_target_s=0.025)
    return gives_way(replica, replace(stream, **changes))


WITHOUT_SLO = [an_exchangeable(f"n{n}", tokens=400 - n, due_s=inf) for n in range(8)]


def test_calls_without_an_slo_leave_a_stream_its_pace_although_slots_are_free() -> None:
    # Beside eight a step takes 55 ms, beside four 35 and beside none 15.
    assert yields_to_a_pace(*WITHOUT_SLO) == [f"n{n}" for n in range(8)]
    assert yields_to_a_pace(*WITHOUT_SLO[:4]) == ["n0", "n1"], "no more than needed"
    assert yields_to_a_pace(*WITHOUT_SLO[:2]) == []


def test_calls_without_an_slo_go_on_where_nothing_is_gained() -> None:
    assert yields_to_a_pace(*WITHOUT_SLO, deadline_s=1.05) == [], "late at any rate"
    assert yields_to_a_pace(*WITHOUT_SLO, tpot_target_s=inf) == [], "it has no pace to keep"
    assert yields_to_a_pace(*WITHOUT_SLO, deadline_s=inf) == []
    assert yields_to_a_pace(*WITHOUT_SLO, tokens=0) == [], "a prompt would be in vain"
    stuck = [replace(call, resumable=False) for call in WITHOUT_SLO]
    assert yields_to_a_pace(*stuck) == []
