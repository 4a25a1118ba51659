"""Agents and completions on the same accelerators: a fifth of the calls are completions.

A completion behind one uncached prompt of an agent is late: a step of 8,192 prompt tokens takes
half a second. The number of users is what sticky routing serves in time without completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import nan
from pathlib import Path

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.lab.studies import agent_fleet
from cato.lab.studies.agent_fleet import POOL, STICKY, STOCK_CARDS, card_profile
from cato.lab.study import Cell, Study
from cato.policies.schedulers import FORESIGHT
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.plots import figure, legend, lines, same_shares, save
from cato.sim.report import Report, Sample, Target, mean_and_stderr
from cato.sim.session_plans import BETWEEN_SESSIONS_S
from cato.sim.session_traces import MAX_GAP_S, RecordedSession
from cato.sim.sessions import Users
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workloads import belief, lengths, poisson

COMPLETION = TaskName("completion")
# Mean tokens and TTFT target, as in the study of completions alone.
PROMPT, OUTPUT, TTFT_S = 800, 40, 0.3
SHARE = 0.2
SHARES = (0.0, SHARE)
ARMS = (FORESIGHT, STICKY, "prefix-score", "block-cost-8", "working-set")
LEAST_IN_TIME, MOST_LOST = 99.0, 1.0
COMPLETIONS = "completions_in_time"


def cells(options: Options) -> list[Cell]:
    """Each accelerator without and with completions."""
    return [
        Cell(
            {"profile": name, "users_per_card": users, "completions": share},
            agent_fleet.cell_of(
                name, card_profile(name), users, options.trace, card.has_host_memory
            ).fleet,
            partial(measure, options.trace, users, share),
        )
        for name, card in STOCK_CARDS.items()
        for users in options.users or (card.users,)
        for share in SHARES
    ]


def measure(
    trace: Path | None, users_per_card: float, share: float, fleet: PoolSetup, seed: int
) -> dict[str, float]:
    """Metrics of the agents' study, and the fraction of completions in time."""
    if trace is None:
        raise InputError("this experiment needs --trace FILE")
    tuned_on, reported = agent_fleet.halves(trace)
    count = max(1, round(users_per_card * len(fleet.profiles)))
    end_s = agent_fleet.WARM_UP_S + agent_fleet.COUNTED_S
    rate = count * turns_per_s(reported, fleet.profiles[0]) * share / (1 - share)
    users = Users(
        reported,
        count,
        fleet,
        agent_fleet.length_belief(tuned_on or reported),
        seed,
        alongside=completions(rate, end_s, seed) if rate else (),
    )
    played = users.run(end_s + agent_fleet.GRACE_S)
    metrics = agent_fleet.metrics_of(played, agent_fleet.WARM_UP_S, end_s)
    beside = [o for o in users.alongside if o.task.arrived_at_s >= agent_fleet.WARM_UP_S]
    ttft_s = [o.ttft_s for o in beside if o.ttft_s == o.ttft_s]
    return metrics | {
        "completions": float(len(beside)),
        COMPLETIONS: sum(o.is_met for o in beside) / len(beside) if beside else nan,
        "completions_ttft_s_p95": float(np.quantile(ttft_s, 0.95)) if ttft_s else nan,
    }


def turns_per_s(sessions: Sequence[RecordedSession], profile: Profile) -> float:
    """Turns per second of a user who waits only for answers, tools and think times."""
    cut = [s.within(profile.context_tokens) for s in sessions]
    turns = [t for s in cut for t in s.turns]
    spent_s = sum(
        min(MAX_GAP_S, t.gap_s)
        + profile.service_s(t.prompt_tokens, t.output_tokens, 1, t.hit_tokens)
        for t in turns
    )
    return len(turns) / (spent_s + BETWEEN_SESSIONS_S * len(cut))


def completions(rate_per_s: float, until_s: float, seed: int) -> list[SimTask]:
    """Poisson arrivals."""
    rng = np.random.default_rng([seed, 10])
    n = round(1.2 * rate_per_s * until_s) + 100
    times = [t for t in poisson(rng, rate_per_s, n) if t < until_s]
    prompts, outputs = lengths(rng, PROMPT, n), lengths(rng, OUTPUT, n)
    draws, known = rng.random(n), belief(OUTPUT)
    return [
        SimTask(
            f"completion-{i}",
            COMPLETION,
            at_s,
            SloMetric.TTFT,
            TTFT_S,
            (SimNode(POOL, int(prompts[i]), int(outputs[i]), OUTPUT, known),),
            (float(draws[i]),),
        )
        for i, at_s in enumerate(times)
    ]


def targets(samples: Sequence[Sample]) -> list[Target]:
    """For the default on the worst accelerator: completions in time, and the agents' loss."""
    ours = [s for s in samples if s.policy == FORESIGHT]
    found: list[tuple[float, float, str]] = []
    lost: list[tuple[float, float, str]] = []
    for where in dict.fromkeys((s.setting["profile"], s.setting["users_per_card"]) for s in ours):
        here = [s for s in ours if (s.setting["profile"], s.setting["users_per_card"]) == where]
        alone, beside = (
            {s.seed: s.metrics for s in here if s.setting["completions"] == share}
            for share in SHARES
        )
        words = f"{where[0]}, {where[1]:g} users per card"
        met = [100 * m[COMPLETIONS] for m in beside.values()]
        found.append((*mean_and_stderr(met), words))
        points = [100 * (alone[k]["in_time"] - beside[k]["in_time"]) for k in alone if k in beside]
        lost.append((*mean_and_stderr(points), words))
    if not found:
        return []
    least, least_error, least_where = min(found)
    most, most_error, most_where = max(lost)
    text = f"% of completions in time beside agents, at least ({least_where})"
    lost_text = f"points of turns in time that agents lose to them, at most ({most_where})"
    return [
        Target(9, text, LEAST_IN_TIME, least, least_error),
        Target(9, lost_text, MOST_LOST, most, most_error, at_least=False),
    ]


def plot(report: Report, folder: Path) -> list[Path]:
    """Turns and completions in time over the users per accelerator."""
    fig, axes = figure(len(STOCK_CARDS), 2)
    panels = [(metric, card) for metric in ("in_time", COMPLETIONS) for card in STOCK_CARDS]
    for axis, (metric, card) in zip(axes, panels, strict=True):
        wanted = {"profile": card, "completions": SHARE}
        means = [
            m for m in report.means if m.metric == metric and wanted.items() <= m.setting.items()
        ]
        lines(axis, means, "users_per_card", f"share of {metric.replace('_', ' ')}")
        axis.set_title(f"{card}, {SHARE:.0%} completions")
        axis.set_xlabel("users a card")
    same_shares(axes)
    legend(fig)
    return [save(fig, folder, report.experiment)]


STUDY = Study(
    "agents-and-completions",
    "agents with a fifth of completions beside them: both in time on the same cards",
    "CATO project; ALGORITHMS.md, target 9",
    ARMS,
    cells,
    targets,
    plot,
    ("in_time", COMPLETIONS, "completions_ttft_s_p95", "ttft_s_p95"),
    ("in_time", "ttft_s_p95"),
    quick_arms=(FORESIGHT, STICKY),
    quick_seeds=1,
    takes=("users",),
    metrics=(*agent_fleet.METRICS, "completions", COMPLETIONS, "completions_ttft_s_p95"),
    check=agent_fleet.check_trace,
)
