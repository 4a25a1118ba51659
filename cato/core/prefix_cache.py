"""KV blocks of one engine, and what of them later prompts can use, after vLLM's block pool.

A block holds `block_tokens` tokens of a sequence. Its content is named by a hash chained from the
beginning of the sequence, so that equal hashes mean equal beginnings. A block that no running
request holds keeps its content until the space is needed: the longest free goes first, of one
request its last blocks first. Partial blocks are never shared, and the last token of a prompt is
always computed, since the first token of the answer comes from it.

Host memory behind the cache takes what loses its place, and loses in turn what was longest unused.
A prompt whose blocks are there takes them back instead of computing them; the engine knows how long
that takes. Saving them costs nothing: transfers run beside the computation.

One thing is simpler than in vLLM: two requests that compute the same block at the same time share
it as soon as it is whole, where vLLM keeps both copies until they end. Hits are the same.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 16  # vLLM's default on a GPU
_HASH_BYTES = 8


def block_hashes(root: str, blocks: Iterable[bytes]) -> list[int]:
    """The chained hash of each block; `root` keeps apart what must not be shared."""
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

    `hashes` are those of its whole blocks as far as they are known; `cached_tokens` of its prompt
    were there when it came, `loaded_tokens` of these in host memory. Only `PrefixCache` changes it.
    """

    hashes: Sequence[int]
    cached_tokens: int
    reserved: int
    allocated: int
    filled: int
    loaded_tokens: int = 0


@dataclass(slots=True)
class PrefixCache:
    """The blocks of one engine, and those in host memory behind it (`host_tokens`; 0: it has none).

    Deterministic; every method costs what it touches.
    """

    capacity_tokens: int
    block_tokens: int = BLOCK_TOKENS
    host_tokens: int = 0
    # Whole blocks by hash: those of running requests with the number of holders, and free ones in
    # the order in which they lose their content.
    _held: dict[int, int] = field(default_factory=dict)
    _free: OrderedDict[int, None] = field(default_factory=OrderedDict)
    # Those in host memory, in the same order.
    _host: OrderedDict[int, None] = field(default_factory=OrderedDict)
    # Blocks of running requests beyond their whole ones: promised, and of these in use.
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
        """Blocks that running requests hold or have been promised."""
        return len(self._held) + self._promised

    @property
    def usage(self) -> float:
        """The fraction of the blocks that is held or promised."""
        return self.held_blocks / max(1, self.capacity_blocks)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def cached_tokens(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        """How many tokens of a prompt need not be computed now."""
        return self._hits(hashes, prompt_tokens) * self.block_tokens

    def admit(self, hashes: Sequence[int], prompt_tokens: int, tokens: int) -> Holding | None:
        """Hold what is cached of a prompt and promise blocks for `tokens` in all; None when there
        is no room for them."""
        hits = self._hits(hashes, prompt_tokens)
        reserved = self.blocks_for(tokens)
        free_hits = sum([hashes[i] in self._free for i in range(hits)])
        host_hits = 0
        if self._host:
            host_hits = sum([hashes[i] in self._host for i in range(hits)])
        if self.held_blocks + free_hits + host_hits + reserved - hits > self.capacity_blocks:
            return None
        for i in range(hits):
            self._hold(hashes[i])
        self._promised += reserved - hits
        if host_hits:
            self._make_room()
        loaded = host_hits * self.block_tokens
        return Holding(hashes, hits * self.block_tokens, reserved, hits, hits, loaded)

    def compute(self, holding: Holding, tokens: int) -> None:
        """From now on the first `tokens` tokens of a request are in its blocks."""
        allocated = max(holding.allocated, self.blocks_for(tokens))
        assert allocated <= holding.reserved, "more tokens than were promised"
        self._partial += allocated - holding.allocated
        holding.allocated = allocated
        self._make_room()
        whole = min(tokens // self.block_tokens, len(holding.hashes))
        for i in range(holding.filled, whole):
            self._hold(holding.hashes[i])
            self._promised -= 1
            self._partial -= 1
            holding.filled = i + 1

    def release(self, holding: Holding) -> None:
        """A request has ended; its whole blocks stay until their space is needed."""
        self._promised -= holding.reserved - holding.filled
        self._partial -= holding.allocated - holding.filled
        for i in reversed(range(holding.filled)):
            block = holding.hashes[i]
            holders = self._held[block] - 1
            if holders:
                self._held[block] = holders
            else:
                del self._held[block]
                self._free[block] = None
        holding.reserved = holding.allocated = holding.filled = 0

    def clear(self) -> None:
        """Forget what no running request holds."""
        self._free.clear()
        self._host.clear()

    def _hits(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        most = min(len(hashes), max(0, prompt_tokens - 1) // self.block_tokens)
        for i in range(most):
            block = hashes[i]
            if block not in self._held and block not in self._free and block not in self._host:
                return i
        return most

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._host.pop(block, None)
        self._held[block] = self._held.get(block, 0) + 1

    def _make_room(self) -> None:
        room = self.capacity_blocks - len(self._held) - self._partial
        while len(self._free) > room:
            block, _ = self._free.popitem(last=False)
            if self.host_tokens:
                self._host[block] = None
                self._host.move_to_end(block)
                if len(self._host) > self.host_tokens // self.block_tokens:
                    self._host.popitem(last=False)
