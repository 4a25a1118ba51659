"""Workflows that follow their files: an edit needs no restart, and a wrong one does no harm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from cato.config.lines import with_lines
from cato.core.errors import ConfigError
from cato.core.ids import TaskName
from cato.core.workflow import Workflow
from cato.workflows.load import load_workflows

log = logging.getLogger("cato.workflows")

POLL_S = 1.0

Workflows = Mapping[TaskName, Workflow]
_Signature = tuple[tuple[str, int, int, int], ...]


class WorkflowFiles:
    """Watches a folder of workflows and their prompts.

    Looks at the files instead of waiting for the system's word: that works for a mounted
    ConfigMap and a network file system, too. A change counts once two looks agree, for an editor
    may be in the middle of writing.
    """

    def __init__(self, folder: Path) -> None:
        """Raise `ConfigError` when the files are wrong now."""
        self._folder = folder
        self._loaded = self._seen = _signature(folder)
        self.workflows: Workflows = load_workflows(folder)
        self.problem = ""
        """What is wrong with the files as they are; the workflows are those before it."""

    def look(self) -> bool:
        """Whether `workflows` or `problem` changed. Blocks for the time of reading files."""
        now = _signature(self._folder)
        is_settled, self._seen = now == self._seen, now
        if now == self._loaded or not is_settled:
            return False
        self._loaded = now
        try:
            self.workflows = load_workflows(self._folder)
        except ConfigError as error:
            self.problem = str(ConfigError(with_lines(error.problems)))
            log.warning("the workflows stay as they were: %s", self.problem)
            return True
        self.problem = ""
        log.warning("%d workflows reloaded from %s", len(self.workflows), self._folder)
        return True

    async def follow(self, changed: Callable[[], None]) -> None:
        """Look for ever; `changed` is called after every change."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if await asyncio.to_thread(self.look):
                    changed()
            except OSError as error:  # the folder is gone for a moment, or cannot be read
                log.warning("the workflows stay as they were: %s", error)


def _signature(folder: Path) -> _Signature:
    """What tells one state of the files from another, without reading them."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if not p.name.startswith(".")):
        try:
            status = path.stat()
        except FileNotFoundError:  # removed since it was listed
            continue
        found.append((str(path), status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)
