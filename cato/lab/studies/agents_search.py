"""The most users whose turns are in time.

The number of users is changed until 95 % of the turns are in time, at a turn rate of 0.9, with one
number and not with a larger one; the answer is interpolated between them. Turns in time alone say
too little: where a part of the users waits for minutes, their turns are late, but few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, nan
from pathlib import Path

from cato.core.profile import Profile
from cato.lab.studies.agent_fleet import REPLICAS, REPORTED, STOCK, STOCK_CARDS, Engine, cell_of
from cato.sim.report import Sample, mean_and_stderr

# The search grows or shrinks the number of users by this factor until two numbers bracket the
# answer, then narrows them down to this distance. `MOST_USERS` per accelerator is the limit.
GROWTH, CLOSE_USERS, QUICK_CLOSE_USERS, MOST_USERS = 1.3, 0.5, 1.0, 64.0
ENOUGH = 0.95
# Turns take at most 1 / 0.9 of their time alone.
LEAST_TURN_RATE = 0.9


@dataclass(frozen=True, slots=True)
class Search:
    """Finds the most users per accelerator with `goal` of the turns in time and `LEAST_TURN_RATE`,
    within `close`.
    """

    trace: Path
    card: str
    profile: Profile
    arm: str
    seed: int
    close: float = CLOSE_USERS
    goal: float = ENOUGH
    part: str = REPORTED
    has_host_memory: bool = False
    first_users: float = STOCK_CARDS["large"].users
    engine: Engine = STOCK

    def sample(self, users: float) -> Sample:
        host = self.has_host_memory
        cell = cell_of(self.card, self.profile, users, self.trace, host, self.part, self.engine)
        return cell.sample(self.arm, self.seed)


def searched(search: Search) -> list[Sample]:
    """All numbers of users that were run, as integers for the whole fleet."""
    tried: dict[float, Sample] = {}

    def is_enough(users: float) -> bool:
        if users not in tried:
            tried[users] = search.sample(users)
        return _spare(tried[users], search.goal) >= 0.0

    users = search.first_users
    is_growing = is_enough(users)
    enough, too_many = (users, nan) if is_growing else (nan, users)
    while 1 / REPLICAS < users < MOST_USERS:
        step = max(1, round(users * REPLICAS * (GROWTH - 1))) / REPLICAS
        users = users + step if is_growing else users - step
        if is_enough(users):
            enough = users
        else:
            too_many = users
        if enough < too_many:
            break
    while too_many - enough > search.close:
        middle = round((enough + too_many) / 2 * REPLICAS) / REPLICAS
        if not enough < middle < too_many:
            break
        if is_enough(middle):
            enough = middle
        else:
            too_many = middle
    return list(tried.values())


def _spare(sample: Sample, goal: float) -> float:
    """How far turns in time and turn rate are above what is asked, the closer of the two."""
    return min(sample.metrics["in_time"] - goal, sample.metrics["turn_rate"] - LEAST_TURN_RATE)


def users_in_time(
    samples: Sequence[Sample], goal: float = ENOUGH, *, is_searched: bool = False
) -> list[Sample]:
    """Users per accelerator with 95 % of turns in time and `LEAST_TURN_RATE`, interpolated between
    two numbers that were run, and the turn rate there.

    nan when all runs are above, or all below, that. Of a search it is then 0, where even the fewest
    users are late, or the most that were tried: a mean without these seeds would be too high.
    """
    curves: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    for s in samples:
        key = (str(s.setting["profile"]), s.policy, s.seed)
        users = float(s.setting["users_per_card"])
        point = (users, _spare(s, goal), s.metrics["turn_rate"])
        curves.setdefault(key, []).append(point)
    found = []
    for (card, arm, seed), points in curves.items():
        points.sort()
        crossed = rate = nan
        for (fewer, before, rate_before), (more, after, rate_after) in pairwise(points):
            if before >= 0.0 > after:
                part = before / (before - after)
                crossed = fewer + (more - fewer) * part
                rate = rate_before + (rate_after - rate_before) * part
                break
        else:
            if is_searched:
                crossed, _, rate = points[-1] if points[0][1] >= 0.0 else (0.0, nan, nan)
        metrics = {"users_in_time": crossed, "turn_rate_there": rate}
        found.append(Sample({"profile": card}, arm, seed, metrics))
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """Users that an accelerator serves, over the seeds: of a seed 0 where even the fewest users are
    late, and the most tried where these are in time.

    `tried`: users per accelerator, and the fraction of their turns in time.
    """

    users_per_card: float
    stderr: float
    turn_rate: float
    tried: tuple[tuple[float, float], ...]
    goal: float

    @property
    def is_none(self) -> bool:
        """Even the fewest users are not in time."""
        return self.users_per_card == 0.0

    @property
    def words(self) -> str:
        fewest, most = self.tried[0][0], self.tried[-1][0]
        if self.is_none:
            return f"fewer than {fewest:g}"
        if self.users_per_card == most:
            return f"more than {most:g}"
        error = "" if isnan(self.stderr) else f" ± {self.stderr:.1f}"
        return f"{self.users_per_card:.1f}{error}"

    @property
    def tried_words(self) -> str:
        return ", ".join(f"{users:g}: {100 * share:.0f} %" for users, share in self.tried)


def answer_of(samples: Sequence[Sample], goal: float, cards: int) -> Answer:
    """From the searches of one profile, whose replicas take `cards` accelerators each."""
    found = [s.metrics for s in users_in_time(samples, goal, is_searched=True)]
    users, stderr = mean_and_stderr([m["users_in_time"] / cards for m in found])
    tried: dict[float, list[float]] = {}
    for s in samples:
        users_per_card = float(s.setting["users_per_card"]) / cards
        tried.setdefault(users_per_card, []).append(s.metrics["in_time"])
    shares = tuple((n, mean_and_stderr(tried[n])[0]) for n in sorted(tried))
    rates = [m["turn_rate_there"] for m in found]
    rate, _ = mean_and_stderr([r for r in rates if not isnan(r)])
    return Answer(users, stderr, rate, shares, goal)
