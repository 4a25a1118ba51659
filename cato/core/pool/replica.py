"""One replica as its pool's router sees it: what it holds, and when it will be free."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from cato.core.commands import Dispatch
from cato.core.ids import DeploymentName, InvocationId, ReplicaId
from cato.core.pool.caches import CachePicture
from cato.core.pool.pace import Pace
from cato.core.pool.queue import Queue
from cato.core.pool.sessions import Home, Homes, WorkingSet
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, ReplicaSnapshot, ReplicaView, Running

T = TypeVar("T")

_NO_HOME = Home(ReplicaId(""), 0, -inf)


def expected_wait_s(running_s: Iterable[float], queued_s: Iterable[float], slots: int) -> float:
    """Expected queueing delay of a new call behind `queued_s`, with `running_s` left to run.

    Walks the queue (CATO, Algorithm 1: "wait"): each queued service time goes to the batch slot
    that frees first. All values in seconds. A replica without slots never takes the call.
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
    """The time of the current event; the pool has no other clock."""

    now_s: float = 0.0


@dataclass(slots=True)
class Lease:
    replica_id: ReplicaId
    running: Running
    command: Dispatch
    # Prompt tokens that the replica was not believed to have cached, and their prefill time.
    uncached_tokens: int
    prompt_s: float
    # When it was expected to be processed, after the prompts ahead.
    prompt_end_s: float
    # Age of the cached part; see `CachePicture.correct`.
    cache_age: int
    # No prompt was ahead of it, so its first token shows the message delay.
    went_first: bool
    # Loads of its prompt and of its decoding, once needed; and how much counted as done so far.
    loads_s: tuple[float, float] | None = None
    counted_s: float = 0.0


@dataclass(slots=True, eq=False)
class Replica:
    """The state of a replica; also the `ReplicaView` that policies see."""

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
    # Early binding: calls waiting for this replica alone, with their service times in order.
    queue: Queue
    # Prefill time of prompts with a first token: what they added to the steps of the others.
    prompts_done_s: float = 0.0
    leases: dict[InvocationId, Running] = field(default_factory=dict)
    # Reported by the replica but unknown here: leased before a restart of the router.
    adopted: frozenset[InvocationId] = frozenset()
    queued_s: dict[InvocationId, float] = field(default_factory=dict)
    queued_tokens: int = 0
    queued_uncached_tokens: int = 0
    held: int = 0
    # Batch slots of leases beyond one each: calls with several answers.
    wide: int = 0
    prefilling: int = 0
    prompt_tokens_ahead: int = 0
    context_tokens: int = 0
    step_tokens: int = 0
    host_tokens: int = 0
    mixes_prompts: bool = False
    dispatch_s: float = 0.0
    first_late_s: float = 0.0
    # When the prefill of the prompts ahead is expected to end.
    _prompts_end_s: float = -inf
    # Same value as `ReplicaSnapshot.has_room`.
    is_open: bool = False
    # The engine caches prefixes; `picture` tracks them.
    has_prefix_cache: bool = False
    # Work that its sessions compute again elsewhere since it takes no calls.
    lost_s: float = 0.0
    awaited_s: float = 0.0
    # Sum of the predicted prefill times of the prompts ahead.
    _prompts_s: float = 0.0
    # Expected start of a new call, and until when that value is valid.
    _free_at_s: float = 0.0
    _free_holds_until_s: float = -inf
    # Values that policies derived from the state at `_derived_at_s`.
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
        """Expected queueing delay of a new call, and until when its predicted start is valid."""
        ends = [r.expected_end_s for r in self.leases.values()]
        running_s = [max(0.0, end_s - now_s) for end_s in ends] + [0.0] * len(self.adopted)
        if self.wide:
            for running in self.leases.values():
                end_s = max(0.0, running.expected_end_s - now_s)
                running_s += [end_s] * (running.invocation.calls - 1)
        wait_s = expected_wait_s(running_s, self.queued_s.values(), self.max_running)
        # A call that exceeds its expected end is expected to end at any moment.
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

    def prompt_sent(self, invocation: Invocation, uncached_tokens: int, prompt_s: float) -> float:
        """A prompt of that time is sent; returns when it is expected to be processed."""
        self.prefilling += 1
        self.prompt_tokens_ahead += uncached_tokens
        self.context_tokens += invocation.prompt_tokens
        self._prompts_s += prompt_s
        start_s = max(self.clock.now_s, self._prompts_end_s)
        self._prompts_end_s = start_s + prompt_s
        return self._prompts_end_s

    def prompt_done(self, uncached_tokens: int, prompt_s: float) -> None:
        """A prompt ahead has its first token or has left."""
        self.prefilling -= 1
        self.prompt_tokens_ahead -= uncached_tokens
        self._prompts_s -= prompt_s
        if not self.prefilling:
            self._prompts_end_s = -inf
            self._prompts_s = 0.0
            return
        # The remaining prompts may have been predicted too long, but not too short.
        if self.profile.prefill_per_attended_token_s:  # tokens alone do not determine the time
            latest_s = self.clock.now_s + self._prompts_s
        else:
            latest_s = self.clock.now_s + self.profile.prefill_s(self.prompt_tokens_ahead)
        self._prompts_end_s = min(self._prompts_end_s, latest_s)

    def change_pace(self, slower: float) -> None:
        """Its pace was corrected by that factor, and so is what was predicted before: otherwise
        intervals that have begun would be taken for further errors of the pace."""
        self.profile = self.pace.corrected
        self.prompts_done_s *= slower
        for running in self.leases.values():
            running.pace_step_s *= slower
            running.prompts_seen_s *= slower

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

    @property
    def turns(self) -> tuple[float, float]:
        return self.pace.turns.at(self.clock.now_s)

    def is_home(self, invocation: Invocation) -> bool:
        home = self.homes.of(invocation.session)
        return home is not None and home.replica_id == self.id

    def cached_tokens(self, invocation: Invocation) -> int:
        if not self.has_prefix_cache:
            return 0
        return self._tokens_in(self.picture.cached_nodes(self.id, invocation.prefix), invocation)

    def loaded_tokens(self, invocation: Invocation) -> int:
        if not self.host_tokens or not self.has_prefix_cache:
            return 0
        nodes = self.picture.cached_nodes(self.id, invocation.prefix)
        in_host = self.picture.host_nodes(self.id, invocation.prefix, nodes)
        if not in_host:
            return 0
        kept = self._tokens_in(nodes - in_host, invocation)
        return self._tokens_in(nodes, invocation) - kept

    def usable_tokens(self, invocation: Invocation) -> int:
        if not self.has_prefix_cache or not self.profile.fetch_token_s:
            return self.cached_tokens(invocation)
        return self._tokens_in(self.picture.most_nodes(invocation.prefix), invocation)

    def _tokens_in(self, nodes: int, invocation: Invocation) -> int:
        if not nodes:
            return 0
        home = self.homes.of(invocation.session) or _NO_HOME
        cached = int(home.tokens(nodes, len(invocation.prefix), invocation.prompt_tokens))
        # The last token of a prompt is always computed: it produces the answer's first token.
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
        """The state at `now_s`; mutates nothing."""
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
            mixes_prompts=self.mixes_prompts,
            dispatch_s=self.dispatch_s,
            first_late_s=self.first_late_s,
            sessions=self.sessions,
            working_set_tokens=self.working_set_tokens,
            awaited_s=self.awaited_s,
            turns=self.pace.turns.at(now_s),
            queued_tokens=self.queued_tokens,
            queued_uncached_tokens=self.queued_uncached_tokens,
        )


def _left_alone_s(running: Running, profile: Profile) -> float:
    prompt_s = 0.0
    if running.first_token_at_s is None:
        prompt_s = profile.prefill_s(running.invocation.prompt_tokens)
    return prompt_s + running.left_tokens * profile.decode_step_s(1, running.context_tokens)
