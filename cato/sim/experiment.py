"""What an experiment is: a name, a source, and a function from options to a report."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from cato.core.errors import InputError
from cato.sim.report import Report

T = TypeVar("T")
R = TypeVar("R")


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

    `headlines`: the metrics that the terminal shows by default; empty: the usual ones. `takes`:
    which of `users`, `cells`, `draw` and `kept` it reads.
    """

    name: str
    title: str
    source: str
    run: Callable[[Options, Progress], Report]
    plot: Callable[[Report, Path], Sequence[Path]]
    headlines: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


def run_all(
    function: Callable[[T], R],
    jobs: Sequence[T],
    progress: Progress,
    processes: int,
    keep: Callable[[R], object] = lambda result: None,
) -> list[R]:
    """Apply `function` to every job, in order. `function` and the jobs must be picklable.

    `keep` gets each result, in order, as soon as it is there. The processes end with this one, even
    if it is killed.
    """
    results: list[R] = []
    progress(0, len(jobs))

    def add(result: R) -> None:
        keep(result)
        results.append(result)
        progress(len(results), len(jobs))

    processes = min(processes, len(jobs))
    if processes <= 1:
        for job in jobs:
            add(function(job))
        return results
    # Spawned, not forked: threads of numba and matplotlib do not survive a fork.
    with ProcessPoolExecutor(
        processes, get_context("forkserver"), initializer=_end_with, initargs=(os.getpid(),)
    ) as pool:
        for result in pool.map(function, jobs, chunksize=max(1, len(jobs) // (processes * 40))):
            add(result)
    return results


def _end_with(pid: int) -> None:
    """End this process when the other one is gone: its queue would keep this one busy."""

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
