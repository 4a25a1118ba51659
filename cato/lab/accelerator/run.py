"""Runs the accelerator measurements one by one, saving after each so that a run can be interrupted.

Importing this module imports Ray, which then reads its settings: set the environment first.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cato.config.deploy_file import DeployFile, deploy_file_of, load_deploy_file
from cato.config.paths import resolve
from cato.control import nvidia
from cato.core.errors import InputError
from cato.core.topology import ModelSpec, Topology
from cato.engines.vllm.host import Zygote
from cato.lab.accelerator import alone, served
from cato.lab.accelerator.plan import (
    Item,
    Step,
    Subject,
    done_of,
    expected_minutes,
    steps,
    too_long,
    why_not,
)
from cato.lab.bench.deployment import models_of, with_models_in, with_profile
from cato.lab.live.rounds import Progress
from cato.profiles.load import load_profiles, profile_name, save_profile
from cato.profiles.schema import ProfileFile, Provenance

log = logging.getLogger("cato.lab.bench")

DONE, SKIPPED, FAILED, CUT = "done", "skipped", "failed", "cut off"


class TimeUp(KeyboardInterrupt):  # like Ctrl-C, it ends every loop and await
    """The budget is used up."""


@dataclass(frozen=True, slots=True)
class Settings:
    """User options. `budget` in minutes; `models`: a folder of models."""

    files: tuple[str, ...]
    json_file: Path
    only: tuple[str, ...] = ()
    budget: float | None = None
    quick: bool = False
    seed: int = 0
    models: Path | None = None
    profiles: Path | None = None


@dataclass(slots=True)
class _File:
    """A deployment file, the measurements of its engine, and the zygote of its bare engines."""

    deploy: DeployFile
    models: tuple[ModelSpec, ...]
    measured: ProfileFile | None = None
    zygote: Zygote | None = None

    @property
    def topology(self) -> Topology:
        return self.deploy.topology


class Accelerator:
    """All steps of some files; `report` is saved after each."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        command: str,
        facts: Callable[[], Mapping[str, object]],
        progress: Progress,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._folder, self._command = settings, folder, command
        self._facts, self._progress, self._say = facts, progress, say
        self._files = {Path(f).name: _loaded(f, settings.models) for f in settings.files}
        if len(self._files) < len(settings.files):
            raise InputError("two of the files have the same name")
        self._cards = nvidia.cards()
        self._started_s = time.monotonic()
        # Zygotes live from one item to the next, and belong to this loop.
        self._loop = asyncio.Runner()
        self._served: served.Served | None = None
        self._served_file = ""
        self._numbers = 0
        self._close = contextlib.ExitStack()
        self.report = self._begun()

    def _begun(self) -> dict[str, Any]:
        """The report of an earlier run to continue, or an empty one."""
        form = "quick" if self._settings.quick else "whole"
        path = self._settings.json_file
        if not path.exists():
            return {"form": form, "seed": self._settings.seed, "runs": [], "steps": []}
        try:
            report: dict[str, Any] = json.loads(path.read_text())
            had = (report["form"], report["seed"])
            keys = [step["key"] for step in report["steps"]]
            names = {card["name"] for run in report["runs"] for card in run["cards"]}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"--json: {path} is no report of this command: {error!r}") from error
        if had != (form, self._settings.seed):
            raise InputError(f"--json: {path} has the form {had[0]} and seed {had[1]}")
        if names != (here := {card.name for card in self._cards}):
            raise InputError(
                f"--json: {path} was measured on {_named(names)}, and this machine has "
                f"{_named(here)}; name another file"
            )
        log.info("%s has %s", path, ", ".join(keys))
        for step in report["steps"]:
            if step["key"].startswith("a ") and step["status"] == DONE:
                file = self._files.get(step["file"])
                if file is not None:
                    self._know(file, step["result"])
        return report

    def run(self) -> dict[str, Any]:
        """Measure what is missing; an interruption ends it, and completed items are kept."""
        self.report["runs"].append(
            {
                "command": self._command,
                **self._facts(),
                "cards": [
                    {"name": c.name, "driver": c.driver, "total_bytes": c.total_bytes}
                    for c in self._cards
                ],
            }
        )
        done = done_of(self.report["steps"])
        try:
            for step in steps(tuple(self._files), self._settings.only):
                if step.key not in done:
                    self._take(step)
        finally:
            self._close_served()
            self._end_bare()
        return self.report

    def _take(self, step: Step) -> None:
        """Run one step, or record why not."""
        file = self._files[step.file]
        reason = why_not(step.item, self._subject(file))
        if not reason:
            is_started = self._served_file == step.file
            quick = self._settings.quick
            expected = expected_minutes(step.item, quick=quick, is_started=is_started)
            reason = too_long(expected, self._left())
        if reason:
            self._keep(step, SKIPPED, 0.0, reason)
            return
        self._say(f"{step.item.letter} {step.item.title} ({step.file})")
        started_s = time.monotonic()
        status, reason, result = DONE, "", None
        try:
            with _at_most(self._left()):
                result = self._measured(step.item, step.file, file)
        except TimeUp:
            status, reason = CUT, "the budget was used up"
        except KeyboardInterrupt:
            minutes = (time.monotonic() - started_s) / 60
            self._keep(step, CUT, minutes, "interrupted")
            raise
        except Exception as error:  # the other steps can still run
            log.exception("step %s failed", step.key)
            status, reason = FAILED, f"{type(error).__name__}: {error}"
            self._close_served()
        self._keep(step, status, (time.monotonic() - started_s) / 60, reason, result)

    def _measured(self, item: Item, name: str, file: _File) -> dict[str, Any]:
        seed = self._settings.seed
        if item.served:
            on = self._serve(name, file)
            measures = {"b": on.predicted, "c": on.overhead, "d": on.mix, "e": on.killed}
            return measures[item.letter](self._progress)
        self._close_served()
        subject = self._alone(file)
        self._progress.begin(f"{item.letter} {item.title}", 1)
        match item.letter:
            case "a":
                found = self._bare(alone.engine_alone(subject, self._provenance(), seed))
                self._know(file, found)
                self._save_profile(file)
            case "f":
                found = self._bare(alone.two_models(subject))
            case "g":
                found = self._bare(alone.adapters(subject, seed))
            case "h":
                found = self._bare(alone.host_memory(subject, seed))
            case letter:
                raise AssertionError(f"no item {letter}")
        self._progress.step()
        return found

    def _alone(self, file: _File) -> alone.Alone:
        pool = file.topology.pools[0]
        deployment = pool.deployments[0]
        profiles = load_profiles(resolve(file.topology.profiles_dir))
        profile = profiles[deployment.profile or ""]
        if file.measured is not None:
            profile = file.measured.to_profile()
        form = alone.SMALL if self._settings.quick else alone.WHOLE
        others = tuple(m for m in file.models if m.name != pool.model.name)
        folder = self._own_folder()
        if file.zygote is None:
            file.zygote = Zygote(folder / "z.sock", python=deployment.engine.python)
        return alone.Alone(deployment, pool.model, others, profile, folder, file.zygote, form)

    def _bare(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        try:
            return self._loop.run(work)
        except BaseException:
            self._end_bare()
            raise

    def _end_bare(self) -> None:
        """End all bare engines and their zygotes."""
        for file in self._files.values():
            if file.zygote is not None:
                self._loop.run(file.zygote.stop())
                file.zygote = None
        self._loop.close()
        self._loop = asyncio.Runner()

    def _serve(self, name: str, file: _File) -> served.Served:
        if self._served is not None and self._served_file == name:
            return self._served
        self._close_served()
        folder = self._own_folder()
        form = served.small if self._settings.quick else served.whole
        deploy = with_profile(file.deploy, file.measured, folder / "known-profiles")
        seed = self._settings.seed
        stage = served.Served(deploy, folder, form(seed), seed, self._say)
        self._served = self._close.enter_context(stage)
        self._served_file = name
        return self._served

    def _close_served(self) -> None:
        self._served, self._served_file = None, ""
        self._close.close()

    def _own_folder(self) -> Path:
        """A new folder with a short name: Unix socket paths are limited in length."""
        self._numbers += 1
        folder = self._folder / str(self._numbers)
        folder.mkdir()
        return folder

    def _subject(self, file: _File) -> Subject:
        deployment = file.topology.pools[0].deployments[0]
        return Subject(
            deployment.accelerator, deployment.engine.kind, len(file.models), len(self._cards)
        )

    def _left(self) -> float | None:
        if self._settings.budget is None:
            return None
        return self._settings.budget - (time.monotonic() - self._started_s) / 60

    def _provenance(self) -> Provenance:
        about = self._facts()
        machine = f"{about['cores']} cores, {about['processor']}"
        if self._cards:
            machine = f"{self._cards[0].name}, driver {self._cards[0].driver}; {machine}"
        today = datetime.date.today().isoformat()
        return Provenance(command=self._command, date=today, machine=machine)

    def _know(self, file: _File, found: Mapping[str, Any]) -> None:
        """Pass the findings of item a to later items."""
        if found["profile"] is not None:
            file.measured = ProfileFile.model_validate(found["profile"])

    def _save_profile(self, file: _File) -> None:
        found, folder = file.measured, self._settings.profiles
        if found is not None and folder is not None:
            path = folder / f"{profile_name(found.model, found.accelerator)}.yaml"
            save_profile(path, found.to_profile(), found.provenance)

    def _keep(
        self,
        step: Step,
        status: str,
        minutes: float,
        reason: str = "",
        result: dict[str, Any] | None = None,
    ) -> None:
        """Save the report with this step, atomically; while all are skipped there is none."""
        row = {
            "key": step.key,
            "letter": step.item.letter,
            "title": step.item.title,
            "file": step.file,
            "on": self._subject(self._files[step.file]).accelerator,
            "status": status,
            "minutes": round(minutes, 2),
            "reason": reason,
            "result": result,
        }
        others = [s for s in self.report["steps"] if s["key"] != step.key]
        self.report["steps"] = [*others, row]
        if not is_measured(self.report):
            return
        path = self._settings.json_file
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.report, indent=1) + "\n")
        os.replace(partial, path)


def _named(cards: Collection[str]) -> str:
    return ", ".join(sorted(cards)) or "no NVIDIA card"


def is_measured(report: Mapping[str, Any]) -> bool:
    """Whether any step was at least tried."""
    return any(step["status"] != SKIPPED for step in report["steps"])


def _loaded(file: str, models: Path | None) -> _File:
    deploy = load_deploy_file(file)
    if models is not None:
        deploy = deploy_file_of(deploy.path, with_models_in(deploy.raw, models))
    if not deploy.topology.pools:
        raise InputError(f"{file} has no unshared pool, so there is no engine to measure")
    return _File(deploy, models_of(deploy))


@contextlib.contextmanager
def _at_most(minutes: float | None) -> Iterator[None]:
    """Raise `TimeUp` in the main thread when the block takes longer."""

    def up(*_: object) -> None:
        raise TimeUp

    if minutes is None:
        yield
        return
    was = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, minutes * 60))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)
