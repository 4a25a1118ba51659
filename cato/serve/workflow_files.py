"""Reloads workflow files when they change; invalid files keep the last good workflows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
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

    Polls instead of using inotify, so that mounted ConfigMaps and network file systems work too.
    A change counts once two polls agree: an editor may still be writing.
    """

    def __init__(self, folder: Path) -> None:
        """Raise `ConfigError` if the files are invalid now."""
        self._folder = folder
        self._loaded = self._seen = _signature(folder)
        self.workflows: Workflows = load_workflows(folder)
        self.problem = ""
        """What is wrong with the current files; `workflows` are the last good ones."""

    def look(self) -> bool:
        """Poll once; return whether `workflows` or `problem` changed. Blocks to read files."""
        now = _signature(self._folder)
        is_settled, self._seen = now == self._seen, now
        if now == self._loaded or not is_settled:
            return False
        self._loaded = now
        try:
            self.workflows = load_workflows(self._folder)
        except ConfigError as error:
            self.problem = str(ConfigError(with_lines(error.problems)))
            log.warning("invalid workflow files, keeping the previous workflows: %s", self.problem)
            return True
        self.problem = ""
        log.warning("%d workflows reloaded from %s", len(self.workflows), self._folder)
        return True

    async def follow(self, changed: Callable[[], None]) -> None:
        """Poll for ever; call `changed` after every change."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if await asyncio.to_thread(self.look):
                    changed()
            except OSError as error:  # the folder is missing or unreadable, perhaps briefly
                log.warning("cannot read the workflow files, keeping the previous ones: %s", error)
            except Exception as error:  # a defect of ours; the next change may be a good one
                self.problem = f"the workflow files cannot be used: {error!r}"
                log.exception("invalid workflow files, keeping the previous workflows")
                with suppress(Exception):
                    changed()


def _signature(folder: Path) -> _Signature:
    """A fingerprint of the files' state, without reading them."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if not p.name.startswith(".")):
        try:
            status = path.stat()
        except OSError:  # removed since it was listed, or a link to itself: loading it tells
            continue
        found.append((str(path), status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)
