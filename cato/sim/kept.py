"""Results of a long run in a file, so that a run that was ended goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import cato
from cato.core.errors import InputError
from cato.sim.experiment import Options, Progress, run_all

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# What results of simulations depend on.
_CODE = ("core", "estimators", "lab", "policies", "profiles", "sim")

T = TypeVar("T")
R = TypeVar("R", bound="DataclassInstance")


class Kept(Generic[R]):
    """The results of a run, one JSON line each with the number of its job; nothing is kept if
    `path` is None.

    Results are dataclasses that a round trip through JSON does not change. The first line
    identifies the run: its options and the code. A file of another run, or with a damaged line, is
    refused with an `InputError`. A line that was cut off when the run was ended is dropped.
    """

    def __init__(self, path: Path | None, options: Options, result: Callable[..., R]) -> None:
        self._path = path
        self._known: dict[int, R] = {}
        self._jobs = 0
        if path is None:
            return
        head = json.dumps({"options": repr(options), "code": code_digest()})
        if path.exists() and not path.is_file():
            raise InputError(f"cannot keep cells in {path}: it is no file")
        before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = before.split("\n")
        if lines[0] not in ("", head):
            reason = "it has cells of other code or other options; name another file or delete it"
            raise InputError(f"cannot go on from {path}: {reason}")
        whole = lines[1:-1]
        for at, line in enumerate(whole, 2):
            try:
                number, values = json.loads(line)
                self._known[number] = result(**values)
            except (ValueError, TypeError) as exc:
                reason = f"line {at} is damaged ({exc}); delete it, and its cell runs again"
                raise InputError(f"cannot go on from {path}: {reason}") from exc
        text = "".join(f"{line}\n" for line in (head, *whole))
        if text != before:  # replaced as a whole: a full disk must not cost the cells
            target = path.resolve()  # a link stays
            fresh = target.with_name(f"{target.name}.new")
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(target)

    def run_all(
        self, function: Callable[[T], R], jobs: Sequence[T], progress: Progress, processes: int
    ) -> list[R]:
        """As `run_all`, without the jobs whose results are kept. The jobs of several calls are
        numbered on."""
        first, self._jobs = self._jobs, self._jobs + len(jobs)
        numbers = range(first, self._jobs)
        missing = [number for number in numbers if number not in self._known]
        before = len(jobs) - len(missing)
        run_all(
            function,
            [jobs[number - first] for number in missing],
            lambda done, _: progress(before + done, len(jobs)),
            processes,
            lambda at, result: self._keep(missing[at], result),
        )
        return [self._known[number] for number in numbers]

    def _keep(self, number: int, result: R) -> None:
        self._known[number] = result
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([number, asdict(result)]) + "\n")


def code_digest() -> str:
    """A digest of the source code that results of simulations depend on."""
    root, digest = Path(cato.__file__).parent, hashlib.sha256()
    for folder in _CODE:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
