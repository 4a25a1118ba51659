"""Write to the store off the event loop: in batches, from a bounded queue, with retries.

While the database is locked, full or gone, serving goes on: records queue up, the oldest are
dropped (and counted) when the queue is full, and the state says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from cato.core.usage_outbox import UsageParcel
from cato.store.errors import (
    StoreCorruptError,
    StoreError,
    StoreMovedError,
    StoreRecordError,
    StoreUnavailableError,
)
from cato.store.records import Limits, Record
from cato.store.state import StoreState
from cato.store.store import BUSY_TIMEOUT_S, MetadataStore

log = logging.getLogger("cato.store")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """`capacity`: records that may queue; 20,000 are some 20 MB, minutes of a busy host.

    A batch holds the records of `gather_s`, which is what a killed process loses, and at most
    `batch` records, so that it is written in milliseconds. `retry_s` doubles up to `max_retry_s`.
    """

    capacity: int = 20_000
    batch: int = 500
    gather_s: float = 0.2
    retry_s: float = 0.5
    max_retry_s: float = 30.0
    prune_every_s: float = 60.0
    busy_timeout_s: float = BUSY_TIMEOUT_S


class StoreWriter:
    """One thread that opens the store at `location` and writes to it.

    `on_open` is called once, when the store first opens: in the thread that calls `start` if that
    succeeds at once, otherwise in the writer's own. It may raise `StoreError`.
    """

    def __init__(
        self,
        location: str | Path,
        on_open: Callable[[MetadataStore], None],
        settings: WriterSettings | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._location = location
        self._on_open = on_open
        self._settings = settings or WriterSettings()
        self.limits = limits or Limits()  # may be replaced at any time
        self._waiting: deque[Record] = deque()
        self._parcels: deque[UsageParcel] = deque()  # never dropped: bills are made of them
        # The highest number of each sender of usage that this writer has stored.
        self.kept_usage: dict[str, int] = {}
        self._writing = 0
        self._dropped = 0
        self._trouble: StoreError | None = StoreUnavailableError("", "not opened yet")
        self._is_closing = False
        self._was_opened = False
        # How often a store was opened. The newest may be empty: an earlier one was deleted or set
        # aside.
        self.openings = 0
        self._pruned_at_s = 0.0
        self._store: MetadataStore | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="cato-store", daemon=True)

    def start(self) -> None:
        """Try to open the store, and start writing; `state` says if it failed. Never raises."""
        try:
            self._opened()
            self._recovered()
        except StoreError as error:
            self._degraded(error)
        self._thread.start()

    def put(self, records: Sequence[Record]) -> None:
        """Queue `records` for writing. Never blocks; drops the oldest when the queue is full, but
        no parcel of usage: their senders keep few."""
        with self._changed:
            self._parcels.extend(r for r in records if isinstance(r, UsageParcel))
            self._waiting.extend(r for r in records if not isinstance(r, UsageParcel))
            self._drop_overflow()
            self._changed.notify_all()

    def read(self, query: Callable[[MetadataStore], T]) -> T:
        """Run a query; raise `StoreError` when the store is not open. Blocks."""
        store, trouble = self._store, self._trouble
        if store is None:
            why = ("", "being opened") if trouble is None else (trouble.location, trouble.problem)
            raise StoreUnavailableError(*why)
        return query(store)

    def state(self) -> StoreState:
        with self._changed:
            queued = len(self._parcels) + len(self._waiting) + self._writing
            why = "" if self._trouble is None else str(self._trouble)
            return StoreState(not why, why, queued, self._dropped)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every queued record is written or dropped; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._has_waiting() and not self._writing, timeout_s
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush once and stop; records that cannot be written now are lost, and logged."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._store is not None:
            self._store.close()

    # The writer's thread

    def _run(self) -> None:
        self._patiently(self._opened)
        while batch := self._next_batch():
            is_written = self._patiently(partial(self._write, batch))
            with self._changed:
                if not is_written:
                    self._dropped += len(batch)
                    log.error("metadata store: closing with %d records unwritten", len(batch))
                self._writing = 0
                self._changed.notify_all()

    def _patiently(self, step: Callable[[], object]) -> bool:
        """Retry until it succeeds; False when closing came first."""
        retry_s = self._settings.retry_s
        while True:
            try:
                step()
                self._recovered()
                return True
            except StoreError as error:
                self._degraded(error)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, retry_s):
                    return False
            retry_s = min(2.0 * retry_s, self._settings.max_retry_s)

    def _next_batch(self) -> list[Record]:
        """Records of the last moment; empty when closing with an empty queue."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_waiting() or self._is_closing)
            if not self._is_closing and len(self._waiting) < self._settings.batch:
                self._changed.wait_for(
                    lambda: self._is_closing or len(self._waiting) >= self._settings.batch,
                    self._settings.gather_s,
                )
            parcels = min(len(self._parcels), self._settings.batch)
            n = min(len(self._waiting), self._settings.batch)
            self._writing = parcels + n
            batch: list[Record] = [self._parcels.popleft() for _ in range(parcels)]
            return batch + [self._waiting.popleft() for _ in range(n)]

    def _has_waiting(self) -> bool:
        return bool(self._parcels or self._waiting)

    def _write(self, batch: list[Record]) -> None:
        """Removes records from `batch` as they are written, so that a retry writes none twice."""
        store = self._opened()
        try:
            self._write_to(store, batch)
            now_s = time.time()
            if now_s - self._pruned_at_s >= self._settings.prune_every_s:
                store.prune(self.limits, now_s)
                self._pruned_at_s = now_s
        except StoreCorruptError as error:
            store.set_aside(error.problem)
            self._store = None
            raise
        except StoreMovedError:
            store.close()
            self._store = None
            raise

    def _write_to(self, store: MetadataStore, batch: list[Record]) -> None:
        try:
            store.write(batch)
            self._note_kept(batch)
            batch.clear()
        except StoreRecordError:
            while batch:
                self._write_one(store, batch[0])
                del batch[0]

    def _write_one(self, store: MetadataStore, record: Record) -> None:
        try:
            store.write([record])
        except StoreRecordError as error:
            log.error("dropped a %s: %s", type(record).__name__, error)
            with self._changed:
                self._dropped += 1
        self._note_kept([record])

    def _note_kept(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, UsageParcel):
                self.kept_usage[record.sender] = record.number

    def _opened(self) -> MetadataStore:
        if self._store is None:
            store = MetadataStore.open(
                self._location, self._settings.busy_timeout_s, sets_aside=True
            )
            if not self._was_opened:
                try:
                    self._on_open(store)
                except StoreCorruptError as error:
                    store.set_aside(error.problem)
                    raise
                except StoreError:
                    store.close()
                    raise
                self._was_opened = True
            self._store = store
            self.openings += 1
        return self._store

    def _drop_overflow(self) -> None:
        while len(self._waiting) > self._settings.capacity:
            self._waiting.popleft()
            self._dropped += 1

    def _degraded(self, error: StoreError) -> None:
        with self._changed:
            if str(self._trouble) != str(error):
                log.warning("%s; serving continues, records are queued", error)
            self._trouble = error
            self._changed.notify_all()

    def _recovered(self) -> None:
        with self._changed:
            if self._trouble is not None and self._store is not None:
                log.info("metadata store %s is open", self._store.name)
            self._trouble = None
            self._changed.notify_all()
