"""Router shards: which shard owns a replica, and which one gets a call.

A pool may have several routers that own disjoint replicas. Ingresses choose the shard of each call
from the loads that the shards report; the simulator uses the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from cato.core.ids import PoolName
from cato.core.orchestrator import PoolOrchestrator, PoolPicture
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.snapshot import PREFIX_BLOCK_TOKENS, Invocation

# Prompts of one tenant begin alike; the common part is short.
TENANT_BLOCKS = 4
# The unit of reported loads: a call of which nothing is known.
TYPICAL_PROMPT, TYPICAL_OUTPUT = 300, 64
_DRAWS = 1 << 16


@record
class ShardLoad:
    """A shard's report of its load, in seconds and counts.

    `replicas` take work; they have `places` batch slots, of which `held` are taken. Its queue takes
    the replicas `wait_s`. Another typical call adds `call_s` to that, and each call beside it on
    its replica slows it by `crowd_s`.
    """

    replicas: int = 0
    places: int = 0
    held: int = 0
    wait_s: float = 0.0
    call_s: float = 0.0
    crowd_s: float = 0.0

    def lost_s(self, more: int) -> float:
        """Delay of a typical call there due to others, after `more` calls since this report."""
        replicas = max(1, self.replicas)
        queued = max(0, more - max(0, self.places - self.held))
        beside = min(self.places, self.held + more) / replicas
        return self.wait_s + queued * self.call_s + beside * self.crowd_s


NO_LOAD = ShardLoad()


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
        sum(r.max_running for r in replicas),
        sum(r.held for r in replicas),
        core.backlog_s / len(replicas),
        (profile.prefill_s(TYPICAL_PROMPT) + share_s) / len(replicas),
        max(0.0, crowded_s / max(1, places - 1)),
    )


def shard_of(key: str, shards: Sequence[int]) -> int:
    """The home of `key` among `shards`; few keys move when the number of shards changes."""
    return max(shards, key=lambda shard: (crc32(f"{shard}:{key}".encode()), shard))


def homes_of(deployment: str, rank: int, shards: int) -> list[int]:
    """The shards that a replica may belong to, its home first.

    `rank` counts the replicas of its deployment from 0: all shards get equally many.
    """
    first = (crc32(deployment.encode()) + rank) % shards
    return [(first + n) % shards for n in range(shards)]


class ShardChoice:
    """The shards of one pool as one ingress sees them. Deterministic: draws come from call ids."""

    def __init__(self, shards: int) -> None:
        self._loads = [NO_LOAD] * shards
        self._sent = [0] * shards  # calls since the shard last reported

    def resize(self, shards: int) -> None:
        """The pool now has this number of shards."""
        more = max(0, shards - len(self._loads))
        self._loads = [*self._loads[:shards], *[NO_LOAD] * more]
        self._sent = [*self._sent[:shards], *[0] * more]

    def tell(self, shard: int, load: ShardLoad) -> None:
        """A report of the shard's load."""
        if shard < len(self._loads):
            self._loads[shard], self._sent[shard] = load, 0

    def is_stranded(self, shard: int) -> bool:
        """Whether calls queued there wait in vain, because other shards own all replicas."""
        if shard < len(self._loads) and self._loads[shard].replicas:
            return False
        return any(load.replicas for load in self._loads)

    def choose(self, invocation: Invocation, shards: Sequence[int], profile: Profile) -> int:
        """The shard of a call among `shards`, the reachable ones.

        A call with a home stays there while that loses less time than moving would cost. Any other
        call goes to the better of two shards, drawn in proportion to their replicas.
        """
        having = [s for s in shards if self._loads[s].replicas] or list(shards)
        if len(having) == 1:
            return self._send(having[0])
        draw = crc32(invocation.id.encode())
        key, moving_s = _home_of(invocation, profile)
        if key:
            home = shard_of(key, having)
            other = self._drawn(draw % _DRAWS, [s for s in having if s != home])
            stays = self._lost_s(home) <= self._lost_s(other) + moving_s
            return self._send(home if stays else other)
        one = self._drawn(draw % _DRAWS, having)
        two = self._drawn(draw // _DRAWS, [s for s in having if s != one])
        return self._send(one if self._lost_s(one) <= self._lost_s(two) else two)

    def _send(self, shard: int) -> int:
        self._sent[shard] += 1
        return shard

    def _drawn(self, draw: int, shards: Sequence[int]) -> int:
        """Draw a shard by a number in [0, `_DRAWS`), in proportion to the shards' replicas."""
        total = sum(self._loads[s].replicas for s in shards)
        at = draw * (total or len(shards)) / _DRAWS
        for shard in shards[:-1]:
            at -= self._loads[shard].replicas if total else 1
            if at < 0:
                return shard
        return shards[-1]

    def _lost_s(self, shard: int) -> float:
        return self._loads[shard].lost_s(self._sent[shard])


def _home_of(invocation: Invocation, profile: Profile) -> tuple[str, float]:
    """The key of a call's home (empty: none), and the seconds that leaving its home costs."""
    if invocation.session:  # its prompt is computed again
        shared = min(invocation.prompt_tokens, invocation.shared_blocks * PREFIX_BLOCK_TOKENS)
        return f"s{invocation.session}", profile.prefill_s(shared) if shared else 0.0
    if invocation.buffer:  # an older run of the buffer is not superseded, and keeps a slot
        return f"b{invocation.buffer}", profile.typical_call_s / profile.max_running
    if invocation.tenant:
        shared = min(invocation.prompt_tokens, TENANT_BLOCKS * PREFIX_BLOCK_TOKENS)
        return f"t{invocation.tenant}", profile.prefill_s(shared)
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
