"""Plans of users: the turns that each plays, independent of policies and delays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from cato.core.profile import Profile
from cato.sim.playing import Playing
from cato.sim.session_traces import MAX_GAP_S, RecordedSession

BETWEEN_SESSIONS_S = 30.0
# Users start at different times.
FIRST_ARRIVALS_S = 60.0
# Quantile of planned turns; one in a hundred is longer.
LONGEST_ANSWER_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """The turns of one session that a user plays, from `first` on.

    `number` names the session and its own blocks of prompts. `begins_s`: when the turns from
    `first` on would begin if each had the replica alone.
    """

    recorded: RecordedSession
    number: int
    first: int
    begins_s: tuple[float, ...]

    def play(self, now_s: float, then: Callable[[], None]) -> Playing:
        return Playing(self.recorded, self.number, now_s, inf, then, self.first)


@dataclass(frozen=True, slots=True)
class UserPlan:
    """A user's turns, independent of policies and delays: runs compare turn by turn."""

    start_s: float
    parts: tuple[PlannedSession, ...]


def plans_of(
    sessions: Sequence[RecordedSession],
    users: int,
    profile: Profile,
    until_s: float,
    seed: int,
    scale: float = 1.0,
) -> list[UserPlan]:
    """For each user the turns that begin by `until_s` when each has a replica alone.

    Users start in the middle of a session. `scale` multiplies all times except those of the
    profile, which is scaled already.
    """
    rng = np.random.default_rng([seed, users, 3])
    known = [s for s in (s.within(profile.context_tokens) for s in sessions) if s.turns]
    plans, number = [], 0
    for start_s in rng.uniform(0.0, min(FIRST_ARRIVALS_S, until_s / scale), users):
        parts: list[PlannedSession] = []
        now_s = scale * float(start_s)
        for i in rng.permutation(len(known)):
            number += 1
            first = 0 if parts else int(rng.integers(len(known[i].turns)))
            part, now_s = _planned(known[i], number, first, profile, (now_s, until_s), scale)
            if not part.begins_s:
                break
            parts.append(part)
            now_s += scale * BETWEEN_SESSIONS_S
        plans.append(UserPlan(scale * float(start_s), tuple(parts)))
    return plans


def _planned(
    recorded: RecordedSession,
    number: int,
    first: int,
    profile: Profile,
    between_s: tuple[float, float],
    scale: float,
) -> tuple[PlannedSession, float]:
    """The turns of a session that begin in time, and when the last one has its answer."""
    start_s, until_s = between_s
    turns = tuple(
        replace(
            t,
            gap_s=scale * min(MAX_GAP_S, t.gap_s),
            output_tokens=min(t.output_tokens, LONGEST_ANSWER_TOKENS),
        )
        for t in recorded.turns
    )
    ends_s: dict[int, float] = {}
    begins_s: list[float] = []
    for i, turn in enumerate(turns[first:], first):
        awaited = [ends_s[j] for j in turn.after if j in ends_s]
        begin_s = max(awaited) + turn.gap_s if awaited else start_s
        if begin_s >= until_s:
            break
        cached = min(turn.hit_tokens, turn.prompt_tokens - 1) if i > first else 0
        alone_s = profile.service_s(turn.prompt_tokens, turn.output_tokens, 1, cached)
        ends_s[i] = begin_s + alone_s
        begins_s.append(begin_s)
    kept = RecordedSession(recorded.id, turns[: first + len(begins_s)])
    return PlannedSession(kept, number, first, tuple(begins_s)), max(ends_s.values(), default=0.0)
