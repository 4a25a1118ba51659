"""Coding agents: how many users playing recorded sessions an accelerator serves in time.

The trace's sessions are sorted by SHA-256 of their ids. Constants were chosen on the first half;
the study plays the second. Turns of the first 900 s are not counted. For each profile, scheduler
and seed, the number of users is searched until 95 % of the turns are in time with one number and
not with a larger one; the answer is interpolated between them. `--users` runs those numbers
instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import isnan, nan
from pathlib import Path

import numpy as np

from cato.config.paths import resolve
from cato.core.errors import InputError
from cato.core.ids import PoolName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.lab.study import NO_POLICIES, Cell, Study, all_compared, chosen_arms
from cato.policies.schedulers import FORESIGHT
from cato.profiles.load import load_profile
from cato.sim.experiment import Options, Progress, run_all
from cato.sim.fleet import PoolSetup
from cato.sim.plots import figure, legend, lines, save
from cato.sim.report import Report, Sample, Setting, Target, compare, mean_and_stderr, summarize
from cato.sim.sessions import PlayedTurn, RecordedSession, Users, read_sessions

POOL = PoolName("agents")


@dataclass(frozen=True, slots=True)
class Card:
    """An assumed accelerator: the name of its file in `profiles/`, and whether KV blocks evicted
    from its cache go to host memory. `users`: the number that sticky routing serves, where the
    search begins. `fetches`: engines fetch blocks from each other's memories, as fast as from the
    host's.
    """

    profile: str
    users: float
    has_host_memory: bool = False
    fetches: bool = False


_LARGE, _SMALL = "reference-large-32b@gpu-80gb", "reference-small-7b@gpu-24gb"
CARDS = {
    "large": Card(_LARGE, 6.0),
    "large + host": Card(_LARGE, 11.0, has_host_memory=True),
    "small": Card(_SMALL, 3.0),
    "small + host": Card(_SMALL, 5.0, has_host_memory=True),
}
# Settings that no real engine is started with.
FETCHING = {
    f"{name} + fetch": replace(CARDS[name], users=users, fetches=True)
    for name, users in (("large + host", 14.0), ("small + host", 7.0))
}
LEAST_FETCHING = 1.75
# The search grows or shrinks the number of users by this factor until two numbers bracket the
# answer, then narrows them down to this distance. `MOST_USERS` per accelerator is the limit.
GROWTH, CLOSE_USERS, QUICK_CLOSE_USERS, MOST_USERS = 1.3, 0.5, 1.0, 64.0
REPLICAS = 4
# vLLM's token budget of a step on a large GPU. Engines' blocks have 16 tokens; traces record 64.
CHUNK_TOKENS, BLOCK_TOKENS = 8192, 64
WARM_UP_S, COUNTED_S = 900.0, 3300.0
# Time that the last turns get to end.
GRACE_S = 60.0
ENOUGH = 0.95
# Parts of a trace.
TUNED_ON, REPORTED, ALL = "tuned on", "reported", "all"

STICKY = "sticky"
# Rules that keep a session's cache warm.
SESSION_RULES = (
    STICKY,
    "session-hash",
    "prefix-score",
    "block-cost",
    "block-cost-8",
    "prefix-affinity",
    "continuum",
    "working-set",
)
ARMS = (FORESIGHT, *SESSION_RULES, "power-of-two", "ray-serve")
# At the most users in time: turns take at most 1 / 0.9 of their time alone.
LEAST_TURN_RATE = 0.9
ROWS = ("in_time", "hit_rate", "ttft_s_p50", "ttft_s_p95", "turn_rate")


@cache
def halves(trace: Path) -> tuple[tuple[RecordedSession, ...], tuple[RecordedSession, ...]]:
    """The sessions used for tuning, and those reported on."""
    sessions = read_sessions(trace)
    middle = len(sessions) // 2
    return tuple(sessions[:middle]), tuple(sessions[middle:])


@cache
def card_profile(card: str) -> Profile:
    """Profile of one of `CARDS` or `FETCHING`."""
    known = (CARDS | FETCHING)[card]
    profile = load_profile(resolve(f"profiles/{known.profile}.yaml"))
    fetch_token_s = profile.host_load_token_s if known.fetches else 0.0
    return replace(profile, fetch_token_s=fetch_token_s)


def cards(options: Options) -> dict[str, Card]:
    return CARDS if options.quick else CARDS | FETCHING


def cells(options: Options) -> list[Cell]:
    """Each accelerator with each number of users: as given, or where a search begins."""
    return [
        cell_of(name, card_profile(name), users, options.trace, card.has_host_memory)
        for name, card in cards(options).items()
        for users in options.users or (card.users,)
    ]


def cell_of(
    card: str,
    profile: Profile,
    users: float,
    trace: Path | None,
    has_host_memory: bool = False,
    part: str = REPORTED,
) -> Cell:
    """This many users per accelerator. Without a trace it cannot be measured."""
    fleet = PoolSetup(
        POOL,
        (profile,) * REPLICAS,
        NO_POLICIES,
        chunk_tokens=CHUNK_TOKENS,
        cache_block_tokens=BLOCK_TOKENS,
        host_memory=has_host_memory,
    )
    setting: Setting = {"profile": card, "users_per_card": users}
    return Cell(setting, fleet, partial(measure, trace, users, part))


def measure(
    trace: Path | None, users_per_card: float, part: str, fleet: PoolSetup, seed: int
) -> dict[str, float]:
    """Play a part of the trace: the tuning half, the reported half, or all."""
    if trace is None:
        raise InputError("this experiment needs --trace FILE")
    tuned_on, reported = halves(trace)
    sessions = {TUNED_ON: tuned_on, REPORTED: reported, ALL: (*tuned_on, *reported)}[part]
    if not sessions:
        raise InputError(f"{trace}: needs at least two sessions, one to tune on and one to report")
    users = max(1, round(users_per_card * len(fleet.profiles)))
    player = Users(sessions, users, fleet, length_belief(tuned_on or reported), seed)
    played = player.run(WARM_UP_S + COUNTED_S + GRACE_S)
    return metrics_of(played)


@dataclass(frozen=True, slots=True)
class Search:
    """Finds the most users per accelerator with `goal` of the turns in time, within `close`."""

    trace: Path
    card: str
    profile: Profile
    arm: str
    seed: int
    close: float = CLOSE_USERS
    goal: float = ENOUGH
    part: str = REPORTED
    has_host_memory: bool = False
    first_users: float = CARDS["large"].users

    def sample(self, users: float) -> Sample:
        host = self.has_host_memory
        cell = cell_of(self.card, self.profile, users, self.trace, host, self.part)
        return cell.sample(self.arm, self.seed)


def searched(search: Search) -> list[Sample]:
    """All numbers of users that were run, as integers for the whole fleet."""
    tried: dict[float, Sample] = {}

    def is_enough(users: float) -> bool:
        if users not in tried:
            tried[users] = search.sample(users)
        return tried[users].metrics["in_time"] >= search.goal

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


def run(study: Study, options: Options, progress: Progress) -> Report:
    """Search, or run the given numbers of users."""
    if options.users:
        return with_rows(all_compared(study, options, progress))
    trace, close = options.needed("trace"), QUICK_CLOSE_USERS if options.quick else CLOSE_USERS
    jobs = [
        Search(
            trace,
            name,
            card_profile(name),
            arm,
            seed,
            close,
            has_host_memory=card.has_host_memory,
            first_users=card.users,
        )
        for name, card in cards(options).items()
        for seed in options.seeds
        for arm in chosen_arms(study, options)
    ]
    samples = [s for part in run_all(searched, jobs, progress, options.jobs) for s in part]
    found = users_in_time(samples)
    report = Report(
        study.name,
        options.seeds,
        summarize((*found, *samples)),
        compare(found, FORESIGHT, ("users_in_time",)),
        tuple(targets(samples)),
    )
    return with_rows(report)


def with_rows(report: Report) -> Report:
    """Adds rows per scheduler, profile and number of users under `extra`: means over the seeds."""
    rows: dict[tuple[str, str, float], dict[str, object]] = {}
    answers = []
    for m in report.means:
        profile = str(m.setting["profile"])
        named: dict[str, object] = {"scheduler": m.policy, "profile": profile}
        if m.metric == "users_in_time":
            answers.append(named | {"users_per_card": m.mean, "stderr": m.stderr, "seeds": m.n})
        elif m.metric in ROWS and "users_per_card" in m.setting:
            users = float(m.setting["users_per_card"])
            named["users_per_card"] = users
            rows.setdefault((profile, m.policy, users), named)[m.metric] = m.mean
    ordered = [rows[key] for key in sorted(rows)]
    return replace(report, extra={"rows": ordered, "users_in_time": answers})


def length_belief(sessions: Sequence[RecordedSession]) -> LengthBelief:
    """Belief of an answer's length: the distribution of the other half's lengths."""
    return LengthBelief.of([t.output_tokens for s in sessions for t in s.turns])


def metrics_of(played: Sequence[PlayedTurn]) -> dict[str, float]:
    """Metrics of the turns begun in the counted time. `hit_rate` is a fraction of prompt tokens."""
    end_s = WARM_UP_S + COUNTED_S
    counted = [p for p in played if WARM_UP_S <= p.outcome.task.arrived_at_s < end_s]
    done = [p for p in counted if p.outcome.is_finished]
    ttft_s = [p.outcome.ttft_s for p in counted if p.outcome.ttft_s == p.outcome.ttft_s]
    prompt_tokens = sum(p.outcome.task.nodes[0].prompt_tokens for p in done)
    cached_tokens = sum(p.outcome.cached_tokens for p in done)
    alone_s = sum(p.gap_s + p.unloaded_s for p in done)
    actual_s = sum(p.gap_s + p.outcome.e2e_s for p in done)
    n = len(counted)
    return {
        "turns": float(n),
        "in_time": sum(p.outcome.is_met for p in counted) / n if n else nan,
        "refused": sum(p.outcome.refused for p in counted) / n if n else nan,
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else nan,
        "ttft_s_p50": float(np.quantile(ttft_s, 0.5)) if ttft_s else nan,
        "ttft_s_p95": float(np.quantile(ttft_s, 0.95)) if ttft_s else nan,
        "ttft_s_max": max(ttft_s, default=nan),
        "turn_rate": alone_s / actual_s if actual_s else nan,
    }


def users_in_time(samples: Sequence[Sample], goal: float = ENOUGH) -> list[Sample]:
    """Users per accelerator with 95 % of turns in time, interpolated between two numbers that were
    run, and the turn rate there.

    None when all runs are above, or all below, that.
    """
    curves: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    for s in samples:
        key = (str(s.setting["profile"]), s.policy, s.seed)
        users = float(s.setting["users_per_card"])
        point = (users, s.metrics["in_time"], s.metrics["turn_rate"])
        curves.setdefault(key, []).append(point)
    found = []
    for (card, arm, seed), points in curves.items():
        points.sort()
        crossed = rate = nan
        for (fewer, before, rate_before), (more, after, rate_after) in pairwise(points):
            if before >= goal > after:
                part = (before - goal) / (before - after)
                crossed = fewer + (more - fewer) * part
                rate = rate_before + (rate_after - rate_before) * part
                break
        metrics = {"users_in_time": crossed, "turn_rate_there": rate}
        found.append(Sample({"profile": card}, arm, seed, metrics))
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """Users that an accelerator serves, over the seeds; nan where the search found no number.

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
        return isnan(self.users_per_card) and self.tried[0][1] < self.goal

    @property
    def words(self) -> str:
        if not isnan(self.users_per_card):
            error = "" if isnan(self.stderr) else f" ± {self.stderr:.1f}"
            return f"{self.users_per_card:.1f}{error}"
        fewest, most = self.tried[0][0], self.tried[-1][0]
        return f"fewer than {fewest:g}" if self.is_none else f"more than {most:g}"

    @property
    def tried_words(self) -> str:
        return ", ".join(f"{users:g}: {100 * share:.0f} %" for users, share in self.tried)


def answer_of(samples: Sequence[Sample], goal: float, cards: int) -> Answer:
    """From the searches of one profile, whose replicas take `cards` accelerators each."""
    found = [
        s.metrics for s in users_in_time(samples, goal) if not isnan(s.metrics["users_in_time"])
    ]
    users, stderr = mean_and_stderr([m["users_in_time"] / cards for m in found])
    tried: dict[float, list[float]] = {}
    for s in samples:
        users_per_card = float(s.setting["users_per_card"]) / cards
        tried.setdefault(users_per_card, []).append(s.metrics["in_time"])
    shares = tuple((n, mean_and_stderr(tried[n])[0]) for n in sorted(tried))
    rate, _ = mean_and_stderr([m["turn_rate_there"] for m in found])
    return Answer(users, stderr, rate, shares, goal)


def targets(samples: Sequence[Sample]) -> list[Target]:
    """The worst profile: the default's users per accelerator over the best other arm's, paired; and
    its turn rate there."""
    by_card: dict[str, dict[str, dict[int, Sample]]] = {}
    for s in users_in_time(samples):
        if s.metrics["users_in_time"] == s.metrics["users_in_time"]:
            by_arm = by_card.setdefault(str(s.setting["profile"]), {})
            by_arm.setdefault(s.policy, {})[s.seed] = s
    fetching = [_fetching(by_card, name) for name in FETCHING if name in by_card]
    by_card = {card: by_arm for card, by_arm in by_card.items() if card not in FETCHING}
    ratios: list[tuple[float, float, str]] = []
    rates: list[tuple[float, float, str]] = []
    for card, by_arm in by_card.items():
        ours = by_arm.pop(FORESIGHT, {})
        if ours:
            there = [s.metrics["turn_rate_there"] for s in ours.values()]
            rates.append((*mean_and_stderr(there), card))
        rivals = {
            arm: [
                ours[seed].metrics["users_in_time"] / theirs[seed].metrics["users_in_time"]
                for seed in ours
                if seed in theirs
            ]
            for arm, theirs in by_arm.items()
        }
        compared = [(*mean_and_stderr(r), f"{card}, {arm}") for arm, r in rivals.items() if r]
        ratios += [min(compared)] if compared else []
    found = []
    if ratios:
        ratio, stderr, where = min(ratios)
        text = f"times the users per card of the best baseline, at least ({where})"
        found.append(Target(9, text, 1.0, ratio, stderr))
    if rates:
        rate, stderr, where = min(rates)
        text = f"turn rate at the most users in time, at least ({where})"
        found.append(Target(9, text, LEAST_TURN_RATE, rate, stderr))
    found += [target for target in fetching if target is not None]
    return found


def _fetching(
    by_card: Mapping[str, Mapping[str, Mapping[int, Sample]]], name: str
) -> Target | None:
    """The default's users per accelerator with fetched blocks, over sticky's without."""
    plain = name.removesuffix(" + fetch")
    ours, theirs = by_card[name].get(FORESIGHT, {}), by_card.get(plain, {}).get(STICKY, {})
    ratios = [
        ours[seed].metrics["users_in_time"] / theirs[seed].metrics["users_in_time"]
        for seed in ours
        if seed in theirs
    ]
    if not ratios:
        return None
    ratio, stderr = mean_and_stderr(ratios)
    text = f"times the users of sticky on {plain}, when blocks are fetched from neighbours"
    return Target(9, text, LEAST_FETCHING, ratio, stderr)


def plot(report: Report, folder: Path) -> list[Path]:
    """Turns in time over the users per accelerator."""
    fig, axes = figure(len(CARDS), 1)
    for axis, card in zip(axes, CARDS, strict=False):
        means = [
            m for m in report.means if m.metric == "in_time" and m.setting.get("profile") == card
        ]
        lines(axis, means, "users_per_card", "share of turns in time")
        axis.set_title(f"{card}, {REPLICAS} cards")
        axis.set_xlabel("users a card")
    legend(fig)
    return [save(fig, folder, report.experiment)]


STUDY = Study(
    "agents",
    "recorded sessions of coding agents in a closed loop: users that a card serves in time",
    "CATO project; ALGORITHMS.md, target 9",
    ARMS,
    cells,
    targets,
    plot,
    ("users_in_time", *ROWS),
    ("in_time", "ttft_s_p95"),
    users_in_time,
    (FORESIGHT, STICKY),
    quick_seeds=1,
    run=run,
)
