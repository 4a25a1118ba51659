"""Converts simulated tasks to live ones: a workflow per class, and the inputs of each task."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from cato.core.errors import CatoError
from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.core.topology import PoolSpec, Topology
from cato.lab.live import real
from cato.lab.live.experiment import SERVE_SUFFIX, Arm, LiveExperiment
from cato.lab.live.prompts import prompt_for, stops_for
from cato.sim.tasks import SimNode, SimTask

# Larger than any answer of these workloads; a tighter limit would reveal something of the length.
MAX_TOKENS = 16_000
# No client gives up: the simulator has no deadlines either.
PATIENCE = 200.0
LEAST_PATIENCE_S = 1800.0
MAX_DEADLINE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class LiveTask:
    """A task as sent. `sim` has the actual lengths of the live task, answers included."""

    sim: SimTask
    inputs: Mapping[str, str]


def workflow_name(experiment: str, task: SimTask, arm: Arm) -> str:
    return f"{experiment}-{task.name}{arm.suffix}"


def workflow(
    name: str, task: SimTask, pools: Mapping[str, PoolSpec], mix: real.Mix | None = None
) -> dict[str, Any]:
    """The workflow of all tasks of `task`'s class; `pools` by the names that `task` uses.

    `mix` belongs to a real engine.
    """
    nodes: dict[str, dict[str, Any]] = {}
    for i, node in enumerate(task.nodes):
        nodes[_node(i)] = {
            "type": "llm",
            "model": pools[node.pool].model.name,
            "needs": [_node(n) for n in node.needs],
            "prompt": f"{{{{ {_input(i)} }}}}",
            "expected_tokens": node.expected_tokens,
            **(_simulated_answer(node) if mix is None else _real_answer(mix.endings[task.name])),
        }
    needed = {n for node in task.nodes for n in node.needs}
    ends = [_node(i) for i in range(len(task.nodes)) if i not in needed]
    last = ends[-1]
    if len(ends) > 1:  # the task ends with the last of them
        last = "all"
        texts = " ".join(f"{{{{ {end}.text }}}}" for end in ends)
        nodes[last] = {"type": "transform", "needs": ends, "text": texts}
    deadline_s = min(MAX_DEADLINE_S, max(LEAST_PATIENCE_S, PATIENCE * task.target_s))
    return {
        "name": name,
        "sla": {
            "metric": task.metric.value,
            "target": f"{task.target_s:.6f}s",
            "deadline": f"{deadline_s:.0f}s",
        },
        "inputs": {_input(i): "str" for i in range(len(task.nodes))},
        "nodes": nodes,
        "stream": last,
        "output": last,
    }


def _simulated_answer(node: SimNode) -> dict[str, Any]:
    return {
        "max_tokens": MAX_TOKENS,
        "stop": list(stops_for(node.expected_tokens)),
        "extra": {"ignore_eos": True},
    }


def _real_answer(ending: real.Ending) -> dict[str, Any]:
    return {
        "max_tokens": ending.max_tokens,
        "stop": list(ending.stops),
        "temperature": real.TEMPERATURE,
        "extra": dict(real.EXTRA),
    }


def _node(index: int) -> str:
    return f"call_{index}"


def _input(index: int) -> str:
    return f"prompt_{index}"


def workflows(
    experiment: LiveExperiment, tasks: Iterable[SimTask], topology: Topology
) -> dict[str, dict[str, Any]]:
    """Workflows by name, one per class in `tasks` and set of pools that an arm uses.

    Raise `CatoError` when a pool is missing in the deployment, or when tasks of one class differ
    in more than their lengths.
    """
    found: dict[str, dict[str, Any]] = {}
    by_suffix = {arm.suffix: arm for arm in experiment.arms}
    for task in tasks:
        for suffix, arm in by_suffix.items():
            pools: dict[str, PoolSpec] = {
                n.pool: pool_named(topology, n.pool + suffix) for n in task.nodes
            }
            name = workflow_name(experiment.name, task, arm)
            made = workflow(name, task, pools, experiment.mix)
            if found.setdefault(name, made) != made:
                raise CatoError(f"tasks of {name} differ in their DAG or their objective")
    return found


def pool_named(topology: Topology, name: str) -> PoolSpec:
    for pool in topology.pools:
        if pool.name == name:
            return pool
    names = ", ".join(p.name for p in topology.pools)
    hint = ", or leave that arm out with --arm" if name.endswith(SERVE_SUFFIX) else ""
    raise CatoError(f"the deployment has no pool {name!r}, only {names}; add it{hint}")


def write(folder: Path, made: Mapping[str, Mapping[str, Any]]) -> None:
    """One file per workflow."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(content), sort_keys=False))


def live_tasks(
    tasks: Sequence[SimTask],
    topology: Topology,
    profiles: Mapping[PoolName, Profile],
    seed: int,
    done: Callable[[], None],
) -> list[LiveTask]:
    """The tasks with prompts whose simulated answers have the wanted lengths; `done` after each.

    Takes about 0.05 s of CPU per call.
    """
    draw = random.Random(seed)
    found = []
    for task in tasks:
        inputs: dict[str, str] = {}
        nodes: list[SimNode] = []
        for i, node in enumerate(task.nodes):
            pool = pool_named(topology, node.pool)
            prompt = prompt_for(
                round(node.prompt_tokens * profiles[node.pool].chars_per_token),
                node.output_tokens,
                stops_for(node.expected_tokens),
                pool.deployments[0].engine.seed,
                draw,
            )
            inputs[_input(i)] = prompt.text
            nodes.append(replace(node, output_tokens=prompt.output_tokens))
        found.append(LiveTask(replace(task, nodes=tuple(nodes)), inputs))
        done()
    return found
