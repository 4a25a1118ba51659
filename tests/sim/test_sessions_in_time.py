"""Targets for whole sessions, simulated: the patient ones give way to the urgent ones."""

from __future__ import annotations

from dataclasses import replace

from cato.core.ids import PoolName
from cato.core.length import LengthBelief
from cato.lab.studies import agent_fleet
from cato.policies import schedulers
from cato.sim.fleet import PoolSetup
from cato.sim.session_traces import RecordedSession, Turn
from cato.sim.sessions import Users

LARGE = agent_fleet.card_profile("large")
LENGTH = LengthBelief.of([150, 200, 250])
# 12 turns take it alone, with 5 s between them.
ALONE_S = 90.0
UNTIL_S = 1500.0
URGENT, PATIENT = 1.6, 6.0


def a_session(id: str) -> RecordedSession:
    first = Turn(0.0, 20_000, 200, 0, None, (), 0, 1280, 640, follows_tool=False)
    later = [
        replace(first, gap_s=5.0, prompt_tokens=20_000 + 800 * k, hit_tokens=19_200 + 800 * k,
                base=k - 1, after=(k - 1,), tools_tokens=0, system_tokens=0)
        for k in range(1, 12)
    ]  # fmt: skip
    return RecordedSession(id, (first, *later))


def target_s(session: RecordedSession) -> float:
    return ALONE_S * (URGENT if session.id.startswith("urgent") else PATIENT)


def in_time(kind: str, *, with_targets: bool) -> float:
    """The share of the sessions of a kind that end in time: 20 users, a card with 8 places."""
    policies = schedulers.OF_PROFILE[schedulers.FORESIGHT](LARGE, LARGE.max_running)
    pool = PoolSetup(PoolName("p"), (LARGE,), policies, 8, chunk_tokens=8192, cache_block_tokens=64)
    sessions = [a_session(f"{kind}-{n}") for n in range(10) for kind in ("urgent", "patient")]
    users = Users(
        sessions, 20, pool, LENGTH, seed=1, session_target_s=target_s if with_targets else None
    )
    users.run(UNTIL_S)
    played = [s for s in users.sessions if s.recorded.id.startswith(kind)]
    return sum(s.ended_at_s - s.began_at_s <= target_s(s.recorded) for s in played) / len(played)


def test_urgent_sessions_end_in_time_more_often_and_patient_ones_no_less() -> None:
    assert in_time("urgent", with_targets=True) > in_time("urgent", with_targets=False) + 0.1
    assert in_time("patient", with_targets=True) == 1.0
