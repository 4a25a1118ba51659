"""`cato profile`: measure a running replica and write its profile."""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cato.cli.bars import Counting
from cato.cli.cluster import AUTO, Address, connect
from cato.cli.outputs import writable_folder
from cato.cli.profile_check import check_profile
from cato.cli.profile_report import adapter_line, report, tell_file, tell_problems
from cato.core.errors import CatoError, ReplicaLostError, UnknownNameError
from cato.core.topology import DeploymentSpec, PoolSpec, Topology
from cato.profiles.load import profile_name, save_profile
from cato.profiles.schema import ProfileFile, Provenance

if TYPE_CHECKING:
    from cato.control.measured_replica import Found, ReplicaCaller
    from cato.measure.check import EngineSteps
    from cato.measure.evaluation import Measured, SweepResult
    from cato.measure.points import Plan, Target
    from cato.measure.sweep import AdapterStep

# Makes this process call replicas as the ingress does in production: gRPC, one event loop.
TRANSPORT_VARIABLE = "RAY_SERVE_THROUGHPUT_OPTIMIZED"
FOLDER = Path("profiles")
TEXT_SAMPLES = ("textwrap.py", "bisect.py", "queue.py", "shlex.py", "heapq.py", "copy.py")
TEXT_CHARS = 1_200
ADAPTER_BATCHES = (1, 8, 32)
ADAPTER_ROUNDS = 3

console = Console(markup=False)


def profile(
    deployment: Annotated[str, typer.Argument(help="A deployment; `cato status` lists them.")],
    address: Address = AUTO,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the profile.", show_default=str(FOLDER), callback=writable_folder
        ),
    ] = None,
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
            "runs. Takes no --out, --quick or --seconds.",
        ),
    ] = False,
) -> None:
    """Measure the steps of one replica's engine and write profiles/MODEL@ACCELERATOR.yaml.

    The deployment keeps serving; other work on the replica distorts the numbers. The file is
    written once all is measured; an existing one is kept as .bak.
    """
    if check and (out is not None or quick or seconds is not None):
        raise typer.BadParameter("--check takes no --out, --quick or --seconds")
    os.environ.setdefault(TRANSPORT_VARIABLE, "1")
    connect(address)
    from cato.measure.points import FULL, QUICK

    plan = QUICK if quick else FULL
    command = f"cato profile {deployment} --seed {seed}{' --quick' if quick else ''}"
    if seconds is not None:
        limit_s = min(plan.point_limit_s, seconds / 10)
        plan = replace(plan, total_s=seconds, point_limit_s=limit_s)
        command += f" --seconds {seconds:g}"
    saved: list[Path] = []
    try:
        if check:
            is_good = asyncio.run(_check_alone(deployment, seed))
            if not is_good:
                raise typer.Exit(1)
        else:
            asyncio.run(_profile(deployment, out or FOLDER, command, plan, seed, saved))
    except CatoError as error:
        console.print(str(error), style="red", markup=False)
        if isinstance(error, ReplicaLostError):
            console.print(
                f"{_kept(saved)} The pool scaled down during the measurement, which it sees "
                "as idle time: try again, or keep its replicas with `scaling: {policy: none}`.",
                highlight=False,
            )
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print(f"Interrupted. {_kept(saved)}", highlight=False)
        raise typer.Exit(130) from None


def _kept(saved: Sequence[Path]) -> str:
    if not saved:
        return "Nothing was written."
    return f"The profile is in {saved[0]}; how well it predicts was not checked to the end."


async def _check_alone(deployment: str, seed: int) -> bool:
    from cato.control.measured_replica import ReplicaCaller, engine_steps

    found = await _find(deployment)
    caller = ReplicaCaller(deployment, found.replica)
    return await check_profile(caller, found.profile, await engine_steps(caller, found), seed)


async def _profile(
    deployment: str, out: Path, command: str, plan: Plan, seed: int, saved: list[Path]
) -> None:
    """Measure, save and check; what is saved is told in `saved`, also if the check ends early."""
    from cato.control import actors
    from cato.control.measured_replica import ReplicaCaller, engine_steps, whole
    from cato.measure.evaluation import evaluate, with_host_memory
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
    sweep = Sweep(caller, target, plan, seed)
    with Counting(console) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        measured = await sweep.run(_texts(), progress)
        costs = await _adapters(caller, found)
    result = evaluate(target, measured)
    profile = with_host_memory(result.profile, found.profile, steps.host_tokens)
    result = replace(result, profile=profile)
    cards = _cards(found, whole(load["pid"]))
    provenance = _provenance(command, target, measured, result, cards)
    report(result)  # before the files, which may fail
    backup = _keep_backup(path)
    save_profile(path, profile, provenance)
    saved.append(path)
    kept_not = await actors.get(actors.PROFILER).keep_profile.remote(
        ProfileFile.of(profile, provenance)
    )
    if kept_not:
        console.print(f"Not saved to the metadata store: {kept_not}", style="yellow", markup=False)
    for line in (*(adapter_line(cost) for cost in costs), cards):
        if line:
            console.print(line, highlight=False)
    tell_problems(measured)
    tell_file(path, backup, found.spec.profile)
    await check_profile(caller, profile, steps, seed)


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
    return nvidia.described(cards, family(pid), found.spec.cards) if cards else ""


def _provenance(
    command: str, target: Target, measured: Measured, result: SweepResult, cards: str
) -> Provenance:
    notes = [f"{measured.rounds} rounds; times at the caller, with one hop of Serve"]
    if measured.disturbed:
        notes.append(f"other work on the replica at {measured.disturbed} of {measured.points}")
    if not target.kv_capacity_tokens:
        notes.append("KV capacity unknown, taken as max_running x context")
    if result.profile.host_load_token_s or result.profile.kv_token_bytes:
        notes.append("host memory as in the profile that was in use")
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


def _keep_backup(path: Path) -> Path | None:
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
    return await find_replica(*spec_of(topology, deployment))


def spec_of(topology: Topology, deployment: str) -> tuple[PoolSpec, DeploymentSpec]:
    """The deployment of that name and its pool; raise `UnknownNameError`, or `CatoError` for one of
    a shared pool."""
    for pool in topology.pools:
        for spec in pool.deployments:
            if spec.name == deployment:
                return pool, spec
    for shared in topology.shared_pools:
        if deployment in {d.name for d in shared.deployments}:
            raise CatoError(
                f"the models of the shared pool {shared.name!r} take turns in {deployment!r}: "
                "measure one that was added with `cato models profile NAME`"
            )
    known = tuple(d.name for p in topology.pools for d in p.deployments)
    raise UnknownNameError("deployment", deployment, known)


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
