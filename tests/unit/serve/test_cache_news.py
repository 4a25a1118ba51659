"""What a router believes of its engines' KV caches, in a pool of simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random

from kits.builders import a_profile, an_invocation
from virtual_time_kit import VirtualLoop

from cato.control.messages import CODEC, Told
from cato.core.events import CacheChanged
from cato.core.ids import ModelName, ReplicaId
from cato.core.kv_events import BlocksRemoved, BlocksStored, NodeNews
from cato.core.pool.caches import CachePicture
from cato.core.prefix_cache import block_hashes
from cato.core.snapshot import PREFIX_BLOCK_TOKENS
from cato.core.topology import EngineSpec, ModelSpec
from cato.engines.base import Endpoint, EngineRequest
from cato.engines.simulated.engine import SimulatedEngine
from cato.lab.chaos.local_pools import LocalPool
from cato.serve.cache_news import CacheNews

PROFILE = replace(
    a_profile(prefill_s=0.001, token_s=0.001),
    chars_per_token=4.0,
    kv_capacity_tokens=4096,
    block_tokens=16,
    load_s=0.0,
)
NODE_CHARS = 4 * PREFIX_BLOCK_TOKENS
OUTPUT_TOKENS = 100


class Talk:
    """Sessions of a pool with one replica."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self._calls = 0

    async def ask(self, text: str, session: str = "") -> tuple[int, int]:
        """Believed and reported cached tokens of a prompt."""
        self._calls += 1
        tokens = PROFILE.count_tokens(text)
        nodes = len(text) // NODE_CHARS
        pieces = (text[i * NODE_CHARS : (i + 1) * NODE_CHARS].encode() for i in range(nodes))
        invocation = replace(
            an_invocation(f"i{self._calls}", prompt=tokens, tokens=OUTPUT_TOKENS),
            prefix=tuple(block_hashes("", pieces)),
            session=session,
            deadline_s=3600.0,
        )
        lease = await self.pool.lease(invocation)
        body = {"prompt": text, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        id = f"{invocation.id}.1"
        request = EngineRequest(
            id, Endpoint.COMPLETIONS, body, prompt_tokens=tokens, prefix=invocation.prefix
        )
        async for chunk in self.pool.stream(lease, request):
            reported = chunk.cached_tokens
        await asyncio.sleep(1.0)  # until the news is out
        return lease.cached_tokens, reported


async def test_an_engine_that_tells_of_more_blocks_than_it_has_is_believed_no_more() -> None:
    told: list[object] = []
    news = CacheNews(ReplicaId("r"), told.append)
    engine = SimulatedEngine(PROFILE, EngineSpec("simulated"))
    news.watch(engine)
    for _ in range(2 * PROFILE.kv_capacity_tokens // PROFILE.block_tokens):
        news._heard(news._map, BlocksStored((1,), None, 16))
    assert not news._map.is_due
    news._heard(news._map, BlocksStored((1,), None, 16))
    news._tell_news()
    assert told == [CacheChanged(0.0, ReplicaId("r"), NodeNews(cleared=True))]


async def test_a_router_that_missed_what_left_the_cache_is_told_by_the_next_link() -> None:
    """After a broken network the next link may begin before the router notices the end of the one
    before, so that it does not forget the replica."""
    id, size, is_linked = ReplicaId("r"), PREFIX_BLOCK_TOKENS, True
    picture, prefix = CachePicture(), (11, 12)
    picture.add(id, 100 * size)

    def tell(told: Told) -> None:
        assert isinstance(told, CacheChanged)
        if is_linked:
            picture.hear(id, told.news)

    news = CacheNews(id, tell)
    request = EngineRequest("c", Endpoint.COMPLETIONS, {}, prompt_tokens=2 * size, prefix=prefix)
    picture.use(id, "", prefix)
    news.begin(request)
    news._heard(news._map, BlocksStored((1, 2), None, size, "c"))
    news.end(request, 2 * size, 0)
    for _ in range(2):  # the last events of a call may come after its end
        news._tell_news()
    assert picture.cached_nodes(id, prefix) == 2
    is_linked = False
    news._heard(news._map, BlocksRemoved((2,)))
    news._tell_news()
    is_linked = True
    news.tell_whole()
    assert picture.cached_nodes(id, prefix) == 1


def in_virtual_time(play: Callable[[Talk], Awaitable[None]]) -> None:
    async def run() -> None:
        model = ModelSpec(ModelName("m"), "m", "qwen")
        pool = LocalPool(model, PROFILE, prefix_caching=True)
        await pool.start()
        try:
            await play(Talk(pool))
        finally:
            await pool.stop()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def a_text(name: str, nodes: int) -> str:
    return "".join(f"{name} {i}".ljust(NODE_CHARS, ".") for i in range(nodes)) + "end"


def test_evictions_that_predictions_do_not_expect_reach_the_router() -> None:
    """The answers take room that the router does not count."""

    async def play(talk: Talk) -> None:
        random = Random(0)
        texts = {f"s{i}": a_text(f"s{i}", 9) for i in range(7)}
        beliefs = []
        for _ in range(60):
            session = random.choice(sorted(texts))
            beliefs.append(await talk.ask(texts[session], session))
        assert {reported for _, reported in beliefs} > {0, 576}
        off = [reported - believed for believed, reported in beliefs]
        assert all(0 <= tokens < PREFIX_BLOCK_TOKENS for tokens in off), beliefs

    in_virtual_time(play)


def test_a_new_router_is_told_what_the_engine_holds() -> None:
    async def play(talk: Talk) -> None:
        first, second = a_text("first", 9), a_text("second", 9)
        await talk.ask(first)
        await talk.ask(second)
        talk.pool.restart_router()
        assert await talk.ask(first) == (576, 576)
        assert await talk.ask(second) == (576, 576)

    in_virtual_time(play)


def test_an_engine_that_starts_again_holds_nothing() -> None:
    async def play(talk: Talk) -> None:
        text = a_text("first", 9)
        (id,) = talk.pool.replicas
        await talk.ask(text)
        await talk.pool.crash(id)
        await talk.pool.revive(id)
        talk.pool.restart_router()
        assert await talk.ask(text) == (0, 0)
        assert await talk.ask(text) == (576, 576)

    in_virtual_time(play)


def test_links_carry_the_news() -> None:
    news = NodeNews((2**64 - 1, 2), (3,), ((4, 5), (6,)), cleared=True)
    event = CacheChanged(1.0, ReplicaId("r"), news)
    assert CODEC.unpack(CODEC.pack(event)) == event
