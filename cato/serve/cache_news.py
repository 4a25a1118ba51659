"""Tells a replica's router what happened to the KV cache of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from cato.control.messages import Told
from cato.core.block_map import BlockMap, most_copies_of
from cato.core.events import CacheChanged
from cato.core.ids import ReplicaId
from cato.core.kv_events import BlocksCleared, KvEvent, NodeNews
from cato.engines.base import Engine, EngineRequest

# Events of several steps share a message. An ended call's last events come within this time, too.
NEWS_EVERY_S = 0.25


class CacheNews:
    """Belongs to one asyncio loop."""

    def __init__(self, replica: ReplicaId, tell: Callable[[Told], None]) -> None:
        self._replica, self._tell_router = replica, tell
        self._map = BlockMap()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, engine: Engine | None) -> None:
        """From now on these are the blocks of `engine`; nothing is known of them."""
        self._map = blocks = BlockMap()
        if engine is not None:
            facts = engine.facts
            blocks.offloads = facts.host_bytes > 0
            blocks.most_copies = most_copies_of(facts.kv_capacity_tokens, facts.block_tokens)
            engine.watch_cache(partial(self._heard, blocks))

    def begin(self, request: EngineRequest) -> None:
        self._map.begin(request.id, request.prefix, request.prompt_tokens)

    def end(
        self, request: EngineRequest, prompt_tokens: int | None, cached_tokens: int | None
    ) -> None:
        """The request has ended, with the engine's counts if it reported them."""
        self._map.end(request.id, prompt_tokens, cached_tokens)
        self._schedule()

    def tell_whole(self) -> None:
        """Tell a router all that is in the cache, and that it knows of nothing else: it may have
        missed news on a link that has broken."""
        self._tell(NodeNews(cleared=True))
        for news in self._map.whole():
            self._tell(news)

    def _heard(self, blocks: BlockMap, event: KvEvent) -> None:
        blocks.heard(event)
        if blocks is not self._map:
            return
        if isinstance(event, BlocksCleared):  # must not cross with the calls that follow
            self._tell_news()
        else:
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is None and self._map.is_due:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(NEWS_EVERY_S, self._tell_news)

    def _tell_news(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        news = self._map.take()
        if news is not None:
            self._tell(news)
        self._schedule()

    def _tell(self, news: NodeNews) -> None:
        self._tell_router(CacheChanged(0.0, self._replica, news))
