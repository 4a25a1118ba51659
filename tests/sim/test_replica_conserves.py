"""An engine with a prefix cache loses no work, no batch slot and no block, whatever it is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import a_profile, prompt_blocks

from cato.core.ids import InvocationId
from cato.core.pool.prefill import CallTarget, DueDateRule
from cato.core.prefix_cache import PrefixCache
from cato.sim.replica import FactKind, Sequence, SimReplica

BLOCK, CAPACITY, PLACES = 16, 512, 3
PROFILE = replace(
    a_profile(prefill_s=0.01, token_s=0.01, prefill_token_s=0.001),
    kv_capacity_tokens=CAPACITY,
    host_load_token_s=1e-4,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """`family`: whose blocks the prompt begins with. `leaves_s`: when it is cancelled."""

    at_s: float
    prompt: int
    output: int
    family: int
    shared_blocks: int
    priority: int
    retain_s: float
    leaves_s: float

    def sequence(self, number: int) -> Sequence:
        blocks = prompt_blocks(number, self.prompt // BLOCK, self.family, self.shared_blocks)
        return Sequence(
            InvocationId(str(number)),
            self.prompt,
            self.output,
            self.priority,
            blocks=blocks,
            session=f"s{self.family}",
            retain_s=self.retain_s,
            target=CallTarget(0.5, 0.05),
        )


asked = st.builds(
    Asked,
    st.floats(0.0, 3.0),
    st.integers(1, 300),
    st.integers(1, 100),
    st.integers(0, 2),
    st.integers(0, 12),
    st.integers(0, 1),
    st.sampled_from([0.0, 0.0, 0.5]),
    st.sampled_from([math.inf, math.inf, 0.0, 0.3, 1.0]),
)


@dataclass(frozen=True, slots=True)
class Engine:
    chunk_tokens: int | None
    prompt_cap_tokens: int
    host_tokens: int
    has_rule: bool
    report_steps: int

    def replica(self) -> SimReplica:
        return SimReplica(
            PROFILE,
            PLACES,
            self.chunk_tokens,
            self.report_steps,
            cache=PrefixCache(CAPACITY, BLOCK, self.host_tokens),
            prompt_cap_tokens=self.prompt_cap_tokens,
            rule=DueDateRule(0.05) if self.has_rule and self.chunk_tokens else None,
        )


engines = st.builds(
    Engine,
    st.sampled_from([None, 32, 128]),
    st.sampled_from([0, 24]),
    st.sampled_from([0, 256, 4096]),
    st.booleans(),
    st.sampled_from([0, 4]),
)


def check(replica: SimReplica) -> None:
    """No slot, block or token is there twice, or less than not at all."""
    cache = replica.cache
    assert cache is not None
    running = [s for _, s in replica._loading]
    running += [*replica._prefilling, *replica._decoding.values()]
    assert len({s.id for s in running}) == len(running) <= PLACES
    assert 0 <= cache.held_blocks <= cache.capacity_blocks
    assert min(cache._held, cache._promised, cache._partial, cache._free.blocks) >= 0
    assert cache._held + cache._partial + cache._free.blocks <= cache.capacity_blocks
    assert 0 <= cache._host.blocks <= cache.host_tokens // BLOCK
    assert replica._context_tokens >= 0


@settings(max_examples=60, deadline=None)
@given(engines, st.lists(asked, min_size=1, max_size=12))
def test_every_request_ends_whole_or_leaves_and_gives_back_what_it_held(
    engine: Engine, calls: list[Asked]
) -> None:
    replica = engine.replica()
    orders: list[tuple[float, int, Sequence | None]] = []
    sequences = [call.sequence(n) for n, call in enumerate(calls)]
    for n, call in enumerate(calls):
        orders.append((call.at_s, n, sequences[n]))
        if call.leaves_s < math.inf:
            orders.append((call.at_s + call.leaves_s, n, None))
    orders.sort(key=lambda o: (o[0], o[2] is None))
    first_s: dict[str, float] = {}
    ended_s: dict[str, float] = {}
    left: set[str] = set()
    now_s = 0.0
    while orders or replica.wake_s < math.inf:
        if orders and orders[0][0] <= replica.wake_s:
            at_s, n, sequence = orders.pop(0)
            now_s = at_s
            if sequence is None:
                if str(n) not in ended_s:
                    left.add(str(n))
                    replica.cancel(now_s, InvocationId(str(n)))
            else:
                is_idle = replica.is_idle
                replica.submit(now_s, sequence)
                if is_idle:
                    replica.go_on(now_s)
        else:
            assert replica.wake_s >= now_s, "time goes back"
            now_s = replica.wake_s
            for kind, sequence in replica.wake(now_s)[0]:
                times = first_s if kind is FactKind.FIRST_TOKEN else ended_s
                assert sequence.id not in times, "told twice"
                assert sequence.id not in left, "told of a request that has left"
                times[sequence.id] = now_s
            replica.go_on(now_s)
        check(replica)
    assert set(ended_s) == {str(n) for n in range(len(calls))} - left
    for n, sequence in enumerate(sequences):
        if str(n) not in left:
            assert sequence.generated == sequence.output_tokens
            assert calls[n].at_s < first_s[str(n)] <= ended_s[str(n)]
            assert 0 <= sequence.cached_tokens < sequence.prompt_tokens
    assert replica.tokens_out == sum(s.generated for s in sequences)
    assert replica.held == 0
    assert replica.busy_s <= now_s
    for session in list(replica._retained):
        replica._release_of(session)
    assert replica.cache is not None
    assert replica.cache.held_blocks == 0
    assert replica._context_tokens == 0
