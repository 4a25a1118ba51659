"""The store, opened for one use by a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from cato.store.location import default_location
from cato.store.store import MetadataStore

T = TypeVar("T")


async def with_store(location: str | None, use: Callable[[MetadataStore], T]) -> T:
    """`use` of the store at `location` (None: the default's), in a thread; raise `StoreError`."""

    def open_and_use() -> T:
        with closing(MetadataStore.open(location or default_location())) as store:
            return use(store)

    return await asyncio.to_thread(open_and_use)
