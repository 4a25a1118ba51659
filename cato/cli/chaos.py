"""`cato chaos`: inject faults on a schedule while clients check every answer."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.interrupts import end_like_ctrl_c
from cato.cli.measuring import set_environment
from cato.cli.outputs import writable_file, write_text
from cato.config.paths import resolve
from cato.core.errors import CatoError, InputError
from cato.lab.chaos.drill import Drill
from cato.lab.chaos.local_stage import local_stage
from cato.lab.chaos.plan import Plan, load_plan

DEFAULT_PLAN = "deployments/drills/quick.yaml"
console = Console(markup=False)


def chaos(
    plan: Annotated[
        str, typer.Option(help="The drill: faults and rates; see deployments/drills.")
    ] = (DEFAULT_PLAN),
    ray: Annotated[
        bool, typer.Option("--ray", help="Start a Ray cluster and kill real processes and actors.")
    ] = False,
    growth: Annotated[
        float | None,
        typer.Option(min=0.0, help="Most memory growth per process, in MB an hour; long drills."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the report to this file.", callback=writable_file),
    ] = None,
) -> None:
    """Kill, pause and starve parts of a test application; check every answer to the last token.

    Without `--ray` the real ingress, executor and router serve simulated engines in this process.
    Exit code 1 when an answer was lost, duplicated, wrong or missing, when a lease or a batch slot
    leaked, or when memory grew faster than `--growth`.
    """
    try:
        wanted = load_plan(resolve(plan))
        if wanted.is_real and not ray:
            raise InputError("`engine: vllm` needs real processes to kill: add --ray")
        report = _on_ray(wanted) if ray else _in_process(wanted)
    except (CatoError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        console.print("Interrupted.")
        raise typer.Exit(130) from None
    grown = _grown(report, growth)
    report["grown"] = grown
    report["passed"] = report["passed"] and not grown
    _show(report)
    if json_file is not None:
        write_text(console, json_file, json.dumps(report, indent=1) + "\n")
    raise typer.Exit(0 if report["passed"] else 1)


def _in_process(plan: Plan) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with local_stage(plan) as stage:
            return await Drill(plan, stage, _say).run()

    return asyncio.run(run())


def _on_ray(plan: Plan) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="cato-c-")  # short: Unix sockets have short names
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        end_like_ctrl_c()
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        set_environment(folder, transport=True)
        from cato.lab.chaos.ray_stage import ray_stage

        stage = stack.enter_context(ray_stage(plan, Path(folder), _say))
        return asyncio.run(Drill(plan, stage, _say).run())


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _grown(report: dict[str, Any], growth: float | None) -> list[str]:
    if growth is None:
        return []
    return [
        f"{name}: {slope['mb_per_hour']} MB an hour"
        for name, slope in report["memory"].items()
        if slope["mb_per_hour"] > growth
    ]


def _show(report: dict[str, Any]) -> None:
    calls = ", ".join(f"{n} {kind}" for kind, n in report["calls"].items())
    console.print(
        f"{report['faults']} faults in {report['seconds']:.0f} s, {report['streams']} streams "
        f"at a time: {calls}; {report['output_tokens']} tokens compared",
        highlight=False,
    )
    if report["refused"]:
        console.print(f"refused: {report['refused']}", highlight=False)
    if found := report["overload"]:
        console.print(
            f"{found['factor']:g} times the capacity: {found['admitted']} of {found['offered']} "
            f"admitted, {found['attainment_of_admitted']:.1%} of them in time, "
            f"{found['use']:.0%} of the capacity used; longest queue {found['longest_queue']}, "
            f"Retry-After {' to '.join(f'{s:g}' for s in found['retry_after_s'])} s; back to "
            f"normal after {found['usual_after_s']:g} s",
            highlight=False,
        )
    table = Table("fault", "times", "p50", "p90", "p99", "max", title="recovery, s")
    for name, found in report["recovery_s"].items():
        times = [f"{found[p]:.2f}" if p in found else "-" for p in ("p50", "p90", "p99", "max")]
        table.add_row(name, str(found["faults"]), *times)
    if report["recovery_s"]:
        console.print(table)
    if found := report["hostile"]:
        console.print(
            f"completions in time: {found['attainment']['alone']:.1%} of "
            f"{found['completions']['alone']} alone, {found['attainment']['beside']:.1%} of "
            f"{found['completions']['beside']} beside hostile requests: {found['hostile']}; "
            f"longest {found['longest_s']:g} s",
            highlight=False,
        )
    broken = [*report["overload"].get("broken", []), *report["hostile"].get("broken", [])]
    for problem in (*broken, *report["leaks"], *report["grown"], *report["problems"]):
        console.print(problem, style="red", markup=False, highlight=False)
    console.print("passed" if report["passed"] else "failed", style="bold")
