"""What an experiment is: a name, a source, and a function from options to a report."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from cato.core.errors import InputError
from cato.sim.report import Report

# Jobs go to a process in so many parts; smaller ones cost more than they run.
PARTS_A_PROCESS = 100

T = TypeVar("T")
R = TypeVar("R")

INTERRUPTED = "interrupted"
"""Key of `Report.extra`: how many runs were done, when a user ended the others."""


class Interrupted(KeyboardInterrupt):
    """A user ended a run; `results` by number of the job."""

    def __init__(self, results: Mapping[int, Any], jobs: int) -> None:
        super().__init__(results, jobs)
        self.results = results
        self.jobs = jobs

    def whole(self, groups: Sequence[Hashable]) -> list[Any]:
        """Results of the groups of jobs that are done, in order; raise this again if there are
        none. `groups`: one for each job, such as its cell and seed."""
        missing = {group for n, group in enumerate(groups) if n not in self.results}
        found = [self.results[n] for n, group in enumerate(groups) if group not in missing]
        if not found:
            raise self
        return found

    def told(self) -> dict[str, object]:
        """For `Report.extra`."""
        return {INTERRUPTED: {"runs": len(self.results), "of": self.jobs}}


class Progress(Protocol):
    """Callback of a long run."""

    def __call__(self, done: int, of: int) -> None: ...


def silent(done: int, of: int) -> None:
    """A no-op progress callback."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of any experiment; `policies` empty: all that it compares.

    `quick`: a shorter version that takes minutes, where the experiment has one. `users`: users per
    replica, for studies with closed-loop users (empty: the study's default). `cells` and `draw`:
    number and seed of random cells, for studies that draw them (0: the fixed cells). `kept`: a file
    of finished cells, for studies that take hours.
    """

    seeds: tuple[int, ...]
    policies: tuple[str, ...] = ()
    trace: Path | None = None
    dataset: Path | None = None
    jobs: int = 1
    quick: bool = False
    users: tuple[float, ...] = ()
    cells: int = 0
    draw: int = 0
    kept: Path | None = None

    def needed(self, option: str) -> Path:
        """The path given by `--trace` or `--dataset`; raise `InputError` when it is missing."""
        path: Path | None = getattr(self, option)
        if path is None:
            raise InputError(f"this experiment needs --{option} FILE")
        if not path.exists():
            raise InputError(f"--{option}: there is no {path}")
        return path


@dataclass(frozen=True, slots=True)
class Experiment:
    """A named experiment; `source` is the paper and section that it reproduces.

    `metrics`: all that its report may have. `headlines`: the metrics that the terminal shows by
    default; empty: the usual ones. `takes`: which of `users`, `cells`, `draw` and `kept` it reads.
    """

    name: str
    title: str
    source: str
    run: Callable[[Options, Progress], Report]
    plot: Callable[[Report, Path], Sequence[Path]]
    metrics: tuple[str, ...]
    headlines: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


def run_all(
    function: Callable[[T], R],
    jobs: Sequence[T],
    progress: Progress,
    processes: int,
    keep: Callable[[int, R], object] = lambda number, result: None,
) -> list[R]:
    """Apply `function` to every job; results are in the order of the jobs. `function` and the jobs
    must be picklable.

    `keep` gets the number of a job and its result as soon as it is there. The processes end with
    this one, even if it is killed. Raise `Interrupted` when the user ends it.
    """
    results: dict[int, R] = {}
    progress(0, len(jobs))

    def add(number: int, result: R) -> None:
        keep(number, result)
        results[number] = result
        progress(len(results), len(jobs))

    processes = min(processes, len(jobs))
    try:
        if processes <= 1:
            for number, job in enumerate(jobs):
                add(number, function(job))
        else:
            _run_beside(function, jobs, processes, add)
    except KeyboardInterrupt as stop:
        raise Interrupted(results, len(jobs)) from stop
    return [results[number] for number in range(len(jobs))]


def _run_beside(
    function: Callable[[T], R], jobs: Sequence[T], processes: int, add: Callable[[int, R], None]
) -> None:
    """Run the jobs in processes of their own."""
    size = max(1, len(jobs) // (processes * PARTS_A_PROCESS))
    # Spawned, not forked: threads of numba and matplotlib do not survive a fork.
    with ProcessPoolExecutor(
        processes, get_context("forkserver"), initializer=_end_with, initargs=(os.getpid(),)
    ) as pool:
        parts = range(0, len(jobs), size)
        running = {pool.submit(_each, function, jobs[at : at + size]): at for at in parts}
        try:
            for done in as_completed(running):
                for number, result in enumerate(done.result(), running[done]):
                    add(number, result)
        except BaseException:
            for process in active_children():  # the end of this one would wait for their jobs
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _each(function: Callable[[T], R], jobs: Sequence[T]) -> list[R]:
    return [function(job) for job in jobs]


def _end_with(pid: int) -> None:
    """End this process when the other one is gone: its queue would keep this one busy. A user who
    presses Ctrl-C ends the other one alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
