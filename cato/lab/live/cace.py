"""CACE live: its 16 models on 4 simulated slots, over HTTP.

The arrivals are those of `cato simulate` for the same seed, and its prediction is reported next to
the measurement. All times are multiplied by `slowdown`, which is below 1, so that a run takes
minutes. Reported times, and the times that policies see, are divided by it again, because policies'
constants are in seconds. Slots are empty at the start of each run.

Importing this module imports Ray, which then reads its settings: set the environment first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import yaml
from ray import serve

from cato.config.deploy_file import load_deploy_file
from cato.control import actors
from cato.core.ids import ModelName, PoolName
from cato.core.slots import LoadCounts, SharedPoolPicture
from cato.lab.client import BenchError, HttpClient, at_due_times
from cato.lab.experiments.cace import PATTERNS
from cato.lab.live.cace_cases import METRICS, NAME, WORKLOADS, Arm, Run, Settings
from cato.lab.live.cace_report import as_json
from cato.lab.live.experiment import scaled_profile
from cato.lab.live.rounds import Progress
from cato.lab.live.stage import OwnStage
from cato.policies.eviction.registry import card_policies
from cato.profiles.load import profile_name, save_profile
from cato.profiles.schema import Provenance
from cato.serve.ingress.hints import DEADLINE_HEADER
from cato.sim import card_workload, cards
from cato.sim.card_workload import CardArrival

POOL = PoolName("cards")
CALL_TIMEOUT_S = 30.0
EMPTY_WITHIN_S = 60.0
POLL_S = 0.1
# Timeout after which a lost call is reported: ten times the longest wait of the slowest arm.
TIMEOUT_S = 600.0
# Model names of the simulator that do not fit in URLs and file names.
_SLUGS = {"C++": "cpp", "C#": "csharp"}


@dataclass(frozen=True, slots=True)
class Seen:
    """One call as seen by the client, in its own seconds; `problem`: why it is incomplete."""

    ttft_s: float
    e2e_s: float
    problem: str = ""


def served_name(model: ModelName) -> str:
    """The simulator's model name in the form that clients use."""
    language, kind = model.rsplit("-", 1)
    return f"{_SLUGS.get(language, language).lower()}-{kind}"


def write_deployment(folder: Path, slowdown: float) -> Path:
    """A deployment file with the 16 models and its profiles and workflow, in `folder`."""
    for kind, profile in card_workload.PROFILES.items():
        # The deployment file gives the load times, from storage and from memory.
        fast = replace(scaled_profile(profile, slowdown, 0.0), model=kind, accelerator="bench")
        path = folder / "profiles" / f"{profile_name(kind, 'bench')}.yaml"
        note = f"CACE's {kind} model, times x {slowdown:g}"
        save_profile(path, fast, Provenance(simulated=True, note=note))
    facts = {served_name(m.name): m for m in card_workload.models()}
    kinds = {name: name.rsplit("-", 1)[1] for name in facts}
    hosted = {
        name: {
            "profile": profile_name(kinds[name], "bench"),
            "load": f"{m.load_s * slowdown:.6f}s",
            "reload": f"{m.reload_s * slowdown:.6f}s",
            "weights": m.weights_bytes,
            "slo": f"{m.slo_s * slowdown:.6f}s",
        }
        for name, m in facts.items()
    }
    slots = {
        "count": cards.CARDS,
        "accelerator": "cpu",
        "cpus": 0.1,
        "engine": {"kind": "simulated", "max_num_seqs": 8, "prefix_caching": False},
    }
    engines = {
        "models": {name: {"source": "simulated", "family": "qwen"} for name in facts},
        "shared_pools": {POOL: {"models": hosted, "slots": slots}},
    }
    app = {"route_prefix": None, "external_scaler_enabled": True, "args": engines}
    file = {
        "applications": [
            {"name": "engines", "import_path": "cato.serve.app:build_engines", **app},
            {"name": "cato", "import_path": "cato.serve.app:build_ingress", "route_prefix": "/"},
        ]
    }
    (folder / "workflows").mkdir(parents=True, exist_ok=True)
    call = {
        "type": "llm",
        "model": next(iter(facts)),
        "prompt": "{{ text }}",
        "max_tokens": 16,
    }
    # Clients use the model names; the workflow is there because an ingress needs at least one.
    workflow = {
        "name": NAME,
        "sla": {"metric": "ttft", "target": "1s"},
        "inputs": {"text": "str"},
        "nodes": {"call": call},
        "stream": "call",
        "output": "call",
    }
    (folder / "workflows" / f"{NAME}.yaml").write_text(yaml.safe_dump(workflow))
    path = folder / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump(file, sort_keys=False))
    return path


def run(
    settings: Settings,
    folder: Path,
    progress: Progress,
    say: Callable[[str], None],
    facts: Mapping[str, object],
    command: str,
) -> dict[str, Any]:
    """Measure everything; `folder` holds generated files. Returns the report."""
    deploy = load_deploy_file(write_deployment(folder, settings.slowdown))
    about = dict(facts)
    with OwnStage(deploy, folder, say) as stage:
        runs = [
            _measure(stage.url, settings, workload, arm, seed, progress)
            for round_number, seed in enumerate(settings.seeds)
            for workload in settings.workloads
            for arm in settings.arms_of(workload)[:: -1 if round_number % 2 else 1]
        ]
    return as_json(runs, settings, about, command)


def _measure(
    url: str, settings: Settings, workload: str, arm: Arm, seed: int, progress: Progress
) -> Run:
    pattern, case = WORKLOADS[workload]
    arrivals = card_workload.arrivals(
        PATTERNS[pattern], case.rate_per_s, settings.tasks, generator(seed)
    )
    _begin(arm, settings.slowdown)
    progress.begin(f"{workload}, {arm.name}, seed {seed}", len(arrivals))
    seen = asyncio.run(_replay(url, arrivals, settings.slowdown, progress.step))
    problems = tuple(dict.fromkeys(s.problem for s in seen if s.problem))
    counts = _picture().counts
    policies = card_policies(arm.policies)
    predicted = cards.run(arrivals, policies, arm.policies.host_memory_bytes).metrics()
    return Run(
        workload,
        arm.name,
        seed,
        metrics_of(arrivals, seen, counts, settings.slowdown),
        {name: predicted[name] for name in METRICS},
        problems,
    )


def generator(seed: int) -> np.random.Generator:
    """Same construction as in the simulator's experiments."""
    return np.random.default_rng(seed)


def _begin(arm: Arm, slowdown: float) -> None:
    """Switch to `arm`, with fresh keeper state and empty slots; it sees times as they would be
    without `slowdown`."""
    policies = arm.policies
    change = {
        "eviction": policies.eviction,
        "dispatch": policies.dispatch,
        "host_memory": policies.host_memory_bytes,
        "max_queued": policies.max_queued,
    }
    control: Any = serve.get_deployment_handle("control-plane", app_name=actors.ENGINES_APP)
    asked = control.change.remote({"shared_pools": {POOL: change}})
    asked.result(timeout_s=CALL_TIMEOUT_S)
    manager: Any = actors.get(actors.EVICTION_MANAGER)
    now = ray.get(manager.policies.remote(POOL), timeout=CALL_TIMEOUT_S)
    if now != policies:
        raise BenchError(f"the shared pool decides by {now}, not as {arm.name}")
    deadline_s = time.monotonic() + EMPTY_WITHIN_S
    while any(slot.running for slot in _picture().slots):
        _wait(deadline_s, "calls of the previous run are still running")
    ray.get(manager.reset.remote(POOL, slowdown), timeout=CALL_TIMEOUT_S)
    while not _is_empty(_picture()):
        _wait(deadline_s, "the slots did not become empty")


def _wait(deadline_s: float, problem: str) -> None:
    if time.monotonic() > deadline_s:
        raise BenchError(f"{problem} after {EMPTY_WITHIN_S:g} s")
    time.sleep(POLL_S)


def _is_empty(picture: SharedPoolPicture) -> bool:
    slots = picture.slots
    return len(slots) == cards.CARDS and all(s.model is None for s in slots)


def _picture() -> SharedPoolPicture:
    manager: Any = actors.get(actors.EVICTION_MANAGER)
    pictures = ray.get(manager.pictures.remote(), timeout=CALL_TIMEOUT_S)
    found: SharedPoolPicture = next(p for p in pictures if p.name == POOL)
    return found


async def _replay(
    url: str, arrivals: Sequence[CardArrival], slowdown: float, done: Callable[[], None]
) -> list[Seen]:
    """Send every call at its time, whatever happened to the others."""
    async with HttpClient(TIMEOUT_S) as client:

        async def one(arrival: CardArrival, due_s: float) -> Seen:
            target_ms = 1000 * card_workload.SLO_S[arrival.kind] * slowdown
            headers = {DEADLINE_HEADER: f"{target_ms:.3f}"}
            answer = await client.stream(f"{url}/v1/completions", _body(arrival), headers)
            done()
            return Seen(answer.first_s - due_s, answer.ended_s - due_s, answer.problem)

        return await at_due_times(arrivals, lambda a: a.wanted.arrived_at_s * slowdown, one)


def _body(arrival: CardArrival) -> dict[str, object]:
    profile = card_workload.PROFILES[arrival.kind]
    text = f"# {arrival.wanted.id}\n"
    return {
        "model": served_name(arrival.wanted.model),
        "prompt": text.ljust(round(arrival.prompt_tokens * profile.chars_per_token), "x"),
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "stream": True,
    }


def metrics_of(
    arrivals: Sequence[CardArrival], seen: Sequence[Seen], counts: LoadCounts, slowdown: float
) -> dict[str, float]:
    """The metrics of `cards.FleetRun.metrics`, in the experiment's seconds."""
    ttft_s = np.array([s.ttft_s for s in seen]) / slowdown
    e2e_s = np.array([s.e2e_s for s in seen]) / slowdown
    met = [
        not s.problem and t <= card_workload.SLO_S[a.kind] and e <= card_workload.E2E_SLO_S[a.kind]
        for a, s, t, e in zip(arrivals, seen, ttft_s, e2e_s, strict=True)
    ]
    return {
        "hit_rate": counts.hits / max(1, counts.served),
        "ttft_s_mean": float(np.nanmean(ttft_s)),
        "load_s": counts.load_s / slowdown,
        "evictions": float(counts.evictions),
        "loads": float(counts.loads),
        "e2e_s_mean": float(e2e_s.mean()),
        "slo_attainment": float(np.mean(met)),
    }
