"""Agents while their fleet changes: who dies, joins or restarts takes the caches of sessions along.

The number of users is what sticky routing serves in time on stock engines; these have CATO's limits
for prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cato.core.errors import InputError
from cato.core.profile import Profile
from cato.lab.studies import agent_fleet
from cato.lab.studies.agent_fleet import LIMITS, POOL, STICKY, STOCK_CARDS, card_profile
from cato.lab.studies.agents import SESSION_RULES
from cato.lab.study import Cell, Study
from cato.policies.schedulers import FORESIGHT
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.plots import bars, figure, legend, save
from cato.sim.report import Report, Sample, Target, mean_and_stderr
from cato.sim.session_plans import FIRST_ARRIVALS_S
from cato.sim.sessions import Users

ARMS = (FORESIGHT, *SESSION_RULES)
QUICK_ARMS = (FORESIGHT, STICKY, "prefix-score")
# From the loss of a replica to its return; from the order to drain one to its return, and to the
# order to drain the next.
AWAY_S, RESTART_S, NEXT_S = 120.0, 60.0, 90.0
# Turns that begin this long after the change count.
COUNTED_S = 600.0
IN_TIME = "turns_in_time"
MOST_BEHIND = 1.0

_Change = Callable[[Users, Profile], None]


def _lose(users: Users, profile: Profile) -> None:
    pool, kernel = users.fleet.pools[POOL], users.fleet.kernel
    pool.lose_replica(min(pool.replicas))
    kernel.at(kernel.now_s + AWAY_S, pool.add_replica, profile)


def _grow(users: Users, profile: Profile) -> None:
    users.fleet.pools[POOL].add_replica(profile)


def _roll(users: Users, profile: Profile) -> None:
    pool, kernel = users.fleet.pools[POOL], users.fleet.kernel
    for n, id in enumerate(sorted(pool.replicas)):
        at_s = kernel.now_s + n * NEXT_S
        kernel.at(at_s, pool.drain_replica, id)
        kernel.at(at_s + RESTART_S, pool.add_replica, profile)


def _nothing(users: Users, profile: Profile) -> None:
    """Until then nobody was there."""


BEGIN = "all users begin at once"
CHANGES: Mapping[str, _Change] = {
    "one replica is lost": _lose,
    "one more joins three": _grow,
    "all restart, one by one": _roll,
    BEGIN: _nothing,
}


def cells(options: Options) -> list[Cell]:
    """Each change on each accelerator; quick: on the large one without and the small one with host
    memory."""
    quick = ("large", "small + host")
    return [
        Cell(
            {"profile": name, "users_per_card": users, "change": change},
            _fleet(name, change, options),
            partial(measure, options.trace, users, change),
        )
        for name, card in STOCK_CARDS.items()
        if not options.quick or name in quick
        for users in options.users or (card.users,)
        for change in CHANGES
    ]


def _fleet(card: str, change: str, options: Options) -> PoolSetup:
    profile, has_host_memory = card_profile(card), STOCK_CARDS[card].has_host_memory
    cell = agent_fleet.cell_of(card, profile, 1.0, options.trace, has_host_memory, engine=LIMITS)
    replicas = agent_fleet.REPLICAS - (1 if CHANGES[change] is _grow else 0)
    return replace(cell.fleet, profiles=(profile,) * replicas)


def measure(
    trace: Path | None, users_per_card: float, change: str, fleet: PoolSetup, seed: int
) -> dict[str, float]:
    """Metrics of the agents' study for the turns begun in the `COUNTED_S` after the change, and how
    many of them were in time."""
    if trace is None:
        raise InputError("this experiment needs --trace FILE")
    tuned_on, reported = agent_fleet.halves(trace)
    count = max(1, round(users_per_card * agent_fleet.REPLICAS))
    length = agent_fleet.length_belief(tuned_on or reported)
    within_s, at_s = FIRST_ARRIVALS_S, agent_fleet.WARM_UP_S
    if change == BEGIN:
        within_s = at_s = 1.0
    users = Users(reported, count, fleet, length, seed, first_within_s=within_s)
    users.fleet.kernel.at(at_s, CHANGES[change], users, fleet.profiles[0])
    end_s = at_s + COUNTED_S
    played = users.run(end_s + agent_fleet.GRACE_S)
    metrics = agent_fleet.metrics_of(played, 0.0 if change == BEGIN else at_s, end_s)
    return metrics | {IN_TIME: metrics["turns"] * metrics["in_time"]}


def targets(samples: Sequence[Sample]) -> list[Target]:
    """Turns in time that the default has less than the best rule, where that is most. Not their
    share: in a closed loop that rewards who lets some sessions wait."""
    worst: list[tuple[float, float, str]] = []
    for setting in {str(s.setting): s.setting for s in samples}.values():
        arms: dict[str, dict[int, float]] = {}
        for s in samples:
            if s.setting == setting:
                arms.setdefault(s.policy, {})[s.seed] = s.metrics[IN_TIME]
        ours = arms.pop(FORESIGHT, {})
        if not ours or not arms:
            continue
        rule = max(arms, key=lambda arm: sum(arms[arm].values()))
        theirs = arms[rule]
        fewer = [100 * (1 - ours[seed] / n) for seed, n in theirs.items() if n and seed in ours]
        where = f"{setting['profile']}, {setting['change']}, {rule}"
        worst.append((*mean_and_stderr(fewer), where))
    if not worst:
        return []
    percent, stderr, where = max(worst)
    text = f"% fewer turns in time than the best rule, at most ({where})"
    return [Target(9, text, MOST_BEHIND, percent, stderr, at_least=False)]


def plot(report: Report, folder: Path) -> list[Path]:
    """Turns that were late after each change, by accelerator."""
    late = [replace(m, mean=1 - m.mean) for m in report.means if m.metric == "in_time"]
    cards = list(dict.fromkeys(str(m.setting["profile"]) for m in late))
    fig, axes = figure(2, max(1, (len(cards) + 1) // 2))
    for axis, card in zip(axes, cards, strict=False):
        means = [m for m in late if m.setting["profile"] == card]
        bars(axis, means, list(CHANGES), "change", "share of turns that were late")
        axis.set_title(card)
    legend(fig)
    return [save(fig, folder, report.experiment)]


STUDY = Study(
    "agents-and-changes",
    "agents' sessions while a replica is lost, joins, or all restart one by one",
    "CATO project",
    ARMS,
    cells,
    targets,
    plot,
    ("in_time", IN_TIME, "ttft_s_p95", "ttft_s_max"),
    ("in_time", IN_TIME, "ttft_s_p95"),
    quick_arms=QUICK_ARMS,
    quick_seeds=2,
    takes=("users",),
    metrics=(*agent_fleet.METRICS, IN_TIME),
    check=agent_fleet.check_trace,
)
