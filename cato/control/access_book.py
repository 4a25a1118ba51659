"""API keys and tenants as last read from the store, for all ingress replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

from cato.core.administration import Change
from cato.core.tenancy import Access, ApiKey, KeyHistory, Tenant
from cato.store import keyed
from cato.store.errors import StoreError
from cato.store.keys import month_of
from cato.store.location import store_url
from cato.store.store import MetadataStore
from cato.store.writer import StoreWriter

log = logging.getLogger("cato.profiler")

# Maximum age of the API keys handed to all ingress replicas.
ACCESS_AGE_S = 0.5


class AccessBook:
    """Keys stay known while the store at `location` cannot be read."""

    def __init__(self, writer: StoreWriter, location: str | Path) -> None:
        self._writer = writer
        self._location = location
        self._access: Access | None = None
        self._reading = asyncio.Lock()
        self._read_at_s = -ACCESS_AGE_S

    async def access(self) -> Access | None:
        """All keys, tenants and this month's spending; None if they could never be read."""
        async with self._reading:  # callers wait for the first read
            if time.monotonic() - self._read_at_s >= ACCESS_AGE_S:
                month = month_of(time.time())
                try:
                    known = self._access
                    self._access = await asyncio.to_thread(
                        self._writer.read, lambda s: _access_of(s, month, known)
                    )
                except StoreError as error:  # the writer has logged it
                    log.debug("API keys not refreshed: %s; known keys stay valid", error)
                    if self._access is None and await asyncio.to_thread(self._had_keys):
                        return Access(history=KeyHistory.KEYED)
                self._read_at_s = time.monotonic()
        return self._access

    async def administer(
        self, change: Change, by: str, within: str | None
    ) -> ApiKey | Tenant | None:
        """See `MetadataStore.administer`; raise `StoreError`. The next `access` sees the change."""
        async with self._reading:
            done: ApiKey | Tenant | None = await asyncio.to_thread(
                self._writer.read, lambda s: s.administer(change, by, within)
            )
            self._read_at_s = -ACCESS_AGE_S
        return done

    def _had_keys(self) -> bool:
        """Whether this host knows that a store it cannot read holds keys."""
        try:
            return keyed.history(store_url(self._location)) is KeyHistory.KEYED
        except StoreError:
            return False


def _access_of(store: MetadataStore, month: str, known: Access | None) -> Access:
    """The store's keys; if its files were lost, it is marked as keyed again."""
    access = store.access(month)
    if known is not None and known.needs_key and access.history is KeyHistory.NEVER:
        store.remember_keys()
        return replace(access, history=KeyHistory.KEYED)
    return access
