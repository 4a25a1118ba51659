"""Open the store for a single use by a coroutine of the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from cato.store.location import default_location
from cato.store.store import MetadataStore

T = TypeVar("T")


async def with_store(location: str | None, use: Callable[[MetadataStore], T]) -> T:
    """Run `use` on the store at `location` (None: the default) in a thread; raise `StoreError`."""

    def open_and_use() -> T:
        opened = MetadataStore.open(location or default_location(), sets_aside=True)
        with closing(opened) as store:
            return use(store)

    return await asyncio.to_thread(open_and_use)
