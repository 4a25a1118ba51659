"""Speed of the simulator: single-call tasks, and agents' turns on engines with caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import process_time

import numpy as np

from cato.config.paths import resolve
from cato.core.ids import PoolName
from cato.core.length import LengthBelief
from cato.core.policies import Policies
from cato.profiles.load import load_profile
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.session_traces import RecordedSession, Turn
from cato.sim.sessions import Users
from cato.sim.workloads import SABER_CLASSES, SEVEN_B, poisson, single_calls

POOL = PoolName("bench")
TASKS, TURNS = "tasks", "turns"
TASKS_GOAL_PER_S, TURNS_GOAL_PER_S = 15_000.0, 5_000.0

# Equal shares of the classes in `SABER_CLASSES`.
COMPLETIONS, MIXED = "completions", "W3 of SABER"
WORKLOADS: Mapping[str, Mapping[str, tuple[int, int, float]]] = {
    COMPLETIONS: {"completion": (600, 30, 2.0)},
    MIXED: SABER_CLASSES,
}
# Agents: tools and system prompt, growth per turn, answer, and tool time.
SHARED_TOKENS, NEW_TOKENS, ANSWER_TOKENS, GAP_S = 20_000, 764, 250, 8.0
SESSIONS, TURNS_A_SESSION, USERS = 40, 60, 24
CARD = "profiles/reference-large-32b@gpu-80gb.yaml"
CARDS, STEP_TOKENS, BLOCK_TOKENS = 4, 8192, 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Simulator speed in `unit` per second of one core: the median of several runs.

    `output_tokens` is the mean length of an answer: progress is reported every 20 tokens, which
    dominates the time for long answers.
    """

    scheduler: str
    workload: str
    unit: str
    output_tokens: float
    count: int
    per_s: float
    events_per_s: float
    slowest_per_s: float
    fastest_per_s: float
    goal_per_s: float

    @property
    def is_met(self) -> bool:
        return self.per_s >= self.goal_per_s


def simulated_tasks(
    scheduler: str,
    policies: Policies,
    workload: str,
    tasks: int = 10_000,
    replicas: int = 12,
    load: float = 0.8,
    runs: int = 3,
) -> Speed:
    """Single-call tasks of one of `WORKLOADS` on replicas that run one at a time."""
    profile = replace(SEVEN_B, max_running=1)
    classes = WORKLOADS[workload]
    mean_s = fmean(profile.service_s(prompt, output) for prompt, output, _ in classes.values())
    output_tokens = fmean(output for _, output, _ in classes.values())
    rng = np.random.default_rng(0)
    times = poisson(rng, load * replicas / mean_s, tasks)
    picked = rng.choice(list(classes), tasks).tolist()
    arriving = single_calls(rng, times, classes, picked, POOL)
    setup = PoolSetup(POOL, (profile,) * replicas, policies)

    def run() -> tuple[int, int]:
        fleet = Fleet([setup])
        fleet.run(arriving)
        return tasks, fleet.kernel.events

    where = f"{workload}, {replicas} replicas"
    return _speed(scheduler, where, TASKS, output_tokens, TASKS_GOAL_PER_S, runs, run)


def simulated_turns(
    scheduler: str, policies: Policies, until_s: float = 450.0, runs: int = 3
) -> Speed:
    """Agents whose prompts grow from turn to turn, on accelerators with prefix caches."""
    profile = load_profile(resolve(CARD))
    setup = PoolSetup(
        POOL,
        (profile,) * CARDS,
        policies,
        chunk_tokens=STEP_TOKENS,
        cache_block_tokens=BLOCK_TOKENS,
    )
    sessions = some_sessions()
    length = LengthBelief.of([t.output_tokens for s in sessions for t in s.turns])

    def run() -> tuple[int, int]:
        users = Users(sessions, USERS, setup, length, 0)
        return len(users.run(until_s)), users.fleet.kernel.events

    where = f"agents, {CARDS} cards with caches"
    return _speed(scheduler, where, TURNS, ANSWER_TOKENS, TURNS_GOAL_PER_S, runs, run)


def some_sessions(seed: int = 0) -> list[RecordedSession]:
    """Sessions that share tools and system prompt; each turn repeats the prompt before it."""
    rng = np.random.default_rng(seed)
    shape = (SESSIONS, TURNS_A_SESSION)
    new = rng.exponential(NEW_TOKENS, shape).astype(int) + 1
    answers = rng.exponential(ANSWER_TOKENS, shape).astype(int) + 1
    gaps_s = rng.exponential(GAP_S, shape)
    sessions = []
    for i in range(SESSIONS):
        turns: list[Turn] = []
        for j in range(TURNS_A_SESSION):
            before = turns[-1].prompt_tokens if j else 0
            prompt_tokens = (before or SHARED_TOKENS) + int(new[i, j])
            base, after, tools = (j - 1, (j - 1,), 0) if j else (None, (), SHARED_TOKENS)
            answer, gap_s = int(answers[i, j]), float(gaps_s[i, j])
            turns.append(
                Turn(gap_s, prompt_tokens, answer, before, base, after, 0, tools, 0, bool(j))
            )
        sessions.append(RecordedSession(f"s{i}", tuple(turns)))
    return sessions


def _speed(
    scheduler: str,
    workload: str,
    unit: str,
    output_tokens: float,
    goal_per_s: float,
    runs: int,
    run: Callable[[], tuple[int, int]],
) -> Speed:
    count, events, took_s = 0, 0, []
    for _ in range(runs):
        started_s = process_time()
        count, events = run()
        took_s.append(process_time() - started_s)
    usual_s, each = median(took_s), [count / t for t in took_s]
    return Speed(
        scheduler,
        workload,
        unit,
        output_tokens,
        count,
        count / usual_s,
        events / usual_s,
        min(each),
        max(each),
        goal_per_s,
    )
