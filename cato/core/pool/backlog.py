"""The backlog of a pool: queued calls, their work and their urgency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from math import inf, isclose
from operator import attrgetter

from cato.core.decision import Rank
from cato.core.fairness import TokenShares
from cato.core.ids import InvocationId
from cato.core.policies import NO_PLAN, PlanningPolicy, Policies, QueueLoad, Work
from cato.core.pool.patience import Order
from cato.core.pool.pressure import Kind, Pressure
from cato.core.pool.queue import Parked, Queue, Waiting
from cato.core.pool.replica import Lease, Replica
from cato.core.pool.replicas import Replicas
from cato.core.pool.stages import Stages
from cato.core.pool.tenant_queues import TenantQueues
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, Running

# A plan is made again after the queue has changed by an eighth. Of the calls that may go earlier
# than before, only the first ones get a new rank at once.
PLANS, FIRST = 8, 16
_BY_REMAINING: Callable[[Work], float] = attrgetter("remaining_s")


def load_of(invocation: Invocation, profile: Profile, places: int, cached_tokens: int = 0) -> float:
    """Replica-seconds of a call when all `places` batch slots (at least one) are busy.

    Prompts are processed one after another. Decode steps are shared by the batch, and so is the
    fixed time of a step with a prompt in it.
    """
    return sum(parts_of_load(invocation, profile, places, cached_tokens))


def parts_of_load(
    invocation: Invocation, profile: Profile, places: int, cached_tokens: int = 0
) -> tuple[float, float]:
    """The parts of `load_of` for the prompt and for decoding."""
    prompt, tokens, places = invocation.prompt_tokens, invocation.expected_tokens, max(1, places)
    step_s = profile.decode_step_s(places, prompt + tokens / 2)
    prompt_s = profile.prefill_s(prompt, 1, cached_tokens)
    prompt_s -= min(prompt_s, profile.prefill_base_s * (1 - 1 / places))
    return prompt_s, (tokens - 1) * step_s / places


def work_alone(
    invocation: Invocation, profile: Profile, batch: int = 1, cached_tokens: int = 0
) -> Work:
    prompt, tokens = invocation.prompt_tokens, invocation.expected_tokens
    service_s = own_s = profile.service_s(prompt, tokens, batch, cached_tokens)
    if invocation.until_first_token:
        own_s = profile.first_token_s(prompt, batch, cached_tokens)
    token_s = profile.decode_step_s(batch, prompt + tokens)
    return Work(own_s + invocation.downstream_s, service_s, token_s)


def _kind_of(invocation: Invocation) -> Kind:
    if invocation.begun_in_time:
        return Kind.PACED_REST if invocation.is_paced_rest else Kind.REST
    if invocation.generated:
        return Kind.OTHER
    return Kind.NEW if invocation.until_first_token else Kind.WHOLE


def _done_s(running: Running, tokens: int, prompt_s: float, decoding_s: float) -> float:
    """Work done of a call once it has `tokens`; of a longer output than expected, all of it."""
    if tokens < 1:
        return 0.0
    left_tokens = max(1, running.invocation.expected_tokens - 1)
    return prompt_s + decoding_s * min(1.0, (tokens - 1) / left_tokens)


def _planner_of(policies: Policies) -> PlanningPolicy | None:
    return policies.ordering if isinstance(policies.ordering, PlanningPolicy) else None


class Backlog:
    """All queued calls of a pool, in its own queue or in those of its replicas.

    `load_s` is their work in replica-seconds: the time in full batches, shared among the slots.
    """

    def __init__(self, replicas: Replicas, policies: Policies) -> None:
        self.policies = policies
        self.shares = TokenShares()
        self._replicas = replicas
        self._accepting = replicas.accepting
        self.versions = count(1)  # only differences of it are used
        self.waiting: dict[InvocationId, Waiting] = {}
        # The pool's queue. With early binding: calls that no replica has accepted yet.
        self.queue = TenantQueues(self.shares, self.versions)
        self.parked = Parked(self.versions)
        # Queued calls without an SLO, by arrival.
        self.unbound: dict[InvocationId, Waiting] = {}
        self.load_s = 0.0
        self._begun: dict[InvocationId, Waiting] = {}  # queued calls that have tokens already
        self.prompt_tokens = 0
        self.pressure = Pressure()
        self.stages = Stages(policies.knows_stages)
        self._planner = _planner_of(policies)
        self._plan = NO_PLAN
        self._changes = 0  # of the queue since the plan was made
        # Profile and batch slots of the replicas that accept work, and how many are alike; of one
        # replica if all have the same profile.
        self._shapes: dict[tuple[Profile, int], int] = {}

    def add(self, waiting: Waiting) -> None:
        invocation = waiting.invocation
        self.waiting[invocation.id] = waiting
        self.stages.came(waiting)
        self._changes += 1
        if self._accepting:
            waiting.load_s, waiting.decoding_s = self._load_of(invocation)
            self.load_s += waiting.load_s
            if not self._replicas.open:
                waiting.predicted_s = self.load_s / len(self._accepting)
        waiting.prompt_tokens = invocation.prompt_tokens
        self.prompt_tokens += waiting.prompt_tokens
        if self._accepting:
            self._press(waiting, waiting.load_s)
        if self.policies.by_turns and not waiting.has_turn:
            self.parked.add(waiting)
        else:
            self.queue.add(waiting)
        if invocation.deadline_s == inf:
            self.unbound[invocation.id] = waiting
        if invocation.generated:
            self._begun[invocation.id] = waiting

    def renew(self, waiting: Waiting, invocation: Invocation) -> None:
        """A queued call is offered again; its load stays what it was when it came."""
        waiting.invocation, waiting.work = invocation, None
        self.stages.came(waiting)
        if invocation.generated:
            self._begun[invocation.id] = waiting
        else:
            self._begun.pop(invocation.id, None)

    def remove(self, waiting: Waiting) -> None:
        id = waiting.invocation.id
        del self.waiting[id]
        self.stages.went(waiting.invocation)
        self._changes += 1
        self.load_s = self.load_s - waiting.load_s if self.waiting else 0.0
        self._begun.pop(id, None)
        self.prompt_tokens -= waiting.prompt_tokens
        self.pressure.leave(id)
        self.unbound.pop(id, None)
        if waiting.awaits is not None:
            self.hold_for(waiting, None)
        waiting.queue.remove(waiting)
        if waiting.bound_to is not None:
            replica = self._replicas.known[waiting.bound_to]
            del replica.queued_s[id]
            replica.queued_tokens -= waiting.prompt_tokens
            replica.queued_uncached_tokens -= waiting.uncached_tokens
            replica.changed()

    def bind(self, waiting: Waiting, replica: Replica) -> None:
        """Early binding: move it from the pool's queue to the replica's."""
        self.queue.remove(waiting)
        waiting.bound_to = replica.id
        replica.queue.add(waiting)
        cached_tokens = replica.cached_tokens(waiting.invocation)
        waiting.uncached_tokens = max(0, waiting.prompt_tokens - cached_tokens)
        replica.queued_tokens += waiting.prompt_tokens
        replica.queued_uncached_tokens += waiting.uncached_tokens
        self.expect(waiting, replica)

    def expect(self, waiting: Waiting, replica: Replica) -> None:
        """The replica's queue has or changes a call of that service time."""
        invocation = waiting.invocation
        replica.queued_s[invocation.id] = replica.profile.service_s(
            invocation.prompt_tokens, invocation.expected_tokens
        )
        replica.changed()

    def unbind(self, replica: Replica) -> None:
        """Return the replica's queue to the pool's."""
        for waiting in list(replica.queue.waiting.values()):
            replica.queue.remove(waiting)
            waiting.bound_to = None
            self.queue.add(waiting)
        replica.queued_s.clear()
        replica.queued_tokens = replica.queued_uncached_tokens = 0
        replica.changed()

    def place_replica(self, replica: Replica) -> bool:
        """Update the lists after a replica has changed; True when the pool's profiles changed."""
        is_new_mix = self._replicas.place(replica)
        some = self._accepting if len(self._replicas.profiles) > 1 else self._accepting[:1]
        self._shapes = Counter((r.profile, r.max_running) for r in some)
        if is_new_mix:
            self._load_again()
            self.queue.forget_ranks()
            for other in self._accepting:
                other.queue.forget_ranks()
        return is_new_mix

    def _load_again(self) -> None:
        """The profiles have changed: what is queued takes less time or more.

        What came before the first replica keeps no load: nobody is refused for a queue that grew
        only because engines were starting.
        """
        if not self._accepting:
            return
        for id, waiting in self.waiting.items():
            load_s, decoding_s = self._load_of(waiting.invocation)
            if not waiting.load_s:
                if not self.is_late(waiting, self._replicas.clock.now_s):
                    self._press(waiting, load_s)
                continue
            waiting.decoding_s = decoding_s
            self.load_s += load_s - waiting.load_s
            self.pressure.changed(id, load_s)
            waiting.load_s = load_s

    def _press(self, waiting: Waiting, load_s: float) -> None:
        """Its load counts in the pressure of the queue from now on."""
        invocation, now_s = waiting.invocation, self._replicas.clock.now_s
        if invocation.deadline_s < inf and invocation.id not in self.pressure:
            work = self.work_of(waiting)
            if self._planner is not None:
                waiting.reserve_s = self._planner.reserve_s(invocation, work)
            latest_s = invocation.deadline_s - work.remaining_s
            self.pressure.join(invocation.id, latest_s, load_s, now_s, _kind_of(invocation))

    def _load_of(
        self, invocation: Invocation, cached_tokens: int | None = None
    ) -> tuple[float, float]:
        """Its load on a mean replica, and the part of it that is decoding."""
        if cached_tokens is None:
            cached_tokens = self._replicas.most_cached(invocation)
        loads, decoding_s = 0.0, 0.0  # calls of this kind, and decoding, per second of all replicas
        for (profile, places), alike in self._shapes.items():
            prompt_s, own_s = parts_of_load(invocation, profile, places, cached_tokens)
            if len(self._shapes) == 1 or prompt_s + own_s <= 0:
                return prompt_s + own_s, own_s
            loads += alike / (prompt_s + own_s)
            decoding_s += alike * own_s / (prompt_s + own_s)
        return len(self._accepting) / loads, decoding_s / loads

    def worked(self, load_s: float) -> None:
        """Running calls did so much work; what is done while nothing is queued does not count."""
        if not self.waiting:
            self.pressure.rests()
        elif self._accepting and load_s:
            self.pressure.worked(load_s, self._replicas.clock.now_s, len(self._accepting))

    def done_s(self, lease: Lease, tokens: int) -> float:
        """Work that a running call did since its last report, now that it has `tokens`."""
        if not (self.waiting and self._accepting):
            return 0.0
        running = lease.running
        if lease.loads_s is None:
            invocation, cached = running.invocation, 0
            if invocation.session:  # as it was counted when it joined the queue
                cached = max(0, invocation.prompt_tokens - lease.uncached_tokens)
            load_s, decoding_s = self._load_of(invocation, cached)
            lease.loads_s = load_s - decoding_s, decoding_s
        done_s = _done_s(running, tokens, *lease.loads_s)
        done_s -= _done_s(running, running.tokens, *lease.loads_s)
        lease.counted_s += done_s
        return done_s

    def change_policies(self, policies: Policies) -> None:
        """Queue all calls again as `policies` say."""
        had_turns, self.policies = self.policies.by_turns, policies
        self._planner, self._plan, self._changes = _planner_of(policies), NO_PLAN, 1
        if policies.by_turns and not had_turns:
            self.end_turns()
        elif not policies.by_turns:
            for waiting in list(self.parked.waiting.values()):
                self.give_turn(waiting)
        for replica in self._replicas.known.values():
            self.unbind(replica)
        self.queue.forget_ranks()

    def give_turn(self, waiting: Waiting) -> None:
        """Allow a parked call to start."""
        self.parked.remove(waiting)
        waiting.has_turn = True
        self.queue.add(waiting)

    def end_turns(self) -> None:
        """Park all calls that are not bound to a replica."""
        for waiting in list(self.queue.waiting.values()):
            self.queue.remove(waiting)
            waiting.has_turn = False
            self.parked.add(waiting)

    def refresh(self, queue: Queue | TenantQueues, now_s: float) -> None:
        """Rank what has no valid rank; before that, plan again if the queue has changed much."""
        self.stages.settle()
        self.pressure.pass_to(now_s)
        if self._planner is not None and PLANS * self._changes > len(self.pressure):
            self._plan_again(self._planner, now_s)
        queue.refresh(self.rank, now_s)

    def _plan_again(self, ordering: PlanningPolicy, now_s: float) -> None:
        """Only calls that may now go first too early or too late get new ranks."""
        self._changes = 0
        pressure, replicas = self.pressure, max(1, len(self._accepting))
        offered_load = pressure.offered_load(now_s, replicas)
        old, speed = self._plan.start_by_s, replicas * pressure.pace
        queued = [
            (latest_s - self.waiting[id].reserve_s, load_s, id)
            for latest_s, load_s, id in pressure.queued()
        ]
        self._plan = ordering.plan(queued, speed, now_s, offered_load, pressure.missed)
        new = self._plan.start_by_s
        outdated = [id for id in old if id not in new]
        for place, (id, by_s) in enumerate(new.items()):
            before_s = old.get(id, inf)
            if by_s > before_s or (by_s < before_s and (place < FIRST or before_s == inf)):
                outdated.append(id)
        for id in outdated:
            waiting = self.waiting.get(id)
            if waiting is not None and waiting.queue is self.queue and waiting.rank is not None:
                self.queue.forget_rank(waiting)

    def rank(self, waiting: Waiting, now_s: float) -> Rank:
        work, invocation = waiting.work or self.work_of(waiting), waiting.invocation
        latest_s = invocation.deadline_s - work.remaining_s
        by_s = latest_s - waiting.reserve_s
        start_by_s = self._plan.place_of(invocation.id, by_s, waiting.load_s)
        remaining_s, service_s, token_s = work.remaining_s, work.service_s, work.token_s
        load_s, decoding_s = waiting.load_s, waiting.decoding_s
        vain = self.pressure.in_vain(now_s) if invocation.is_paced_rest else 0.0
        crowded_s = self.pressure.crowded_s(now_s)
        work = Work(
            remaining_s, service_s, token_s, load_s, decoding_s, start_by_s, vain, crowded_s
        )
        return self.policies.ordering.rank(waiting.invocation, work, now_s)

    def queue_load(self, now_s: float) -> QueueLoad:
        """The queue must have been refreshed at `now_s`."""
        load_s = sum(w.load_s for w in self._begun.values())
        pressure, replicas = self.pressure, max(1, len(self._accepting))
        # New calls go before streams that rest.
        ahead_s = pressure.ahead_s(now_s, replicas)
        ahead_s -= pressure.needs_s(pressure.resting_s, replicas)
        rest_s = ahead_s + pressure.needs_s(load_s, replicas)
        crowded_s, in_vain = pressure.crowded_s(now_s), pressure.in_vain(now_s)
        rest_before_s = pressure.rests_before(ahead_s, replicas)
        return QueueLoad(ahead_s, rest_s, crowded_s, pressure.missed, in_vain, rest_before_s)

    def work_of(self, waiting: Waiting) -> Work:
        """Work of a call on the fastest profile."""
        work = waiting.work
        if work is None:
            invocation = waiting.invocation
            cached = self._replicas.most_cached(invocation) if invocation.session else 0
            profiles = self._replicas.profiles
            work = work_alone(invocation, profiles[0], 1, cached)
            if len(profiles) > 1:
                work = min(
                    [work_alone(invocation, p, 1, cached) for p in profiles], key=_BY_REMAINING
                )
            waiting.work = work
        return work

    def is_late(self, waiting: Waiting, now_s: float) -> bool:
        """Whether it would miss its SLO even if it started now, alone, with a short answer."""
        invocation, work = waiting.invocation, self.work_of(waiting)
        latest_s = invocation.deadline_s - work.remaining_s
        if now_s <= latest_s or invocation.until_first_token or invocation.length is None:
            return now_s > latest_s
        shortest = max(1.0, invocation.length.points[0] - invocation.generated)
        return now_s > latest_s + work.token_s * (invocation.expected_tokens - shortest)

    def order(self, waiting: Waiting, now_s: float) -> Order:
        """The call's place in the queue, by a rank that is still valid."""
        rank, invocation = waiting.rank, waiting.invocation
        if rank is None or rank.until_s <= now_s:
            rank = self.rank(waiting, now_s)
        return rank.value, rank.key, invocation.arrived_at_s, invocation.id

    def alone_s(self, waiting: Waiting) -> float:
        """Seconds to the SLO's event if it started now, alone, on the fastest profile."""
        invocation, profiles = waiting.invocation, self._replicas.profiles
        cached = self._replicas.most_cached(invocation)
        if cached:
            return min(work_alone(invocation, p, 1, cached).remaining_s for p in profiles)
        return min(invocation.remaining_s(p) for p in profiles)

    def hold_for(self, waiting: Waiting, replica: Replica | None) -> None:
        """Hold a session's call back for that replica; None ends the hold."""
        if waiting.awaits is not None:
            waiting.awaits.awaited_s -= waiting.awaits_s
            waiting.awaits = None
        if replica is not None:
            invocation = waiting.invocation
            cached = replica.cached_tokens(invocation)
            waiting.awaits_s = replica.profile.prefill_s(invocation.prompt_tokens, 1, cached)
            waiting.awaits = replica
            replica.awaited_s += waiting.awaits_s

    def check_invariants(self) -> None:
        """Assert that the queues hold exactly the queued calls."""
        self.queue.check_invariants()
        queued = self.queue.waiting | self.parked.waiting
        for replica in self._replicas.known.values():
            assert not queued.keys() & replica.queue.waiting.keys()
            queued |= replica.queue.waiting
            bound_to = {w.bound_to for w in replica.queue.waiting.values()}
            assert bound_to <= {replica.id}, f"some calls are not bound to {replica.id}"
        assert queued == self.waiting, "each call waits in one queue"
        assert self.prompt_tokens == sum(w.prompt_tokens for w in self.waiting.values())
        assert isclose(self.load_s, sum(w.load_s for w in self.waiting.values()), abs_tol=1e-6)
        assert self.waiting or self.load_s == 0
        assert self._begun == {id: w for id, w in self.waiting.items() if w.invocation.generated}
        assert self.unbound.keys() <= self.waiting.keys()
