"""Replay of a production trace of a coding service (Azure LLM inference trace 2023, code).

Arrivals and lengths are those of the trace; classes by output length: at most 20 tokens TTFT 1 s,
21-100 tokens 5 s, more 20 s end to end. Policies learn the classes from earlier rows: the report
learns from rows 1-2,500 and replays 2,501-5,000; seeds below 100 replay 1,251-2,500, for
development. The seed only feeds policies that draw, and there is one trace, so errors are those of
batch means, over `BLOCKS` stretches of it (Law, "Simulation Modeling and Analysis", 9.5.3). The
clairvoyant knows every arrival and length and searches for the best set of tasks to give up; no
scheduler can exceed the upper bound (`bounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import PoolName
from cato.core.policies import Policies
from cato.core.topology import RAY_SERVE
from cato.estimators.usl import UslFit
from cato.lab.experiments.bounds import UPPER_BOUND, Capacity, attainable
from cato.lab.experiments.hindsight import CLAIRVOYANT, clairvoyant, missed_of
from cato.lab.experiments.saber_estimators import offline_law
from cato.lab.study import Measured, Study, Trial
from cato.policies import schedulers
from cato.sim.experiment import Options
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.looks import look_of
from cato.sim.metrics import metrics_of
from cato.sim.plots import figure, legend, save
from cato.sim.report import Report, Sample, Setting, Target, mean_and_stderr
from cato.sim.tasks import SimTask
from cato.sim.trace_tasks import trace_beliefs, trace_tasks
from cato.sim.traces import load_azure
from cato.sim.workloads import SEVEN_B

POOL = PoolName("engine")
CHUNK_TOKENS = 512
# Replicas and speed of the replay: settings of the targets.
SETTINGS = ((4, 1.0), (4, 2.0), (2, 1.0))
# Rows to learn from, rows to replay; 0-based, end exclusive.
DEVELOPMENT, REPORT = ((0, 1250), (1250, 2500)), ((0, 2500), (2500, 5000))
REPORT_SEEDS_FROM = 100
BLOCKS = 20
SEARCH_ROUNDS = 40
# Independent of the seed and nearly of chunking: computed once.
WITH_HINDSIGHT = (CLAIRVOYANT, UPPER_BOUND)
OPPONENTS = (
    schedulers.KNOWS_BATCHES,
    RAY_SERVE,
    "edf-bounded",
    "sjf-bounded",
    "plas-waiting",
)
SABER = "saber"
# Arrivals of SABER's offline phase, from one request at a time to more than a replica can bear.
OFFLINE_RATES_PER_S = (0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@lru_cache(maxsize=4)
def speed_law(trace: Path, learnt: tuple[int, int], chunked: bool) -> UslFit:
    """SABER's offline phase on rows `learnt`: see `offline_law`.

    The law depends neither on the number of replicas nor on the trace's speed.
    """
    rows = load_azure(trace)[slice(*learnt)]

    def drawn(rng: np.random.Generator, n: int) -> list[tuple[int, int]]:
        chosen = [rows[i] for i in rng.integers(0, len(rows), n)]
        return [(row.prompt_tokens, max(1, row.output_tokens)) for row in chosen]

    return offline_law(OFFLINE_RATES_PER_S, drawn, SEVEN_B, _chunk_tokens(chunked))


# Without SABER, which learns its law from the trace.
POLICIES: Mapping[str, Callable[[], Policies]] = {
    "power-of-two": partial(schedulers.early, "power-of-two"),
    "cato": schedulers.cato,
    **{name: partial(schedulers.OF_PROFILE[name], SEVEN_B, 0) for name in OPPONENTS},
    "fcfs, late": partial(schedulers.static_cap, SEVEN_B.max_running),
    schedulers.FORESIGHT: schedulers.foresight,
}
ARMS = (SABER, *POLICIES)


def _policies(name: str, trace: Path, chunked: bool, seed: int) -> Policies:
    if name == SABER:
        learnt, _ = _split(seed)
        return schedulers.saber(speed_law(trace, learnt, chunked))
    return POLICIES[name]()


def _chunk_tokens(chunked: bool) -> int | None:
    return CHUNK_TOKENS if chunked else None


def _setup(replicas: int, chunked: bool, policies: Policies) -> PoolSetup:
    chunk_tokens = _chunk_tokens(chunked)
    return PoolSetup(POOL, (SEVEN_B,) * replicas, policies, chunk_tokens=chunk_tokens)


def _split(seed: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return DEVELOPMENT if seed < REPORT_SEEDS_FROM else REPORT


def _tasks(trace: Path, speed: float, seed: int) -> list[SimTask]:
    rows = load_azure(trace)
    (first, end), (begin, stop) = _split(seed)
    if len(rows) <= begin:
        raise InputError(f"--trace: {trace} has {len(rows)} rows; {begin + 1} are needed")
    known = trace_beliefs(rows[first:end])
    return trace_tasks(rows[begin:stop], known, POOL, seed, speed)


def _measured(
    options: Options, replicas: int, speed: float, chunked: bool, policy: str, seed: int
) -> Measured:
    """Metrics, and the attainment in each block of the trace."""
    trace = options.needed("trace")
    tasks = _tasks(trace, speed, seed)
    if policy == UPPER_BOUND:
        pool = Capacity(SEVEN_B, replicas)
        return Measured({"slo_attainment": attainable(tasks, {POOL: pool})}, ())
    setup = partial(_setup, replicas, chunked)
    if policy == CLAIRVOYANT:
        best = clairvoyant(tasks, setup, seed, SEARCH_ROUNDS)
        metrics, missed = best.metrics, best.missed
    else:
        fleet = Fleet([setup(_policies(policy, trace, chunked, seed))])
        outcomes = fleet.run(tasks)
        metrics, missed = metrics_of(fleet, outcomes), missed_of(outcomes)
    blocks = np.array_split([t.id not in missed for t in tasks], BLOCKS)
    return Measured(metrics, tuple(float(b.mean()) for b in blocks if b.size))


def _setting(replicas: int, speed: float, chunked: bool) -> Setting:
    prompts = "chunked" if chunked else "whole"
    return {"replicas": float(replicas), "speed": speed, "prompts": prompts}


def _cells(options: Options) -> list[Trial]:
    return [
        Trial(
            _setting(replicas, speed, chunked),
            partial(_measured, options, replicas, speed, chunked),
            ARMS if chunked else (),
        )
        for chunked in (False, True)
        for replicas, speed in SETTINGS
    ]


def _targets(samples: Sequence[Sample]) -> list[Target]:
    """Target group 8, for whole prompts and for chunks; the search for whole prompts only."""
    targets: list[Target] = []
    for chunked in (False, True):
        for (replicas, speed), over_cato, over_saber in zip(
            SETTINGS, (20.0, 40.0, 40.0), (16.0, 28.0, 28.0), strict=True
        ):
            wanted = _setting(replicas, speed, chunked)
            where = f"{replicas} replicas, {speed:g}x, prompts {wanted['prompts']}"
            for baseline, goal in (
                ("cato", over_cato),
                ("saber", over_saber),
                (CLAIRVOYANT, -3.0),
            ):
                ours = _attained(samples, schedulers.FORESIGHT, wanted)
                theirs = _attained(samples, baseline, wanted)
                if ours and theirs:
                    text = f"points over {baseline}, {where}"
                    gaps = [100 * (a - b) for a, b in zip(ours, theirs, strict=True)]
                    targets.append(Target(8, text, goal, *mean_and_stderr(gaps)))
    return targets


def _attained(samples: Sequence[Sample], policy: str, setting: Setting) -> Sequence[float]:
    """Attainment of each block, averaged over the seeds; empty when the policy did not run."""
    found = [s.further for s in samples if s.policy == policy and s.setting == setting]
    return [fmean(block) for block in zip(*found, strict=True)]


def plot(report: Report, folder: Path) -> list[Path]:
    """Attainment by policy, one group of bars per setting."""
    prompts = list(dict.fromkeys(str(m.setting["prompts"]) for m in report.means))
    fig, axes = figure(len(prompts))
    for axis, kind in zip(axes, prompts, strict=True):
        means = [
            m for m in report.means if m.metric == "slo_attainment" and m.setting["prompts"] == kind
        ]
        policies = list(dict.fromkeys(m.policy for m in means))
        settings = list(dict.fromkeys((m.setting["replicas"], m.setting["speed"]) for m in means))
        width = 0.8 / len(policies)
        for i, policy in enumerate(policies):
            heights = [
                next(
                    (
                        m.mean
                        for m in means
                        if m.policy == policy
                        and (m.setting["replicas"], m.setting["speed"]) == setting
                    ),
                    0.0,
                )
                for setting in settings
            ]
            places = [k + i * width - 0.4 + width / 2 for k in range(len(settings))]
            axis.bar(places, heights, width, label=policy, color=look_of(fig, policy).color)
        axis.set_xticks(range(len(settings)), [f"{r:g} replicas, {s:g}x" for r, s in settings])
        axis.set_ylabel("attainment")
        axis.set_title(f"prompts {kind}", fontsize=9)
        axis.grid(alpha=0.3, axis="y")
    legend(fig)
    return [save(fig, folder, report.experiment)]


STUDY = Study(
    "azure-replay",
    "replay of a production coding trace on 7B replicas, against a clairvoyant search",
    "Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024)",
    (*ARMS, *WITH_HINDSIGHT),
    _cells,
    _targets,
    plot,
    compared=("slo_attainment", "ttft_s_mean", "e2e_s_p95"),
    unseeded=WITH_HINDSIGHT,
)
