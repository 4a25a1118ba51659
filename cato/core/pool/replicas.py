"""Replicas as a pool's books have them: what each holds, and when it will be free."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

from cato.core.commands import Dispatch
from cato.core.ids import DeploymentName, InvocationId, ReplicaId
from cato.core.pool.caches import CachePicture
from cato.core.pool.pace import Pace
from cato.core.pool.queue import Queue
from cato.core.pool.sessions import Home, Homes, WorkingSet
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.snapshot import (
    PREFIX_BLOCK_TOKENS,
    Invocation,
    ReplicaSnapshot,
    ReplicaView,
    Running,
)

T = TypeVar("T")


def expected_wait_s(running_s: Iterable[float], queued_s: Iterable[float], slots: int) -> float:
    """Expected queueing time of a newcomer behind `queued_s`, with `running_s` still to run.

    Walks the queue (CATO, Algorithm 1: "wait"): each queued service time goes to the slot that
    frees first. All values in seconds. A replica without slots never takes it.
    """
    if slots < 1:
        return inf
    free_at = sorted(running_s)[-slots:]
    free_at = [0.0] * (slots - len(free_at)) + free_at  # sorted, so a heap
    for service_s in queued_s:
        heapq.heapreplace(free_at, free_at[0] + service_s)
    return free_at[0]


@dataclass(slots=True)
class Clock:
    """The instant of the event in hand; the books never ask for another."""

    now_s: float = 0.0


@record
class Lease:
    replica_id: ReplicaId
    running: Running
    command: Dispatch
    # Of its prompt, what the replica was not believed to have cached, and the time that it takes.
    uncached_tokens: int
    prompt_s: float
    # Of what was believed to be cached: see `CachePicture.correct`.
    cache_age: int
    # No prompt was ahead of it: its first token tells the delay of messages.
    went_first: bool


@dataclass(slots=True, eq=False)
class Replica:
    """A replica of the books; also the `ReplicaView` that policies see."""

    clock: Clock
    picture: CachePicture
    homes: Homes
    working_set: WorkingSet
    id: ReplicaId
    deployment: DeploymentName
    profile: Profile
    max_running: int
    standby: int
    accepting_work: bool
    seen_at_s: float
    pace: Pace
    # Early binding: what waits for this replica alone, with its service times in order.
    queue: Queue
    # Time of prompts that have their first token: what they added to the steps of the others.
    prompts_done_s: float = 0.0
    leases: dict[InvocationId, Running] = field(default_factory=dict)
    # Held according to the replica but unknown here: leased before a restart of the router.
    adopted: frozenset[InvocationId] = frozenset()
    queued_s: dict[InvocationId, float] = field(default_factory=dict)
    queued_tokens: int = 0
    held: int = 0
    # Places that leases take beyond one each: those of several answers.
    wide: int = 0
    prefilling: int = 0
    prompt_tokens_ahead: int = 0
    context_tokens: int = 0
    step_tokens: int = 0
    host_tokens: int = 0
    dispatch_s: float = 0.0
    # When the prompts that are ahead are expected to be done.
    _prompts_end_s: float = -inf
    # The same claim as `ReplicaSnapshot.has_room`.
    is_open: bool = False
    # Its engine keeps the beginnings of prompts; `picture` has them.
    has_prefix_cache: bool = False
    awaited_s: float = 0.0
    # The time that the prompts ahead were predicted to take, added up.
    _prompts_s: float = 0.0
    # When a newcomer would start, and until when that answer holds.
    _free_at_s: float = 0.0
    _free_holds_until_s: float = -inf
    # What policies derived from the present state at `_derived_at_s`.
    _derived: dict[object, Any] = field(default_factory=dict)
    _derived_at_s: float = -inf

    @property
    def queued(self) -> int:
        return len(self.queued_s)

    @property
    def accepting(self) -> bool:
        return self.accepting_work and self.max_running > 0

    @property
    def batch(self) -> int:
        joined = self.held + 1
        return joined if joined < self.max_running else max(1, self.max_running)

    @property
    def running(self) -> Collection[Running]:
        return self.leases.values()

    @property
    def wait_s(self) -> float:
        now_s = self.clock.now_s
        if now_s < self._free_holds_until_s:
            return max(0.0, self._free_at_s - now_s)
        if not self.queued_s and self.held < self.max_running:
            return 0.0
        wait_s, self._free_holds_until_s = self._wait_at(now_s)
        self._free_at_s = now_s + wait_s
        return wait_s

    def _wait_at(self, now_s: float) -> tuple[float, float]:
        """Expected wait of a newcomer, and until when the instant of its end holds."""
        ends = [r.expected_end_s for r in self.leases.values()]
        running_s = [max(0.0, end_s - now_s) for end_s in ends] + [0.0] * len(self.adopted)
        if self.wide:
            for running in self.leases.values():
                end_s = max(0.0, running.expected_end_s - now_s)
                running_s += [end_s] * (running.invocation.calls - 1)
        wait_s = expected_wait_s(running_s, self.queued_s.values(), self.max_running)
        # What has overrun its expected end is expected to end at once, for as long as it runs.
        first_end_s = min(ends, default=inf)
        overrun = bool(self.adopted) or first_end_s <= now_s
        return wait_s, -inf if overrun else first_end_s

    @property
    def serial_s(self) -> float:
        return self._serial_s(self.wait_s) if self.max_running == 1 else self._serial_s(0.0)

    def _serial_s(self, wait_s: float) -> float:
        if self.max_running == 1:
            return wait_s
        running_s = sum(_left_alone_s(r, self.profile) for r in self.leases.values())
        return running_s + sum(self.queued_s.values())

    @property
    def prompts_ahead_s(self) -> float:
        return max(0.0, self._prompts_end_s - self.clock.now_s)

    def prompt_sent(self, invocation: Invocation, uncached_tokens: int, prompt_s: float) -> None:
        self.prefilling += 1
        self.prompt_tokens_ahead += uncached_tokens
        self.context_tokens += invocation.prompt_tokens
        self._prompts_s += prompt_s
        start_s = max(self.clock.now_s, self._prompts_end_s)
        self._prompts_end_s = start_s + prompt_s

    def prompt_done(self, uncached_tokens: int, prompt_s: float) -> None:
        """One of the prompts ahead has its first token, or has left."""
        self.prefilling -= 1
        self.prompt_tokens_ahead -= uncached_tokens
        self._prompts_s -= prompt_s
        if not self.prefilling:
            self._prompts_end_s = -inf
            self._prompts_s = 0.0
            return
        # What was predicted for those that remain may have been too long, but not too short.
        if self.profile.prefill_per_attended_token_s:  # tokens alone do not tell the time
            latest_s = self.clock.now_s + self._prompts_s
        else:
            latest_s = self.clock.now_s + self.profile.prefill_s(self.prompt_tokens_ahead)
        self._prompts_end_s = min(self._prompts_end_s, latest_s)

    def changed(self) -> None:
        self.held = len(self.leases) + len(self.adopted) + self.wide
        self._free_holds_until_s = -inf
        if self._derived:
            self._derived.clear()

    @property
    def sessions(self) -> int:
        return self.working_set.sessions

    @property
    def working_set_tokens(self) -> int:
        return self.working_set.tokens

    def is_home(self, invocation: Invocation) -> bool:
        home = self.homes.of(invocation.session)
        return home is not None and home.replica_id == self.id

    def cached_tokens(self, invocation: Invocation) -> int:
        if not self.has_prefix_cache:
            return 0
        return self._tokens_in(self.picture.cached_nodes(self.id, invocation.prefix), invocation)

    def usable_tokens(self, invocation: Invocation) -> int:
        if not self.has_prefix_cache or not self.profile.fetch_token_s:
            return self.cached_tokens(invocation)
        return self._tokens_in(self.picture.most_nodes(invocation.prefix), invocation)

    def _tokens_in(self, nodes: int, invocation: Invocation) -> int:
        if not nodes:
            return 0
        cached = int(_tokens_of(nodes, invocation, self.homes.of(invocation.session)))
        # The last token of a prompt is always computed: it gives the first one of the answer.
        return cached if cached < invocation.prompt_tokens else invocation.prompt_tokens - 1

    def derived(self, derive: Callable[[ReplicaView, float], T], now_s: float) -> T:
        if now_s != self._derived_at_s:
            self._derived.clear()
            self._derived_at_s = now_s
        if derive not in self._derived:
            self._derived[derive] = derive(self, now_s)
        value: T = self._derived[derive]
        return value

    def snapshot(self, now_s: float) -> ReplicaSnapshot:
        """As it is at `now_s`; changes nothing."""
        if now_s < self._free_holds_until_s:
            wait_s = max(0.0, self._free_at_s - now_s)
        elif not self.queued_s and self.held < self.max_running:
            wait_s = 0.0
        else:
            wait_s, _ = self._wait_at(now_s)
        return ReplicaSnapshot(
            id=self.id,
            deployment=self.deployment,
            profile=self.profile,
            held=self.held,
            max_running=self.max_running,
            standby=self.standby,
            queued=self.queued,
            wait_s=wait_s,
            serial_s=self._serial_s(wait_s),
            accepting=self.accepting,
            prefilling=self.prefilling,
            prompt_tokens_ahead=self.prompt_tokens_ahead,
            prompts_ahead_s=max(0.0, self._prompts_end_s - now_s),
            context_tokens=self.context_tokens,
            step_tokens=self.step_tokens,
            host_tokens=self.host_tokens,
            dispatch_s=self.dispatch_s,
            sessions=self.sessions,
            working_set_tokens=self.working_set_tokens,
            awaited_s=self.awaited_s,
            queued_tokens=self.queued_tokens,
        )


_BY_ID: Callable[[Replica], ReplicaId] = attrgetter("id")


class Replicas:
    """All replicas of a pool, and which of them take work."""

    __slots__ = ("accepting", "known", "open", "profiles")

    def __init__(self) -> None:
        self.known: dict[ReplicaId, Replica] = {}
        self.open: list[Replica] = []  # with room, by id
        self.accepting: list[Replica] = []  # by id
        self.profiles: tuple[Profile, ...] = ()  # of what accepts work

    def touch(self, replica: Replica) -> None:
        """The load of a replica changed: is it still listed where it belongs?"""
        replica.changed()
        has_room = replica.accepting and replica.held < replica.max_running + replica.standby
        if has_room != replica.is_open:
            replica.is_open = has_room
            _list(self.open, replica, has_room)

    def place(self, replica: Replica) -> bool:
        """Like `touch`, when the replica itself changed; True when the pool's profiles did."""
        self.touch(replica)
        _list(self.accepting, replica, replica.accepting)
        profiles = tuple(dict.fromkeys(r.profile for r in self.accepting))
        if profiles == self.profiles:
            return False
        self.profiles = profiles
        return True

    def pace_of(self, profile: Profile) -> Pace:
        """Replicas of one profile share it."""
        for replica in self.known.values():
            if replica.pace.profile == profile:
                return replica.pace
        return Pace(profile)

    def most_cached(self, invocation: Invocation) -> int:
        """Tokens of a session's prompt on the replica that is believed to hold most of it."""
        if not invocation.session:
            return 0
        return max((r.cached_tokens(invocation) for r in self.accepting), default=0)

    def check_invariants(self) -> None:
        """Fail where what is known of the replicas does not agree."""
        by_id = sorted(self.known.values(), key=_BY_ID)
        assert self.accepting == [r for r in by_id if r.accepting]
        has_room = [r for r in by_id if r.accepting and r.held < r.max_running + r.standby]
        assert self.open == has_room
        assert all(r.is_open == (r in self.open) for r in by_id)
        for r in by_id:
            assert r.wide == sum(x.invocation.calls - 1 for x in r.leases.values())
            assert r.held == len(r.leases) + len(r.adopted) + r.wide, f"{r.id} miscounts"
            assert r.prefilling == sum(x.first_token_at_s is None for x in r.leases.values())
            assert r.context_tokens == sum(x.context_tokens for x in r.leases.values())
            assert r.queued_s.keys() == r.queue.waiting.keys()
            assert r.queued_tokens == sum(w.prompt_tokens for w in r.queue.waiting.values())
            r.queue.check_invariants()


def _list(replicas: list[Replica], replica: Replica, belongs: bool) -> None:
    """Put `replica` into the list by id, or take it out."""
    i = bisect_left(replicas, replica.id, key=_BY_ID)
    is_listed = i < len(replicas) and replicas[i] is replica
    if belongs and not is_listed:
        replicas.insert(i, replica)
    elif is_listed and not belongs:
        del replicas[i]


def _left_alone_s(running: Running, profile: Profile) -> float:
    prompt_s = 0.0
    if running.first_token_at_s is None:
        prompt_s = profile.prefill_s(running.invocation.prompt_tokens)
    return prompt_s + running.left_tokens * profile.decode_step_s(1, running.context_tokens)


def _tokens_of(nodes: int, invocation: Invocation, home: Home | None) -> float:
    """Tokens of the prompt's first nodes, which are cut by characters.

    Up to the end of an earlier prompt of the session an engine has counted them.
    """
    prompt_tokens, length = invocation.prompt_tokens, len(invocation.prefix)
    if home is None or not 0 < home.counted_nodes < length:
        return nodes * _node_tokens(prompt_tokens, length)
    counted, tokens = home.counted_nodes, home.counted_tokens
    if nodes <= counted:
        return nodes * _node_tokens(tokens, counted)
    return tokens + (nodes - counted) * max(0, prompt_tokens - tokens) / (length - counted)


def _node_tokens(tokens: int, nodes: int) -> float:
    """Of each node of a prompt; half a node stands for the text behind the last one."""
    if 0 <= tokens - nodes * PREFIX_BLOCK_TOKENS < PREFIX_BLOCK_TOKENS:
        return PREFIX_BLOCK_TOKENS
    return tokens / (nodes + 0.5)
