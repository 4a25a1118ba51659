"""`cato simulate`, `cato plan` and `cato bench core`: what they print, write and refuse."""

from __future__ import annotations

import json
import pkgutil
import re
import signal
from datetime import datetime, timedelta
from importlib import import_module
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from cato.cli import app, bars
from cato.cli.measuring import shown
from cato.cli.outputs import writable_file, writable_folder
from cato.cli.simulation import print_whole, tables
from cato.core.commands import Dispatch
from cato.core.errors import UnknownNameError
from cato.core.words import counted
from cato.lab import experiments, studies
from cato.lab.bench import core, router_alone
from cato.lab.bench.core import (
    ENDED,
    OFFERED_FULL,
    OFFERED_ROOM,
    PROGRESSED,
    CoreReport,
    RouterBench,
    as_json,
    dag_match,
    decisions,
)
from cato.lab.bench.simulated import Speed, simulated_tasks, simulated_turns
from cato.lab.registry import STUDIES, experiment, study
from cato.lab.studies import agents_search
from cato.lab.study import Study
from cato.policies import schedulers
from cato.sim.experiment import Experiment, Options, Progress
from cato.sim.report import Mean, Report, Sample, Target

SCENARIO = """
name: tiny
seeds: 2
duration: 30s
pools:
  only: {profile: 7b, max_replicas: 4, max_running: 1}
traffic:
  rate_per_s: RATE
  tasks:
    ask:
      sla: {metric: e2e, target: 8s}
      calls: {ask: {pool: only, prompt_tokens: 50, output_tokens: 20}}
"""


def cato(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, [str(a) for a in arguments])


def words(result: Result) -> str:
    """Without the frames and line ends of rich."""
    return " ".join(re.sub(r"[│╭╮╰╯─━]", " ", result.output).split())


# Starting processes takes longer than such a short run.
ALONE = ("--jobs", 1)


def a_scenario(folder: Path, rate_per_s: float = 2.0) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(SCENARIO.replace("RATE", str(rate_per_s)), encoding="utf-8")
    return path


# The registry


@pytest.mark.parametrize("name", STUDIES)
def test_every_registered_name_leads_to_an_experiment_of_that_name(name: str) -> None:
    assert experiment(name).name == name


def test_every_experiment_is_registered() -> None:
    held: list[Study] = []
    for package in (experiments, studies):
        for name in (m.name for m in pkgutil.iter_modules(package.__path__)):
            module = import_module(f"{package.__name__}.{name}")
            held += getattr(module, "STUDIES", ())
            held += [module.STUDY] if hasattr(module, "STUDY") else []
    assert {s.name for s in held} == set(STUDIES)


def test_an_unknown_experiment_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="slo-sa"):
        experiment("slo")
    result = cato("simulate", "slo")
    assert result.exit_code == 1
    assert "no experiment named 'slo'" in words(result)
    assert "cace-rq1" in words(result)


# cato simulate


def test_the_list_names_every_experiment_with_its_source() -> None:
    listed = words(cato("simulate", "--list"))
    assert all(name in listed for name in STUDIES)
    assert "SLO-Aware Scheduling" in listed


@pytest.mark.slow
def test_an_experiment_is_run_on_the_seeds_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    result = cato(
        "simulate", "saber-estimators", "--seeds", "100-101", "--json", out, "--plot", tmp_path
    )
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["seeds"] == [100, 101]
    assert report["simulated"] is True
    assert "± " in result.output
    assert list(tmp_path.glob("*.png"))


def test_an_unknown_policy_or_metric_ends_with_the_known_ones(tmp_path: Path) -> None:
    path = a_scenario(tmp_path)
    policy = cato("simulate", "--scenario", path, "--policy", "fastest", "--seeds", "1", *ALONE)
    assert policy.exit_code == 1
    assert "no scheduler named 'fastest'; known: foresight" in words(policy)
    metric = cato("simulate", "--scenario", path, "--metric", "speed", "--seeds", "1", *ALONE)
    assert metric.exit_code == 2
    assert "slo_attainment" in words(metric)


def test_a_missing_trace_is_asked_for() -> None:
    result = cato("simulate", "length-bounds", "--seeds", "1", *ALONE)
    assert result.exit_code == 1
    assert "--trace FILE" in words(result)


@pytest.mark.parametrize(
    "arguments", [[], ["slo-sa", "--scenario", "x.yaml"], ["slo-sa", "--seeds", "many"]]
)
def test_what_to_run_must_be_clear(arguments: list[str]) -> None:
    assert cato("simulate", *arguments).exit_code == 2


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("cato-rq1", "users", 2),
        ("agents", "cells", 3),
        ("saber-rq1", "seed", 4),
        ("papers", "keep", "k"),
    ],
)
def test_an_option_that_would_not_be_read_is_refused(name: str, option: str, value: object) -> None:
    result = cato("simulate", name, f"--{option}", value)
    assert result.exit_code == 2
    assert f"takes no --{option}" in words(result)


def test_a_scenario_prints_every_class_and_the_difference(tmp_path: Path) -> None:
    result = cato(
        "simulate", "--scenario", a_scenario(tmp_path), "--plot", tmp_path / "plots", *ALONE
    )
    assert result.exit_code == 0, result.output
    printed = words(result)
    assert "tiny, simulated, 2 seeds" in printed
    assert "task ask" in printed
    assert "foresight - ray-serve" in printed
    assert (tmp_path / "plots" / "tiny.png").exists()


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "LINE_EVERY_S", 0.0)
    result = cato("simulate", "--scenario", a_scenario(tmp_path), *ALONE)
    done = re.findall(r"^tiny: (\d+) of (\d+), after 0 minutes$", result.stderr, re.MULTILINE)
    assert done[-1][0] == done[-1][1] > "1"


def test_one_minute_is_one_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bars, "LINE_EVERY_S", 0.0)
    clock = SimpleNamespace(monotonic=iter([0.0, 61.0, 61.0]).__next__)
    monkeypatch.setattr(bars, "time", clock)
    with bars.Counting(Console(stderr=True)) as bar:
        bar.update(bar.add_task("agents", total=2), completed=1)
    assert "agents: 1 of 2, after 1 minute\n" in capsys.readouterr().err


def test_a_live_experiment_tells_its_step_in_lines_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bars, "LINE_EVERY_S", 0.0)
    with shown() as (progress, say):
        say("starting Ray")
        progress.begin("rq1, seed 100: foresight", 2)
        progress.step()
    lines = capsys.readouterr().err.splitlines()
    assert "starting Ray, after 0 minutes" in lines
    assert "rq1, seed 100: foresight: 1 of 2, after 0 minutes" in lines


@pytest.mark.parametrize("width", [100, 80, 72, 40])
def test_a_table_keeps_every_digit_at_any_width(width: int) -> None:
    metrics = ("slo_attainment", "ttft_s_mean", "e2e_s_p95", "goodput_per_s")
    report = Report(
        "x",
        (0, 1),
        tuple(
            Mean({"load": 0.9}, policy, metric, 0.765, 0.012, 2)
            for policy in ("foresight", "ray-serve")
            for metric in metrics
        ),
        targets=(Target(1, "points above the best of all baselines", 3.0, 4.123, 0.512),),
    )
    means, targets = tables(report, metrics)
    console = Console(width=width, file=StringIO(), color_system=None)
    print_whole(console, means)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(heading in printed for heading in (*metrics, "foresight", "ray-serve"))
    assert printed.count("0.765 ± 0.012") == 8
    print_whole(console, targets)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "4.12 ± 0.51" in printed
    assert "…" not in printed


def test_a_table_of_a_scenario_is_whole_in_a_narrow_terminal(tmp_path: Path) -> None:
    result = CliRunner(env={"COLUMNS": "60"}).invoke(
        app, ["simulate", "--scenario", str(a_scenario(tmp_path)), "--jobs", "1"]
    )
    heading = next(line for line in result.stdout.splitlines() if "slo_attainment" in line)
    assert heading.split() == ["slo_attainment", "ttft_s_mean", "e2e_s_p95"]


# Options


@pytest.mark.parametrize("verb", ["simulate", "plan", "replay", "chaos"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_run(*_: object, **__: object) -> None:
        pytest.fail("it ran")

    monkeypatch.setattr("cato.sim.scenario_file.load_scenario", must_not_run)
    monkeypatch.setattr("cato.cli.chaos.load_plan", must_not_run)
    path = a_scenario(tmp_path)
    what = {"simulate": ("--scenario", path), "plan": (path,), "replay": (path,), "chaos": ()}
    for option, value, problem in (
        ("--json", tmp_path / "none" / "x.json", "No such file or directory"),
        ("--json", tmp_path, "is a folder; name a file"),
        ("--plot", path, "is a file; name a folder"),
        ("--plot", path / "x", "Not a directory"),
    ):
        if (verb, option) == ("chaos", "--plot"):
            continue
        result = cato(verb, *what[verb], option, value)
        assert result.exit_code == 2, result.output
        assert f"Invalid value for '{option}'" in words(result)
        assert problem in words(result)
    assert list(tmp_path.iterdir()) == [path]


def test_checking_an_output_changes_nothing(tmp_path: Path) -> None:
    old, link, folder = tmp_path / "old.json", tmp_path / "link.json", tmp_path / "a" / "b"
    old.write_text("kept", encoding="utf-8")
    link.symlink_to("missing.json")
    for path in (old, link, tmp_path / "new.json", Path("/dev/null")):
        assert writable_file(path) == path
    assert writable_folder(folder) == folder
    assert writable_folder(tmp_path) == tmp_path
    assert old.read_text(encoding="utf-8") == "kept"
    assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"old.json", "link.json"}


def test_results_are_printed_even_if_their_file_fails_later(tmp_path: Path) -> None:
    result = cato("simulate", "--scenario", a_scenario(tmp_path), "--json", "/dev/full", *ALONE)
    assert result.exit_code == 1
    assert "slo_attainment" in result.stdout
    assert "/dev/full cannot be written: No space left on device" in words(result)


def test_a_metric_that_only_the_report_can_refuse_costs_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: Options, progress: Progress) -> Report:
        return Report("x", (0,), (Mean({}, "p", "speed", 0.5, 0.0, 1),))

    both = ("speed", "hit_rate")
    chosen = Experiment("x", "an x", "this test", run, lambda report, folder: (), both)
    monkeypatch.setattr("cato.lab.registry.experiment", lambda name: chosen)
    out = tmp_path / "x.json"
    result = cato("simulate", "x", "--metric", "hit_rate", "--json", out)
    assert result.exit_code == 2
    assert "no metric 'hit_rate' in this report; it has speed" in words(result)
    assert "x, simulated, 1 seed: mean" in words(result)
    assert json.loads(out.read_text(encoding="utf-8"))["experiment"] == "x"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_what_it_has_and_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a shell's background job

    def run(options: Options, progress: Progress) -> Report:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(end)
        told = {"interrupted": {"runs": 1, "of": 2}}
        return Report("x", (0,), (Mean({}, "p", "speed", 0.5, 0.0, 1),), extra=told)

    def plot(report: Report, folder: Path) -> list[Path]:
        raise AssertionError("a part of the cells may not suffice for a plot")

    chosen = Experiment("x", "an x", "a test", run, plot, ("speed",))
    monkeypatch.setattr("cato.lab.registry.experiment", lambda name: chosen)
    out = tmp_path / "x.json"
    try:
        result = cato("simulate", "x", "--json", out, "--plot", tmp_path / "plots")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert result.exit_code == 130
    assert "Interrupted: only what all arms had finished" in words(result)
    assert json.loads(out.read_text(encoding="utf-8"))["extra"]["interrupted"]["of"] == 2


def test_a_metric_that_no_scenario_has_is_refused_before_its_run(tmp_path: Path) -> None:
    result = cato("simulate", "--scenario", a_scenario(tmp_path), "--metric", "slo_atainment")
    assert result.exit_code == 2
    assert "did you mean 'slo_attainment'?" in words(result)
    assert "mean ±" not in result.stdout


@pytest.mark.parametrize("name", STUDIES)
def test_a_metric_that_no_arm_of_a_study_has_is_refused_before_its_run(name: str) -> None:
    result = cato("simulate", name, "--metric", "slo_atainment")
    assert result.exit_code == 2
    assert "no metric 'slo_atainment' in this report" in words(result)


def test_infinity_is_no_number_of_users_and_no_speed(tmp_path: Path) -> None:
    for arguments in (
        ("simulate", "agents", "--users", "inf"),
        ("plan", "--traffic", a_trace(tmp_path), "--speed", "inf", "--profile", "7b"),
    ):
        result = cato(*arguments)
        assert result.exit_code == 2
        assert "inf is no number" in words(result)


def test_a_study_that_draws_its_seeds_takes_no_others() -> None:
    result = cato("simulate", "robustness", "--seeds", "100-103")
    assert result.exit_code == 2
    assert "takes its seeds from --seed, not --seeds" in words(result)


def test_options_that_a_plan_or_a_scenario_would_not_read_are_refused(tmp_path: Path) -> None:
    path, trace = a_scenario(tmp_path), a_trace(tmp_path)
    for arguments, option in (
        (("plan", path, "--profile", "7b"), "a scenario takes no --profile"),
        (("plan", path, "--speed", 1), "a scenario takes no --speed"),
        (("plan", "--agents", trace, "--speed", 2), "--agents takes no --speed"),
        (("plan", "--agents", trace, "--max-replicas", 3), "--agents takes no --max-replicas"),
        (("plan", "--agents", trace, "--plot", tmp_path), "--agents takes no --plot"),
        (("simulate", "--scenario", path, "--trace", trace), "takes no --trace"),
        (("simulate", "--scenario", path, "--dataset", trace), "takes no --dataset"),
        (("simulate", "--scenario", path, "--quick"), "takes no --quick"),
        (("replay", trace, "--check", "--scheduler", "edf"), "--check takes no --scheduler"),
    ):
        result = cato(*arguments)
        assert result.exit_code == 2, result.output
        assert option in words(result)


def test_a_near_name_is_suggested_before_the_known_ones(tmp_path: Path) -> None:
    path = a_scenario(tmp_path)
    for arguments, near in (
        (("simulate", "agentz"), "agents"),
        (("simulate", "--scenario", path, "--policy", "foresigt"), "foresight"),
        (("plan", path, "--scheduler", "foresigt"), "foresight"),
        (("replay", path, "--scheduler", "foresigt"), "foresight"),
    ):
        assert f"(did you mean '{near}'?); known: " in words(cato(*arguments))


def test_a_folder_is_no_log_but_has_some(tmp_path: Path) -> None:
    assert "a folder without logs" in words(cato("replay", tmp_path))
    (tmp_path / "main-1.jsonl").touch()
    result = cato("replay", tmp_path)
    assert result.exit_code == 2
    assert "name one of its logs, such as" in words(result)
    assert "main-1.jsonl" in "".join(words(result).split())


def test_help_is_broken_by_the_terminal_alone() -> None:
    for words_ in (("explain",), ("plan",), ("chaos",), ("bench", "live")):
        lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*words_, "--help"]).stdout
        text = lines.partition("Usage:")[2].partition("╭")[0].splitlines()[1:]
        for line, following in pairwise(text):
            first = following.split()[:1]
            if line.strip() and first:
                assert len(line.rstrip()) + 1 + len(first[0]) > 79, line


def test_problems_of_a_scenario_are_printed_not_raised(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: bad\nspeed: 3\n", encoding="utf-8")
    for verb in (["simulate", "--scenario", path], ["plan", path]):
        result = cato(*verb)
        assert result.exit_code == 1
        assert "3 problems" in words(result)
        assert "pools: this key is required" in words(result)
        assert "bad.yaml:2: speed: unknown key" in words(result)


def test_a_usual_metric_that_no_policy_has_is_left_out() -> None:
    report = Report("x", (0,), (Mean({}, "upper bound", "slo_attainment", 0.5, 0.0, 1),))
    (table,) = tables(report, usual=("slo_attainment", "e2e_s_p95"))
    assert [c.header for c in table.columns] == ["", "slo_attainment"]
    with pytest.raises(typer.BadParameter, match="no metric 'e2e_s_p95'"):
        tables(report, ["e2e_s_p95"])


def test_targets_are_said_to_be_met_or_missed() -> None:
    targets = (
        Target(1, "points above", 3.0, 4.0, 0.5),
        Target(1, "time", 2.0, 2.5, 0.1, at_least=False),
    )
    report = Report("x", (0,), (Mean({}, "p", "slo_attainment", 0.5, 0.0, 1),), targets=targets)
    _, table = tables(report)
    assert [str(c) for c in table.columns[-1].cells] == ["met", "missed"]
    assert [str(c) for c in table.columns[2].cells] == [">= 3", "<= 2"]


# cato plan


def test_a_plan_prints_what_it_tried_and_the_answer(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = cato("plan", a_scenario(tmp_path), "--json", out, "--plot", tmp_path)
    assert result.exit_code == 0, result.output
    printed = words(result)
    assert "tiny with foresight, simulated: fleets tried" in printed
    assert re.search(
        r"ray-serve: (1 replica \(1 only\) reaches|\d replicas \(\d only\) reach) ", printed
    )
    assert "no engine ran" in printed
    report = json.loads(out.read_text(encoding="utf-8"))
    chosen = report["extra"]["plans"]["foresight"]["replicas"]["only"]
    assert f"foresight: {counted(chosen, 'replica')} ({chosen} only) reach" in printed
    assert (tmp_path / "plan-tiny.png").exists()


def test_a_plan_that_fails_says_which_pool_is_short(tmp_path: Path) -> None:
    path = a_scenario(tmp_path, rate_per_s=8.0)
    result = cato("plan", path, "--max-replicas", 1, "--attainment", 0.999)
    assert result.exit_code == 1
    assert "no number of replicas reaches 99.9 %" in words(result)
    assert "pool 'only' is short" in words(result)


def test_the_example_can_be_planned_from(tmp_path: Path) -> None:
    example = cato("plan", "--example")
    path = tmp_path / "mine.yaml"
    path.write_text(example.stdout, encoding="utf-8")
    result = cato("plan", path, "--attainment", "1.5")
    assert result.exit_code == 1  # read without a problem; the goal is what is wrong
    assert "cannot be planned for" in words(result)


def test_an_unknown_scheduler_is_refused_before_anything_runs(tmp_path: Path) -> None:
    result = cato("plan", a_scenario(tmp_path), "--scheduler", "fastest")
    assert result.exit_code == 2
    assert "power-of-two" in words(result)


def a_trace(folder: Path, requests: int = 200, every_s: float = 0.5) -> Path:
    """Medium answers at a steady pace: one replica of 7b, a place each, cannot keep up."""
    path = folder / "trace.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    begin = datetime(2026, 11, 21, 12)
    for i in range(requests):
        at = begin + timedelta(seconds=i * every_s)
        rows.append(f"{at:%Y-%m-%d %H:%M:%S.%f},400,{60 if i % 2 else 12}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_cards_are_planned_for_each_profile_from_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "cards.json"
    result = cato(
        "plan", "--traffic", a_trace(tmp_path, every_s=0.04), "--profile", "7b", "--profile",
        "tempo:2", "--target", "95%", "--json", out, "--plot", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["goal"] == 0.95
    assert report["cards"]["tempo"] % 2 == 0
    for kind, curve in report["attainment"].items():
        enough = dict(curve)
        cards = report["cards"][kind]
        step = 2 if kind == "tempo" else 1
        assert enough[cards] >= 0.95
        assert all(enough[c] < 0.95 for c in range(step, cards, step)), "the smallest number"
        assert set(range(step, cards + 1, step)) <= set(enough), "the whole curve"
    assert (tmp_path / "cards-trace.png").exists()


def test_a_trace_needs_a_profile_and_excludes_a_scenario(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    for arguments, problem in (
        (("--traffic", trace), "at least one --profile"),
        (("--traffic", trace, "--profile", "7b:x"), "cards per replica"),
        (("--traffic", trace, "--profile", "7b:²"), "cards per replica"),
        (("--traffic", trace, "--profile", "7b", "--profile", "7b:2"), "'7b' is there twice"),
        (("--agents", trace, "--profile", "7b", "--profile", "7b:2"), "'7b' is there twice"),
        ((a_scenario(tmp_path), "--traffic", trace), "name a scenario file"),
        (("--agents", trace, "--traffic", trace), "name a scenario file"),
        (("--agents", trace), "at least one --profile"),
        (("--agents", trace, "--profile", "7b", "--target", "0"), "is not between 0 and 1"),
        (("--traffic", trace, "--profile", "7b", "--target", "most"), "95% or 0.95"),
    ):
        result = cato("plan", *arguments)
        assert result.exit_code == 2
        assert problem in words(result)


@pytest.mark.parametrize(
    ("limit", "code", "answer"),
    [(12.0, 0, "6.0 ± 0.0"), (900.0, 0, "more than 40.6"), (-99.0, 1, "fewer than 0.125")],
)
def test_agents_a_card_are_planned_from_recorded_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, code: int, answer: str
) -> None:
    """Two cards a replica; a share of 0.95 falls by a hundredth with each user above the limit."""

    def sample(search: agents_search.Search, users: float) -> Sample:
        metrics = {"in_time": 0.95 + 0.01 * (limit - users), "turn_rate": 1.0}
        setting = {"profile": search.card, "users_per_card": users}
        return Sample(setting, search.arm, search.seed, metrics)

    monkeypatch.setattr(agents_search.Search, "sample", sample)
    out = tmp_path / "plan.json"
    result = cato(
        *("plan", "--agents", tmp_path / "trace", "--profile", "7b:2", "--seeds", 2, "--json", out)
    )
    assert result.exit_code == code, result.output
    assert answer in words(result)
    assert json.loads(out.read_text())["agents"]["7b"]["goal"] == 0.95


def test_a_plan_for_agents_says_what_host_memory_buys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user more for each 250,000 tokens, beside six."""

    def sample(search: agents_search.Search, users: float) -> Sample:
        limit = 6.0 + search.profile.host_capacity_tokens / 250_000
        metrics = {"in_time": 0.95 + 0.01 * (limit - users), "turn_rate": 1.0}
        setting = {"profile": search.card, "users_per_card": users}
        return Sample(setting, search.arm, search.seed, metrics)

    monkeypatch.setattr(agents_search.Search, "sample", sample)
    out, name = tmp_path / "plan.json", "reference-small-7b@gpu-24gb"
    result = cato(
        *("plan", "--agents", tmp_path / "trace", "--profile", name, "--seeds", 2, "--json", out)
    )
    assert result.exit_code == 0, result.output
    found = {k: v["users_per_card"] for k, v in json.loads(out.read_text())["agents"].items()}
    assert found == pytest.approx(
        {
            name: 6.0,
            f"{name} + 0.125M tokens of host memory (7 GB)": 6.5,
            f"{name} + 0.25M tokens of host memory (14 GB)": 7.0,
            f"{name} + 0.5M tokens of host memory (29 GB)": 8.0,
        }
    )


# cato bench core


@pytest.mark.parametrize("max_running", [1, 4])
def test_the_pool_that_is_timed_is_full_and_dispatches_when_a_place_frees(max_running: int) -> None:
    bench = RouterBench(schedulers.early("power-of-two"), 5, max_running, 50)
    picture = bench.orchestrator.picture(0.0)
    assert picture.queued == 50
    assert {r.held for r in picture.replicas} == {max_running}
    _, per_offer = bench.time(bench.offer, 10)
    assert per_offer == 0
    assert bench.orchestrator.picture(0.0).queued == 60
    commands = bench.orchestrator.handle(bench.end())
    assert [type(c) for c in commands] == [Dispatch]


def test_every_kind_of_event_is_timed_for_the_default_scheduler() -> None:
    found = decisions("foresight", 6, 2, queued=40, n=10)
    assert [d.event for d in found] == [OFFERED_ROOM, OFFERED_FULL, ENDED, PROGRESSED]
    by_event = {d.event: d for d in found}
    assert by_event[OFFERED_FULL].acted == 0
    assert by_event[OFFERED_ROOM].acted > 0.5
    assert by_event[ENDED].acted > 0.5
    assert all(0 < d.timing.p50_us <= d.timing.p99_us for d in found)


def test_goals_are_judged_in_the_json() -> None:
    timing, target = dag_match(n=40, history=20)
    assert target.measured == pytest.approx(timing.p50_us)
    assert target.stderr >= 0
    per_s = (14_999.0, 50_000.0, 14_000.0, 15_500.0)
    slow = Speed("foresight", "completions", "tasks", 30.0, 10, *per_s, goal_per_s=15_000.0)
    report = as_json(CoreReport((), (timing,), (slow,)), {"machine": "m"})
    assert report["machine"] == "m"
    assert "targets" not in report
    (row,) = report["simulator"]  # type: ignore[misc]
    assert row["met"] is False


def test_with_a_trace_every_target_of_the_estimators_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("TRACE_SEEDS", (0,)), ("MAPPINGS", ()), ("WORKLOADS", {})):
        monkeypatch.setattr(core, name, few)
    for name, few in (("CALLS", 50), ("WARM_UP", 1)):
        monkeypatch.setattr(router_alone, name, few)
    out = tmp_path / "core.json"
    result = cato(
        "bench", "core", "--replicas", 2, "--queued", 5, "--events", 10, "--json", out,
        "--trace", a_trace(tmp_path, requests=600),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    targets = json.loads(out.read_text(encoding="utf-8"))["targets"]
    assert {t["group"] for t in targets} == {7}
    bounds = [t["text"] for t in length_bounds_of(tmp_path / "trace.csv")]
    timed = ["one prediction by the trace's compiled forest, median [µs]"]
    timed += ["DAG match of a pair, median [µs]"]
    assert [t["text"] for t in targets] == bounds + timed
    assert [t["goal"] for t in targets[-2:]] == [50.0, 5.0]
    for t in targets:
        holds = t["measured"] >= t["goal"] if t["at_least"] else t["measured"] <= t["goal"]
        assert t["met"] is holds
        assert t["stderr"] >= 0
    assert "DAG match of a pair" in words(result)
    timings = json.loads(out.read_text(encoding="utf-8"))["timings"]
    (router,) = (t for t in timings if t["what"] == "router process")
    assert (router["n"], router["goal_us"]) == (5, 200.0)
    assert "64 calls at once" in router["setting"]


def length_bounds_of(trace: Path) -> list[dict[str, Any]]:
    """What `cato simulate length-bounds` says of the targets."""
    out = trace.with_name("bounds.json")
    result = cato(
        "simulate", "length-bounds", "--trace", trace, "--seeds", 1, "--json", out, *ALONE
    )
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text(encoding="utf-8"))
    assert {m["metric"] for m in report["means"]} == set(study("length-bounds").metrics)
    found: list[dict[str, Any]] = report["targets"]
    return found


def test_a_trace_that_cannot_be_used_ends_the_measurement_before_it_begins(tmp_path: Path) -> None:
    for trace, problem in (
        (tmp_path / "none.csv", "there is no"),
        (a_trace(tmp_path), "200 requests; bounds need at least 400"),
    ):
        result = cato("bench", "core", "--trace", trace)
        assert result.exit_code == 1
        assert problem in words(result)


def test_the_speed_of_the_simulator_counts_tasks_turns_and_events() -> None:
    early = schedulers.early("power-of-two")
    tasks = simulated_tasks("power-of-two", early, "completions", tasks=50, replicas=2)
    assert (tasks.unit, tasks.count, tasks.output_tokens) == ("tasks", 50, 30)
    turns = simulated_turns("power-of-two", early, until_s=90.0, runs=1)
    assert turns.unit == "turns"
    assert turns.count >= 24  # each of the users has begun
    for speed in (tasks, turns):
        assert speed.events_per_s >= 2 * speed.per_s > 0
        assert speed.slowest_per_s <= speed.per_s <= speed.fastest_per_s
