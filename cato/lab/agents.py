"""Coding agents: users who play recorded sessions, and how many of them a card serves in time.

The trace's sessions are sorted by SHA-256 of their ids. Constants were chosen on the first half;
the study plays the second. Turns of the first 900 s are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from math import nan
from pathlib import Path

import numpy as np

from cato.config.paths import resolve
from cato.core.errors import InputError
from cato.core.ids import PoolName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.lab.study import NO_POLICIES, Cell, Study
from cato.policies.schedulers import FORESIGHT
from cato.profiles.load import load_profile
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.plots import figure, lines, save
from cato.sim.report import Report, Sample, Target, mean_and_stderr
from cato.sim.sessions import PlayedTurn, RecordedSession, Users, read_sessions

POOL = PoolName("agents")
# Assumed cards, by the names of their files in `profiles/`.
CARDS = {"large": "reference-large-32b@gpu-80gb", "small": "reference-small-7b@gpu-24gb"}
USERS = {"large": (4.0, 5.0, 6.0, 7.0, 8.0), "small": (2.0, 3.0, 4.0, 5.0)}
QUICK_USERS = {"large": (5.0, 7.0), "small": (2.0, 4.0)}
REPLICAS = 4
# vLLM's budget of a step on a large card. Blocks of engines have 16 tokens; traces know 64.
CHUNK_TOKENS, BLOCK_TOKENS = 8192, 64
WARM_UP_S, COUNTED_S = 900.0, 3300.0
# What began last has so long to end.
GRACE_S = 60.0
ENOUGH = 0.95

STICKY = "sticky"
ARMS = (FORESIGHT, STICKY, "session-hash", "prefix-score", "power-of-two")


@cache
def halves(trace: Path) -> tuple[tuple[RecordedSession, ...], tuple[RecordedSession, ...]]:
    """The sessions that are tuned on, and those that are reported."""
    sessions = read_sessions(trace)
    middle = len(sessions) // 2
    return tuple(sessions[:middle]), tuple(sessions[middle:])


@cache
def card_profile(card: str) -> Profile:
    """Of one of `CARDS`."""
    return load_profile(resolve(f"profiles/{CARDS[card]}.yaml"))


def cells(options: Options) -> list[Cell]:
    """Each card with each number of users; without a trace nothing of them can be measured."""
    usual = QUICK_USERS if options.quick else USERS
    return [
        Cell(
            {"profile": card, "users_per_card": users},
            PoolSetup(
                POOL,
                (card_profile(card),) * REPLICAS,
                NO_POLICIES,
                chunk_tokens=CHUNK_TOKENS,
                cache_block_tokens=BLOCK_TOKENS,
            ),
            partial(measure, options, users, False),
        )
        for card in CARDS
        for users in options.users or usual[card]
    ]


def measure(
    options: Options, users_per_card: float, is_tuning: bool, fleet: PoolSetup, seed: int
) -> dict[str, float]:
    """Play the half of the trace that is tuned on, or the other one."""
    tuned_on, reported = halves(options.needed("trace"))
    sessions = tuned_on if is_tuning else reported
    if not sessions:
        raise InputError(f"{options.trace}: one session is too few to be tuned on and reported")
    users = max(1, round(users_per_card * len(fleet.profiles)))
    player = Users(sessions, users, fleet, length_belief(tuned_on or reported), seed)
    played = player.run(WARM_UP_S + COUNTED_S + GRACE_S)
    return metrics_of(played)


def length_belief(sessions: Sequence[RecordedSession]) -> LengthBelief:
    """What is known of an answer's length: how long others were."""
    return LengthBelief.of([t.output_tokens for s in sessions for t in s.turns])


def metrics_of(played: Sequence[PlayedTurn]) -> dict[str, float]:
    """Of the turns that began in the counted time. `hit_rate` is a share of prompt tokens."""
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


def users_in_time(samples: Sequence[Sample]) -> list[Sample]:
    """Users a card of whom 95 % of turns are in time, between two numbers that were run.

    Nothing is said where all that was run has more, or less, than that.
    """
    curves: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for s in samples:
        key = (str(s.setting["profile"]), s.policy, s.seed)
        users = float(s.setting["users_per_card"])
        curves.setdefault(key, []).append((users, s.metrics["in_time"]))
    found = []
    for (card, arm, seed), points in curves.items():
        points.sort()
        crossed = nan
        for (fewer, before), (more, after) in pairwise(points):
            if before >= ENOUGH > after:
                crossed = fewer + (more - fewer) * (before - ENOUGH) / (before - after)
                break
        found.append(Sample({"profile": card}, arm, seed, {"users_in_time": crossed}))
    return found


def targets(samples: Sequence[Sample]) -> list[Target]:
    """The worst cell: the default's share of turns in time minus the best other arm's, paired."""
    by_cell: dict[tuple[str, float], dict[str, list[float]]] = {}
    for s in samples:
        key = (str(s.setting["profile"]), float(s.setting["users_per_card"]))
        by_cell.setdefault(key, {}).setdefault(s.policy, []).append(s.metrics["in_time"])
    gaps: list[tuple[float, float, str]] = []
    for (card, users), by_arm in by_cell.items():
        ours = by_arm.pop(FORESIGHT, [])
        if not ours or not by_arm:
            continue
        best = max(by_arm, key=lambda arm: sum(by_arm[arm]))
        points = [100 * (a - b) for a, b in zip(ours, by_arm[best], strict=True)]
        gaps.append((*mean_and_stderr(points), f"{card}, {users:g} users a card, {best}"))
    if not gaps:
        return []
    points_, stderr, where = min(gaps)
    text = f"points of turns in time beside the best baseline, at the least ({where})"
    return [Target(9, text, 0.0, points_, stderr)]


def plot(report: Report, folder: Path) -> list[Path]:
    """Turns in time over the users of a card."""
    fig, axes = figure(len(CARDS), 1)
    for axis, card in zip(axes, CARDS, strict=False):
        means = [
            m for m in report.means if m.metric == "in_time" and m.setting.get("profile") == card
        ]
        lines(axis, means, "users_per_card", "share of turns in time")
        axis.set_title(f"{card} card, {REPLICAS} replicas")
        axis.set_xlabel("users a card")
    axes[0].legend(fontsize=7)
    return [save(fig, folder, report.experiment)]


STUDY = Study(
    "agents",
    "recorded sessions of coding agents in a closed loop: users whom a card serves in time",
    "CATO project; algorithms.md, target 9",
    ARMS,
    cells,
    targets,
    plot,
    ("in_time", "hit_rate", "ttft_s_p50", "ttft_s_p95", "turn_rate", "users_in_time"),
    ("in_time", "ttft_s_p95"),
    users_in_time,
    (FORESIGHT, STICKY),
)
