"""Progress bars of the commands, erased at the end."""

from __future__ import annotations

import time
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from cato.core.words import counted

# Progress of a command that does not run in a terminal.
LINE_EVERY_S = 60.0


class Counting(Progress):
    """What is done, how many of how many steps, and the time so far. Without a terminal: a line on
    stderr, at most once a minute."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._began_s = self._told_s = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def reset(self, task_id: TaskID, **changes: Any) -> None:
        super().reset(task_id, **changes)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        now_s = time.monotonic()
        if self.console.is_terminal or now_s - self._told_s < LINE_EVERY_S:
            return
        self._told_s = now_s
        task = self._tasks[task_id]
        steps = "" if task.total is None else f": {task.completed:g} of {task.total:g}"
        minutes = counted(round((now_s - self._began_s) / 60), "minute")
        typer.echo(f"{task.description}{steps}, after {minutes}", err=True)


def waiting() -> Progress:
    """For work without steps: a spinner on stderr."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=Console(stderr=True), transient=True)
