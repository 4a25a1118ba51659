"""Reloads workflow files when they change; of an invalid file the last valid version stays.

An ingress that starts while a file is invalid leaves its task out and serves the others: a mistake
in one file must not keep an ingress from coming back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cato.config.lines import with_lines
from cato.core.errors import ConfigError, Problem
from cato.core.ids import TaskName
from cato.core.workflow import Workflow
from cato.workflows.load import files_of_workflows, read_workflows

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
        """Raise `ConfigError` without such a folder."""
        self._folder = folder
        self._loaded = self._seen = _signature(folder)
        self._by_file: dict[Path, Workflow] = {}
        self.workflows: Workflows = {}
        self.problem = ""
        """What is wrong with the current files; `workflows` has their last valid versions."""
        self._load()

    def look(self) -> bool:
        """Poll once; return whether `workflows` or `problem` changed. Blocks to read files."""
        now = _signature(self._folder)
        is_settled, self._seen = now == self._seen, now
        if now == self._loaded or not is_settled:
            return False
        self._loaded = now
        try:
            self._load()
        except ConfigError as error:
            self._tell(error.problems)
            return True
        log.warning("%d workflows reloaded from %s", len(self.workflows), self._folder)
        return True

    def _load(self) -> None:
        """Read the files; an invalid one leaves the last valid workflow of that file in use."""
        valid, problems = read_workflows(self._folder)
        names = {workflow.name for workflow in valid.values()}
        kept = {
            path: workflow
            for path in files_of_workflows(self._folder)
            if path not in valid
            and (workflow := self._by_file.get(path)) is not None
            and workflow.name not in names
        }
        self._by_file = valid | kept
        self.workflows = {w.name: w for w in self._by_file.values()}
        self._tell(problems)

    def _tell(self, problems: tuple[Problem, ...]) -> None:
        self.problem = str(ConfigError(with_lines(problems))) if problems else ""
        if problems:
            log.warning(
                "invalid workflow files; what was valid before stays in use: %s", self.problem
            )

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
