"""Batch storage: one folder with the files and batches of each tenant.

All ingress replicas share it; with several hosts it must be on a shared file system. Metadata are
small JSON files, replaced atomically. An open batch has a file in `open`. The process that holds
its lock runs the batch; the lock is released when that process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cato.core.topology import BatchLimits

_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
_TENANT = re.compile(r"[0-9a-f]{32}")
OUTPUT = "batch_output"
# Small files count as this many bytes of a tenant's total: what a file and its metadata take on a
# disk. Otherwise empty files would fill it.
LEAST_BYTES = 8_192
# Batches of a tenant that are kept; the oldest ended ones go first.
KEPT_BATCHES = 1_000
# Age of files that belong to nothing, as after a crash, before they are deleted.
LEFT_S = 3_600.0


@dataclass(frozen=True, slots=True)
class BatchRoom:
    """The folder and its limits; each ingress replica runs up to `at_once` lines."""

    root: Path
    limits: BatchLimits
    at_once: int = 8


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Metadata of one file; times are seconds since the epoch."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch and its caller. `errors` say why its file was refused, or which line became
    invalid later; results so far are in its output and error files. Times are seconds since the
    epoch."""

    id: str
    endpoint: str
    input_file_id: str
    caller: Mapping[str, Any]
    output_file_id: str
    error_file_id: str
    status: str
    created_at: int
    expires_at: int
    total: int = 0
    completed: int = 0
    failed: int = 0
    ended_at: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


class TenantFolder:
    """The files and batches of one tenant. Its methods block."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self.name = name

    @classmethod
    def of(cls, root: Path, tenant: str) -> TenantFolder:
        """The folder of `tenant`, named by a hash: tenant names may hold any character."""
        digest = hashlib.blake2b(tenant.encode("utf-8", "replace"), digest_size=16)
        return cls(root, digest.hexdigest())

    def make(self) -> None:
        for part in ("files", "batches", "open"):
            (self.path / part).mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock: between a look at its limits and a write, no other process may
        write."""
        self.make()
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    # Files

    def content(self, id: str) -> Path:
        """The path of a file's lines; a running batch may still be writing it."""
        assert _ID.fullmatch(id), f"{id} is not an id made here"
        return self.path / "files" / f"{id}.jsonl"

    def keep(self, id: str, filename: str, purpose: str) -> FileFacts:
        """Publish a file whose content was written."""
        size = self.content(id).stat().st_size
        facts = FileFacts(id, size, int(time.time()), filename, purpose)
        _write(self.path / "files" / f"{id}.json", asdict(facts))
        return facts

    def file(self, id: str) -> FileFacts | None:
        if not _ID.fullmatch(id):
            return None
        found = _read(self.path / "files" / f"{id}.json")
        return None if found is None else FileFacts(**found)

    def files(self) -> list[FileFacts]:
        """All files, newest first."""
        found = [FileFacts(**facts) for facts in self._facts("files")]
        return sorted(found, key=lambda f: (f.created_at, f.id), reverse=True)

    def delete_file(self, id: str) -> None:
        (self.path / "files" / f"{id}.json").unlink(missing_ok=True)
        self.content(id).unlink(missing_ok=True)

    def size(self) -> int:
        """Total bytes of all files, including those being written."""
        files = (self.path / "files").glob("*.jsonl")
        return sum(max(LEAST_BYTES, f.stat().st_size) for f in files if _ID.fullmatch(f.stem))

    # Batches

    def batch(self, id: str) -> Batch | None:
        if not _ID.fullmatch(id):
            return None
        found = _read(self.path / "batches" / f"{id}.json")
        return None if found is None else _batch(found)

    def batches(self) -> list[Batch]:
        """All batches, newest first."""
        found = [_batch(facts) for facts in self._facts("batches")]
        return sorted(found, key=lambda b: (b.created_at, b.id), reverse=True)

    def make_room(self) -> None:
        """Forget the oldest ended batches before another is written."""
        if len(os.listdir(self.path / "batches")) < KEPT_BATCHES:
            return
        is_open = set(self.open_ids())
        ended = [b for b in self.batches() if b.id not in is_open]
        for batch in ended[max(0, KEPT_BATCHES - len(is_open) - 1) :]:
            (self.path / "batches" / f"{batch.id}.json").unlink(missing_ok=True)

    def write(self, batch: Batch) -> None:
        _write(self.path / "batches" / f"{batch.id}.json", asdict(batch))

    def open(self, batch: Batch) -> None:
        """Write the batch and open it for runners."""
        self.write(batch)
        (self.path / "open" / batch.id).touch(mode=0o600)

    def open_ids(self) -> list[str]:
        try:
            names = sorted(os.listdir(self.path / "open"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name for name in names if _ID.fullmatch(name)]

    def cancel(self, id: str) -> None:
        (self.path / "open" / f"{id}.cancel").touch(mode=0o600)

    def is_cancelled(self, id: str) -> bool:
        return (self.path / "open" / f"{id}.cancel").exists()

    def close(self, batch: Batch) -> None:
        """The batch is over: write it and close it for runners."""
        self.write(batch)
        for name in (batch.id, f"{batch.id}.cancel"):
            (self.path / "open" / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def running(self, id: str) -> Iterator[bool]:
        """Try to lock the batch; yields whether this process may run it."""
        try:
            lock = os.open(self.path / "open" / id, os.O_RDWR)
        except FileNotFoundError:  # it just ended
            yield False
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            yield False
            return
        try:
            batch = self.batch(id)
            yield batch is not None and not batch.is_over
        finally:
            os.close(lock)

    def sweep(self, before_s: float) -> None:
        """Delete files and batches older than `before_s`, except those of open batches, and what
        killed processes left."""
        is_open = set(self.open_ids())
        kept: set[str] = set()
        for batch in self.batches():
            if batch.created_at < before_s and batch.id not in is_open:
                (self.path / "batches" / f"{batch.id}.json").unlink(missing_ok=True)
            else:
                kept |= {batch.input_file_id, batch.output_file_id, batch.error_file_id}
        for file in self.files():
            if file.created_at < before_s and file.id not in kept:
                self.delete_file(file.id)
        self._delete_left(kept | is_open, time.time() - LEFT_S)

    def _delete_left(self, kept: set[str], before_s: float) -> None:
        """Delete files that never got their facts, facts that never got their name, and orders to
        cancel batches that are over."""
        files, batches, orders = (self.path / part for part in ("files", "batches", "open"))
        left = [f for f in files.glob("*.jsonl") if not f.with_suffix(".json").exists()]
        left += [*files.glob("*.json.*.new"), *batches.glob("*.json.*.new")]
        left += orders.glob("*.cancel")
        for path in left:
            id = path.name.partition(".")[0]
            with contextlib.suppress(FileNotFoundError):  # another ingress deletes it, too
                if _ID.fullmatch(id) and id not in kept and path.stat().st_mtime < before_s:
                    path.unlink()

    def _facts(self, part: str) -> Iterator[dict[str, Any]]:
        for path in (self.path / part).glob("*.json"):
            # Other programs leave files too, such as the `._*.json` that macOS writes to a share.
            if _ID.fullmatch(path.stem) and (found := _read(path)) is not None:
                yield found


def tenants(root: Path) -> list[TenantFolder]:
    """The folders of all tenants that ever stored a file; other files and folders are ignored."""
    try:
        with os.scandir(root) as found:
            names = sorted(e.name for e in found if _TENANT.fullmatch(e.name) and e.is_dir())
    except FileNotFoundError:
        return []
    return [TenantFolder(root, name) for name in names]


def copy_bounded(source: BinaryIO, to: Path, most: int) -> int:
    """Copy `source`; return its size, or -1 without leaving a file if above `most` bytes."""
    written = 0
    try:
        with to.open("xb") as out:
            os.chmod(to, 0o600)
            while part := source.read(1 << 20):
                written += len(part)
                if written > most:
                    raise OverflowError
                out.write(part)
    except OverflowError:
        to.unlink()
        return -1
    except OSError:
        to.unlink(missing_ok=True)
        raise
    return written


def _batch(facts: dict[str, Any]) -> Batch:
    return Batch(**{**facts, "errors": tuple(facts["errors"])})


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    with new.open("w", encoding="utf-8") as file:
        os.chmod(new, 0o600)
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found
