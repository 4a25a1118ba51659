"""Model loads of a shared pool: those under way, and its counters for operators."""

from __future__ import annotations

from dataclasses import replace

from cato.core.eviction import CopyId
from cato.core.pool.placement_events import Load
from cato.core.slots import LoadCounts


class LoadBook:
    """Owned by one `SharedPool`."""

    def __init__(self) -> None:
        self.counts = LoadCounts()
        self._ordered: dict[CopyId, tuple[float, Load]] = {}

    def ordered(self, copy_id: CopyId) -> Load | None:
        """The load of that copy, while it is under way."""
        return self._ordered[copy_id][1] if copy_id in self._ordered else None

    def begin(self, load: Load, now_s: float) -> None:
        """A load was ordered; the models that it evicts count as gone."""
        for victim in load.evicted:
            self.end(victim.copy_id, now_s)
        self._ordered[load.copy_id] = (now_s, load)
        c = self.counts
        self.counts = replace(
            c,
            loads=c.loads + 1,
            from_host_memory=c.from_host_memory + load.from_host_memory,
            prefetches=c.prefetches + load.is_prefetch,
            evictions=c.evictions + len(load.evicted),
        )

    def end(self, copy_id: CopyId, now_s: float, *, has_failed: bool = False) -> None:
        """The load has ended: the copy serves, or is gone."""
        c, ordered = self.counts, self._ordered.pop(copy_id, None)
        load_s = 0.0 if ordered is None else now_s - ordered[0]
        self.counts = replace(c, load_s=c.load_s + load_s, failures=c.failures + has_failed)

    def lend(self, copy_id: CopyId, now_s: float) -> None:
        """The copy leaves an accelerator that is lent."""
        self.end(copy_id, now_s)
        self.counts = replace(self.counts, evictions=self.counts.evictions + 1)

    def serve(self, calls: int, hits: int) -> None:
        """`calls` got their lease; `hits` of them found their model loaded."""
        c = self.counts
        self.counts = replace(c, served=c.served + calls, hits=c.hits + hits)

    def refuse(self, calls: int) -> None:
        """`calls` were refused. Kept here and not with the queues, which end with their models: the
        count must not fall."""
        self.counts = replace(self.counts, refused=self.counts.refused + calls)
