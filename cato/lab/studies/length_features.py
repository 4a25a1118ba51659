"""Length bounds from more features than prompt length: their accuracy, and the attainment gained.

`--trace` with recorded agents: a turn's role, position, tools and its agent's earlier answers.
`--dataset` with a folder of CodeXGLUE files (see `codexglue-tasks`): features of the text. The
Profiler's own learner (`cato.estimators.output_lengths`) learns from half of each; the other is
evaluated: coverage and pinball loss of the 0.9 quantile, and attainment where the default believes
the learnt distribution, on one engine in overload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean

import numpy as np

from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.slo import SloMetric
from cato.estimators.calibration import covered, pinball_losses
from cato.estimators.output_lengths import (
    ENDED,
    LEVEL,
    LengthHistory,
    LengthSample,
    OutputLengths,
    refitted,
)
from cato.estimators.prompt_features import Asked, EarlierAnswers, features_of
from cato.lab.experiments.common import measured
from cato.lab.studies import agent_fleet
from cato.lab.study import Study, Trial, no_targets
from cato.policies import schedulers
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.metrics import NAMES
from cato.sim.report import Report
from cato.sim.session_traces import RecordedSession
from cato.sim.tasks import SimNode, SimTask
from cato.sim.traces import json_texts, parallel_texts, token_count
from cato.sim.workloads import SABER_ENGINE, poisson

MARGINAL, PROMPT, ALL, EXACT = "marginal", "prompt length", "all features", "told lengths"
ARMS = (ALL, PROMPT, MARGINAL, EXACT)
NODE, MODEL = NodeId("call"), "m"
AMPLE_TOKENS = 1_000_000
POOL = PoolName("engine")
TASKS, LOAD, FULL_BATCH, STRICTNESS = 600, 1.1, 64, 1.5
AGENTS, TEXTS = "turns of agents", "text pairs"


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call: its features, and its answer. `new_tokens`: not cached."""

    task: TaskName
    asked: Asked
    new_tokens: int
    output_tokens: int


def calls_of_agents(sessions: Sequence[RecordedSession]) -> Iterator[Call]:
    """In order of start; an agent of a session is a user."""
    earlier = EarlierAnswers()
    for session in sessions:
        turns: dict[int, int] = {}
        for turn in session.turns:
            user = f"{session.id}/{turn.agent}"
            asked = Asked(
                turn.prompt_tokens,
                role="tool" if turn.follows_tool else "user",
                turn=turns.get(turn.agent, 0),
                tools=turn.tools_tokens,
                earlier=earlier.of("agent", "agent", user),
            )
            new = max(1, turn.prompt_tokens - turn.hit_tokens)
            yield Call(TaskName("agent"), asked, new, turn.output_tokens)
            turns[turn.agent] = turns.get(turn.agent, 0) + 1
            earlier.add("agent", "agent", user, turn.output_tokens)


def calls_of_texts(folder: Path) -> Iterator[Call]:
    """Generation and summarization from `.json` files, translation from `.java` ones, in turns."""
    pairs: list[tuple[str, str, str]] = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            for nl, code in json_texts(path):
                pairs += [("generation", nl, code), ("summarization", code, nl)]
        elif path.suffix == ".java":
            pairs += [("translation", source, target) for source, target in parallel_texts(path)]
    for task, source, target in pairs:
        tokens = token_count(source)
        yield Call(TaskName(task), Asked(tokens, text=source), tokens, token_count(target))


@lru_cache(maxsize=2)
def halves(kind: str, path: Path) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """The training half, and the half to report on."""
    if kind == AGENTS:
        first, second = agent_fleet.halves(path)
        return tuple(calls_of_agents(first)), tuple(calls_of_agents(second))
    calls = tuple(calls_of_texts(path))
    # A pair of texts gives two calls, one in each direction.
    sides = [tuple(c for i, c in enumerate(calls) if i // 2 % 2 == side) for side in (0, 1)]
    return sides[0], sides[1]


def _features(call: Call, arm: str) -> tuple[float, ...]:
    return features_of(call.asked if arm == ALL else Asked(call.asked.prompt_tokens))


def _sample(call: Call, arm: str) -> LengthSample:
    tokens, reason = call.output_tokens, min(ENDED)
    prompt, features = call.asked.prompt_tokens, _features(call, arm)
    return LengthSample(call.task, NODE, MODEL, prompt, tokens, reason, features)


@lru_cache(maxsize=8)
def learnt(kind: str, path: Path, arm: str, seed: int) -> OutputLengths:
    """What the Profiler would know after the first half."""
    history, nothing = LengthHistory(), OutputLengths()
    history.add(_sample(call, arm) for call in halves(kind, path)[0])
    return refitted(nothing, history.taken(history.due(nothing)), 1, seed)


def belief(call: Call, kind: str, path: Path, arm: str, seed: int) -> LengthBelief:
    """The belief about a call of the second half."""
    if arm == EXACT:
        return LengthBelief((float(call.output_tokens),))
    if arm == MARGINAL:
        return learnt(kind, path, PROMPT, seed).keys[call.task, NODE, MODEL].belief
    features = _features(call, arm)
    known = learnt(kind, path, arm, seed)
    found = known.belief(call.task, NODE, MODEL, features, AMPLE_TOKENS)
    assert found is not None, "both halves have calls of every task"
    return found


def _measured(kind: str, option: str, options: Options, arm: str, seed: int) -> dict[str, float]:
    path = options.needed(option)
    test = halves(kind, path)[1]
    metrics = {}
    if arm != EXACT:
        lengths = [c.output_tokens for c in test]
        bounds = [belief(c, kind, path, arm, seed).left_quantile(LEVEL, 0) for c in test]
        metrics["coverage"] = float(covered(lengths, bounds).mean())
        metrics["pinball_loss_tokens"] = float(pinball_losses(lengths, bounds, LEVEL).mean())
    ran = measured(
        [PoolSetup(POOL, (SABER_ENGINE,), schedulers.foresight())],
        tasks_of(test, kind, path, arm, seed),
    )
    return metrics | ran


def tasks_of(test: Sequence[Call], kind: str, path: Path, arm: str, seed: int) -> list[SimTask]:
    """Random calls of the second half; their target is that of the task's mean call."""
    rng = np.random.default_rng([seed, 23])
    chosen = [test[int(i)] for i in rng.integers(len(test), size=TASKS)]
    step_s = SABER_ENGINE.decode_step_s(FULL_BATCH) / FULL_BATCH
    call_s = fmean(
        c.output_tokens * step_s + c.new_tokens * SABER_ENGINE.prompt_token_s for c in test
    )
    times = poisson(rng, LOAD / call_s, TASKS)
    target_s = {
        name: STRICTNESS
        * SABER_ENGINE.service_s(
            round(fmean(c.new_tokens for c in test if c.task == name)),
            round(fmean(c.output_tokens for c in test if c.task == name)),
            FULL_BATCH,
        )
        for name in {c.task for c in test}
    }
    found = []
    for i, (at_s, call) in enumerate(zip(times, chosen, strict=True)):
        known = belief(call, kind, path, arm, seed)
        node = SimNode(POOL, call.new_tokens, call.output_tokens, max(1, round(known.mean)), known)
        found.append(
            SimTask(
                f"t{i:05d}",
                call.task,
                at_s,
                SloMetric.E2E,
                target_s[call.task],
                (node,),
                (float(rng.random()),),
            )
        )
    return found


def _cells(options: Options) -> list[Trial]:
    """Cells for the given files; without any, running them reports what is needed."""
    kinds = [(AGENTS, "trace"), (TEXTS, "dataset")]
    given = [(k, o) for k, o in kinds if getattr(options, o) is not None] or kinds[:1]
    return [Trial({"calls": kind}, partial(_measured, kind, o, options)) for kind, o in given]


def _plot(report: Report, folder: Path) -> list[Path]:
    metrics = ("coverage", "pinball_loss_tokens", "slo_attainment")
    fig, axes = plots.figure(len(metrics))
    for ax, metric in zip(axes, metrics, strict=True):
        means = [m for m in report.means if m.metric == metric]
        groups = list(dict.fromkeys(str(m.setting["calls"]) for m in means))
        plots.bars(ax, means, groups, "calls", metric.replace("_", " "))
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


STUDY = Study(
    "length-features",
    "answer length from more than the prompt's length (--trace SESSIONS, --dataset FOLDER)",
    "CATO project; Tempo's length bounds",
    ARMS,
    _cells,
    no_targets,
    _plot,
    ("coverage", "pinball_loss_tokens", "slo_attainment"),
    ("slo_attainment",),
    quick_seeds=3,
    reference=ALL,
    metrics=("coverage", "pinball_loss_tokens", *NAMES),
)
