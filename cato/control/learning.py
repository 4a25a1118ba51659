"""Fits of the Profiler: output lengths and past runs, refitted from time to time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from subprocess import SubprocessError

from cato.control.fitting import has_first_forest, most_urgent, needs_forest, refitted_apart
from cato.control.memory import give_back
from cato.core.receipt import SlaReceipt
from cato.estimators.output_lengths import (
    LengthHistory,
    LengthSample,
    OutputLengths,
    Taken,
    refitted,
    samples_of,
)
from cato.estimators.stages import FinishedStages, PastRuns, RunHistory, finished_stages, past_runs

log = logging.getLogger("cato.profiler")

# Refitting costs milliseconds per node, in a thread; forests cost some seconds of one core, in a
# subprocess. A first forest comes soon; the next ones may take one percent of a core.
RELEARN_S = 5.0
GROW_S = 60.0
REGROW_S = 300.0
SEED = 0

Fit = Callable[[OutputLengths, Taken, int, int], OutputLengths]


class Learning:
    """Belongs to one asyncio loop. A fit replaces the one before it when it is complete."""

    def __init__(self) -> None:
        self._length_history = LengthHistory()
        self._run_history = RunHistory()
        self._lengths = OutputLengths()
        self._past_runs = PastRuns()
        self._has_new_runs = False
        self._version = 0
        self._learning: asyncio.Task[None] | None = None
        self._learnt_at_s = -RELEARN_S
        self._grown_at_s = -REGROW_S

    def add_lengths(self, receipt: SlaReceipt) -> tuple[LengthSample, ...]:
        """Samples carry their model's name, so a canary has estimates of its own."""
        samples = samples_of(receipt)
        self._length_history.add(samples)
        return samples

    def add_run(self, receipt: SlaReceipt) -> FinishedStages | None:
        """The run's stages, if there is something to learn from them."""
        stages = finished_stages(receipt)
        if stages is not None:
            self._run_history.add([stages])
            self._has_new_runs = True
        return stages

    def restore(self, samples: Iterable[LengthSample], runs: Iterable[FinishedStages]) -> None:
        """Put what was learnt before a restart, oldest first, before what came since."""
        self._length_history.restore(samples)
        self._run_history.restore(runs)
        self._has_new_runs = True

    def lengths(self, known_version: int) -> OutputLengths | None:
        """See `Profiler.lengths`."""
        self.refit_when_due()
        self._version = max(self._version, known_version)
        return self._lengths if self._lengths.version > known_version else None

    def past_runs(self, known_version: int) -> PastRuns | None:
        """See `Profiler.past_runs`."""
        self.refit_when_due()
        self._version = max(self._version, known_version)
        return self._past_runs if self._past_runs.version > known_version else None

    def refit_when_due(self) -> None:
        now_s = time.monotonic()
        is_busy = self._learning is not None and not self._learning.done()
        if is_busy or now_s - self._learnt_at_s < RELEARN_S:
            return
        due = self._length_history.due(self._lengths)
        grows = needs_forest(due)
        wait_s = GROW_S if has_first_forest(due, self._lengths) else REGROW_S
        if grows and now_s - self._grown_at_s < wait_s:
            due = {key: seen for key, seen in due.items() if not needs_forest({key: seen})}
            grows = False
        if grows:
            due = most_urgent(due, self._lengths)
            grows = needs_forest(due)
        if not due and not self._has_new_runs:
            return
        self._learnt_at_s = now_s
        if grows:
            self._grown_at_s = now_s
        fit = _with_forests if grows else refitted
        self._learning = asyncio.get_running_loop().create_task(
            self._refit(self._length_history.taken(due), fit)
        )
        self._learning.add_done_callback(_report_failure)

    async def _refit(self, taken: Taken, fit: Fit) -> None:
        """Fit in a thread, from copies; the result replaces the old one in a single assignment."""
        if taken:
            version = self._next_version()
            self._lengths = await asyncio.to_thread(fit, self._lengths, taken, version, SEED)
            if fit is not refitted:
                await asyncio.to_thread(give_back)
        if self._has_new_runs:
            self._has_new_runs = False
            version = self._next_version()
            runs = self._run_history.by_task()
            self._past_runs = await asyncio.to_thread(past_runs, runs, version)

    def _next_version(self) -> int:
        """Higher than any version an ingress knows, including those of earlier incarnations."""
        self._version = max(self._version + 1, time.time_ns() // 1_000_000)
        return self._version


def _with_forests(lengths: OutputLengths, taken: Taken, version: int, seed: int) -> OutputLengths:
    """Refit in a subprocess; without forests if it fails, say for lack of memory, so that lengths
    are still learnt."""
    try:
        return refitted_apart(lengths, taken, version, seed)
    except (OSError, SubprocessError):
        log.exception("no forests of output lengths; learning their quantiles")
        return refitted(lengths, taken, version, seed, grows=False)


def _report_failure(learning: asyncio.Task[None]) -> None:
    if not learning.cancelled() and (error := learning.exception()) is not None:
        log.error("learning failed; keeping what was learnt before", exc_info=error)
