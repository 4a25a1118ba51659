"""All replicas of a pool, and which of them accept work or have room."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from operator import attrgetter

from cato.core.events import ReplicaReported
from cato.core.ids import ReplicaId
from cato.core.pool.caches import CachePicture
from cato.core.pool.pace import Pace
from cato.core.pool.queue import Queue
from cato.core.pool.replica import Clock, Replica
from cato.core.pool.sessions import MEMORY_S, Homes
from cato.core.profile import Profile
from cato.core.snapshot import Invocation

BY_ID: Callable[[Replica], ReplicaId] = attrgetter("id")


class Replicas:
    """The replicas by id; `touch` one after each change of its load."""

    __slots__ = (
        "_silent", "accepting", "clock", "homes", "known", "open", "paces", "picture", "profiles",
    )  # fmt: skip

    def __init__(self) -> None:
        self.clock = Clock()
        self.picture = CachePicture()
        self.homes = Homes()
        self.known: dict[ReplicaId, Replica] = {}
        self.open: list[Replica] = []  # with room, by id
        self.accepting: list[Replica] = []  # by id
        self.profiles: tuple[Profile, ...] = ()  # that accept work
        self.paces: tuple[Pace, ...] = ()  # of these
        # Since when those are silent whose caches and sessions are still known.
        self._silent: dict[ReplicaId, float] = {}

    def report(self, event: ReplicaReported, versions: Iterator[int]) -> Replica:
        """Add or update the replica that reports; `touch` it after that.

        `versions`: see `Queue`.
        """
        self._silent.pop(event.replica_id, None)
        replica = self.known.get(event.replica_id)
        if replica is None:
            replica = self.known[event.replica_id] = Replica(
                self.clock,
                self.picture,
                self.homes,
                self.homes.working_set(event.replica_id),
                event.replica_id,
                event.deployment,
                event.profile,
                event.max_running,
                event.standby,
                event.accepting,
                event.now_s,
                self.pace_of(event.profile),
                Queue(versions),
            )
            replica.first_late_s = event.profile.latency_s
        is_changed = replica.host_tokens != event.host_tokens
        if replica.pace.profile != event.profile:
            is_changed, replica.pace = True, self.pace_of(event.profile)
        replica.profile = replica.pace.corrected
        replica.max_running = event.max_running
        replica.standby = event.standby
        replica.step_tokens = event.step_tokens
        replica.host_tokens = event.host_tokens
        replica.mixes_prompts = event.mixes_prompts
        replica.accepting_work = event.accepting
        replica.seen_at_s = event.now_s
        if event.prefix_caching and (is_changed or not replica.has_prefix_cache):
            capacity_tokens = event.profile.kv_capacity_tokens + event.host_tokens
            self.picture.add(replica.id, capacity_tokens)
        elif not event.prefix_caching:
            self.picture.remove(replica.id)
        replica.has_prefix_cache = event.prefix_caching
        return replica

    def lose(self, id: ReplicaId) -> Replica | None:
        """Forget the replica and its cache; returns it if it was known."""
        self._silent.pop(id, None)
        self.picture.remove(id)
        self.homes.lose(id)
        return self.known.pop(id, None)

    def miss(self, id: ReplicaId) -> Replica | None:
        """The replica is silent: as `lose`, but its process may only have been held up. Then its
        engine still has its cache, and nobody would tell what is in it."""
        self._silent[id] = self.clock.now_s
        return self.known.pop(id, None)

    def forget_silent(self) -> None:
        """Forget replicas that have been silent for longer than sessions are remembered."""
        before_s = self.clock.now_s - MEMORY_S
        for id in [id for id, since_s in self._silent.items() if since_s < before_s]:
            self.lose(id)

    def touch(self, replica: Replica) -> None:
        """The load of a replica changed: update the lists."""
        replica.changed()
        has_room = replica.accepting and replica.held < replica.max_running + replica.standby
        if has_room != replica.is_open:
            replica.is_open = has_room
            _list(self.open, replica, has_room)

    def place(self, replica: Replica) -> bool:
        """Like `touch`, for a change of the replica itself; True if the pool's profiles changed."""
        self.touch(replica)
        _list(self.accepting, replica, replica.accepting)
        self.paces = tuple({id(r.pace): r.pace for r in self.accepting}.values())
        profiles = tuple(dict.fromkeys(r.profile for r in self.accepting))
        if profiles == self.profiles:
            return False
        self.profiles = profiles
        return True

    def pace_of(self, profile: Profile) -> Pace:
        """The pace shared by all replicas of a profile."""
        for replica in self.known.values():
            if replica.pace.profile == profile:
                return replica.pace
        return Pace(profile)

    def share_late(self, now_s: float) -> float:
        """The share of late ones among the turns of sessions that ended lately."""
        in_time = late = 0.0
        for pace in self.paces:
            gained, lost = pace.turns.at(now_s)
            in_time += gained
            late += lost
        return late / (in_time + late) if late else 0.0

    def most_cached(self, invocation: Invocation) -> int:
        """Cached tokens of a session's prompt on the replica believed to hold most of it."""
        if not invocation.session:
            return 0
        return max((r.cached_tokens(invocation) for r in self.accepting), default=0)

    def check_invariants(self) -> None:
        """Assert that the state of the replicas is consistent."""
        by_id = sorted(self.known.values(), key=BY_ID)
        assert self.accepting == [r for r in by_id if r.accepting]
        has_room = [r for r in by_id if r.accepting and r.held < r.max_running + r.standby]
        assert self.open == has_room
        assert not self._silent.keys() & self.known.keys()
        assert all(r.is_open == (r in self.open) for r in by_id)
        for r in by_id:
            assert r.wide == sum(x.invocation.calls - 1 for x in r.leases.values())
            assert r.held == len(r.leases) + len(r.adopted) + r.wide, f"{r.id} miscounts"
            assert r.prefilling == sum(x.first_token_at_s is None for x in r.leases.values())
            assert r.context_tokens == sum(x.context_tokens for x in r.leases.values())
            assert r.queued_s.keys() == r.queue.waiting.keys()
            bound = r.queue.waiting.values()
            assert r.queued_tokens == sum(w.prompt_tokens for w in bound)
            assert r.queued_uncached_tokens == sum(w.uncached_tokens for w in bound)
            r.queue.check_invariants()


def _list(replicas: list[Replica], replica: Replica, belongs: bool) -> None:
    """Insert `replica` into the list by id, or remove it."""
    i = bisect_left(replicas, replica.id, key=BY_ID)
    is_listed = i < len(replicas) and replicas[i] is replica
    if belongs and not is_listed:
        replicas.insert(i, replica)
    elif is_listed and not belongs:
        del replicas[i]
