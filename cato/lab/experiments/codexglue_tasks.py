"""CATO's four coding tasks with the lengths of real code, including both calls of two-call tasks.

`--dataset` is a folder. Tasks by file type: lines of {"nl", "code"} give generation and, reversed,
summarization (CodeXGLUE text-to-code; a summary is the description alone, without the class around
it); two parallel files give translation (code-to-code); `.py` files are cut at random places for
completion. Tasks without files are skipped. Generation and translation ask a small model, then a
large one that also reads the first answer; the others ask the small one. Judged as in the paper:
completion and generation by TTFT, the others by E2E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from statistics import fmean
from types import MappingProxyType

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.slo import SloMetric
from cato.core.topology import RAY_SERVE
from cato.lab.experiments.codexglue import LEAST_PAIRS, STRICTNESS
from cato.lab.experiments.coding_mixes import ONE_AT_A_TIME, REPLICAS, TASKS
from cato.lab.experiments.printed import JUDGED
from cato.lab.study import Study, Trial, no_targets
from cato.policies import schedulers
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.metrics import NAMES, metrics_of
from cato.sim.report import Report
from cato.sim.tasks import SimNode, SimTask
from cato.sim.traces import TokenPair, json_texts, load_pairs, token_count
from cato.sim.workloads import poisson

SMALL, LARGE = PoolName("small"), PoolName("large")
UTILIZATIONS = (0.5, 0.7, 0.83, 0.9)
# Separator in CONCODE's descriptions: the class around the method follows it.
FIELD_SEPARATOR = "concode_field_sep"
# Prompt of a completion: the last part of the file before the cut; answer: the next few lines.
SEEN_CHARS, COMPLETED_LINES = 4000, 3
ARMS = (schedulers.FORESIGHT, RAY_SERVE, "round-robin", "cato", "edf-bounded", "sjf-bounded")
CALLS: Mapping[str, tuple[PoolName, ...]] = MappingProxyType(
    {
        "completion": (SMALL,),
        "generation": (SMALL, LARGE),
        "translation": (SMALL, LARGE),
        "summarization": (SMALL,),
    }
)


@lru_cache(maxsize=2)
def pairs_of(folder: Path) -> Mapping[str, tuple[TokenPair, ...]]:
    """Lengths of prompts and answers by task; raise `InputError` for unreadable files."""
    if not folder.is_dir():
        raise InputError(f"--dataset: {folder} is not a folder; give the one that holds the files")
    found: dict[str, tuple[TokenPair, ...]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            found["generation"] = load_pairs(path)
            found["summarization"] = tuple(
                TokenPair(token_count(code), token_count(nl.split(FIELD_SEPARATOR)[0]))
                for nl, code in json_texts(path)
            )
        elif path.suffix == ".java":
            found["translation"] = load_pairs(path)
    if completions := _completions(folder):
        found["completion"] = completions
    known = {name: pairs for name, pairs in found.items() if len(pairs) >= LEAST_PAIRS}
    if not known:
        raise InputError(
            f"--dataset: {folder} has no {LEAST_PAIRS} pairs of any task: .json files of CodeXGLUE "
            "text-to-code, .java files with others beside them, or .py files"
        )
    return known


def _completions(folder: Path) -> tuple[TokenPair, ...]:
    """One reproducible cut per file; files that cannot be cut are skipped."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) < 2:
            continue
        cut = Random(path.name).randrange(1, len(text))
        answer = "\n".join(text[cut:].split("\n")[:COMPLETED_LINES]).strip()
        if answer:
            found.append(
                TokenPair(token_count(text[max(0, cut - SEEN_CHARS) : cut]), token_count(answer))
            )
    return tuple(found)


def nodes_of(task: str, pair: TokenPair, known: LengthBelief) -> tuple[SimNode, ...]:
    """The calls of a task; the second reads the prompt and the first answer."""
    expected = max(1, round(known.mean))
    pools = CALLS[task]
    first = SimNode(pools[0], pair.source_tokens, pair.target_tokens, expected, known)
    if len(pools) == 1:
        return (first,)
    prompt = pair.source_tokens + pair.target_tokens
    second = SimNode(pools[1], prompt, pair.target_tokens, expected, known, (0,))
    after_s = ONE_AT_A_TIME.first_token_s(prompt)
    if JUDGED[task] is SloMetric.E2E:
        after_s = ONE_AT_A_TIME.service_s(prompt, expected)
    return replace(first, downstream_s=after_s), second


def alone_s(task: str, nodes: Sequence[SimNode]) -> float:
    """The judged metric on idle replicas."""
    profile = ONE_AT_A_TIME
    before_s = sum(profile.service_s(n.prompt_tokens, n.output_tokens) for n in nodes[:-1])
    last = nodes[-1]
    if JUDGED[task] is SloMetric.TTFT:
        return before_s + profile.first_token_s(last.prompt_tokens)
    return before_s + profile.service_s(last.prompt_tokens, last.output_tokens)


@lru_cache(maxsize=4)
def tasks_of(folder: Path, utilization: float, seed: int) -> Sequence[SimTask]:
    """Equal shares of the available tasks. Every second pair was used for the beliefs."""
    rng = np.random.default_rng([seed, 19])
    names = list(pairs_of(folder))
    drawn: dict[str, list[tuple[SimNode, ...]]] = {}
    for name, pairs in pairs_of(folder).items():
        known = LengthBelief.of(float(p.target_tokens) for p in pairs[::2])
        drawn[name] = [nodes_of(name, p, known) for p in pairs[1::2]]
    busy_s = {SMALL: 0.0, LARGE: 0.0}
    for name in names:
        for nodes in drawn[name]:
            for n in nodes:
                share = 1 / (len(names) * len(drawn[name]))
                busy_s[n.pool] += share * ONE_AT_A_TIME.service_s(n.prompt_tokens, n.output_tokens)
    target_s = {
        name: STRICTNESS * fmean(alone_s(name, nodes) for nodes in drawn[name]) for name in names
    }
    times = poisson(rng, utilization * REPLICAS / max(busy_s.values()), TASKS)
    found = []
    for i, at_s in enumerate(times):
        name = names[int(rng.integers(len(names)))]
        nodes = drawn[name][int(rng.integers(len(drawn[name])))]
        draws = tuple(float(x) for x in rng.random(len(nodes)))
        found.append(
            SimTask(f"t{i:05d}", TaskName(name), at_s, JUDGED[name], target_s[name], nodes, draws)
        )
    return found


def _measured(folder: Path, utilization: float, arm: str, seed: int) -> dict[str, float]:
    tasks = tasks_of(folder, utilization, seed)
    pools = [
        PoolSetup(name, (ONE_AT_A_TIME,) * REPLICAS, schedulers.OF_PROFILE[arm](ONE_AT_A_TIME, 1))
        for name in (SMALL, LARGE)
        if any(n.pool == name for t in tasks for n in t.nodes)
    ]
    fleet = Fleet(pools)
    outcomes = fleet.run(tasks)
    metrics = metrics_of(fleet, outcomes)
    for name in pairs_of(folder):
        mine = [o for o in outcomes if o.task.name == name]
        if mine:
            metrics[f"attainment_{name}"] = fmean(o.is_met for o in mine)
    return metrics


def _cells(options: Options) -> list[Trial]:
    """Without a folder the cells have no tasks; running them reports the missing option."""
    loads = (0.7, 0.9) if options.quick else UTILIZATIONS
    return [Trial({"load": x}, partial(_of_options, options, x)) for x in loads]


def _of_options(options: Options, utilization: float, arm: str, seed: int) -> dict[str, float]:
    return _measured(options.needed("dataset"), utilization, arm, seed)


def _plot(report: Report, folder: Path) -> list[Path]:
    metrics = [
        "slo_attainment",
        *sorted({m.metric for m in report.means if m.metric.startswith("attainment_")}),
    ]
    fig, axes = plots.figure(len(metrics))
    for ax, metric in zip(axes, metrics, strict=True):
        plots.lines(ax, [m for m in report.means if m.metric == metric], "load", "attainment")
        ax.set_title(metric.removeprefix("attainment_").replace("_", " "))
        ax.set_xlabel("utilization of the fuller pool")
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


STUDY = Study(
    "codexglue-tasks",
    "four coding tasks with both calls and the lengths of real code (--dataset FOLDER)",
    "CodeXGLUE: text-to-code, code-to-code; CATO's decomposition",
    ARMS,
    _cells,
    no_targets,
    _plot,
    ("slo_attainment", "ttft_s_p95", "e2e_s_p95"),
    quick_seeds=3,
    metrics=(*NAMES, *(f"attainment_{name}" for name in CALLS)),
)
