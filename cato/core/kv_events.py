"""What an engine tells about its KV blocks: the values of all engines, after vLLM's KV events.

A block is named by a hash chained from the start of its sequence, so equal hashes mean equal
prefixes.
"""

from __future__ import annotations

from enum import StrEnum

from cato.core.record import record


class KvTier(StrEnum):
    """Where KV blocks live."""

    ACCELERATOR = "accelerator"
    HOST = "host"


@record
class BlocksStored:
    """Consecutive blocks of `block_tokens` tokens hold what the engine computed.

    `parent` is the block before them (None: they begin a sequence). The request `call` computed
    them (empty: unknown).
    """

    hashes: tuple[int, ...]
    parent: int | None
    block_tokens: int
    call: str = ""


@record
class BlocksCopied:
    """The blocks are now in host memory, too."""

    hashes: tuple[int, ...]


@record
class BlocksRemoved:
    """The blocks left `tier`."""

    hashes: tuple[int, ...]
    tier: KvTier = KvTier.ACCELERATOR


@record
class BlocksCleared:
    """All blocks are gone, or some events were lost, so that none is known any more."""


KvEvent = BlocksStored | BlocksCopied | BlocksRemoved | BlocksCleared


@record
class NodeNews:
    """What the events mean for a router's picture, in nodes of prompts (`Invocation.prefix`).

    `cleared`: first of all, the whole cache is gone. `gone` nodes are in no tier, `moved` ones in
    host memory only. `held` prompts are in the cache, the least recently used first; a router that
    has just started is told all of them.
    """

    gone: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    held: tuple[tuple[int, ...], ...] = ()
    cleared: bool = False
