"""The store, opened for one use by a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cato.store.location import default_location
from cato.store.store import MetadataStore

T = TypeVar("T")


async def with_store(location: str | None, use: Callable[[MetadataStore], T]) -> T:
    """`use` of the store at `location` (None: the default's), in a thread; raise `StoreError`."""

    def open_and_use() -> T:
        store = MetadataStore.open(location or default_location())
        try:
            return use(store)
        finally:
            store.close()

    return await asyncio.to_thread(open_and_use)
