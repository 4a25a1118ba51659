"""Coding agents: how many users playing recorded sessions an accelerator serves in time.

For each profile, scheduler and seed, the number of users is searched (`agents_search.py`).
`--users` runs those numbers instead. The accelerators, engines and sessions: `agent_fleet.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path

from cato.lab.studies.agent_fleet import (
    CARDS,
    DUE_CARDS,
    FETCH,
    METRICS,
    REPLICAS,
    STICKY,
    STOCK,
    STOCK_CARDS,
    Card,
    card_profile,
    cell_of,
    check_trace,
)
from cato.lab.studies.agents_search import (
    CLOSE_USERS,
    QUICK_CLOSE_USERS,
    Search,
    searched,
    users_in_time,
)
from cato.lab.study import Cell, Study, all_compared, chosen_arms
from cato.policies.schedulers import FORESIGHT
from cato.sim.experiment import Interrupted, Options, Progress, run_all
from cato.sim.plots import figure, legend, lines, same_shares, save
from cato.sim.report import Report, Sample, Target, compare, mean_and_stderr, summarize

# Rules that keep a session's cache warm.
SESSION_RULES = (
    STICKY,
    "session-hash",
    "prefix-score",
    "block-cost",
    "block-cost-8",
    "block-cost-agentic",
    "prefix-affinity",
    "continuum",
    "working-set",
)
ARMS = (FORESIGHT, *SESSION_RULES, "power-of-two", "ray-serve")
# In a row of the picture.
PANELS = 4
ROWS = ("in_time", "hit_rate", "ttft_s_p50", "ttft_s_p95", "turn_rate")


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
    extra: Mapping[str, object] = {}
    try:
        parts = run_all(searched, jobs, progress, options.jobs)
    except Interrupted as stop:
        parts, extra = stop.whole([(job.card, job.seed) for job in jobs]), stop.told()
    samples = [s for part in parts for s in part]
    seeds = tuple(s for s in options.seeds if s in {x.seed for x in samples})
    found = users_in_time(samples, is_searched=True)
    report = Report(
        study.name,
        seeds,
        summarize((*found, *samples)),
        compare(found, FORESIGHT, ("users_in_time",)),
        () if extra else tuple(targets_of(found)),
        extra,
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
    rows_of = {"rows": ordered, "users_in_time": answers}
    return replace(report, extra=rows_of | dict(report.extra))


Found = Mapping[str, Mapping[int, Sample]]
"""By arm and seed: users in time."""


def targets(samples: Sequence[Sample]) -> list[Target]:
    """`targets_of` the given numbers of users."""
    return targets_of(users_in_time(samples))


def targets_of(answers: Sequence[Sample]) -> list[Target]:
    """The default's users per accelerator over those of others, paired by seed.

    On stock engines the worst ratio to the best other arm counts, elsewhere that to sticky routing
    on stock engines. Seeds in which the other serves nobody in time are left out.
    """
    found: dict[str, dict[str, dict[int, Sample]]] = {}
    for s in answers:
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
    return [*targets, *_with_other_engines(found)]


def _with_other_engines(found: Mapping[str, Found]) -> Iterator[Target]:
    for name, card in CARDS.items():
        stock = name.split(",")[0].removesuffix(FETCH)
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
        if seed in theirs and theirs[seed].metrics["users_in_time"]
    ]


def plot(report: Report, folder: Path) -> list[Path]:
    """Turns in time over the users per accelerator."""
    shown = [c for c in CARDS if any(m.setting.get("profile") == c for m in report.means)]
    columns = min(PANELS, len(shown))
    fig, axes = figure(columns, -(-len(shown) // columns))
    for axis, card in zip(axes, shown, strict=False):
        means = [
            m for m in report.means if m.metric == "in_time" and m.setting.get("profile") == card
        ]
        lines(axis, means, "users_per_card", "share of turns in time")
        axis.set_title(f"{card}, {REPLICAS} cards")
        axis.set_xlabel("users a card")
    for empty in axes[len(shown) :]:
        empty.remove()
    same_shares(axes[: len(shown)])
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
    lambda samples: summarize((*users_in_time(samples), *samples)),
    quick_arms=(FORESIGHT, STICKY),
    quick_seeds=1,
    run=run,
    takes=("users",),
    metrics=("users_in_time", "turn_rate_there", *METRICS),
    check=check_trace,
)
