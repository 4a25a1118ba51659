"""`cato profile`: measure a running replica and write its profile."""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import statistics
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cato.cli.cluster import AUTO, Address, connect
from cato.core.errors import CatoError, ReplicaLostError
from cato.core.topology import Topology
from cato.profiles.load import profile_name, save_profile
from cato.profiles.schema import ProfileFile, Provenance

if TYPE_CHECKING:
    from cato.control.measured_replica import Found, ReplicaCaller
    from cato.control.nvidia import Card
    from cato.core.profile import Profile
    from cato.measure.check import EngineSteps
    from cato.measure.evaluation import Measured, SweepResult
    from cato.measure.points import Plan, Target
    from cato.measure.sweep import AdapterStep

# Makes this process call replicas as the ingress does in production: gRPC, one event loop.
TRANSPORT_VARIABLE = "RAY_SERVE_THROUGHPUT_OPTIMIZED"
TEXT_SAMPLES = ("textwrap.py", "bisect.py", "queue.py", "shlex.py", "heapq.py", "copy.py")
TEXT_CHARS = 1_200
# A median error above this gets a warning. R2 is not used: a few samples with a pause of the
# machine, which the fit leaves out, ruin it.
ROUGH = 0.15
ADAPTER_BATCHES = (1, 8, 32)
ADAPTER_ROUNDS = 3

console = Console()


def profile(
    deployment: Annotated[str, typer.Argument(help="A deployment; `cato status` lists them.")],
    address: Address = AUTO,
    out: Annotated[Path, typer.Option(help="Folder for the profile.")] = Path("profiles"),
    quick: Annotated[
        bool, typer.Option(help="Fewer lengths and rounds: under a minute, less exact.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1, help="Most time to measure; skips points that would take a tenth of it."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and their order.")] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Only check how well the profile in use predicts a mixed run. Exit code 1 when "
            "it is off by more than 10 % and by more than 1.3 times the difference between two "
            "runs.",
        ),
    ] = False,
) -> None:
    """Measure the steps of one replica's engine and write profiles/MODEL@ACCELERATOR.yaml.

    The deployment keeps serving; other work on the replica distorts the numbers. The file is
    written once all is measured; an existing one is kept as .bak.
    """
    os.environ.setdefault(TRANSPORT_VARIABLE, "1")
    connect(address)
    from cato.measure.points import FULL, QUICK

    plan = QUICK if quick else FULL
    command = f"cato profile {deployment} --seed {seed}{' --quick' if quick else ''}"
    if seconds is not None:
        limit_s = min(plan.point_limit_s, seconds / 10)
        plan = replace(plan, total_s=seconds, point_limit_s=limit_s)
        command += f" --seconds {seconds:g}"
    try:
        if check:
            is_good = asyncio.run(_check_alone(deployment, seed))
            if not is_good:
                raise typer.Exit(1)
        else:
            asyncio.run(_profile(deployment, out, command, plan, seed))
    except CatoError as error:
        console.print(str(error), style="red", markup=False)
        if isinstance(error, ReplicaLostError):
            console.print(
                "Nothing was written. The pool scaled down during the measurement, which it sees "
                "as idle time: try again, or keep its replicas with `scaling: {policy: none}`.",
                highlight=False,
            )
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("Interrupted; nothing was written.")
        raise typer.Exit(130) from None


async def _check_alone(deployment: str, seed: int) -> bool:
    from cato.control.measured_replica import ReplicaCaller, engine_steps

    found = await _find(deployment)
    caller = ReplicaCaller(deployment, found.replica)
    return await _check(caller, found.profile, await engine_steps(caller, found), seed)


async def _check(caller: ReplicaCaller, profile: Profile, steps: EngineSteps, seed: int) -> bool:
    """Measure a mixed run that the profile was not fitted to, and compare it with the simulator's
    prediction; True when the profile predicts it."""
    from cato.measure.check import Verdict, check, mixed_run

    calls = mixed_run(profile, seed, shares=steps.block_tokens > 0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("a mixed run, twice", total=2 * len(calls))
        checked = await check(caller, profile, steps, calls, seed, lambda: bar.advance(task))
    console.print(
        f"A mixed run of {len(calls)} calls, twice (seed {seed}); E2E, median errors:",
        highlight=False,
    )
    cold = [c for c in checked if not c.call.shared_tokens]
    warm = [c for c in checked if c.call.shared_tokens]
    verdicts = []
    for what, some in (("without cache hits", cold), ("with cache hits", warm)):
        if not some:
            continue
        verdict = Verdict.of(some)
        verdicts.append(verdict)
        console.print(
            f"  {what}: {verdict.calls} calls, predicted {verdict.error:.1%} off "
            f"({verdict.bias:+.1%} on average); the second run is {verdict.repeat_error:.1%} off "
            f"the first",
            style=None if verdict.is_good else "yellow",
            highlight=False,
        )
    if warm:
        console.print(
            f"  cached tokens: {sum(c.measured.cached_tokens for c in warm)} by the engine's "
            f"count, {sum(c.predicted.cached_tokens for c in warm)} predicted",
            highlight=False,
        )
    is_good = all(v.is_good for v in verdicts)
    console.print(
        "The profile predicts this engine."
        if is_good
        else "The profile is off: measure it again when the machine is quiet.",
        style=None if is_good else "yellow",
        highlight=False,
    )
    if max(v.repeat_error for v in verdicts) > ROUGH:
        console.print(
            "The two runs of the same calls differ too much to judge the profile: check again when "
            "the machine is quiet.",
            style="yellow",
        )
    return is_good


async def _profile(deployment: str, out: Path, command: str, plan: Plan, seed: int) -> None:
    from cato.control import actors
    from cato.control.measured_replica import ReplicaCaller, engine_steps, whole
    from cato.measure.evaluation import evaluate
    from cato.measure.sweep import Sweep

    found = await _find(deployment)
    caller = ReplicaCaller(deployment, found.replica)
    load = await caller.load()
    steps = await engine_steps(caller, found)
    target = _target(found, steps, whole(load.get("kv_capacity_tokens")))
    path = out / f"{profile_name(target.model, target.accelerator)}.yaml"
    console.print(
        f"Measuring replica {found.replica} of {deployment}: {target.model} on "
        f"{target.accelerator} ({target.engine}).\nIt keeps serving; other work on it, or on "
        "this machine, distorts the numbers.",
        highlight=False,
    )
    if whole(load["held"]) > 0:
        console.print(f"The replica holds {load['held']} other requests now.", style="yellow")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    sweep = Sweep(caller, target, plan, seed)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        measured = await sweep.run(_texts(), progress)
        costs = await _adapters(caller, found)
    result = evaluate(target, measured)
    cards = _cards(found, whole(load["pid"]))
    provenance = _provenance(command, target, measured, result, cards)
    backup = keep_backup(path)
    save_profile(path, result.profile, provenance)
    kept_not = await actors.get(actors.PROFILER).keep_profile.remote(
        ProfileFile.of(result.profile, provenance)
    )
    if kept_not:
        console.print(f"Not saved to the metadata store: {kept_not}", style="yellow", markup=False)
    _report(result)
    for line in (*(_adapter_line(cost) for cost in costs), cards):
        if line:
            console.print(line, highlight=False)
    _tell_problems(measured)
    await _check(caller, result.profile, steps, seed)
    _tell_file(path, backup, found.spec.profile)


def _target(found: Found, steps: EngineSteps, kv_capacity_tokens: int) -> Target:
    from cato.measure.points import Target

    spec = found.spec
    return Target(
        model=found.pool.model.name,
        accelerator=spec.accelerator_type or spec.accelerator,
        engine=spec.engine.kind,
        context_tokens=found.context_tokens,
        max_running=found.max_running,
        kv_capacity_tokens=kv_capacity_tokens,
        load_s=found.load_s,
        step_tokens=steps.step_tokens,
        prompt_cap_tokens=steps.prompt_cap_tokens,
        block_tokens=steps.block_tokens,
    )


def _cards(found: Found, pid: int) -> str:
    """The GPUs of the engine process `pid`, for the provenance; empty without any."""
    from cato.control import nvidia
    from cato.engines.vllm.threads import family

    cards = nvidia.cards() if found.spec.accelerator == "gpu" else ()
    return _on_cards(cards, family(pid), found.spec.cards) if cards else ""


def _provenance(
    command: str, target: Target, measured: Measured, result: SweepResult, cards: str
) -> Provenance:
    notes = [f"{measured.rounds} rounds; times at the caller, with one hop of Serve"]
    if measured.disturbed:
        notes.append(f"other work on the replica at {measured.disturbed} of {measured.points}")
    if not target.kv_capacity_tokens:
        notes.append("KV capacity unknown, taken as max_running x context")
    if cards:
        notes.append(cards)
    return Provenance(
        command=command,
        date=datetime.date.today().isoformat(),
        machine=machine(),
        samples=result.samples,
        prefill_r2=round(result.prefill_r2, 4),
        decode_r2=round(result.decode_r2, 4),
        simulated=target.engine == "simulated",
        note="; ".join(notes),
    )


def _tell_problems(measured: Measured) -> None:
    for line in dict.fromkeys(measured.skipped):
        console.print(f"skipped: {line}", style="dim", highlight=False)
    if measured.disturbed:
        console.print(
            f"The replica held other work at {measured.disturbed} of {measured.points} "
            "measurements; measure again when it is quiet.",
            style="yellow",
        )


def _tell_file(path: Path, backup: Path | None, used: str | None) -> None:
    kept = f" (the old one is {backup.name})" if backup else ""
    console.print(f"Wrote {path}{kept}.", highlight=False)
    if used != path.stem:
        console.print(
            f"The deployment file says `profile: {used or 'nothing'}`; to use this one: "
            f"`profile: {path.stem}`.",
            highlight=False,
        )
    console.print("Deploy the application `engines` again to use the file.", highlight=False)


async def _adapters(caller: ReplicaCaller, found: Found) -> list[AdapterStep]:
    """The decode-step times with the model's adapters; empty for a model without any."""
    from cato.control.measured_replica import ReplicaCaller
    from cato.measure.sweep import adapter_steps

    if not found.pool.model.adapters:
        return []
    name = found.spec.name
    tuned = [ReplicaCaller(name, found.replica, a) for a in found.pool.model.adapters]
    batches = [b for b in ADAPTER_BATCHES if b <= found.max_running]
    return await adapter_steps(caller, tuned, batches, ADAPTER_ROUNDS)


def _adapter_line(cost: AdapterStep) -> str:
    """A line of the report."""
    kinds = {"no adapter": cost.none_s, "one": cost.one_s, "all, mixed": cost.mixed_s}
    times = (f"{kind} {s * 1000:.2f} ms" for kind, s in kinds.items() if s is not None)
    return f"decode step of {cost.batch} calls: " + (", ".join(times) or "not measured")


def _on_cards(cards: Sequence[Card], pids: Sequence[int], count: int) -> str:
    """The GPU and its driver and, where it can be told, the memory that the engine holds on it."""
    from cato.control import nvidia

    card = cards[0]
    said = f"{card.name}, driver {card.driver}"
    knows = any(pid in c.processes for c in cards for pid in pids)
    if not knows and len(cards) != count:  # would include other engines' memory
        return said
    held = nvidia.held_bytes(cards, pids, ())
    return f"{said}; weights, KV cache and graphs hold {held / 1e9:.1f} GB"


def keep_backup(path: Path) -> Path | None:
    """Copy the file that will be replaced, which took minutes to measure; None without a file.

    Replaces an earlier copy: older ones are in version control.
    """
    if not path.exists():
        return None
    backup = path.with_suffix(".yaml.bak")
    backup.write_bytes(path.read_bytes())
    return backup


def machine() -> str:
    """This machine's cores and CPU model."""
    name = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    for line in info.splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores, {name}"


async def _find(deployment: str) -> Found:
    from cato.control import actors
    from cato.control.measured_replica import find_replica

    try:
        topology: Topology | None = await actors.get(actors.PROVISIONER).topology.remote()
    except ValueError:
        topology = None
    if topology is None:
        raise CatoError("CATO is not deployed on this cluster (no provisioner)")
    for pool in topology.pools:
        for spec in pool.deployments:
            if spec.name == deployment:
                return await find_replica(pool, spec)
    known = ", ".join(d.name for p in topology.pools for d in p.deployments)
    raise CatoError(f"no deployment {deployment!r}; there are: {known}")


def _texts() -> list[str]:
    """Excerpts of Python's standard library, as prompts."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for name in TEXT_SAMPLES:
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        middle = max(0, len(text) // 2 - TEXT_CHARS // 2)
        texts.append(text[middle : middle + TEXT_CHARS])
    return texts


def _report(result: SweepResult) -> None:
    profile = result.profile
    table = Table("", "batch", "tokens", "samples", "measured ms", "predicted ms", "error")
    table.title = "What the profile predicts"
    for c in result.comparisons:
        style = "" if abs(c.error) < 0.25 else "yellow"
        table.add_row(
            c.what,
            str(c.batch),
            str(c.tokens),
            str(c.samples),
            f"{c.measured_s * 1000:.2f}",
            f"{c.predicted_s * 1000:.2f}",
            f"{c.error:+.0%}",
            style=style,
        )
    console.print(table)
    console.print(
        f"step = {_us(profile.decode_base_s)} us"
        f" + {_us(profile.decode_per_request_s)} us x b"
        f" + {_us(profile.decode_per_context_token_s)} us x h"
        f" + {_us(profile.prefill_per_request_s)} us x prompts that end + the larger of\n"
        f"       {_us(profile.weights_read_s)} us + {_us(profile.kv_read_token_s)} us x h and"
        f" {_us(profile.prompt_token_s)} us x n"
        f" + {_us(profile.prefill_per_attended_token_s)} us x positions before\n"
        f"R2 {result.prefill_r2:.3f} of first tokens, {result.decode_r2:.3f} of decode steps; "
        f"latency {_us(profile.latency_s)} us beside the engine's steps\n"
        f"{profile.chars_per_token:.2f} characters a token, load {profile.load_s:.2f} s, "
        f"context {profile.context_tokens}, KV cache {profile.kv_capacity_tokens} tokens in "
        f"blocks of {profile.block_tokens}, {profile.step_tokens} tokens a step",
        highlight=False,
    )
    for what in dict.fromkeys(c.what for c in result.comparisons):
        errors = [abs(c.error) for c in result.comparisons if c.what == what]
        if (typical := statistics.median(errors)) > ROUGH:
            console.print(
                f"The fit of the {what} is rough ({typical:.0%} off in the median): other load on "
                "the machine, or non-linear times; measure again when it is quiet.",
                style="yellow",
            )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}"
