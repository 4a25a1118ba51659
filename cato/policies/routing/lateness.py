"""Routing of session turns in CATO's default policy: least expected lateness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cato.core.decision import Hold, Route
from cato.core.pool.window import wait_for_prompts_s
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.due import step_beside_s

# Replicas count as if so many turns had been in time; late where even a single stream is too slow.
FIRST_TURNS = 3.0
LEAVES_ROOM = "late anyway: leaves the room to turns that can be in time"
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class LeastLateness:
    """The replica where the turn's first token is least late, including the cost of moving.

    A turn of an agent has 100,000 tokens, of which 1,000 are new. Where its context is cached this
    is a tenth of a second of work; elsewhere it is twelve seconds, which delay all others there.
    Cost, in seconds, is the sum of: expected lateness of the first token; that of the last one
    behind the target pace, and the same of the answers that run there, as each call makes steps
    longer; `move_s` and the recomputation when it leaves a warm cache; the excess of the replica's
    working set over its KV cache, as the part of a whole prefill that each later turn will pay for
    it; `spread_s_per_mtoken` of the working set, so that new sessions are spread; a little of the
    expected time; and `harm_weight` times its prefill time for each running answer that stands
    still meanwhile. Ties: most cached, then id.

    A replica without room may be the best: then the turn waits for it. Where engines fetch blocks
    from each other a move costs `fetch_move_s` and the time of the fetch.

    A turn that is late even at the best replica stays at home, unless that one is idle: to move
    would delay others and gain nothing. If it would be late even if it started now, and late turns
    have used their share of the pool's time, it waits: turns in time would be late because of it,
    and their followers too. So in an overload some sessions keep their pace and the others wait,
    where otherwise all would be late.

    Where accelerators differ, a new session goes by how turns went there lately, too: it stays, so
    the batch of the moment says little. Where a share q of them was late, 1 - q of its own will be
    in time, and it makes others late, `crowding` times q for each of those. So if fast accelerators
    begin to miss the pace, new sessions go to those that miss it anyway. `place_s`: cost of a place
    that gains nothing.
    """

    move_s: float = 1.0
    fetch_move_s: float = 0.2
    shortage_s: float = 1.0
    spread_s_per_mtoken: float = 0.5
    time_weight: float = 0.05
    harm_weight: float = 0.3
    place_s: float = 100.0
    crowding: float = 10.0
    # If work in time uses less of a pool than this, late turns delay nothing.
    least_in_time: float = 0.02

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        replicas = pool.accepting or pool.replicas
        if not replicas:
            return Hold("no replica has room")
        cached = [r.cached_tokens(invocation) for r in replicas]
        homes = [r.is_home(invocation) for r in replicas]
        is_new = not pool.is_uniform and not invocation.shared_blocks and not any(homes)
        turn = _Turn(invocation, max(cached), is_new)
        if self._leaves_room(turn, replicas, cached, pool):
            return Hold(LEAVES_ROOM)
        best, least, is_late = replicas[0], (inf, 0, ""), False
        home = None
        for replica, tokens, is_home in zip(replicas, cached, homes, strict=True):
            late_s, cost_s = self._cost_s(turn, replica, tokens, pool.now_s, is_home)
            if is_home or cost_s <= least[0]:
                cost_s += turn.slows_others_s(replica)
            if is_home:
                home = replica, cost_s
            if cost_s <= least[0]:
                key = (round(cost_s, 6), -tokens, str(replica.id))
                if key < least:
                    best, least, is_late = replica, key, late_s > 0
        reason = f"expected cost {least[0]:.2f} s, {-least[1]} of its prompt tokens cached"
        if home is not None and home[0] is not best:
            reason += f", {home[1]:.2f} s at home"
            if is_late and best.held:
                best = home[0]
                reason += ", late anyway"
        if replicas is pool.replicas or best in pool.replicas:
            return Route(best.id, reason)
        return Hold(f"waits for {best.id}: {reason}", best.id)

    def _leaves_room(
        self,
        turn: _Turn,
        replicas: Sequence[ReplicaView],
        cached: Sequence[int],
        pool: PoolSnapshot,
    ) -> bool:
        """Whether a turn that is late even if it starts now should wait."""
        if turn.invocation.deadline_s == inf or pool.late_share_s > 0:
            return False
        if pool.in_time < self.least_in_time:
            return False
        return all(
            pool.now_s + r.dispatch_s + turn.times_s(r.profile, tokens)[0] > turn.due_s(r)
            for r, tokens in zip(replicas, cached, strict=True)
        )

    def _cost_s(
        self, turn: _Turn, replica: ReplicaView, cached: int, now_s: float, is_home: bool
    ) -> tuple[float, float]:
        """Its expected lateness there, and the cost of sending it there."""
        profile, invocation = replica.profile, turn.invocation
        own_s, saved_s, whole_s = turn.times_s(profile, cached)
        held, capacity_tokens = replica.held, profile.kv_capacity_tokens
        first_s = wait_for_prompts_s(replica, own_s) + own_s
        first_s += replica.awaited_s + replica.dispatch_s
        if held >= replica.max_running:
            first_s += replica.wait_s
        if cached and replica.host_tokens:
            first_s += profile.host_load_token_s * replica.loaded_tokens(invocation)
        missing = replica.context_tokens + turn.context_tokens - capacity_tokens
        if missing > 0 and held:
            tokens = min(missing, invocation.prompt_tokens)
            first_s += self.shortage_s + profile.prefill_s(tokens)
        late_s = 0.0
        cost_s = self.time_weight * first_s + self.harm_weight * own_s * held
        if invocation.deadline_s == inf:
            cost_s += first_s
        else:
            late_s = max(0.0, now_s + first_s - turn.due_s(replica))
            cost_s += late_s + turn.behind_pace_s(replica)
            if turn.is_new:
                cost_s += self.place_s * (1.0 - self._gain(turn, replica))
        if cached < turn.most_cached:
            cost_s += own_s - saved_s
        working_set = replica.working_set_tokens
        if not is_home:
            working_set += turn.context_tokens
            if turn.most_cached:
                cost_s += self.fetch_move_s if profile.fetch_token_s else self.move_s
        excess = working_set - capacity_tokens
        if excess > 0:
            kept = min(excess, replica.host_tokens)
            load_s = kept * invocation.prompt_tokens * profile.host_load_token_s
            cost_s += (load_s + (excess - kept) * whole_s) / working_set
        return late_s, cost_s + self.spread_s_per_mtoken * working_set / _MILLION

    def _gain(self, turn: _Turn, replica: ReplicaView) -> float:
        """Turns in time for each turn of its session there, less those of others made late."""
        in_time, late = replica.turns
        alone_s = replica.profile.decode_step_s(1, turn.context_tokens)
        too_slow = alone_s > turn.invocation.tpot_target_s
        late += FIRST_TURNS * too_slow
        share = late / (in_time + late + FIRST_TURNS * (not too_slow))
        return (1.0 - share) * (1.0 - self.crowding * share)


class _Turn:
    """An invocation and its prompt's times, cached because most replicas are alike. `is_new`: the
    first turn of its session, in a pool of several kinds of replicas."""

    __slots__ = ("_times_s", "context_tokens", "invocation", "is_new", "most_cached")

    def __init__(self, invocation: Invocation, most_cached: int, is_new: bool) -> None:
        self.invocation = invocation
        self.most_cached = most_cached
        self.is_new = is_new
        self.context_tokens = invocation.prompt_tokens + invocation.expected_tokens
        # By profile: prefill time of the whole prompt, and with a number of its tokens cached.
        self._times_s: dict[int, tuple[float, dict[int, float]]] = {}

    def due_s(self, replica: ReplicaView) -> float:
        """The latest time of its first token there; of an answer that is due as a whole, the time
        that leaves enough for the rest and for the downstream time."""
        invocation = self.invocation
        if invocation.until_first_token:
            return invocation.deadline_s
        step_s = replica.profile.decode_step_s(
            replica.batch, self.context_tokens - invocation.expected_tokens / 2
        )
        rest_s = (invocation.expected_tokens - 1) * step_s + invocation.downstream_s
        return invocation.deadline_s - rest_s

    def behind_pace_s(self, replica: ReplicaView) -> float:
        """How much later than its target pace its last token is expected, once it has begun."""
        invocation = self.invocation
        if invocation.tpot_target_s == inf:
            return 0.0
        late_s = step_beside_s(invocation, replica) - invocation.tpot_target_s
        return max(0.0, (invocation.expected_tokens - 1) * late_s)

    def slows_others_s(self, replica: ReplicaView) -> float:
        """How much later than their target pace the answers that run there are expected beside it,
        in total."""
        paced = [r for r in replica.running if r.invocation.tpot_target_s < inf]
        if not paced:
            return 0.0
        step_s = step_beside_s(self.invocation, replica)
        return sum(max(0.0, step_s - r.invocation.tpot_target_s) * r.left_tokens for r in paced)

    def times_s(self, profile: Profile, cached: int) -> tuple[float, float, float]:
        """Prefill times of its prompt.

        With the tokens cached here (and the rest of the most cached fetched, if the engine can),
        with the most that any replica has, and with none.
        """
        tokens, most = self.invocation.prompt_tokens, self.most_cached
        known = self._times_s.get(id(profile))
        if known is None:
            whole_s = profile.prefill_s(tokens)
            by_cached = {} if most and profile.fetch_token_s else {0: whole_s}
            if most:
                by_cached[most] = profile.prefill_s(tokens, 1, most)
            known = self._times_s[id(profile)] = whole_s, by_cached
        whole_s, by_cached = known
        own_s = by_cached.get(cached)
        if own_s is None:
            usable = most if profile.fetch_token_s else cached
            own_s = by_cached[cached] = profile.prompt_s(tokens, cached, usable)
        return own_s, by_cached[most], whole_s


LEAST_LATENESS = LeastLateness()
