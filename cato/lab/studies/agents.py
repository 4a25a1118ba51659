"""Coding agents: how many users playing recorded sessions an accelerator serves in time.

The trace's sessions are sorted by SHA-256 of their ids. Constants were chosen on the first half;
the study plays the second. Turns of the first 900 s are not counted. For each profile, scheduler
and seed, the number of users is searched until 95 % of the turns are in time with one number and
not with a larger one; the answer is interpolated between them. `--users` runs those numbers
instead.

Engines are stock vLLM, vLLM with the limits for prompts that CATO sets, or vLLM with CATO's
due-date scheduler (`ENGINES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from cato.core.pool.prefill import MOST_S
from cato.core.profile import Profile
from cato.core.topology import CARD_PROMPT_TOKENS, CARD_STEP_TOKENS
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
class Engine:
    """How an engine computes prompts: tokens per step, the most of them for one prompt beside
    others (0: all), and the time for prompts per step by due date (0: by arrival).
    """

    chunk_tokens: int
    prompt_cap_tokens: int = 0
    prefill_step_s: float = 0.0


# vLLM's token budget of a step on a large GPU; what CATO starts vLLM with on a GPU; and
# `scheduler: due-date`.
STOCK = Engine(8192)
LIMITS = Engine(CARD_STEP_TOKENS, CARD_PROMPT_TOKENS)
BY_DUE_DATE = Engine(CARD_STEP_TOKENS, prefill_step_s=MOST_S)


@dataclass(frozen=True, slots=True)
class Card:
    """An assumed accelerator: the name of its file in `profiles/`, and whether KV blocks evicted
    from its cache go to host memory. `users`: the number that sticky routing serves, where the
    search begins. `fetches`: engines fetch blocks from each other's memories, as fast as from the
    host's. `goal`: users of the default over those of sticky routing with stock engines.
    """

    profile: str
    users: float
    has_host_memory: bool = False
    fetches: bool = False
    engine: Engine = STOCK
    goal: float = 1.0


_LARGE, _SMALL = "reference-large-32b@gpu-80gb", "reference-small-7b@gpu-24gb"
STOCK_CARDS = {
    "large": Card(_LARGE, 6.0),
    "large + host": Card(_LARGE, 11.0, has_host_memory=True),
    "small": Card(_SMALL, 3.0),
    "small + host": Card(_SMALL, 5.0, has_host_memory=True),
}


def _with(words: str, engine: Engine, *goals: float) -> dict[str, Card]:
    """The stock cards with another engine and these goals."""
    return {
        name + words: replace(card, users=card.users * goal, engine=engine, goal=goal)
        for (name, card), goal in zip(STOCK_CARDS.items(), goals, strict=True)
    }


_LIMITED, _DUE, _FETCH = ", limits", ", due date", " + fetch"
LIMITED_CARDS = _with(_LIMITED, LIMITS, 1.12, 1.2, 1.25, 1.4)
DUE_CARDS = _with(_DUE, BY_DUE_DATE, 1.3, 1.5, 1.4, 1.6)
# Settings that no real engine is started with.
FETCHING_CARDS = {
    name.replace(_DUE, _FETCH + _DUE): replace(
        card, users=1.2 * card.users, fetches=True, goal=1.75
    )
    for name, card in DUE_CARDS.items()
    if card.has_host_memory
}
CARDS = STOCK_CARDS | LIMITED_CARDS | DUE_CARDS | FETCHING_CARDS
# The search grows or shrinks the number of users by this factor until two numbers bracket the
# answer, then narrows them down to this distance. `MOST_USERS` per accelerator is the limit.
GROWTH, CLOSE_USERS, QUICK_CLOSE_USERS, MOST_USERS = 1.3, 0.5, 1.0, 64.0
REPLICAS = 4
# Engines' blocks have 16 tokens; traces record 64.
BLOCK_TOKENS = 64
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
    """Profile of one of `CARDS`."""
    known = CARDS[card]
    profile = load_profile(resolve(f"profiles/{known.profile}.yaml"))
    fetch_token_s = profile.host_load_token_s if known.fetches else 0.0
    return replace(profile, fetch_token_s=fetch_token_s)


def cards(options: Options) -> dict[str, Card]:
    return STOCK_CARDS | DUE_CARDS if options.quick else CARDS


def arms_of(card: Card, arms: Sequence[str]) -> list[str]:
    """All arms on stock engines; on others the default and sticky routing."""
    return [a for a in arms if card.engine == STOCK or a in (FORESIGHT, STICKY)]


def cells(options: Options) -> list[Cell]:
    """Each accelerator with each number of users: as given, or where a search begins."""
    return [
        cell_of(
            name, card_profile(name), users, options.trace, card.has_host_memory, engine=card.engine
        )
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
    engine: Engine = STOCK,
) -> Cell:
    """This many users per accelerator. Without a trace it cannot be measured."""
    fleet = PoolSetup(
        POOL,
        (profile,) * REPLICAS,
        NO_POLICIES,
        chunk_tokens=engine.chunk_tokens,
        cache_block_tokens=BLOCK_TOKENS,
        prompt_cap_tokens=engine.prompt_cap_tokens,
        prefill_step_s=engine.prefill_step_s,
        host_memory=has_host_memory,
    )
    setting: Setting = {"profile": card, "users_per_card": users}
    arms = () if engine == STOCK else (STICKY,)
    return Cell(setting, fleet, partial(measure, trace, users, part), arms)


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
            engine=card.engine,
        )
        for name, card in cards(options).items()
        for seed in options.seeds
        for arm in arms_of(card, chosen_arms(study, options))
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


Found = Mapping[str, Mapping[int, Sample]]
"""By arm and seed: users in time."""


def targets(samples: Sequence[Sample]) -> list[Target]:
    """The default's users per accelerator over those of others, paired by seed; its turn rate.

    On stock engines the worst ratio to the best other arm counts, elsewhere that to sticky routing
    on stock engines.
    """
    found: dict[str, dict[str, dict[int, Sample]]] = {}
    for s in users_in_time(samples):
        if not isnan(s.metrics["users_in_time"]):
            by_arm = found.setdefault(str(s.setting["profile"]), {})
            by_arm.setdefault(s.policy, {})[s.seed] = s
    stock = [name for name in found if name in STOCK_CARDS]
    ratios = [
        (*mean_and_stderr(paired), f"{name}, {arm}")
        for name in stock
        for arm, theirs in found[name].items()
        if arm != FORESIGHT and (paired := _ratios(found[name].get(FORESIGHT, {}), theirs))
    ]
    targets = []
    if ratios:
        ratio, stderr, where = min(ratios)
        text = f"times the users per card of the best baseline, at least ({where})"
        targets.append(Target(9, text, 1.0, ratio, stderr))
    targets += _with_other_engines(found)
    rates = [
        (*mean_and_stderr([s.metrics["turn_rate_there"] for s in ours.values()]), name)
        for name, by_arm in found.items()
        if (ours := by_arm.get(FORESIGHT))
    ]
    if rates:
        rate, stderr, where = min(rates)
        text = f"turn rate at the most users in time, at least ({where})"
        targets.append(Target(9, text, LEAST_TURN_RATE, rate, stderr))
    return targets


def _with_other_engines(found: Mapping[str, Found]) -> Iterator[Target]:
    for name, card in CARDS.items():
        stock = name.split(",")[0].removesuffix(_FETCH)
        if card.engine == STOCK or name not in found or stock not in found:
            continue
        ratio = _ratios(found[name].get(FORESIGHT, {}), found[stock].get(STICKY, {}))
        if ratio:
            text = f"times the users of sticky routing on stock engines ({name})"
            yield Target(9, text, card.goal, *mean_and_stderr(ratio))


def _ratios(ours: Mapping[int, Sample], theirs: Mapping[int, Sample]) -> list[float]:
    """Users of ours over those of theirs, by seed."""
    return [
        ours[seed].metrics["users_in_time"] / theirs[seed].metrics["users_in_time"]
        for seed in ours
        if seed in theirs
    ]


def plot(report: Report, folder: Path) -> list[Path]:
    """Turns in time over the users per accelerator."""
    shown = [c for c in CARDS if any(m.setting.get("profile") == c for m in report.means)]
    fig, axes = figure(len(shown), 1)
    for axis, card in zip(axes, shown, strict=False):
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
