"""What `cato bench live` sends, predicts and reports; the live path is in `tests/live`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from rich.console import Console

from cato.config.control import pool_changes
from cato.config.deploy_file import DeployFile, load_deploy_file
from cato.core.errors import CatoError, UnknownNameError
from cato.core.ids import DeploymentName, PoolName
from cato.core.profile import Profile
from cato.core.topology import EngineSpec, PoolPolicies, PoolScaling
from cato.core.workflow import NodeKind
from cato.engines.base import Endpoint, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.lab.experiments import saber
from cato.lab.experiments.coding_scaling_plots import plot_cell
from cato.lab.experiments.common import measured
from cato.lab.intervals import mean_interval
from cato.lab.live import serve_llm
from cato.lab.live.client import Ask, Seen, TaskClient
from cato.lab.live.experiment import WARM_UP_SEED, Arm, LiveExperiment, scaled, scaled_profile
from cato.lab.live.experiments import EXPERIMENTS, live_experiment
from cato.lab.live.plots import pictures
from cato.lab.live.prediction import Prediction, router_profiles, simulated
from cato.lab.live.prompts import TOLERANCE, prompt_for, stops_for
from cato.lab.live.report import as_json, tables
from cato.lab.live.rounds import (
    CpuLoad,
    ReplicaPoint,
    Run,
    Settings,
    Subject,
    order,
    whole_rounds,
)
from cato.lab.live.workflows import LiveTask, live_tasks, workflow_name, workflows, write
from cato.lab.studies import agents, completions
from cato.policies import schedulers
from cato.profiles.load import check_profiles, load_profile, load_profiles
from cato.sim import mixed
from cato.sim.fleet import PoolSetup
from cato.sim.plots import figure
from cato.sim.tasks import Outcome, SimTask
from cato.sim.tempo_workload import TEMPO_ENGINE
from cato.sim.workloads import SABER_ENGINE, SEVEN_B
from cato.workflows.load import load_workflows

ROOT = Path(__file__).resolve().parents[3]
DEPLOYMENTS = sorted((ROOT / "deployments" / "bench").glob("*.yaml"))
TRACE_LINES = ["TIMESTAMP,ContextTokens,GeneratedTokens"] + [
    f"2023-11-16 18:{15 + i // 600:02d}:{i / 10 % 60:010.7f},{200 + i % 50},{5 + i % 150}"
    for i in range(2600)
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    path.write_text("\n".join(TRACE_LINES) + "\n")
    return path


def the_deployment(name: str) -> DeployFile:
    return load_deploy_file(ROOT / live_experiment(name).deployment)


def engines_of(deploy: DeployFile, slowdown: float = 1.0) -> dict[DeploymentName, Profile]:
    known = load_profiles(ROOT / "profiles")
    return {
        d.name: scaled_profile(known[d.profile or ""], slowdown, 0.2)
        for p in deploy.topology.pools
        for d in p.deployments
    }


def profiles_of(deploy: DeployFile, slowdown: float = 1.0) -> dict[PoolName, Profile]:
    return router_profiles(deploy.topology, engines_of(deploy, slowdown))


def predicted(name: str, arm: Arm, tasks: Sequence[SimTask], slowdown: float = 1.0) -> Prediction:
    deploy = the_deployment(name)
    engines = engines_of(deploy, slowdown)
    return simulated(tasks, arm, live_experiment(name), deploy.topology, engines)


def saber_tasks(n: int = 60, seed: int = 0, slowdown: float = 1.0) -> list[SimTask]:
    made = live_experiment("saber").workloads["W3 at 10/s"](seed, n)
    return [scaled(task, slowdown) for task in made]


# Tasks


@pytest.mark.parametrize(("mean", "tokens"), [(30, 12), (60, 61), (150, 200), (400, 350)])
def test_the_simulated_engine_ends_an_answer_where_its_prompt_says(mean: int, tokens: int) -> None:
    stops = stops_for(mean)
    prompt = prompt_for(500, tokens, stops, 3, random.Random(1))
    profile = replace(load_profile(ROOT / "profiles" / "zero@none.yaml"), load_s=0.0)

    async def answer() -> tuple[int, str | None]:
        engine = SimulatedEngine(profile, EngineSpec("simulated", seed=3))
        await engine.start()
        body = {
            "prompt": prompt.text,
            "max_tokens": 2000,
            "stop": list(stops),
            "ignore_eos": True,
        }
        chunks = [c async for c in engine.generate(EngineRequest("1", Endpoint.COMPLETIONS, body))]
        await engine.stop()
        return chunks[-1].output_tokens, chunks[-1].finish_reason

    assert len(prompt.text) == 500
    assert abs(prompt.output_tokens - tokens) <= TOLERANCE * tokens
    # By itself, as a model does: a limit would be known to CATO.
    assert asyncio.run(answer()) == (prompt.output_tokens, "stop")


def test_a_class_of_longer_answers_has_rarer_ends() -> None:
    singles, pairs = stops_for(30), stops_for(600)
    assert all(s.count(" ") == 1 for s in singles)
    assert all(p.count(" ") == 2 for p in pairs)
    assert len(stops_for(150)) > len(pairs)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_generated_workflows_load_and_promise_what_the_tasks_have(
    name: str, trace: Path, tmp_path: Path
) -> None:
    experiment, deploy = live_experiment(name, trace), the_deployment(name)
    seeds = (1, WARM_UP_SEED)  # a class has one workflow, for all seeds
    tasks = [t for w in experiment.workloads.values() for seed in seeds for t in w(seed, 60)]
    made = workflows(experiment, [scaled(t, 2.0) for t in tasks], deploy.topology)
    write(tmp_path / "workflows", made)
    loaded = load_workflows(tmp_path / "workflows")
    assert set(loaded) == set(made)
    for task in tasks:
        for arm in experiment.arms:
            workflow = loaded[workflow_name(name, task, arm)]  # type: ignore[index]
            assert workflow.slo.metric is task.metric
            assert workflow.slo.target_s == pytest.approx(2 * task.target_s, abs=1e-6)
            calls = [n for n in workflow.nodes if n.kind is NodeKind.LLM]
            assert [len(n.needs) for n in calls] == [len(n.needs) for n in task.nodes]
            models = {n.settings.model for n in calls}  # type: ignore[union-attr]
            assert all(m.endswith(arm.suffix) for m in models)


def test_tasks_are_sent_with_the_lengths_of_the_simulated_ones() -> None:
    deploy = the_deployment("coding-mixes")
    made = live_experiment("coding-mixes").workloads["equal-shares"](4, 12)
    sent: list[str] = []
    profiles = profiles_of(deploy)
    live = live_tasks(made, deploy.topology, profiles, 4, lambda: sent.append(""))
    assert len(sent) == len(live) == 12
    for task, original in zip(live, made, strict=True):
        assert task.sim.arrived_at_s == original.arrived_at_s
        for i, (node, wanted) in enumerate(zip(task.sim.nodes, original.nodes, strict=True)):
            assert abs(node.output_tokens - wanted.output_tokens) <= 0.02 * wanted.output_tokens
            counted = profiles[node.pool].count_tokens(task.inputs[f"prompt_{i}"])
            assert counted == node.prompt_tokens == wanted.prompt_tokens
    prompts = [p for task in live for p in task.inputs.values()]
    assert len(set(prompts)) == len(prompts)


def test_a_pool_that_the_deployment_lacks_is_named() -> None:
    experiment = live_experiment("coding-mixes")
    with pytest.raises(CatoError, match=r"no pool 'large', only engine, engine-serve"):
        workflows(
            experiment, experiment.workloads["equal-shares"](0, 5), the_deployment("saber").topology
        )


def test_unknown_names_are_refused_with_those_that_there_are() -> None:
    experiment = live_experiment("coding-mixes")
    with pytest.raises(UnknownNameError, match="equal-shares"):
        experiment.chosen(["pattern-9"], [])
    with pytest.raises(UnknownNameError, match="power-of-two"):
        experiment.chosen([], ["power-of-three"])
    with pytest.raises(UnknownNameError, match="saber"):
        live_experiment("sabre")
    assert [a.name for a in experiment.chosen([], ["cato"]).arms] == ["cato"]


def test_agents_meet_the_opponents_of_the_simulated_study() -> None:
    live = {arm.name for arm in live_experiment("agents").arms}
    assert "block-cost-agentic" in live
    assert {*agents.ARMS} - live == {"continuum"}  # engines retain no blocks


def test_a_replay_needs_its_trace() -> None:
    with pytest.raises(CatoError, match="--trace"):
        live_experiment("azure-replay").workloads["code"](1, 10)


def test_the_warm_up_has_a_seed_that_no_user_asks_for() -> None:
    assert WARM_UP_SEED > 1000


# What runs


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda p: p.name)
def test_every_bench_deployment_belongs_to_an_experiment(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema  # importing it starts nothing

    deploy = load_deploy_file(path)
    assert path.stem in EXPERIMENTS
    check_profiles(deploy.topology, load_profiles(ROOT / "profiles"))
    ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("7b", SEVEN_B),
        ("saber", SABER_ENGINE),
        ("tempo", TEMPO_ENGINE),
        ("7b-a100", completions.ENGINE),
    ],
)
def test_live_engines_have_the_times_of_the_simulators(name: str, engine: Profile) -> None:
    profile = load_profile(ROOT / "profiles" / f"bench-{name}@gpu.yaml")
    own = {"model", "accelerator", "engine", "load_s"}
    for field in set(Profile.__slots__) - own:
        assert getattr(profile, field) == getattr(engine, field), field


def test_arms_take_turns() -> None:
    a, b, c = Arm("a"), Arm("b"), Arm("c")
    assert [order((a, b, c), n) for n in range(3)] == [(a, b, c), (c, b, a), (a, b, c)]


def test_an_interrupted_benchmark_keeps_its_whole_rounds() -> None:
    experiment = live_experiment("saber").chosen(["W3 at 10/s"], ["foresight", "saber"])
    tasks = saber_tasks(3)
    runs = [a_run(arm, tasks, missed=0, seed=7) for arm in ("foresight", "saber")]
    runs.append(a_run("saber", tasks, missed=0, seed=8))
    assert whole_rounds(runs, experiment) == (7,)
    assert whole_rounds(runs[2:], experiment) == ()


def the_arm(experiment: LiveExperiment, name: str) -> Arm:
    return next(a for a in experiment.arms if a.name == name)


def test_the_prediction_is_what_the_simulator_says() -> None:
    tasks = saber_tasks(100)
    found = predicted("saber", the_arm(live_experiment("saber"), "static-cap-30"), tasks)
    setup = PoolSetup(saber.POOL, (SABER_ENGINE,), schedulers.static_cap(30))
    expected = measured([setup], tasks)["slo_attainment"]
    assert sum(o.is_met for o in found.outcomes) / len(tasks) == expected
    assert 0 < expected < 1


def test_a_scaled_fleet_is_predicted_as_the_simulator_scales_it() -> None:
    experiment = live_experiment("coding-scaling")
    tasks = [scaled(t, 1.0) for t in experiment.workloads["utilization 0.5"](3, 150)]
    found = {
        arm.name: predicted("coding-scaling", arm, tasks) for arm in experiment.arms if arm.has_twin
    }
    assert all(2.0 <= (p.replicas or 0) <= 12.0 for p in found.values())
    met = {name: sum(o.is_met for o in p.outcomes) for name, p in found.items()}
    assert met["foresight + forecast"] > met["cato + cato"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_is_something_that_pools_can_be_told(name: str) -> None:
    pools = tuple(p.name for p in the_deployment(name).topology.pools)
    for arm in live_experiment(name).arms:
        if not arm.policies:
            continue
        config = {"pools": {pool: arm.user_config() for pool in pools}}
        policies, scaling = pool_changes(config, pools)
        assert PoolPolicies(**policies[pools[0]]) == arm.pool_policies()
        assert PoolScaling(**scaling[pools[0]]) == arm.scaling


def test_slower_is_the_same_experiment() -> None:
    arm = the_arm(live_experiment("saber"), "static-cap-30")

    def met(slowdown: float) -> list[bool]:
        found = predicted("saber", arm, saber_tasks(slowdown=slowdown), slowdown)
        return [o.is_met for o in found.outcomes]

    assert met(1.0) == met(4.0)


def test_each_card_is_predicted_with_its_own_speed() -> None:
    experiment = live_experiment("mixed")
    tasks = experiment.workloads["W3"](0, 200)
    met = {
        a.name: sum(o.is_met for o in predicted("mixed", a, tasks).outcomes)
        for a in experiment.arms
    }
    setup = PoolSetup(mixed.POOL, mixed.FLEET, schedulers.BY_NAME["foresight"]())
    assert met["foresight"] / len(tasks) == measured([setup], tasks)["slo_attainment"]
    assert met["foresight"] > max(met["least-wait"], met["power-of-two"])


# Numbers


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4))
def test_an_interval_holds_its_mean(rounds: list[list[float]]) -> None:
    found = mean_interval(rounds)
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9


def test_rounds_that_differ_make_a_wide_interval() -> None:
    alike = mean_interval([[0.0, 1.0] * 50] * 4)
    apart = mean_interval([[0.0] * 100, [1.0] * 100] * 2)
    assert apart.high - apart.low > 3 * (alike.high - alike.low)


@pytest.mark.parametrize("rounds", [[], [[1.0], []], [[]]])
def test_rounds_without_values_are_refused(rounds: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_interval(rounds)


def test_each_value_of_rounds_of_different_sizes_counts_the_same() -> None:
    found = mean_interval([[1.0] * 30, [0.0] * 10])
    assert found.value == 0.75
    assert (found.low, found.high) == (0.0, 1.0)
    assert mean_interval([[1.0] * 3, [1.0]]).low == 1.0


def a_receipt(*, met: bool, tokens: Sequence[int], cached: int = 0) -> dict[str, Any]:
    nodes = [
        {"node": f"call_{i}", "llm": {"output_tokens": n, "cached_prompt_tokens": cached}}
        for i, n in enumerate(tokens)
    ]
    return {"met": met, "status": "done", "simulated": True, "nodes": nodes}


def a_run(arm: str, tasks: Sequence[SimTask], *, missed: int, lost: int = 0, seed: int = 0) -> Run:
    """The first `missed` tasks come a minute late, the `lost` behind them not at all."""
    seen = []
    for i, task in enumerate(tasks):
        is_met = i >= missed
        receipt = a_receipt(met=is_met, tokens=[n.output_tokens for n in task.nodes])
        e2e_s = task.target_s / 2 if is_met else task.target_s + 60
        is_lost = missed <= i < missed + lost
        seen.append(
            Seen(
                LiveTask(task, {}),
                0.001,
                0.1,
                e2e_s,
                None if is_lost else receipt,
                "500, no whole answer" if is_lost else "",
            )
        )
    outcomes = [Outcome(t, t.arrived_at_s, t.arrived_at_s + t.target_s / 2) for t in tasks]
    cpu = CpuLoad([0.5, 0.9], 0.3)
    return Run("W3 at 10/s", Arm(arm), seed, seen, Prediction(outcomes), cpu)


def a_report(
    *runs: Run, experiment: LiveExperiment | None = None, deploy: DeployFile | None = None
) -> dict[str, Any]:
    deploy = deploy or the_deployment("saber")
    experiment = experiment or live_experiment("saber").chosen(["W3 at 10/s"], [])
    subject = Subject(experiment, deploy.topology, engines_of(deploy))
    facts = {
        "date": "2026-11-21",
        "cores": 2,
        "processor": "a processor",
        "python": "3.11",
        "ray": "2.60",
        "transport": "HAProxy and gRPC",
    }
    settings = Settings((0,), 60, 1.0, 20)
    return as_json(runs, subject, settings, facts, "cato bench live saber", "saber.yaml")


def test_engines_without_receipts_are_named_by_the_experiment() -> None:
    """Ray Serve's own deployment writes none."""
    tasks = saber_tasks(10)
    run = a_run("ray-serve", tasks, missed=0, lost=10)
    run = replace(run, seen=[replace(s, receipt=None) for s in run.seen])
    experiment = live_experiment("saber").chosen(["W3 at 10/s"], [])
    assert a_report(run, experiment=experiment)["simulated_engines"] is True
    mix = live_experiment("vllm-mix").mix
    assert mix is not None
    report = a_report(run, experiment=replace(experiment, mix=mix))
    assert report["simulated_engines"] is False


def test_a_report_says_what_was_met_lost_and_predicted() -> None:
    tasks = saber_tasks(60)
    report = a_report(a_run("foresight", tasks, missed=6), a_run("saber", tasks, missed=18, lost=3))
    assert json.loads(json.dumps(report)) == report
    assert report["simulated_engines"] is True
    assert report["lost"] == 3
    assert report["problems"] == ["500, no whole answer"]
    ours = report["workloads"]["W3 at 10/s"]["arms"]["foresight"]
    assert ours["attainment"]["value"] == ours["attainment_at_client"]["value"] == 0.9
    assert ours["simulated"] == 1.0
    assert ours["live_minus_simulated"]["value"] == -10
    assert ours["ttft"] == {"p50_ms": 100.0, "p95_ms": 100.0}
    [difference] = report["workloads"]["W3 at 10/s"]["differences"].values()
    assert difference["points"]["value"] == 25  # 12 more missed and 3 lost, of 60
    assert difference["simulated_points"]["value"] == 0


def test_an_arm_without_receipts_is_compared_at_the_client() -> None:
    """Receipts leave out HTTP: our tasks are in time by them, and a minute late at the client."""
    tasks = saber_tasks(60)
    ours, theirs = (a_run(arm, tasks, missed=6) for arm in ("foresight", "ray-serve-llm"))
    kind = a_receipt(met=True, tokens=[n.output_tokens for n in tasks[0].nodes])
    ours = replace(ours, seen=[replace(s, receipt=kind) for s in ours.seen])
    theirs = replace(theirs, seen=[replace(s, receipt=None) for s in theirs.seen])
    report = a_report(ours, theirs)
    found = report["workloads"]["W3 at 10/s"]
    assert found["arms"]["foresight"]["attainment"]["value"] == 1.0
    assert found["arms"]["foresight"]["attainment_at_client"]["value"] == 0.9
    [difference] = found["differences"].values()
    assert difference["points"] == difference["points_at_client"]
    assert difference["points"]["value"] == 0.0
    console = Console(width=100, record=True)
    console.print(tables(report))
    assert "ray-serve-llm: without receipts" in console.export_text()


def test_a_report_counts_answers_of_other_lengths_and_cached_prompts() -> None:
    tasks = saber_tasks(3)
    run = a_run("foresight", tasks, missed=0)
    tokens = [tasks[0].nodes[0].output_tokens + 1]
    odd = replace(run.seen[0], receipt=a_receipt(met=True, tokens=tokens, cached=16))
    report = a_report(replace(run, seen=(odd, *run.seen[1:])))
    assert (report["other_lengths"], report["cached_prompts"]) == (1, 1)


def test_a_report_reads_well_and_warns_of_a_busy_machine(tmp_path: Path) -> None:
    tasks = saber_tasks(60)
    busy = replace(a_run("saber", tasks, missed=9, lost=1), cpu=CpuLoad([0.95], 0.4))
    report = a_report(a_run("foresight", tasks, missed=6), busy)
    console = Console(width=100, record=True)
    console.print(tables(report))
    text = console.export_text()
    for words in (
        "simulated engines",
        "cato bench live saber",
        "90.0 [",
        "foresight - saber",
        "more than 80% busy during saber (seed 0, W3 at 10/s)",
        "1 tasks were lost",
    ):
        assert words in text
    [path] = pictures(report, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_scaled_fleet_is_shown_with_its_replicas_over_time(tmp_path: Path) -> None:
    experiment, deploy = live_experiment("coding-scaling"), the_deployment("coding-scaling")
    experiment = experiment.chosen(["utilization 0.25"], ["foresight + forecast"])
    tasks = [scaled(t, 1.0) for t in experiment.workloads["utilization 0.25"](0, 40)]
    points = [ReplicaPoint(float(t), 1 + (t > 20), 2, 3) for t in range(60)]
    run = replace(
        a_run("foresight + forecast", tasks, missed=4),
        workload="utilization 0.25",
        predicted=Prediction([Outcome(t) for t in tasks], 3.5),
        replicas={PoolName("small"): points, PoolName("large"): points},
    )
    report = a_report(run, experiment=experiment, deploy=deploy)
    assert json.loads(json.dumps(report)) == report
    workload = report["workloads"]["utilization 0.25"]
    assert workload["arms"]["foresight + forecast"]["mean_replicas"] == 4.0
    assert set(workload["offered"]) == {"small", "large"}
    console = Console(width=100, record=True)
    console.print(tables(report))
    assert "4.0 (3.5)" in console.export_text()
    assert [p.name for p in pictures(report, tmp_path)] == [
        "live-coding-scaling.png",
        "live-coding-scaling-replicas-utilization-025.png",
    ]


@pytest.mark.parametrize(("replicas", "highest"), [(6, 12.0), (20, 20.0)])
def test_a_picture_of_replicas_shows_all_of_them_and_says_where_it_cuts_calls(
    replicas: int, highest: float
) -> None:
    fig, (axis,) = figure()
    plot_cell(axis, [(0.0, 1, 2, 3), (1.0, replicas, replicas, 50)], [(0.0, 1.0), (1.0, 2.0)])
    lines = {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}
    assert lines["replicas ready"][-1] == replicas
    assert lines[f"calls waiting or running, up to {highest:g}"] == [3, highest]
    assert axis.get_ylim()[1] >= highest
    plt.close(fig)


# The baseline that is asked in place of CATO


def test_an_openai_stream_is_timed_and_judged_at_the_client() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
        if body["prompt"] == "whole":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def ask(prompts: Sequence[str]) -> list[Seen]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        tasks = [LiveTask(saber_tasks(1)[0], {"prompt_0": p}) for p in prompts]
        async with TestServer(app) as server, TaskClient(str(server.make_url("")).rstrip("/")) as c:
            return await c.all_of(
                tasks,
                lambda t: Ask("/v1/completions", {"prompt": t.inputs["prompt_0"]}, is_plain=True),
                1,
                lambda: None,
            )

    whole, cut = asyncio.run(ask(["whole", "cut"]))
    assert not whole.is_lost
    assert whole.is_met == whole.is_met_at_client
    assert whole.ttft_s <= whole.e2e_s
    assert cut.is_lost
    assert not cut.is_met
    assert "incomplete answer" in cut.problem


def test_ray_serve_llm_is_an_arm_where_its_packages_are() -> None:
    names = [a.name for a in live_experiment("vllm-mix").arms]
    assert (serve_llm.NAME in names) == (not serve_llm.missing_packages())
