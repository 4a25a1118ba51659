"""The API keys before there is a Profiler to ask: from the store itself, where it can be read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from cato.core.tenancy import Access
from cato.store import keyed
from cato.store.errors import StoreError
from cato.store.in_thread import with_store
from cato.store.location import default_location, store_url

log = logging.getLogger("cato.access")


async def stored_access(args: Mapping[str, object], *, is_on_head_node: bool) -> Access | None:
    """All keys in the store that a deployment with the `args` of `engines` has.

    None when this process cannot say what the Profiler will: that one opens files on the head node.
    No file there is a store without keys; a deployment may have had some all the same.
    """
    location = args.get("store") or default_location()
    try:
        url = store_url(str(location))
        if url.get_backend_name() == "sqlite":
            # Two processes have different working folders, so that a relative path says nothing.
            path = Path(str(location)).expanduser()
            if not is_on_head_node or "://" in str(location) or not path.is_absolute():
                return None
            if not path.exists():
                return Access(history=keyed.history(url))
        month = datetime.now(UTC).strftime("%Y-%m")
        return await with_store(str(location), lambda store: store.access(month))
    except StoreError as error:
        log.info("the API keys cannot be read yet: %s", error)
        return None
