"""A turn sends its router only what is new in the session's prefix."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_profile, a_report, an_invocation

from cato.control.router import ReplicaRouter
from cato.core.errors import PrefixUnknownError
from cato.core.ids import PoolName
from cato.core.pool.prefixes import BLOCKS_OF_A_SESSION, SessionPrefixes, difference
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.serve.sessions import Hashing, SessionMemory


def a_call(prefix: tuple[int, ...], shared: int = 0, session: str = "s") -> Invocation:
    return replace(an_invocation("i"), prefix=prefix, shared_blocks=shared, session=session)


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), max_size=8))
def test_a_router_puts_together_what_the_ingress_took_apart(turns: list[list[str]]) -> None:
    memory, router = SessionMemory(), SessionPrefixes()
    for sections in turns:
        prompt = memory.read("s", [x * 40 for x in sections], Hashing(16, "m"), kind="k").prompt
        call = a_call(prompt.prefix, prompt.shared_blocks)
        rest, shared = difference(call)
        assert router.whole("s", shared, rest) == prompt.prefix


def test_a_router_that_was_restarted_or_knows_another_prompt_asks_for_all() -> None:
    fresh, other = SessionPrefixes(), SessionPrefixes()
    other.whole("s", 0, (7, 8, 9, 10))
    rest, shared = difference(a_call((1, 2, 3, 4, 5), shared=4))
    for router in (fresh, other):
        with pytest.raises(PrefixUnknownError):
            router.whole("s", shared, rest)
        assert router.whole("s", 0, (1, 2, 3, 4, 5)) == (1, 2, 3, 4, 5)
        assert router.whole("s", shared, rest) == (1, 2, 3, 4, 5)


def test_memory_is_bounded_and_the_oldest_session_goes_first() -> None:
    router = SessionPrefixes(most_blocks=2 * (5 + BLOCKS_OF_A_SESSION))
    for session in ("a", "b", "a", "c"):
        router.whole(session, 0, (1, 2, 3, 4))
    router.whole("a", 4, (4, 5))
    with pytest.raises(PrefixUnknownError):
        router.whole("b", 4, (4, 5))


def test_a_later_turn_of_a_long_session_is_a_short_message() -> None:
    memory = SessionMemory()
    sections = [f"{i} " + "word " * 1_750 for i in range(80)]  # 200,000 tokens
    hashing = Hashing(224, "m")
    first = memory.read("s", sections, hashing, kind="k").prompt
    second = memory.read("s", [*sections, "new " * 800], hashing, kind="k").prompt
    sizes = []
    for prompt in (first, second):
        call = a_call(prompt.prefix, prompt.shared_blocks)
        rest, _ = difference(call)
        sizes.append(len(pickle.dumps(rest, protocol=5)))
    assert len(first.prefix) > 3_000
    assert sizes[0] <= 30_000
    assert sizes[1] <= 2_000


async def test_the_router_gets_the_whole_prefix() -> None:
    router = ReplicaRouter(PoolName("p"), PoolPolicies(), a_profile())
    router.take(a_report("a", slots=4))
    await router.offer(a_call((1, 2, 3)))
    with pytest.raises(PrefixUnknownError):
        await router.offer(a_call((9, 10), session="t"), 2)
    rest, shared = difference(a_call((1, 2, 3, 4), shared=3))
    lease = await asyncio.wait_for(
        router.offer(replace(a_call(rest), id=an_invocation("j").id), shared), 5
    )
    assert lease.invocation_id == an_invocation("j").id
