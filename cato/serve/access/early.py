"""Reads API keys directly from the store before the Profiler runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from cato.core.tenancy import Access
from cato.store import keyed
from cato.store.errors import StoreError
from cato.store.in_thread import with_store
from cato.store.keys import month_of
from cato.store.location import default_location, store_url

log = logging.getLogger("cato.access")


async def stored_access(args: Mapping[str, object], *, is_on_head_node: bool) -> Access | None:
    """All keys in the store of a deployment with the engines' `args`.

    None when this process may see another store than the Profiler, which opens files on the head
    node. A missing file is a store without keys; its key history may still say that there were any.
    """
    location = args.get("store") or default_location()
    try:
        url = store_url(str(location))
        if url.get_backend_name() == "sqlite":
            # Working directories differ between processes, so a relative path is ambiguous.
            path = Path(str(location)).expanduser()
            if not is_on_head_node or "://" in str(location) or not path.is_absolute():
                return None
            if not path.exists():
                return Access(history=keyed.history(url))
        month = month_of(time.time())
        return await with_store(str(location), lambda store: store.access(month))
    except StoreError as error:
        log.info("the API keys cannot be read yet: %s", error)
        return None
