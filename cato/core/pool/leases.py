"""The leases of a pool: what each replica runs, how far that is, and what is learnt from it."""

from __future__ import annotations

from math import inf

from cato.core.commands import Dispatch
from cato.core.events import CacheChanged, InvocationEnded, ReplicaProgressed
from cato.core.ids import InvocationId
from cato.core.pool.backlog import Backlog
from cato.core.pool.pace import MOST_PROMPTS
from cato.core.pool.replica import Lease, Replica
from cato.core.pool.replicas import BY_ID, Replicas
from cato.core.pool.usual_lengths import UsualLengths
from cato.core.pool.window import learnt_dispatch_s, learnt_late_s
from cato.core.snapshot import Invocation, Running, due_s

# If a replica still does not report a lease this long after its dispatch, the lease never reached
# it. The message from ingress to replica takes milliseconds, and a first connection a second at
# worst. An ingress looks for a replica that it does not know yet for up to 5 s.
LEASE_GRACE_S = 6.0


class Leases:
    """Keeps the counts of replicas and the shares of tenants in step with the leases."""

    __slots__ = ("_adopters", "_backlog", "_replicas", "_shares", "by_id", "lengths")

    def __init__(self, replicas: Replicas, backlog: Backlog) -> None:
        self._replicas = replicas
        self._backlog = backlog
        self._shares = backlog.shares
        self.by_id: dict[InvocationId, Lease] = {}
        self.lengths = UsualLengths()
        # Replicas that hold an invocation without a lease.
        self._adopters: dict[InvocationId, list[Replica]] = {}

    def add(
        self,
        invocation: Invocation,
        replica: Replica,
        command: Dispatch,
        prompt_s: float,
        waited_s: float,
    ) -> None:
        """`command` gives the invocation to the replica; its prompt is expected to take `prompt_s`.
        It was queued for `waited_s`.
        """
        id, now_s, cached = invocation.id, self._replicas.clock.now_s, command.cached_tokens
        self._shares.charge(
            invocation.tenant,
            invocation.weight,
            invocation.prompt_tokens,
            invocation.expected_tokens * invocation.calls,
        )
        # Standby calls start when a batch slot frees; in an already free slot a call starts at
        # once.
        start_s = now_s + (replica.wait_s if replica.held >= replica.max_running else 0.0)
        end_s = start_s + command.service_s
        running = Running(invocation, now_s, end_s, waited_s=waited_s)
        uncached_tokens = invocation.prompt_tokens - cached
        went_first = not replica.prefilling and replica.held < replica.max_running
        picture, age = self._replicas.picture, 0
        if cached:
            nodes = picture.cached_nodes(replica.id, invocation.prefix)
            age = picture.age_of(replica.id, invocation.prefix, nodes)
        sent_end_s = replica.prompt_sent(invocation, uncached_tokens, prompt_s)
        prompt_end_s = max(sent_end_s, start_s + prompt_s)
        self.by_id[id] = Lease(
            replica.id, running, command, uncached_tokens, prompt_s, prompt_end_s, age, went_first
        )
        replica.leases[id] = running
        self._backlog.stages.came(running)
        replica.wide += invocation.calls - 1
        if invocation.prefix and replica.has_prefix_cache:
            picture.use(replica.id, invocation.session, invocation.prefix)
        if invocation.session:
            context_tokens = invocation.prompt_tokens + invocation.expected_tokens
            self._replicas.homes.note(invocation.session, replica.id, context_tokens, now_s)
        self._replicas.touch(replica)

    def release(self, id: InvocationId, output_tokens: int = 0) -> list[Replica]:
        """End a lease; return its replica if that is still known.

        `output_tokens` as far as the caller knows: the tenant is charged for the tokens it
        received.
        """
        lease = self.by_id.pop(id, None)
        if lease is None:
            return []
        served = lease.running.invocation
        self._backlog.stages.went(served)
        # The reported sum: its share of each answer was rounded up.
        known = max(0, lease.running.tokens * served.calls - (served.calls - 1))
        tokens = max(output_tokens, known)
        paid = served.expected_tokens * served.calls
        self._shares.charge(served.tenant, served.weight, 0, tokens - paid)
        replica = self._replicas.known.get(lease.replica_id)
        if replica is None:
            return []
        running = replica.leases.pop(id)
        replica.wide -= running.invocation.calls - 1
        if running.first_token_at_s is None:
            replica.prompt_done(lease.uncached_tokens, lease.prompt_s)
        replica.context_tokens -= running.context_tokens
        self._replicas.touch(replica)
        return [replica]

    def take_back(self, id: InvocationId) -> None:
        """End the lease of a call that is preempted.

        What it did does not count as done, as others will be preempted for those that are queued.
        """
        self._backlog.worked(-self.by_id[id].counted_s)
        self.release(id)

    def end(self, lease: Lease, event: InvocationEnded) -> list[Replica]:
        """Learn from a call's end, then release its lease."""
        invocation, replicas = lease.running.invocation, self._replicas
        replica = replicas.known.get(lease.replica_id)
        tokens = invocation.of_each(event.output_tokens)
        if event.outcome == "done" and self._backlog.policies.corrects:
            running = lease.running
            self.lengths.ended(invocation, tokens)
            if replica is not None:
                self._see_pace(replica, running, tokens, _step_s(replica, running, tokens))
                if invocation.session and invocation.arrived_at_s <= invocation.deadline_s < inf:
                    now_s = replicas.clock.now_s
                    is_lost = _is_late(running, tokens, now_s)
                    replica.pace.turns.add(1.0, now_s, is_lost=is_lost)
        if replica is not None:
            if event.outcome == "done":
                # However many tokens it had, all that was expected is done: lengths that are
                # believed wrongly make what is queued take less time or more, too.
                tokens = max(tokens, invocation.expected_tokens)
            self._backlog.worked(self._backlog.done_s(lease, tokens))
        if event.prompt_tokens is not None and invocation.session:
            nodes = len(invocation.prefix)
            replicas.homes.count(invocation.session, nodes, event.prompt_tokens)
        if event.cached_tokens is not None:
            estimated = invocation.prompt_tokens
            counted = event.prompt_tokens or estimated
            replicas.picture.correct(
                lease.replica_id,
                estimated - lease.uncached_tokens,
                lease.cache_age,
                event.cached_tokens * estimated / counted,
            )
        return self.release(invocation.id, event.output_tokens)

    # Invocations that a replica holds without a lease

    def reported(self, replica: Replica, held: frozenset[InvocationId]) -> None:
        """The replica reports all that it holds: end lost leases, adopt what is unknown."""
        for id, running in list(replica.leases.items()):
            if id not in held and self._replicas.clock.now_s - running.at_s > LEASE_GRACE_S:
                self.release(id)
        # Calls leased to another replica since then belong to that one.
        waiting = self._backlog.waiting
        unknown = frozenset(id for id in held if id not in self.by_id and id not in waiting)
        self._adopt(replica, unknown)

    def lose(self, replica: Replica) -> None:
        """End all leases of a replica that is not known any more."""
        for id in replica.leases:
            self.release(id)
        replica.leases.clear()
        replica.wide = 0
        self._adopt(replica, frozenset())

    def unadopt(self, id: InvocationId) -> list[Replica]:
        """Forget that replicas hold the invocation; returns them."""
        freed = sorted(self._adopters.pop(id, ()), key=BY_ID) if self._adopters else []
        for replica in freed:
            replica.adopted -= {id}
            self._replicas.touch(replica)
        return freed

    def _adopt(self, replica: Replica, ids: frozenset[InvocationId]) -> None:
        """Record `ids` as the replica's only invocations without a lease."""
        for id in replica.adopted - ids:
            self._adopters[id].remove(replica)
            if not self._adopters[id]:
                del self._adopters[id]
        for id in ids - replica.adopted:
            self._adopters.setdefault(id, []).append(replica)
        replica.adopted = ids

    # Progress

    def hear_cache(self, event: CacheChanged) -> None:
        """The replica's engine tells what happened to its KV blocks."""
        picture = self._replicas.picture
        picture.hear(event.replica_id, event.news)
        replica = self._replicas.known.get(event.replica_id)
        if event.news.cleared and replica is not None:  # its calls' prompts are computed again
            for running in replica.leases.values():
                call = running.invocation
                picture.use(replica.id, call.session, call.prefix)

    def see_first_token(self, lease: Lease) -> Replica:
        """The replica has sent the lease's first token."""
        replica = self._replicas.known[lease.replica_id]
        if lease.running.first_token_at_s is None:
            self._backlog.worked(self._backlog.done_s(lease, 1))
            self._see_tokens(replica, lease.running, 1)
            replica.changed()
        return replica

    def progress(self, replica: Replica, event: ReplicaProgressed) -> None:
        """The replica reports the tokens of its calls."""
        done_s = 0.0
        for id, reported in event.tokens:
            running = replica.leases.get(id)
            if running is None:
                continue
            tokens = running.invocation.of_each(reported)
            if tokens > running.tokens:
                done_s += self._backlog.done_s(self.by_id[id], tokens)
                self._see_tokens(replica, running, tokens)
        self._backlog.worked(done_s)
        replica.changed()

    def _see_tokens(self, replica: Replica, running: Running, tokens: int) -> None:
        now_s = self._replicas.clock.now_s
        step_s = _step_s(replica, running, tokens)
        if running.first_token_at_s is not None:
            if self._backlog.policies.corrects and self._see_pace(replica, running, tokens, step_s):
                step_s = _step_s(replica, running, tokens)
        else:
            running.first_token_at_s = now_s
            lease = self.by_id[running.invocation.id]
            # The call's last step also gave the other streams a token.
            replica.prompts_done_s += max(0.0, lease.prompt_s - replica.profile.step_base_s)
            if tokens == 1:
                _learn_delays(replica, lease, now_s)
            replica.prompt_done(lease.uncached_tokens, lease.prompt_s)
        replica.context_tokens += running.invocation.calls * (tokens - running.tokens)
        running.saw(tokens, now_s, step_s)
        self._backlog.stages.progressed(running)
        running.prompts_seen_s = replica.prompts_done_s

    def _see_pace(self, replica: Replica, running: Running, tokens: int, step_s: float) -> bool:
        """Compare the time since the last report with the prediction: True if the pace changes.

        `step_s`: a step's predicted time now. The tokens of several answers to one request say
        little of their steps, because some end before others.
        """
        if running.first_token_at_s is None or tokens <= running.tokens:
            return False
        if running.invocation.calls > 1:
            return False
        steps_s = (tokens - running.tokens) * (step_s + running.pace_step_s) / 2
        prompts_s = replica.prompts_done_s - running.prompts_seen_s
        if prompts_s > MOST_PROMPTS * steps_s:
            return False
        took_s = self._replicas.clock.now_s - running.seen_at_s
        slower = replica.pace.saw(took_s, steps_s + prompts_s)
        if slower == 1.0:
            return False
        for other in self._replicas.known.values():
            if other.pace is replica.pace:
                other.change_pace(slower)
        self._backlog.place_replica(replica)
        return True

    def check_invariants(self) -> None:
        """Assert that the replicas hold exactly these leases."""
        replicas = self._replicas.known.values()
        leased = {id: r.id for r in replicas for id in r.leases}
        assert leased == {id: lease.replica_id for id, lease in self.by_id.items()}
        assert not leased.keys() & self._backlog.waiting.keys(), "a call waits or has a lease"
        adopters = {(id, r.id) for r in replicas for id in r.adopted}
        assert adopters == {(id, r.id) for id, rs in self._adopters.items() for r in rs}


def _learn_delays(replica: Replica, lease: Lease, now_s: float) -> None:
    """From the first token of the lease, which has just come."""
    late_s = now_s - lease.prompt_end_s
    replica.first_late_s = learnt_late_s(replica.first_late_s, late_s)
    if lease.went_first:
        prompt_tokens = lease.running.invocation.prompt_tokens
        cached = prompt_tokens - lease.uncached_tokens
        predicted_s = replica.profile.first_token_s(prompt_tokens, _batch(replica), cached)
        delay_s = now_s - lease.running.at_s - predicted_s
        replica.dispatch_s = learnt_dispatch_s(replica.dispatch_s, delay_s)


def _step_s(replica: Replica, running: Running, tokens: int) -> float:
    """Predicted time of the engine's step after the call's token number `tokens`."""
    context_tokens = running.invocation.prompt_tokens + max(tokens, running.tokens)
    return replica.profile.decode_step_s(_batch(replica), context_tokens)


def _batch(replica: Replica) -> int:
    return min(replica.held, max(1, replica.max_running))


def _is_late(running: Running, tokens: int, now_s: float) -> bool:
    """Whether a call that ends now with so many tokens has missed its SLO."""
    call, first_s = running.invocation, running.first_token_at_s
    if first_s is None:
        first_s = now_s
    if call.until_first_token and first_s + call.downstream_s > call.deadline_s:
        return True
    return now_s > due_s(call, first_s, max(2, tokens))
