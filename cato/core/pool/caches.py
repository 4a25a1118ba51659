"""What the KV caches of a pool's replicas are believed to hold.

Belief is kept in nodes of `PREFIX_BLOCK_TOKENS` tokens, named by the hash of all up to their end.
Engines forget the prompt that was used longest ago first, of one prompt its end first; so does the
picture. An answer that reports fewer cached tokens than were believed shows that its engine has
forgotten more than that, and the picture follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cato.core.ids import ReplicaId
from cato.core.snapshot import PREFIX_BLOCK_TOKENS

# A report counts engine blocks of up to 128 tokens, and the parts of a prompt have more or fewer
# tokens than its mean tells; less than this is no difference.
LEAST_SHORTFALL_TOKENS = 2 * PREFIX_BLOCK_TOKENS
LEAST_SHORTFALL_SHARE = 0.25


@dataclass(slots=True, eq=False)
class _Run:
    """Nodes in a row that the same prompts have; `last` is the number of the latest of these."""

    nodes: list[int]
    last: int


@dataclass(slots=True, eq=False)
class _Cache:
    """One replica's. `touched` has the runs of each prompt, by the prompt's number, which counts up
    in the pool. Along a prompt the numbers of runs never rise."""

    bit: int
    capacity_nodes: int
    runs: dict[int, _Run] = field(default_factory=dict)  # by node
    touched: dict[int, list[_Run]] = field(default_factory=dict)
    by_session: dict[str, int] = field(default_factory=dict)

    def path(self, prefix: Sequence[int], number: int) -> list[_Run]:
        """The runs of a prompt, which is now the latest of them all."""
        path: list[_Run] = []
        i = 0
        while i < len(prefix):
            run = self.runs.get(prefix[i])
            if run is None:
                self._extend(path, prefix[i:], number)
                break
            shared = self._shared(run, prefix, i)
            if shared < len(run.nodes):
                run = self._beginning(run, shared)
            run.last = number
            path.append(run)
            i += shared
        return path

    def _extend(self, path: list[_Run], nodes: Sequence[int], number: int) -> None:
        """New nodes belong to the run that they follow, if there is one."""
        if path:
            run = path[-1]
            run.nodes += nodes
        else:
            run = _Run(list(nodes), number)
            path.append(run)
        self.runs.update(dict.fromkeys(nodes, run))

    def _shared(self, run: _Run, prefix: Sequence[int], start: int) -> int:
        """How many nodes of the run are those of the prompt from `start` on; the first one is."""
        most = min(len(run.nodes), len(prefix) - start)
        if prefix[start + most - 1] == run.nodes[most - 1]:
            return most
        equal, unequal = 1, most
        while unequal - equal > 1:
            middle = (equal + unequal) // 2
            if prefix[start + middle - 1] == run.nodes[middle - 1]:
                equal = middle
            else:
                unequal = middle
        return equal

    def _beginning(self, run: _Run, size: int) -> _Run:
        """Cut a run in two, and return the first part; the shorter one is new."""
        nodes = run.nodes
        if 2 * size <= len(nodes):
            first = _Run(nodes[:size], run.last)
            self.runs.update(dict.fromkeys(first.nodes, first))
            del nodes[:size]
            return first
        rest = _Run(nodes[size:], run.last)
        self.runs.update(dict.fromkeys(rest.nodes, rest))
        del nodes[size:]
        own = self.touched.get(run.last)
        if own is not None and run in own:
            own[own.index(run)] = rest
        return run


@dataclass(slots=True, eq=False)
class CachePicture:
    """Of one pool. Memory is bounded by the capacities of its replicas' caches."""

    _caches: dict[ReplicaId, _Cache] = field(default_factory=dict)
    # Which replicas hold a node: a bit each.
    _holders: dict[int, int] = field(default_factory=dict)
    _prompts: int = 0
    # The answer to the last question: holders and how many nodes of the prompt they hold.
    _asked: Sequence[int] = ()
    _found: list[tuple[int, int]] = field(default_factory=list)

    def add(self, id: ReplicaId, capacity_tokens: int) -> None:
        """A replica caches prompts; adding it again only changes its capacity."""
        cache = self._caches.get(id)
        if cache is None:
            taken = 0
            for other in self._caches.values():
                taken |= other.bit
            cache = self._caches[id] = _Cache(~taken & (taken + 1), 0)
        self._asked = ()
        cache.capacity_nodes = capacity_tokens // PREFIX_BLOCK_TOKENS
        self._shrink(cache)

    def remove(self, id: ReplicaId) -> None:
        """A replica is gone, or caches nothing any more; harmless for one that is not there."""
        cache = self._caches.pop(id, None)
        if cache is not None:
            self._asked = ()
            for number in list(cache.touched):
                self._forget(cache, number, len(cache.runs))

    def cached_nodes(self, id: ReplicaId, prefix: Sequence[int]) -> int:
        """How many of the prompt's first nodes the replica is believed to hold."""
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
        """How many of the prompt's first nodes any replica is believed to hold."""
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
        """The replica was sent a prompt, and will hold it."""
        cache = self._caches.get(id)
        if cache is None or not prefix:
            return
        known = self.cached_nodes(id, prefix)
        self._asked = ()
        self._prompts += 1
        number = self._prompts
        holders, bit = self._holders, cache.bit
        for i in range(known, len(prefix)):
            node = prefix[i]
            holders[node] = holders.get(node, 0) | bit
        cache.touched[number] = cache.path(prefix, number)
        if session:
            before = cache.by_session.get(session)
            if before is not None and before in cache.touched:
                self._drop_if_covered(cache, before)
            cache.by_session[session] = number
        if len(cache.touched) > 2 * cache.capacity_nodes + 64:
            for old in list(cache.touched):
                self._drop_if_covered(cache, old)
        if len(cache.by_session) > 2 * len(cache.touched) + 64:
            kept = cache.by_session.items()
            cache.by_session = {s: n for s, n in kept if n in cache.touched}
        self._shrink(cache)

    def correct(self, id: ReplicaId, believed_tokens: int, age: int, cached_tokens: float) -> None:
        """An answer told how much of its prompt was cached; `age` was that of what was believed.

        What its engine used before what it has forgotten is forgotten, too.
        """
        cache = self._caches.get(id)
        least = max(LEAST_SHORTFALL_TOKENS, LEAST_SHORTFALL_SHARE * believed_tokens)
        if cache is None or cached_tokens > believed_tokens - least:
            return
        self._asked = ()
        for number in list(cache.touched):
            if number >= age:
                break
            self._forget(cache, number, len(cache.runs))

    def _look_up(self, prefix: Sequence[int]) -> list[tuple[int, int]]:
        """Replicas with the same beginning of the prompt are found together, by bisection."""
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

    def _shrink(self, cache: _Cache) -> None:
        while len(cache.runs) > cache.capacity_nodes:
            oldest = next(iter(cache.touched))
            self._forget(cache, oldest, len(cache.runs) - cache.capacity_nodes)

    def _forget(self, cache: _Cache, number: int, most: int) -> None:
        """Of a prompt at most so many nodes that no later one has used, its end first."""
        path, holders, others = cache.touched[number], self._holders, ~cache.bit
        while path:
            run = path[-1]
            if run.last != number:
                break  # what is before it was used later, too
            if not most:
                return
            gone = run.nodes[-most:]
            del run.nodes[-most:]
            most -= len(gone)
            for node in gone:
                del cache.runs[node]
                left = holders[node] & others
                if left:
                    holders[node] = left
                else:
                    del holders[node]
            if not run.nodes:
                path.pop()
        del cache.touched[number]

    def _drop_if_covered(self, cache: _Cache, number: int) -> None:
        """A later prompt used all of it, when it used its end."""
        if cache.touched[number][-1].last > number:
            del cache.touched[number]
