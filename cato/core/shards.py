"""Router shards: which shard owns a replica, and which one gets a call.

A pool may have several routers that own disjoint replicas. Ingresses choose the shard of each call
from the loads that the shards report; the simulator uses the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import attrgetter
from zlib import crc32

from cato.core.ids import PoolName
from cato.core.orchestrator import PoolOrchestrator, PoolPicture
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.snapshot import PREFIX_BLOCK_TOKENS, Invocation
from cato.core.topology import Shards

# The unit of reported loads: a call of which nothing is known.
TYPICAL_PROMPT, TYPICAL_OUTPUT = 300, 64
# Differences between shards are evened out over this many reports, half a second: sooner, and
# their noise sends bursts to and fro.
HORIZON = 10
# What a shard got above or below its share is made up for later, up to this many calls.
MOST_CREDIT = 10.0
_OTHER_DIGITS, _GOLDEN = 1 << 20, 0.618034
_LEAST_S = 1e-9  # a profile may contain calls that take no time


@record
class ShardLoad:
    """A shard's report of its load, in seconds and counts.

    `replicas` take work and hold `held` calls. Its queue takes them `wait_s`. Another typical call
    adds `call_s` to that, and each call beside it on its replica slows it by `crowd_s`. `offered`
    counts the offers since the shard's start.
    """

    replicas: int = 0
    held: int = 0
    wait_s: float = 0.0
    call_s: float = 0.0
    crowd_s: float = 0.0
    offered: int = 0

    @property
    def lost_s(self) -> float:
        """Delay of a typical call there due to others."""
        return self.wait_s + self.held / max(1, self.replicas) * self.crowd_s

    @property
    def more_s(self) -> float:
        """By how much another call raises `lost_s`; positive."""
        return max(self.call_s, self.crowd_s / max(1, self.replicas), _LEAST_S)


NO_LOAD = ShardLoad()
_LOST_S: Callable[[ShardLoad], float] = attrgetter("lost_s")


def load_now(core: PoolOrchestrator) -> ShardLoad:
    """The load of the shard with the state `core`."""
    replicas = core.accepting
    if not replicas:
        return NO_LOAD
    profile, places = replicas[0].profile, max(1, replicas[0].max_running)
    typical = (TYPICAL_PROMPT, TYPICAL_OUTPUT)
    crowded_s = profile.service_s(*typical, places) - profile.service_s(*typical)
    share_s = profile.decode_step_s(places, sum(typical)) * TYPICAL_OUTPUT / places
    return ShardLoad(
        len(replicas),
        sum(r.held for r in replicas),
        core.backlog_s / len(replicas),
        (profile.prefill_s(TYPICAL_PROMPT) + share_s) / len(replicas),
        max(0.0, crowded_s / max(1, places - 1)),
    )


def shard_of(key: str, shards: Sequence[int]) -> int:
    """The home of `key` among `shards`; few keys move when the number of shards changes."""
    return max(shards, key=lambda shard: (crc32(f"{shard}:{key}".encode()), shard))


def draw_of(invocation: Invocation) -> float:
    """A number in [0, 1), independent of the draw that the shard's policies use."""
    return invocation.draw * _OTHER_DIGITS % 1.0


def homes_of(deployment: str, rank: int, shards: Shards) -> list[int]:
    """The shards that a replica may belong to, its home first.

    `rank` counts the replicas of its deployment from 0: all owners get equally many.
    """
    owners = shards.owners
    first = (crc32(deployment.encode()) + rank) % owners
    others = [(first + n) % owners for n in range(1, owners)]
    return [first, *range(owners, shards.count), *others]


def shares_of(loads: Sequence[ShardLoad], calls: int) -> list[float]:
    """The shares of the next `calls` calls that even out the delays of shards; they add up to 1.

    All ingresses choose by the same reports. If each took the best shard, they would all crowd it
    until the next report; with these shares together they fill the shards up to one level
    (Dahlin, 2000, "Interpreting Stale Load Information").
    """
    order = sorted(loads, key=_LOST_S)
    level_s, left, calls_per_s = order[0].lost_s, float(max(1, calls)), 0.0
    for load, next_s in zip(order, [*map(_LOST_S, order[1:]), inf], strict=True):
        calls_per_s += 1 / load.more_s
        rise_s = min(left / calls_per_s, next_s - level_s)
        level_s += rise_s
        left -= rise_s * calls_per_s
        if left <= 0:
            break
    taken = [max(0.0, level_s - load.lost_s) / load.more_s for load in loads]
    total = sum(taken)
    return [n / total for n in taken] if total > 0 else [1 / len(loads)] * len(loads)


class ShardChoice:
    """The shards of one pool as one ingress sees them. Deterministic: calls bring their draws."""

    def __init__(self, shards: int) -> None:
        self._shards = Shards(shards)
        self._loads = [NO_LOAD] * shards
        self._coming = [0] * shards  # offers in the shard's last interval between reports
        self._credit = [0.0] * shards  # calls that a shard is behind its share
        self._sent = 0  # calls since the last report
        self._shares: tuple[Sequence[int], list[float]] = ((), [])
        self._lasts = 0  # the shares hold for this many calls

    def resize(self, shards: Shards) -> None:
        """The pool now has these shards."""
        if shards == self._shards:
            return
        self._shards, count = shards, shards.count
        more = max(0, count - len(self._loads))
        self._loads = [*self._loads[:count], *[NO_LOAD] * more]
        self._coming = [*self._coming[:count], *[0] * more]
        self._credit = [0.0] * count
        self._lasts = 0

    def tell(self, shard: int, load: ShardLoad) -> None:
        """A report of the shard's load."""
        if shard < len(self._loads):
            self._coming[shard] = max(0, load.offered - self._loads[shard].offered)
            self._loads[shard] = load
            self._sent = self._lasts = 0

    def is_stranded(self, shard: int) -> bool:
        """Whether calls queued there wait in vain, because other shards own all replicas."""
        if shard < len(self._loads) and self._loads[shard].replicas:
            return False
        return any(load.replicas for load in self._loads)

    def choose(self, invocation: Invocation, shards: Sequence[int], profile: Profile) -> int:
        """The shard of a call among `shards`, the reachable ones.

        Each call goes to the shard that is most behind its share (`shares_of`): smoother than
        drawing. A call with a home goes there, unless it loses more time than moving costs.
        """
        having = [s for s in shards if self._loads[s].replicas]
        # Without any replica, calls wait where replicas will come first.
        having = having or [s for s in shards if s < self._shards.owners] or list(shards)
        if len(having) == 1:
            return having[0]
        key, moving_s = _home_of(invocation, profile)
        shard = self._next(having, draw_of(invocation))
        if key:
            home = shard_of(key, having)
            if self._loads[home].lost_s <= self._loads[shard].lost_s + moving_s:
                shard = home
        self._sent += 1
        self._credit[shard] = max(self._credit[shard] - 1.0, -MOST_CREDIT)
        return shard

    def _next(self, shards: Sequence[int], draw: float) -> int:
        """The shard that is most behind its share of the calls; `draw` decides between equals."""
        if self._sent >= self._lasts or self._shares[0] != shards:
            # More calls than the ingresses expected together: reckon with twice as many.
            calls = max(HORIZON * sum(self._coming[s] for s in shards), 2 * self._sent)
            self._shares = shards, shares_of([self._loads[s] for s in shards], calls)
            self._lasts = max(1, calls)
        credit = self._credit
        for shard, share in zip(shards, self._shares[1], strict=True):
            credit[shard] = min(credit[shard] + share, MOST_CREDIT)
        return max(shards, key=lambda s: (round(credit[s], 6), (draw + s * _GOLDEN) % 1.0))


def _home_of(invocation: Invocation, profile: Profile) -> tuple[str, float]:
    """The key of a call's home (empty: none), and the seconds that leaving its home costs."""
    if invocation.session:  # its prompt is computed again
        shared = min(invocation.prompt_tokens, invocation.shared_blocks * PREFIX_BLOCK_TOKENS)
        return f"s{invocation.session}", profile.prefill_s(shared) if shared else 0.0
    if invocation.buffer:  # an older run of the buffer is not superseded, and keeps a slot
        return f"b{invocation.buffer}", profile.typical_call_s / profile.max_running
    return "", 0.0


def merged(name: PoolName, pictures: Iterable[PoolPicture]) -> PoolPicture:
    """The combined state of the pool's shards. A replica that moves between two counts once."""
    pictures = sorted(pictures, key=lambda p: p.now_s)
    replicas = {r.id: r for p in pictures for r in p.replicas}
    return PoolPicture(
        name,
        pictures[-1].now_s if pictures else 0.0,
        sum(p.queued for p in pictures),
        sum(p.dispatched for p in pictures),
        sum(p.refused for p in pictures),
        tuple(replicas[id] for id in sorted(replicas)),
    )
