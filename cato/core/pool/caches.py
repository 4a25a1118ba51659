"""Estimated KV-cache contents of a pool's replicas.

The estimate is kept in nodes of `PREFIX_BLOCK_TOKENS` tokens; a node's name is the hash of the
prompt up to its end. Engines evict the least recently used prompt first, and a prompt from its end;
so does the estimate. If an answer reports fewer cached tokens than estimated, its engine has
evicted at least that much, and the estimate is corrected.

Replicas whose engines tell what happens to their blocks say which nodes are gone or have moved to
host memory. There nothing is estimated but that a prompt that was sent will be cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cato.core.ids import ReplicaId
from cato.core.kv_events import NodeNews
from cato.core.pool.replica_cache import ReplicaCache
from cato.core.snapshot import PREFIX_BLOCK_TOKENS

# Engines count in blocks of up to 128 tokens, and parts of a prompt deviate from its mean tokens
# per node. Smaller differences are ignored.
LEAST_SHORTFALL_TOKENS = 2 * PREFIX_BLOCK_TOKENS
LEAST_SHORTFALL_SHARE = 0.25


@dataclass(slots=True, eq=False)
class CachePicture:
    """The caches of one pool. Their replicas' cache capacities bound the memory used."""

    _caches: dict[ReplicaId, ReplicaCache] = field(default_factory=dict)
    # Replicas that hold a node, and those that hold it in host memory only, as bit masks.
    _holders: dict[int, int] = field(default_factory=dict)
    _in_host: dict[int, int] = field(default_factory=dict)
    _prompts: int = 0
    # The last lookup: replicas, and how many nodes of the prompt each holds.
    _asked: Sequence[int] = ()
    _found: list[tuple[int, int]] = field(default_factory=list)

    def add(self, id: ReplicaId, capacity_tokens: int) -> None:
        """Track a replica that caches prompts; adding it again only changes its capacity."""
        cache = self._caches.get(id)
        if cache is None:
            taken = 0
            for other in self._caches.values():
                taken |= other.bit
            cache = self._caches[id] = ReplicaCache(~taken & (taken + 1), 0)
        self._asked = ()
        cache.capacity_nodes = capacity_tokens // PREFIX_BLOCK_TOKENS
        self._shrink(cache)

    def remove(self, id: ReplicaId) -> None:
        """Forget a replica that is gone or no longer caches; unknown ones are ignored."""
        cache = self._caches.pop(id, None)
        if cache is not None:
            self._clear(cache)

    def hear(self, id: ReplicaId, news: NodeNews) -> None:
        """The replica's engine told what happened to its blocks; unknown nodes are ignored."""
        cache = self._caches.get(id)
        if cache is None:
            return
        self._asked = ()
        if news.cleared:
            self._clear(cache)
            cache.is_told = False  # these may have been its last events
        cache.is_told |= bool(news.gone or news.moved or news.held)
        for prefix in news.held:
            self.use(id, "", prefix)
        for node in news.gone:
            self._cut(cache, node)
        for node in news.moved:
            if node in cache.runs:
                self._in_host[node] = self._in_host.get(node, 0) | cache.bit

    def host_nodes(self, id: ReplicaId, prefix: Sequence[int], cached_nodes: int) -> int:
        """How many of the prompt's first `cached_nodes` nodes are in host memory only.

        A prompt moves there from its end.
        """
        cache, in_host = self._caches.get(id), self._in_host
        if cache is None or not in_host:
            return 0
        least, most = 0, cached_nodes  # nodes on the accelerator
        while least < most:
            middle = (least + most + 1) // 2
            if in_host.get(prefix[middle - 1], 0) & cache.bit:
                most = middle - 1
            else:
                least = middle
        return cached_nodes - least

    def cached_nodes(self, id: ReplicaId, prefix: Sequence[int]) -> int:
        """Leading nodes of the prompt that the replica is estimated to hold."""
        cache = self._caches.get(id)
        if cache is None or not prefix:
            return 0
        if prefix is not self._asked:
            self._found = self._look_up(prefix)
            self._asked = prefix
        for holders, nodes in self._found:
            if holders & cache.bit:
                return nodes
        return 0

    def most_nodes(self, prefix: Sequence[int]) -> int:
        """Leading nodes of the prompt that the best replica is estimated to hold."""
        if not prefix:
            return 0
        if prefix is not self._asked:
            self._found = self._look_up(prefix)
            self._asked = prefix
        return max([nodes for _, nodes in self._found], default=0)

    def age_of(self, id: ReplicaId, prefix: Sequence[int], nodes: int) -> int:
        """The number of the prompt that last used node `nodes` of this one; for `correct`."""
        run = self._caches[id].runs.get(prefix[nodes - 1]) if nodes else None
        return run.last if run is not None else 0

    def use(self, id: ReplicaId, session: str, prefix: Sequence[int]) -> None:
        """The replica was sent this prompt and will cache it."""
        cache = self._caches.get(id)
        if cache is None or not prefix:
            return
        known = self.cached_nodes(id, prefix)
        self._asked = ()
        self._prompts += 1
        number = self._prompts
        holders, bit = self._holders, cache.bit
        if in_host := self.host_nodes(id, prefix, known):  # the engine will load them
            for node in prefix[known - in_host : known]:
                self._leave_host(node, bit)
        cache.touched[number], new = cache.path(prefix, number)
        for node in new:
            holders[node] = holders.get(node, 0) | bit
        if session:
            before = cache.by_session.get(session)
            if before is not None and before in cache.touched:
                self._drop_if_covered(cache, before)
            cache.by_session[session] = number
        if len(cache.touched) > 2 * cache.limit_nodes + 64:
            for old in list(cache.touched):
                self._drop_if_covered(cache, old)
        if len(cache.by_session) > 2 * len(cache.touched) + 64:
            kept = cache.by_session.items()
            cache.by_session = {s: n for s, n in kept if n in cache.touched}
        self._shrink(cache)

    def correct(self, id: ReplicaId, believed_tokens: int, age: int, cached_tokens: float) -> None:
        """Correct the estimate by the cached tokens of an answer.

        `age` is that of the estimated nodes.

        Everything that was used before the evicted nodes is evicted, too.
        """
        cache = self._caches.get(id)
        least = max(LEAST_SHORTFALL_TOKENS, LEAST_SHORTFALL_SHARE * believed_tokens)
        if cache is None or cache.is_told or cached_tokens > believed_tokens - least:
            return
        self._asked = ()
        for number in list(cache.touched):
            if number >= age:
                break
            self._forget(cache, number, len(cache.runs))

    def _look_up(self, prefix: Sequence[int]) -> list[tuple[int, int]]:
        """Find the replicas that share a beginning of the prompt, by bisection."""
        everyone = 0
        for cache in self._caches.values():
            everyone |= cache.bit
        holders = self._holders
        found: list[tuple[int, int]] = []
        todo = [(everyone, 0, len(prefix))]
        while todo:
            group, least, most = todo.pop()
            while least < most:
                middle = (least + most + 1) // 2
                have = holders.get(prefix[middle - 1], 0) & group
                if have == group:
                    least = middle
                elif have:
                    todo.append((group & ~have, least, middle - 1))
                    group, least = have, middle
                else:
                    most = middle - 1
            if least:
                found.append((group, least))
        return found

    def _shrink(self, cache: ReplicaCache) -> None:
        while len(cache.runs) > cache.limit_nodes:
            oldest = next(iter(cache.touched))
            self._forget(cache, oldest, len(cache.runs) - cache.limit_nodes)

    def _forget(self, cache: ReplicaCache, number: int, most: int) -> None:
        """Evict up to `most` nodes of a prompt that no later one has used, from its end."""
        path = cache.touched[number]
        while path:
            run = path[-1]
            if run.last != number:
                break  # earlier nodes were used later, too
            if run.nodes and not most:
                return
            gone = run.nodes[-most:]
            del run.nodes[-most:]
            most -= len(gone)
            for node in gone:
                self._drop(cache, node)
            if not run.nodes:
                path.pop()
        del cache.touched[number]

    def _clear(self, cache: ReplicaCache) -> None:
        self._asked = ()
        for number in list(cache.touched):
            self._forget(cache, number, len(cache.runs))

    def _cut(self, cache: ReplicaCache, node: int) -> None:
        """Evict a node, and those after it in its run."""
        run = cache.runs.get(node)
        if run is None:
            return
        while node in cache.runs:
            self._drop(cache, run.nodes.pop())
        if not run.nodes:
            self._forget(cache, run.last, 0)

    def _drop(self, cache: ReplicaCache, node: int) -> None:
        """The cache no longer holds the node."""
        del cache.runs[node]
        left = self._holders[node] & ~cache.bit
        if left:
            self._holders[node] = left
        else:
            del self._holders[node]
        if self._in_host:
            self._leave_host(node, cache.bit)

    def _leave_host(self, node: int, bit: int) -> None:
        in_host = self._in_host.get(node, 0)
        if in_host & bit:
            if in_host == bit:
                del self._in_host[node]
            else:
                self._in_host[node] = in_host & ~bit

    def _drop_if_covered(self, cache: ReplicaCache, number: int) -> None:
        """Drop the prompt if a later one used its end, and therefore all of it."""
        if cache.touched[number][-1].last > number:
            del cache.touched[number]
