"""`cato bench accelerator` before it meets a card: what it measures, leaves out, and finds."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from virtual_time_kit import VirtualLoop

from cato.config.deploy_file import load_deploy_file
from cato.config.schema import EnginesArgs
from cato.control.nvidia import Card
from cato.core.errors import InputError, UnknownNameError
from cato.engines.vllm.host import Zygote
from cato.lab.accelerator import run
from cato.lab.accelerator.alone import (
    SMALL,
    Alone,
    accelerator_name,
    engine_alone,
    host_memory,
    two_models,
)
from cato.lab.accelerator.plan import (
    ITEMS,
    START_MINUTES,
    Item,
    Subject,
    expected_minutes,
    letters_of,
    steps,
    too_long,
    why_not,
)
from cato.lab.accelerator.report import findings, tables
from cato.lab.accelerator.run import Accelerator, Settings
from cato.lab.accelerator.served import _Stream, verdict_of_kill
from cato.lab.bench.deployment import (
    file_on_accelerator,
    models_of,
    on_accelerator,
    with_models_in,
    with_profile,
)
from cato.lab.bench.overhead import engines_args
from cato.lab.live.experiment import WARM_UP_SEED
from cato.lab.live.experiments import mix_of
from cato.lab.live.rounds import _Recorder
from cato.lab.live.session import Options, Session
from cato.profiles.load import load_profile_file, load_profiles
from cato.profiles.schema import ProfileFile, Provenance

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "deployments" / "accelerator").glob("*.yaml"))
ONE_CARD = ROOT / "deployments" / "accelerator" / "one-card-7b.yaml"
ONE_CORE = ROOT / "deployments" / "accelerator" / "one-core.yaml"
ON_CARD = Subject("gpu", "vllm", models=2, cards=1)
CARD = Card(0, "GPU-a", "NVIDIA H200", "580.1", 141 << 30, 0, {})
BY_LETTER = {item.letter: item for item in ITEMS}


# What is measured


def test_engines_come_first_and_each_file_is_deployed_once() -> None:
    keys = [step.key for step in steps(["x", "y"])]
    assert keys[:2] == ["a x", "a y"]
    assert keys[2:10] == ["b x", "c x", "d x", "e x", "b y", "c y", "d y", "e y"]
    assert keys[10:] == ["f x", "f y", "g x", "g y", "h x", "h y"]
    assert [s.key for s in steps(["x"], ("h", "a"))] == ["a x", "h x"]
    with pytest.raises(UnknownNameError, match="'z'"):
        steps(["x"], ("z",))


def test_letters_are_separated_by_commas() -> None:
    assert letters_of(" c, a,c") == ("c", "a")
    assert letters_of("") == ()
    with pytest.raises(InputError):
        letters_of(" , ")


@pytest.mark.parametrize(
    ("letter", "subject", "reason"),
    [
        ("a", replace(ON_CARD, cards=0), "NVIDIA's driver shows none"),
        ("a", replace(ON_CARD, engine="simulated"), "simulated"),
        ("f", replace(ON_CARD, models=1), "one model"),
        ("a", replace(ON_CARD, accelerator="cpu", cards=0), ""),
        ("f", ON_CARD, ""),
    ],
)
def test_what_the_device_cannot_do_is_left_out_with_the_reason(
    letter: str, subject: Subject, reason: str
) -> None:
    found = why_not(BY_LETTER[letter], subject)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_budget_holds_the_start_of_cato_too() -> None:
    item = BY_LETTER["b"]
    first = expected_minutes(item, quick=False, is_started=False)
    assert first == item.minutes + START_MINUTES
    assert expected_minutes(item, quick=False, is_started=True) == item.minutes
    assert too_long(first, left=None) == too_long(first, left=first) == ""
    assert too_long(first, left=0.5) == f"takes about {first:.1f} min; 0.5 min are left"


# The run, and what becomes of it


class Canned(Accelerator):
    """Measures nothing: an item's result is what `results` has, or it raises that."""

    results: dict[str, Any] = {}  # noqa: RUF012  # replaced by each test
    asked: list[str] = []  # noqa: RUF012

    def _measured(self, item: Item, name: str, file: Any) -> dict[str, Any]:
        self.asked.append(item.letter)
        found = self.results.get(item.letter, {})
        if isinstance(found, Exception):
            raise found
        if found == "forever":
            asyncio.run(asyncio.sleep(60))
        assert isinstance(found, dict)
        return found


class Silent:
    def begin(self, what: str, steps: int) -> None: ...

    def step(self) -> None: ...


FACTS = {"date": "d", "cores": 2, "processor": "p", "python": "3", "ray": "2", "vllm": "0"}


def a_run(folder: Path, results: dict[str, Any], **settings: Any) -> tuple[Canned, dict[str, Any]]:
    json_file = folder / "report.json"
    chosen = Settings((str(ONE_CORE),), json_file, **settings)
    accelerator = Canned(chosen, folder, "cato", lambda: FACTS, Silent(), lambda what: None)
    accelerator.results, accelerator.asked = results, []
    accelerator.run()
    return accelerator, json.loads(json_file.read_text())


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {step["letter"]: step["status"] for step in report["steps"]}


def test_a_failed_step_ends_no_other_and_is_tried_again(tmp_path: Path) -> None:
    _, report = a_run(tmp_path, {"c": ValueError("no luck")}, only=("b", "c", "d"))
    assert statuses(report) == {"b": "done", "c": "failed", "d": "done"}
    assert report["steps"][1]["reason"] == "ValueError: no luck"
    again, report = a_run(tmp_path, {}, only=("b", "c", "d", "e"))
    assert again.asked == ["c", "e"]
    assert set(statuses(report).values()) == {"done"}
    assert len(report["runs"]) == 2


def test_what_the_budget_does_not_hold_is_left_out_and_what_runs_over_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "expected_minutes", lambda item, **_: 0.0 if item.letter == "b" else 9)
    _, report = a_run(tmp_path, {"b": "forever"}, only=("b", "c"), budget=0.005)
    assert statuses(report) == {"b": "cut off", "c": "skipped"}
    assert report["steps"][1]["reason"].startswith("takes about 9.0 min")


def test_an_interrupt_keeps_what_was_whole(tmp_path: Path) -> None:
    class Interrupted(Canned):
        def _measured(self, item: Item, name: str, file: Any) -> dict[str, Any]:
            if item.letter == "c":
                raise KeyboardInterrupt
            return {}

    chosen = Settings((str(ONE_CORE),), tmp_path / "report.json", ("b", "c", "d"))
    stopped = Interrupted(chosen, tmp_path, "cato", lambda: FACTS, Silent(), lambda what: None)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert statuses(json.loads(chosen.json_file.read_text())) == {"b": "done", "c": "cut off"}


def test_no_report_is_written_where_nothing_can_be_measured(tmp_path: Path) -> None:
    file = str(ROOT / "deployments" / "simulated.yaml")
    chosen = Settings((file,), tmp_path / "report.json")
    skipped = Canned(chosen, tmp_path, "cato", lambda: FACTS, Silent(), lambda what: None)
    report = skipped.run()
    assert set(statuses(report).values()) == {"skipped"}
    assert not run.is_measured(report)
    assert not chosen.json_file.exists()
    tried, report = a_run(tmp_path, {"b": ValueError("no luck")}, only=("b",))
    assert run.is_measured(tried.report)
    assert statuses(report) == {"b": "failed"}


@pytest.mark.slow
def test_a_file_without_an_engine_to_measure_ends_with_a_problem(tmp_path: Path) -> None:
    """In a process of its own: the command sets Ray's environment."""
    cato, file = Path(sys.executable).with_name("cato"), ROOT / "deployments" / "simulated.yaml"
    done = subprocess.run(
        [cato, "bench", "accelerator", file, "--json", tmp_path / "x.json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "nothing could be measured here" in done.stderr
    assert "seed 100, 1 run\n" in "".join(line.rstrip() + "\n" for line in done.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_another_form_is_not_gone_on_with(tmp_path: Path) -> None:
    a_run(tmp_path, {}, only=("b",), quick=True)
    with pytest.raises(InputError, match="form quick"):
        a_run(tmp_path, {}, only=("b",))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(InputError, match="no report of this command"):
        a_run(tmp_path, {}, only=("b",))


def test_a_report_of_another_card_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its profile would judge what is measured here."""
    a_run(tmp_path, {}, only=("b",))
    monkeypatch.setattr(run.nvidia, "cards", lambda: (CARD,))
    with pytest.raises(InputError, match=r"on no NVIDIA card, and this machine has NVIDIA H200;"):
        a_run(tmp_path, {}, only=("b",))


# Engines alone, simulated and in virtual time


def alone_on_simulated(folder: Path) -> Alone:
    deploy = load_deploy_file(ONE_CORE)
    deployment = deploy.topology.pools[0].deployments[0]
    engine = replace(deployment.engine, kind="simulated", zygote=False)
    first, *others = models_of(deploy)
    known = replace(load_profiles(ROOT / "profiles")["demo-coder@cpu"], load_s=0.0)
    zygote = Zygote(folder / "z.sock")  # simulated engines never start it
    return Alone(replace(deployment, engine=engine), first, others, known, folder, zygote, SMALL)


T = TypeVar("T")


def in_virtual_time(measuring: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(measuring)


def test_an_engine_alone_gives_its_profile_and_the_raw_sweep(tmp_path: Path) -> None:
    alone = alone_on_simulated(tmp_path)
    found = in_virtual_time(engine_alone(alone, Provenance(command="c"), seed=1))
    profile = ProfileFile.model_validate(found["profile"])
    assert (profile.model, profile.accelerator) == ("demo-coder", "cpu")
    assert profile.provenance.command == "c"
    assert found["kv_capacity_tokens"] == alone.profile.kv_capacity_tokens
    assert {row["batch"] for row in found["sweep"]["decode"]} == {1, 4, 8}
    step_s = alone.profile.decode_step_s(4, 400)
    assert profile.to_profile().decode_step_s(4, 400) == pytest.approx(step_s, rel=0.1)


def test_a_sweep_that_no_profile_fits_is_kept(tmp_path: Path) -> None:
    alone = alone_on_simulated(tmp_path)
    few = replace(alone.form, plan=replace(alone.form.plan, concurrencies=(1,), rounds=1))
    found = in_virtual_time(engine_alone(replace(alone, form=few), Provenance(), seed=1))
    assert found["profile"] is None
    assert "at least 4 samples" in found["problem"]
    assert found["sweep"]["decode"]


def test_a_prompt_that_is_cached_is_not_computed_again(tmp_path: Path) -> None:
    found = in_virtual_time(host_memory(alone_on_simulated(tmp_path), seed=1))
    [row] = found["prompts"]
    assert row["cached_s"] < row["computed_s"] / 2
    assert row["cached_tokens"] > row["tokens"] // 2
    assert found["host_gib"] == 0


def test_a_slot_without_sleep_finds_no_ratio(tmp_path: Path) -> None:
    found = in_virtual_time(two_models(alone_on_simulated(tmp_path)))
    assert not found["really_sleeps"]
    assert {name: row["ratio"] for name, row in found["models"].items()} == {
        "demo-coder": None,
        "demo-again": None,
    }


# What it finds


def a_report(on: str = "gpu") -> dict[str, Any]:
    """One step of each kind, all claims held."""
    times = {"p50_ms": 10.0}
    near = {"ms": 0.1, "low_ms": -0.1, "high_ms": 0.3}
    arms = {name: {"ttft": times, "e2e": times} for name in ("engine", "plain", "cato")}
    fit = {"what": "decode step", "batch": 1, "tokens": 64, "measured_s": 0.007}
    results: dict[str, dict[str, Any]] = {
        "a": {
            "start_s": 60.0, "had_compiled": False, "kv_capacity_tokens": 900_000,
            "memory_bytes": 70e9, "memory_is_of": "cards", "fit": [fit | {"predicted_s": 0.007}],
            "profile": {},
            "sleep": {"sleep_s": [1.0], "wake_s": [0.5], "asleep_bytes": 2e9},
        },
        "b": {"verdicts": {"cold": {"error": 0.05, "repeat_error": 0.01}}},
        "c": {
            "results": [
                {"concurrency": 1, "arms": arms,
                 "differences_p50": {"cato - plain": {"ttft": near, "e2e": near}}}
            ]
        },
        "d": {
            "workloads": {
                "W": {
                    "arms": {"foresight": {"attainment": {"value": 0.9}, "simulated": 0.92}},
                    "differences": {"foresight - saber": {"points": {"value": 1.0}}},
                }
            }
        },
        "e": {
            "streams": 4, "whole": 4, "changed_before": 0, "other_after": 1, "running": 4,
            "other_undisturbed": 1, "engine_back_s": 20.0, "last_answer_s": 22.0,
        },
        "f": {
            "really_sleeps": True,
            "models": {"m": {"load_s": 30.0, "wake_s": [3.0], "ratio": 10.0, "same_answers": True}},
        },
        "g": {"steps": [{"batch": 16, "none_s": 0.01, "one_s": 0.012, "mixed_s": 0.0121}]},
        "h": {
            "host_gib": 32,
            "prompts": [
                {"tokens": 4096, "computed_s": 0.2, "cached_s": 0.02, "pushed_out_s": 0.05}
            ],
        },
    }  # fmt: skip
    return {
        "form": "whole", "seed": 1,
        "runs": [{**FACTS, "cards": [{"name": "NVIDIA H200", "driver": "580"}]}],
        "steps": [
            {"letter": letter, "title": "", "file": "f.yaml", "on": on, "status": "done",
             "minutes": 1.0, "reason": "", "result": result}
            for letter, result in results.items()
        ],
    }  # fmt: skip


def held(report: dict[str, Any]) -> dict[str, bool]:
    """Of each item that claims something, whether all of that holds."""
    found: dict[str, bool] = {}
    for row in findings(report):
        if row.holds is not None:
            found[row.letter] = found.get(row.letter, True) and row.holds
    return found


@pytest.mark.parametrize(
    ("letter", "path", "value"),
    [
        ("b", ("verdicts", "cold", "error"), 0.11),
        ("c", ("results", 0, "differences_p50", "cato - plain", "e2e", "low_ms"), 0.01),
        ("d", ("workloads", "W", "arms", "foresight", "simulated"), 0.94),
        ("e", ("whole",), 3),
        ("e", ("changed_before",), 1),
        ("f", ("models", "m", "ratio"), 4.9),
        ("f", ("models", "m", "same_answers"), False),
        ("g", ("steps", 0, "mixed_s"), 0.02),
        ("h", ("prompts", 0, "pushed_out_s"), 0.3),
    ],
)
def test_each_claim_can_fail(letter: str, path: tuple[Any, ...], value: Any) -> None:
    report = a_report()
    assert held(report) == dict.fromkeys("bcdefgh", True)
    place = next(s["result"] for s in report["steps"] if s["letter"] == letter)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert held(report)[letter] is False


def test_a_cpu_is_held_to_no_claim_about_cards() -> None:
    def shown(report: dict[str, Any]) -> str:
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(tables(report))
        return console.export_text()

    assert "yes" in shown(a_report())
    assert "yes" not in shown(a_report("cpu"))
    assert held(a_report("cpu")) == {}


def a_stream(text: str, tokens: int = 4, *, is_whole: bool = True, problem: str = "") -> _Stream:
    return _Stream(text, 1, tokens, is_whole, problem=problem)


def test_a_kill_may_change_what_comes_after_it_and_nothing_before() -> None:
    calm = ["abcd", "abcd", "abcd", "abcd"]
    again = ["abcd", "abcd", "abcd", "abXY"]
    streams = [a_stream("abcd"), a_stream("abZZ"), a_stream("aXcd"), a_stream("abXY")]
    found = verdict_of_kill(calm, again, streams, sent=[2, 2, 2, 4], tokens=4)
    assert (found["whole"], found["changed_before"]) == (4, 1)
    assert (found["other_after"], found["other_undisturbed"]) == (2, 1)


def test_an_answer_that_broke_off_is_not_whole() -> None:
    streams = [
        a_stream("ab", is_whole=False),
        a_stream("abcd", problem="503"),
        a_stream("abcd", tokens=40),
    ]
    found = verdict_of_kill(["abcd"] * 3, ["abcd"] * 3, streams, [2] * 3, tokens=100)
    assert (found["whole"], found["problems"]) == (0, ["503"])


# Files


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_shipped_file_is_for_serve_and_for_every_item(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema  # importing it starts nothing

    ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    deploy = load_deploy_file(path)
    session = Session(Options("vllm-mix", deploy, has_one_engine=True))
    assert session.workflows
    # Item d empties the engine's prefix cache.
    assert deploy.topology.pools[0].deployments[0].engine.env == {"VLLM_SERVER_DEV_MODE": "1"}
    small = path.name == "one-card-1.5b.yaml"
    assert len(models_of(deploy)) == (1 if small else 2)


def test_models_are_read_from_a_folder_that_has_them(tmp_path: Path) -> None:
    (tmp_path / "qwen-7b").mkdir()
    raw = with_models_in(load_deploy_file(ONE_CARD).raw, tmp_path)
    seven, one = (EnginesArgs.model_validate(raw["applications"][0]["args"]).models).values()
    assert seven.source == str(tmp_path / "qwen-7b")
    assert one.source == "Qwen/Qwen2.5-Coder-1.5B"


def test_what_was_measured_is_what_routers_and_simulator_are_given(tmp_path: Path) -> None:
    measured = load_profile_file(ROOT / "profiles" / "demo-coder@cpu.yaml").model_copy(
        update={"accelerator": "H200", "load_s": 7.5}
    )
    deploy = with_profile(load_deploy_file(ONE_CORE), measured, tmp_path / "profiles")
    [pool] = deploy.topology.pools
    assert pool.deployments[0].profile == "demo-coder@H200"
    assert load_profiles(Path(deploy.topology.profiles_dir))["demo-coder@H200"].load_s == 7.5
    assert Session(Options("vllm-mix", deploy)).subject.engines["engine"].load_s == 7.5


async def test_what_the_warm_up_did_not_show_keeps_the_expectation_of_its_mix() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"usage": {"prompt_tokens": 9, "completion_tokens": 5}})

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    session = Session(Options("vllm-mix", load_deploy_file(ONE_CORE), has_one_engine=True))
    subject, mix = session.subject, session.experiment.mix
    assert mix is not None
    tasks = subject.sim_tasks(next(iter(session.experiment.workloads)), 1, session.settings, 40)
    first = [task for task in tasks if task.name == tasks[0].name]
    async with TestServer(app) as server:
        make = _Recorder(subject, mix, str(server.make_url("")).rstrip("/"))
        await make(first, WARM_UP_SEED, lambda: None)
        made = await make(tasks, 1, lambda: None)
    known = {live.sim.name for live in made if live.sim.nodes[0].length is not None}
    assert known == {tasks[0].name} < {live.sim.name for live in made}


def test_a_profile_is_named_as_ray_names_the_card() -> None:
    deployment = load_deploy_file(ONE_CARD).topology.pools[0].deployments[0]
    assert accelerator_name(deployment, [CARD]) == "H200"
    assert accelerator_name(deployment, []) == "gpu"
    assert accelerator_name(replace(deployment, accelerator_type="H100"), [CARD]) == "H100"
    assert accelerator_name(replace(deployment, accelerator="cpu"), [CARD]) == "cpu"


# Other benchmarks on a card


@pytest.mark.parametrize("accelerator", ["cpu", "gpu", "npu"])
def test_overhead_runs_its_engine_where_it_is_told(accelerator: str) -> None:
    args = engines_args(("vllm",), accelerator, "saber@gpu")
    pool = EnginesArgs.model_validate(args).to_topology().pools[0]
    deployment = pool.deployments[0]
    is_cpu = accelerator == "cpu"
    assert (deployment.accelerator, deployment.cards) == (accelerator, 0 if is_cpu else 1)
    assert deployment.profile == "saber@gpu"
    assert (deployment.engine.zygote, deployment.engine.enforce_eager) == (is_cpu, is_cpu)
    assert (deployment.engine.gpu_memory_utilization is None) == is_cpu


def test_a_file_for_cards_does_not_become_one_for_the_cpu() -> None:
    file = load_deploy_file(ONE_CARD)
    with pytest.raises(InputError, match="the deployment is for gpu"):
        file_on_accelerator(file, "cpu", None)
    assert file_on_accelerator(file, "gpu", None).topology == file.topology


def test_the_mix_takes_accelerator_and_profile() -> None:
    options = Options("vllm-mix", accelerator="gpu", profile="reference-7b@gpu-32gb")
    session = Session(options)
    [deployment] = session.deploy.topology.pools[0].deployments
    assert (deployment.accelerator, deployment.profile) == ("gpu", "reference-7b@gpu-32gb")
    known = load_profiles(ROOT / "profiles")["reference-7b@gpu-32gb"]
    assert session.experiment.mix is not None
    assert session.experiment.mix.profile == known
    assert session.experiment.title.endswith("on gpu")


def test_simulated_engines_stay_where_they_are() -> None:
    simulated = {"accelerator": "cpu", "engine": {"kind": "simulated"}, "profile": "a"}
    assert on_accelerator(simulated, "gpu", None) == simulated


def test_random_weights_answer_to_their_limit() -> None:
    deploy = load_deploy_file(ONE_CARD)
    [pool] = deploy.topology.pools
    profile = load_profiles(ROOT / "profiles")["reference-7b@gpu-32gb"]
    experiment = mix_of(pool, profile)
    assert (experiment.chunk_tokens, experiment.prompt_cap_tokens) == (2048, 256)
    mix = experiment.mix
    assert mix is not None
    assert mix.full_batch == 64
    task = mix.tasks(0.5, 1, 1)[0]
    body = mix.completion(task, "def", "m")
    assert (body["stop"], body["max_tokens"]) == ([], task.nodes[0].output_tokens)
    real = replace(pool.deployments[0], engine=replace(pool.deployments[0].engine, args=()))
    ends = mix_of(replace(pool, deployments=(real,)), profile).mix
    assert ends is not None
    assert ends.completion(task, "def", "m")["stop"]
