"""The prefix cache of one engine: its KV blocks and their reuse, modelled on vLLM's block pool.

A block holds `block_tokens` tokens of a sequence. Its name is a hash chained from the start of the
sequence, so equal hashes mean equal prefixes. A block without a running request keeps its content
until the space is needed: the least recently used goes first, and of one request its last blocks go
first. Partial blocks are never shared. The last token of a prompt is always computed, since it
produces the first token of the answer.

Host memory behind the cache takes evicted blocks and evicts the least recently used in turn. A
prompt whose blocks are there loads them instead of computing them; the engine knows how long that
takes. Saving them is free: transfers run beside the computation.

One simplification: two requests that compute the same block at the same time share it as soon as it
is complete. vLLM keeps both copies until they end. Hits are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cato.core.block_runs import Line, Run, matching
from cato.core.kv_events import (
    BlocksCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvTier,
)

BLOCK_TOKENS = 16  # vLLM's default on a GPU
_HASH_BYTES = 8


def block_hashes(root: str, blocks: Iterable[bytes]) -> list[int]:
    """The chained hash of each block; different `root`s never share blocks."""
    chain = hashlib.blake2b(root.encode("utf-8", "replace"), digest_size=_HASH_BYTES)
    found = []
    for block in blocks:
        chain.update(len(block).to_bytes(_HASH_BYTES))
        chain.update(block)
        found.append(int.from_bytes(chain.digest()))
    return found


@dataclass(eq=False, slots=True)
class Holding:
    """The blocks of one running request.

    `hashes` are those of its whole blocks as far as known; `cached_tokens` of its prompt were
    cached on arrival, `loaded_tokens` of these in host memory. Only `PrefixCache` mutates it.
    `call` names the request in events.
    """

    hashes: Sequence[int]
    cached_tokens: int
    reserved: int
    allocated: int
    filled: int
    loaded_tokens: int
    _last: Run
    call: str = ""


@dataclass(slots=True)
class PrefixCache:
    """The KV blocks of one engine, and those in the host's memory (`host_tokens`; 0: none).

    Deterministic. The cost of a method grows with the runs of blocks, not with the blocks.
    `tell`, if given, is called with the KV events that vLLM would send.
    """

    capacity_tokens: int
    block_tokens: int = BLOCK_TOKENS
    host_tokens: int = 0
    tell: Callable[[KvEvent], None] | None = None
    _root: Run = field(default_factory=lambda: Run([]))
    _free: Line = field(default_factory=Line)
    _host: Line = field(default_factory=Line)
    # Whole blocks of running requests; blocks promised to them beyond these; and the blocks in use.
    _held: int = 0
    _promised: int = 0
    _partial: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"a block has at least one token, not {self.block_tokens}")

    @property
    def capacity_blocks(self) -> int:
        return self.capacity_tokens // self.block_tokens

    @property
    def held_blocks(self) -> int:
        """Blocks that are held by or promised to running requests."""
        return self._held + self._promised

    @property
    def usage(self) -> float:
        """The fraction of blocks that is held or promised."""
        return self.held_blocks / max(1, self.capacity_blocks)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def cached_tokens(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        """How many tokens of a prompt need not be computed now."""
        return sum([n for _, n in self._hits(hashes, prompt_tokens)]) * self.block_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held by nor promised to a running request."""
        return self.capacity_blocks - self.held_blocks

    def needed_blocks(self, hashes: Sequence[int], prompt_tokens: int, tokens: int) -> int:
        """How many of the free blocks a prompt needs, for `tokens` tokens in total."""
        return self.blocks_for(tokens) - sum(
            [n for run, n in self._hits(hashes, prompt_tokens) if run.holders]
        )

    def admit(
        self, hashes: Sequence[int], prompt_tokens: int, tokens: int, call: str = ""
    ) -> Holding | None:
        """Hold a prompt's cached blocks and promise blocks for `tokens` tokens in total.

        None when there is no room for them.
        """
        found = self._hits(hashes, prompt_tokens)
        hits = sum([n for _, n in found])
        unheld = sum([n for run, n in found if not run.holders])
        from_host = 0
        if self._host.blocks:
            from_host = sum([n for run, n in found if run in self._host.runs])
        reserved = self.blocks_for(tokens)
        if unheld + reserved - hits > self.free_blocks:
            return None
        last = self._root
        for run, n in found:
            last = self._hold(run, n)
        self._promised += reserved - hits
        if from_host:
            self._make_room()
        size = self.block_tokens
        return Holding(hashes, hits * size, reserved, hits, hits, from_host * size, last, call)

    def compute(self, holding: Holding, tokens: int) -> None:
        """The first `tokens` tokens of a request are now in its blocks."""
        allocated = max(holding.allocated, self.blocks_for(tokens))
        assert allocated <= holding.reserved, "more tokens than were promised"
        self._partial += allocated - holding.allocated
        holding.allocated = allocated
        self._make_room()
        hashes, i = holding.hashes, holding.filled
        whole = min(tokens // self.block_tokens, len(hashes))
        if whole <= i:
            return
        self._promised -= whole - i
        self._partial -= whole - i
        holding.filled = whole
        while i < whole:
            last = holding._last
            child = last.children.get(hashes[i])
            if child is not None:  # another request has computed it
                n = matching(child.hashes, hashes, i, whole)
                holding._last = self._hold(child, n)
                i += n
                continue
            new = list(hashes[i:whole])
            self._held += len(new)
            self._tell_stored(hashes, i, whole, holding.call)
            if last.holders == 1 and not last.children:
                last.hashes += new
            else:
                holding._last = last.children[new[0]] = Run(new, last, {}, 1)
            return

    def release(self, holding: Holding) -> None:
        """A request has ended; its whole blocks stay until their space is needed."""
        self._promised -= holding.reserved - holding.filled
        self._partial -= holding.allocated - holding.filled
        run = holding._last
        while run.parent is not None:
            run.holders -= 1
            if not run.holders:
                self._held -= len(run.hashes)
                self._free.add(run)
            run = run.parent
        holding._last = self._root
        holding.reserved = holding.allocated = holding.filled = 0

    def retain(self, holding: Holding) -> None:
        """A request has ended; its whole blocks keep their content until `release`."""
        self._promised -= holding.reserved - holding.filled
        self._partial -= holding.allocated - holding.filled
        holding.reserved = holding.allocated = holding.filled

    def clear(self) -> None:
        """Drop all blocks that no running request holds."""
        for line in (self._free, self._host):
            for run in line.lost(0):
                run.forget()
        if self.tell is not None:
            self.tell(BlocksCleared())

    def _tell_stored(self, hashes: Sequence[int], start: int, end: int, call: str) -> None:
        if self.tell is not None:
            parent = hashes[start - 1] if start else None
            stored = tuple(hashes[start:end])
            self.tell(BlocksStored(stored, parent, self.block_tokens, call))

    def _tell_gone(self, run: Run, tier: KvTier) -> None:
        if self.tell is not None:  # from the end, as in vLLM
            self.tell(BlocksRemoved(tuple(reversed(run.hashes)), tier))

    def _hits(self, hashes: Sequence[int], prompt_tokens: int) -> list[tuple[Run, int]]:
        """The runs that match the start of a prompt, and how many blocks of each."""
        most = min(len(hashes), max(0, prompt_tokens - 1) // self.block_tokens)
        found: list[tuple[Run, int]] = []
        run, i = self._root, 0
        while i < most:
            child = run.children.get(hashes[i])
            if child is None:
                break
            n = matching(child.hashes, hashes, i, most)
            found.append((child, n))
            i += n
            if n < len(child.hashes):
                break
            run = child
        return found

    def _hold(self, run: Run, blocks: int) -> Run:
        """Hold the first `blocks` of the run for one more request; return them."""
        first = run.beginning(blocks)
        if not run.holders:
            line = self._free if run in self._free.runs else self._host
            line.blocks -= blocks
            if line is self._host and self.tell is not None:
                hashes, above = first.hashes, first.parent
                parent = above.hashes[-1] if above is not None and above.hashes else None
                self.tell(BlocksStored(tuple(hashes), parent, self.block_tokens))
                self._tell_gone(first, KvTier.HOST)
            if first is run:
                del line.runs[run]
            self._held += blocks
        first.holders += 1
        return first

    def _make_room(self) -> None:
        room = self.capacity_blocks - self._held - self._partial
        if self._free.blocks <= room:
            return
        most = self.host_tokens // self.block_tokens
        for run in self._free.lost(room):
            if most:
                self._host.add(run)
                if self.tell is not None:
                    self.tell(BlocksCopied(tuple(run.hashes)))
            self._tell_gone(run, KvTier.ACCELERATOR)
            if not most:
                run.forget()
        for run in self._host.lost(most):
            self._tell_gone(run, KvTier.HOST)
            run.forget()
