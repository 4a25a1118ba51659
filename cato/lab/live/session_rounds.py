"""Rounds of agent sessions: one seed per round, all arms in turns with identical turns."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import cycle, islice

from cato.core.ids import PoolName
from cato.lab.client import BenchError
from cato.lab.live.agents import Player, Prompts, predicted
from cato.lab.live.client import Ask, TaskClient
from cato.lab.live.experiment import SESSIONS, WARM_UP_SEED, Arm
from cato.lab.live.prediction import setup_of
from cato.lab.live.rounds import (
    LEARN_S,
    SERVE_WARM_UPS,
    Configurable,
    Progress,
    Run,
    Settings,
    Subject,
    cpu_load,
    order,
    prepare,
)
from cato.lab.live.traffic import SessionTraffic
from cato.lab.live.workflows import LiveTask, pool_named
from cato.sim.fleet import PoolSetup
from cato.sim.playing import TurnRules
from cato.sim.session_plans import LONGEST_ANSWER_TOKENS, PlannedSession, UserPlan
from cato.sim.session_traces import RecordedSession, Turn
from cato.sim.tasks import SimTask

# Limits of the warm-up, which only teaches answer lengths.
WARM_UP_PROMPT_TOKENS = 300
WARM_UP_STREAMS = 16


async def measure_sessions(
    subject: Subject,
    stage: Configurable,
    settings: Settings,
    progress: Progress,
    runs: list[Run],
) -> None:
    """All rounds, after a warm-up that teaches the Profiler; runs are added to `runs`."""
    traffic = subject.experiment.sessions
    assert traffic is not None, "the experiment needs sessions"
    async with TaskClient(stage.url) as client:
        await _warm_up(subject, stage, settings, progress, client, traffic)
        for number, seed in enumerate(settings.seeds):
            for arm in order(subject.experiment.arms, number):
                setup = _setup(subject, arm)
                rules = traffic.rules(setup, settings.slowdown)
                plans = traffic.plans(rules.profile, seed, settings.slowdown, settings.tasks)
                prompts = _prompts(subject, arm, f"{arm.name} {seed}")
                where = f"round {number + 1}/{len(settings.seeds)}"
                tasks = planned_tasks(plans, rules)
                progress.begin(f"{where}: prompts", len(tasks))
                for task in tasks:
                    prompts.find(task)
                    progress.step()
                    await asyncio.sleep(0)
                await asyncio.to_thread(stage.forget_sessions)
                await prepare(subject, stage, arm, progress)
                progress.begin(f"{where}: {arm.name}", len(tasks))
                async with cpu_load() as cpu:
                    seen = await Player(client, prompts, rules, progress.step).play(plans)
                counted = [seen[id] for id in traffic.counted(plans, settings.slowdown)]
                found = None
                if arm.has_twin:
                    found = predicted(traffic, plans, setup, rules, prompts, seed)
                runs.append(Run(SESSIONS, arm, seed, counted, found, cpu))


def planned_tasks(plans: list[UserPlan], rules: TurnRules) -> list[SimTask]:
    """All turns, in order of their sessions."""
    return [
        rules.task(part.play(0.0, _nothing), part.first + i, 0.0, 0.0)[0]
        for plan in plans
        for part in plan.parts
        for i in range(len(part.begins_s))
    ]


def _nothing() -> None:
    pass


def _setup(subject: Subject, arm: Arm) -> PoolSetup:
    pool = subject.topology.pools[0]
    profile = subject.profiles[pool.name]
    return setup_of(pool, arm, profile, subject.engines, subject.experiment)


def _prompts(subject: Subject, arm: Arm, salt: str) -> Prompts:
    name = PoolName(subject.topology.pools[0].name + arm.suffix)
    pool = pool_named(subject.topology, name)
    profile = subject.profiles[pool.name]
    return Prompts(pool.model.name, profile, pool.deployments[0].engine.seed, salt)


async def _warm_up(
    subject: Subject,
    stage: Configurable,
    settings: Settings,
    progress: Progress,
    client: TaskClient,
    traffic: SessionTraffic,
) -> None:
    """Answers as long as those of the known half, to short prompts of distinct sessions."""
    turns = [t for s in traffic.taught() for t in s.turns]
    spread = turns[:: max(1, len(turns) // settings.warm_up)]
    chosen = list(islice(cycle(spread), settings.warm_up))
    first: dict[str, Arm] = {}
    for arm in subject.experiment.arms:
        first.setdefault(arm.suffix, arm)
    for suffix, arm in first.items():
        rules = traffic.rules(_setup(subject, arm), settings.slowdown)
        prompts = _prompts(subject, arm, f"warm-up {suffix}")
        made = planned_tasks([_warm_up_plan(n, turn) for n, turn in enumerate(chosen)], rules)
        tasks = [LiveTask(t, {}) for t in (made[:SERVE_WARM_UPS] if suffix else made)]
        await asyncio.to_thread(stage.configure, arm)
        progress.begin(f"warm-up of {arm.name}", len(tasks))

        def ask(task: LiveTask, prompts: Prompts = prompts) -> Ask:
            return prompts.ask(task.sim)

        seen = await client.all_of(tasks, ask, WARM_UP_STREAMS, progress.step)
        problem = next((s.problem for s in seen if s.is_lost), "")
        if problem:
            raise BenchError(f"a warm-up turn was lost: {problem}")
    await asyncio.sleep(LEARN_S)


def _warm_up_plan(number: int, turn: Turn) -> UserPlan:
    """One turn with a short prompt of its own."""
    output_tokens = min(turn.output_tokens, LONGEST_ANSWER_TOKENS)
    alone = replace(
        turn,
        prompt_tokens=WARM_UP_PROMPT_TOKENS,
        output_tokens=output_tokens,
        hit_tokens=0,
        base=None,
        after=(),
        agent=0,
        tools_tokens=0,
        system_tokens=0,
    )
    recorded = RecordedSession(f"warm-up {number}", (alone,))
    return UserPlan(0.0, (PlannedSession(recorded, WARM_UP_SEED + number, 0, (0.0,)),))
