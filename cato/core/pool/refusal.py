"""Refusal: which calls a pool turns away, on arrival or while they wait, and why.

Reasons: the queue is full, the call cannot meet its SLO, or its client will have left.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from math import exp, inf
from operator import itemgetter

from cato.core.commands import Refuse
from cato.core.ids import InvocationId, PoolName
from cato.core.pool.backlog import Backlog
from cato.core.pool.patience import EVERY_S, LINED_UP_S, LateService, Line
from cato.core.pool.queue import Waiting
from cato.core.pool.refused_turns import RefusedTurns
from cato.core.pool.replicas import Replicas

MIN_RETRY_AFTER_S = 1.0
# Typical error of a predicted wait; admitted calls should still be in time.
WAIT_MARGIN = 1.15
# Time constant of the queue's observed drain rate; a shorter observation is not used.
DRAIN_MEMORY_S = 10.0
LEAST_DRAIN_S = 1.0


class Refusal:
    """Removes refused calls from the backlog. All times are those of the pool's events."""

    def __init__(self, pool: PoolName, backlog: Backlog, replicas: Replicas) -> None:
        self._pool = pool
        self._backlog = backlog
        self._waiting = backlog.waiting
        self._replicas = replicas
        self._accepting = replicas.accepting
        self._clock = replicas.clock
        self.refused = 0
        # How many calls left the queue for a replica while others waited, and how long some waited.
        self._drained = 0.0
        self._queueing_s = 0.0
        self._watched_at_s = 0.0
        # By the latest dispatch before their clients leave; some entries have left the queue since.
        self._leaving: list[tuple[float, int, Waiting]] = []
        self._late = LateService()
        self._late_line = Line()
        # The whole queue in order at that time, and the work that has joined since.
        self._line = Line()
        self._lined_up_at_s = -inf
        self._joined_s = 0.0
        self._judged_at_s = -inf
        self.turns = RefusedTurns()

    @property
    def may_be_due(self) -> bool:
        """Whether to check the time for clients that leave."""
        return bool(self._leaving)

    def joined(self, waiting: Waiting, now_s: float) -> None:
        """A call joined the queue."""
        if self._accepting:
            self._joined_s += waiting.load_s
        # A call with tokens was preempted or lost its replica: its client waits for the next one.
        begun = waiting.invocation.generated > 0
        from_s = now_s - waiting.waited_s if begun else waiting.invocation.arrived_at_s
        self.await_client(waiting, from_s)

    def dispatched(self, waiting: Waiting, others_wait: bool, now_s: float) -> None:
        """A queued call was sent to a replica."""
        if self._late_line and self._backlog.is_late(waiting, now_s):
            self._late.served(waiting.load_s)
        if others_wait:
            self._drained += 1.0

    def refuse(self, waiting: Waiting, reason: str) -> Refuse:
        """Remove it from the queue and refuse it."""
        self._backlog.remove(waiting)
        self.refused += 1
        self.turns.keep(waiting.invocation, self._clock.now_s)
        retry_after_s = MIN_RETRY_AFTER_S
        if self._accepting:
            retry_after_s = max(retry_after_s, self._backlog.load_s / len(self._accepting))
        return Refuse(waiting.invocation.id, reason, retry_after_s)

    def why_not_queued(self, waiting: Waiting, now_s: float) -> str:
        """Why a new call that found no room is refused; empty if it may wait."""
        if self._is_too_much(waiting.invocation.tenant):
            return (
                f"{len(self._waiting) - 1} invocations are queued, the limit of pool {self._pool!r}"
            )
        bound = self._backlog.policies.max_queued_tokens
        if bound is not None and self._backlog.prompt_tokens > bound and len(self._waiting) > 1:
            return f"prompts of {bound} tokens are queued, the limit of pool {self._pool!r}"
        if why_not := self._why_in_vain(waiting, now_s):
            return why_not
        if not self._backlog.policies.refuse_late or not self._may_be_shed(waiting):
            return ""
        late_s = now_s + WAIT_MARGIN * self._wait_s(waiting) + self._backlog.alone_s(waiting)
        late_s -= waiting.invocation.deadline_s
        return f"it would miss its SLO by {late_s:.2f} s" if late_s > 0 else ""

    def watch(self, now_s: float) -> None:
        """Time has passed; note whether calls were queued."""
        passed_s = max(0.0, now_s - self._watched_at_s)
        kept = exp(-passed_s / DRAIN_MEMORY_S)
        self._drained *= kept
        self._queueing_s *= kept
        if self._waiting:
            self._queueing_s += DRAIN_MEMORY_S * (1 - kept)
        self._watched_at_s = now_s

    def _may_be_shed(self, waiting: Waiting) -> bool:
        """Whether it has an SLO and no engine has started it; calls with some tokens continue."""
        invocation = waiting.invocation
        is_new = invocation.attempt == 1 and invocation.served_s == 0.0
        return is_new and invocation.deadline_s < inf and bool(self._replicas.profiles)

    def _wait_s(self, candidate: Waiting) -> float:
        """Expected queueing delay behind running calls and earlier deadlines.

        The profile's estimate or the observed drain rate, whichever is longer.
        """
        deadline_s = candidate.invocation.deadline_s
        before = [
            w.load_s
            for w in self._waiting.values()
            if w is not candidate and w.invocation.deadline_s <= deadline_s
        ]
        wait_s = sum(before) / len(self._accepting)
        if self._queueing_s >= LEAST_DRAIN_S and self._drained > 0:
            wait_s = max(wait_s, len(before) * self._queueing_s / self._drained)
        return wait_s + min((r.wait_s for r in self._accepting), default=0.0)

    # Clients leave

    def _why_in_vain(self, waiting: Waiting, now_s: float) -> str:
        """Why a new call would get no first token before its client leaves; empty if it would."""
        if waiting.latest_s == inf or waiting.invocation.served_s > 0.0 or not self._accepting:
            return ""
        # The pool is modelled as one fast replica.
        wait_s = 0.0 if self._replicas.open else self._accepting[0].wait_s
        if self._backlog.is_late(waiting, now_s):
            if self._late_line:
                wait_s += self._late_line.wait_s(self._backlog.order(waiting, now_s))
        elif self._backlog.load_s <= len(self._accepting) * (waiting.latest_s - now_s - wait_s):
            return ""  # calls ahead of it
        else:
            wait_s += self._line_now(now_s).wait_s(self._backlog.order(waiting, now_s))
            wait_s += max(0.0, self._joined_s - waiting.load_s) / len(self._accepting)
        return "" if now_s + wait_s <= waiting.latest_s else _in_vain(waiting, wait_s, now_s)

    def _line_now(self, now_s: float) -> Line:
        """The queue in order, as of a moment ago; `_joined_s` is the work that has joined since."""
        replicas = len(self._accepting)
        is_old = now_s >= self._lined_up_at_s + EVERY_S
        if is_old or self._joined_s > LINED_UP_S * replicas:
            self._lined_up_at_s, self._joined_s = now_s, 0.0
            self._backlog.refresh(self._backlog.queue, now_s)
            self._line = Line(float(replicas))
            # A call with an expired rank is at the end; it is as good as late.
            loads_s = [
                (self._backlog.order(w, now_s), w.load_s)
                for w in self._waiting.values()
                if not (w.rank is not None and w.rank.worsens and w.rank.until_s <= now_s)
            ]
            for order, load_s in sorted(loads_s):
                self._line.join(order, load_s)
        return self._line

    def impatient(self, now_s: float, spared: Collection[InvocationId] = ()) -> tuple[Refuse, ...]:
        """Refuse calls whose clients will leave before the first token.

        Calls in `spared` are refused only later, if they are queued then.
        """
        gone: list[Refuse] = []
        later = []
        while self._leaving and self._leaving[0][0] <= now_s:
            entry = heapq.heappop(self._leaving)
            waiting = entry[2]
            if self._waiting.get(waiting.invocation.id) is not waiting or waiting.latest_s > now_s:
                continue
            if not self._accepting and waiting.invocation.leaves_at_s == inf:
                # The duration of a start says nothing about the patience of clients.
                self.await_client(waiting, now_s)
                continue
            if waiting.invocation.id in spared:
                later.append(entry)
                continue
            gone.append(self.refuse(waiting, "the patience of its client is used up"))
        for entry in later:
            heapq.heappush(self._leaving, entry)
        if now_s >= self._judged_at_s + EVERY_S:
            self._judged_at_s = now_s
            gone += self._late_in_vain(now_s, spared)
            if len(self._leaving) > 2 * len(self._waiting) + 64:
                self._leaving = [
                    e for e in self._leaving if self._waiting.get(e[2].invocation.id) is e[2]
                ]
                heapq.heapify(self._leaving)
        return tuple(gone)

    def _late_in_vain(self, now_s: float, spared: Collection[InvocationId]) -> list[Refuse]:
        """Late calls, in order, that other late calls will delay beyond their clients' patience."""
        self._late.watch(now_s, have_waited=len(self._late_line) > 0)
        line = self._late_line = Line(self._late.speed(len(self._accepting)))
        if not self._accepting:
            return []
        backlog = self._backlog
        late = [
            (backlog.order(w, now_s), w)
            for w in self._waiting.values()
            if backlog.is_late(w, now_s)
        ]
        late.sort(key=itemgetter(0))
        gone: list[Refuse] = []
        for order, waiting in late:
            wait_s, invocation = line.wait_s(order), waiting.invocation
            may_stay = invocation.attempt > 1 or invocation.was_taken or invocation.served_s > 0.0
            may_stay |= invocation.id in spared
            if may_stay or now_s + wait_s <= waiting.latest_s:
                line.join(order, waiting.load_s)
            else:
                gone.append(self.refuse(waiting, _in_vain(waiting, wait_s, now_s)))
        return gone

    def await_client(self, waiting: Waiting, from_s: float) -> None:
        """Schedule the refusal of `waiting` for when its client leaves.

        The client's patience counts from `from_s`: its own word, or the policies' assumption, which
        is never shorter than its SLO. If nodes of the run were served meanwhile, the client had
        signs of life, and the policies' assumption counts.
        """
        invocation, assumed_s = waiting.invocation, self._backlog.policies.patience_s
        if assumed_s == inf:
            return
        if invocation.leaves_at_s < inf and invocation.served_s == 0.0:
            patience_s = invocation.leaves_at_s - invocation.arrived_at_s
        else:
            patience_s = max(assumed_s, invocation.deadline_s - invocation.arrived_at_s)
        if patience_s == inf:
            return
        waiting.leaves_at_s = waiting.latest_s = from_s + patience_s
        # a prompt that takes longer than its client's patience may still be tried
        if self._accepting:
            prompt_s = self._accepting[0].profile.first_token_s(invocation.prompt_tokens)
            waiting.latest_s -= min(prompt_s, patience_s / 2)
        heapq.heappush(self._leaving, (waiting.latest_s, next(self._backlog.versions), waiting))

    def hopeless(self, now_s: float) -> tuple[Refuse, ...]:
        """Refuse calls that would be late even if run now, alone: others need the slot more."""
        if not self._backlog.policies.refuse_late:
            return ()
        hopeless = [
            w
            for w in self._waiting.values()
            if self._may_be_shed(w) and now_s + self._backlog.alone_s(w) > w.invocation.deadline_s
        ]
        return tuple(self.refuse(w, "it can no longer meet its SLO") for w in hopeless)

    def _is_too_much(self, tenant: str) -> bool:
        """Whether the queue is full and `tenant` has used its share of it."""
        bound, shares = self._backlog.policies.max_queued, self._backlog.shares
        if len(self._waiting) <= bound or shares.tenants_waiting < 2:
            return len(self._waiting) > bound
        return shares.waiting(tenant) > bound / shares.tenants_waiting


def _in_vain(waiting: Waiting, wait_s: float, now_s: float) -> str:
    first_s = wait_s + waiting.leaves_at_s - waiting.latest_s
    left_s = waiting.leaves_at_s - now_s
    return f"its first token is expected in {first_s:.1f} s, its client leaves in {left_s:.1f} s"
