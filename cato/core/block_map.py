"""Which part of a router's picture each KV block of an engine holds; kept by the replica.

An engine names its blocks by its own hashes of tokens. Routers know prompts as nodes: hashes of
their text in blocks of `PREFIX_BLOCK_TOKENS` tokens, counted or estimated. The replica knows both,
since each call brings its nodes and each stored block names its call. So it can tell the router
which nodes are gone, and the router needs no tokens.

A node is attached to the last block that it needs. When that block leaves, the node is gone; the
deeper nodes are gone already, because engines evict a prompt from its end.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import assert_never

from cato.core.kv_events import (
    BlocksCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvTier,
    NodeNews,
)
from cato.core.snapshot import node_tokens

# Nodes of all prompts that a new router is told, 8 bytes each: a cache of 1M tokens has 16,000, but
# prompts may share their beginnings.
MOST_TOLD_NODES = 65_536
# Nodes per message.
MESSAGE_NODES = 4_096
# Copies per block of the accelerator that are still plausible: engines can give the beginning of a
# block a hash of its own.
COPIES_PER_BLOCK = 2


def most_copies_of(capacity_tokens: int, block_tokens: int) -> float:
    """For a KV cache of this capacity; inf if its sizes are unknown (0)."""
    if not capacity_tokens or not block_tokens:
        return inf
    return COPIES_PER_BLOCK * (capacity_tokens // block_tokens)


@dataclass(slots=True, eq=False)
class _Block:
    """One block of the engine: its number in its sequence, and the nodes that need it last.

    `copies` on the accelerator: requests that compute the same block at once have one each.
    """

    parent: _Block | None
    depth: int
    copies: int = 1
    in_host: bool = False
    nodes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Call:
    """A running call, and the deepest block that it stored."""

    prefix: Sequence[int]
    prompt_tokens: int
    cached_tokens: int | None = None
    last: _Block | None = None
    # It stored blocks behind one that is not known.
    is_unclear: bool = False


@dataclass(slots=True, eq=False)
class BlockMap:
    """The blocks of one engine. Its capacity bounds the memory: 230 bytes a block of 16 tokens.

    `most_copies` is more than the engine's accelerator can hold (see `most_copies_of`).
    `offloads`: blocks that leave the accelerator go to host memory. Some engines do not tell what
    happens there; then the blocks count as moved, and the router predicts when they are gone.
    """

    offloads: bool = False
    most_copies: float = inf
    _block_tokens: int = 0
    _blocks: dict[int, _Block] = field(default_factory=dict)
    # Of all blocks.
    _copies: int = 0
    # By node: its end in tokens, and its last block.
    _nodes: dict[int, tuple[float, _Block]] = field(default_factory=dict)
    _calls: dict[str, _Call] = field(default_factory=dict)
    # Calls that ended before the last `take`, and since: their last events may still come.
    _ended: dict[str, _Call] = field(default_factory=dict)
    _ended_now: dict[str, _Call] = field(default_factory=dict)
    # Not told yet.
    _gone: set[int] = field(default_factory=set)
    _moved: set[int] = field(default_factory=set)
    _is_cleared: bool = False
    # The engine names the calls of its blocks, and tells what is in host memory.
    _names_calls: bool = False
    _tells_host: bool = False
    # Prompts by their last node, the least recently used first.
    _prompts: OrderedDict[int, array[int]] = field(default_factory=OrderedDict)
    _prompt_nodes: int = 0

    def begin(self, call: str, prefix: Sequence[int], prompt_tokens: int) -> None:
        """The engine gets a call with these nodes; `prompt_tokens` is an estimate."""
        self._calls[call] = _Call(prefix, prompt_tokens)

    def end(self, call: str, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """The call has ended; the engine's own counts, if it reported them."""
        ended = self._calls.pop(call, None)
        if ended is not None and ended.prefix:
            ended.prompt_tokens = prompt_tokens or ended.prompt_tokens
            ended.cached_tokens = cached_tokens
            self._ended_now[call] = ended

    def heard(self, event: KvEvent) -> None:
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksCopied(hashes):
                self._tells_host = True
                for block in self._known(hashes):
                    block.in_host = True
            case BlocksRemoved(hashes, tier):
                for hash in hashes:
                    self._leave(hash, tier)
            case BlocksCleared():
                self.clear()
            case _:
                assert_never(event)

    def clear(self) -> None:
        """Nothing is known of the engine's blocks."""
        self._blocks.clear()
        self._copies = 0
        self._nodes.clear()
        self._prompts.clear()
        self._prompt_nodes = 0
        self._gone.clear()
        self._moved.clear()
        self._ended.clear()
        self._ended_now.clear()
        for call in self._calls.values():
            call.last, call.is_unclear = None, True
        self._is_cleared = True

    @property
    def is_due(self) -> bool:
        """Whether `take` has something to do."""
        return bool(self._is_cleared or self._gone or self._moved or self._ended or self._ended_now)

    def take(self) -> NodeNews | None:
        """News for the router since the last call; None if there is none.

        Nodes of running calls are not told: they are in the cache when their prompt is computed.
        """
        for call in self._ended.values():
            self._settle(call)
        self._ended, self._ended_now = self._ended_now, {}
        held = [c.prefix for c in (*self._calls.values(), *self._ended.values())]
        gone = sorted(self._gone.difference(*held)) if self._gone else ()
        moved = sorted(self._moved.difference(*held)) if self._moved else ()
        news = NodeNews(tuple(gone), tuple(moved), cleared=self._is_cleared)
        self._gone.difference_update(gone)
        self._moved.clear()
        self._is_cleared = False
        return news if news != NodeNews() else None

    def whole(self) -> Iterator[NodeNews]:
        """All that is held, for a new router, in messages of about `MESSAGE_NODES` nodes."""
        held: list[tuple[int, ...]] = []
        for prefix in self._prompts.values():
            held.append(tuple(prefix[: self._known_nodes(prefix)]))
            if sum(map(len, held)) >= MESSAGE_NODES:
                yield NodeNews(held=tuple(held))
                held = []
        if any(held):
            yield NodeNews(held=tuple(held))

    def _known(self, hashes: Iterable[int]) -> Iterator[_Block]:
        return (block for h in hashes if (block := self._blocks.get(h)) is not None)

    def _store(self, event: BlocksStored) -> None:
        self._block_tokens = event.block_tokens
        self._names_calls = self._names_calls or bool(event.call)
        call = self._call(event.call)
        parent: _Block | None = None
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None:
                if call is not None:
                    call.is_unclear = True
                return
        depth = 0 if parent is None else parent.depth + 1
        for hash in event.hashes:
            block = self._blocks.get(hash)
            if block is None:
                block = self._blocks[hash] = _Block(parent, depth)
            else:
                block.copies += 1
                self._moved.difference_update(block.nodes)
            parent, depth = block, depth + 1
        self._copies += len(event.hashes)
        if self._copies > self.most_copies:
            self.clear()  # some were counted that are not there, and no event would remove them
            return
        if call is not None and parent is not None:
            is_deeper = call.last is None or call.last.depth < parent.depth
            call.last = parent if is_deeper else call.last

    def _call(self, name: str) -> _Call | None:
        """A call that runs or has just ended."""
        return self._calls.get(name) or self._ended_now.get(name) or self._ended.get(name)

    def _leave(self, hash: int, tier: KvTier) -> None:
        block = self._blocks.get(hash)
        if block is None:
            return
        if tier is KvTier.HOST:
            block.in_host = False
        elif block.copies:
            block.copies -= 1
            self._copies -= 1
        if block.copies:
            return
        if block.in_host:
            self._moved.update(block.nodes)
            return
        del self._blocks[hash]
        for node in block.nodes:
            self._nodes.pop(node, None)
        self._lost(block.nodes)

    def _lost(self, nodes: Sequence[int]) -> None:
        """Their block has left all tiers that the engine tells of."""
        if self.offloads and not self._tells_host:
            self._moved.update(nodes)
        else:
            self._gone.update(nodes)
            self._moved.difference_update(nodes)

    def _known_nodes(self, prefix: Sequence[int]) -> int:
        known = 0
        for node in prefix:
            if node not in self._nodes:
                break
            known += 1
        return known

    def _settle(self, call: _Call) -> None:
        """Attach the nodes of an ended call to the blocks that hold them; the others are gone."""
        if call.is_unclear or not self._names_calls or not self._block_tokens:
            return
        size, prefix, last = self._block_tokens, call.prefix, call.last
        known = self._known_nodes(prefix)
        before, fallback = self._nodes[prefix[known - 1]] if known else (0.0, None)
        held_tokens = max(call.cached_tokens or 0, 0 if last is None else (last.depth + 1) * size)
        tokens = node_tokens(call.prompt_tokens, len(prefix), known, before)
        kept, block = known, last
        ends = [before + (i + 1) * tokens for i in range(len(prefix) - known)]
        while kept < len(prefix) and ends[kept - known] <= held_tokens:
            kept += 1
        self._gone.update(islice(prefix, kept, None))
        for i in range(kept - 1, known - 1, -1):
            needs = int(ends[i - known] - 1) // size
            while block is not None and block.depth > needs:
                block = block.parent
            # The answer to an earlier call filled blocks that no event of this call names.
            found = block if block is not None and block.depth == needs else fallback
            if found is not None and not (found.copies or found.in_host):
                self._lost(prefix[i : i + 1])  # it left before the call's end was known
            elif found is not None:
                found.nodes += (prefix[i],)
                self._nodes[prefix[i]] = (ends[i - known], found)
                self._gone.discard(prefix[i])
        if kept:
            self._note_prompt(prefix, kept)

    def _note_prompt(self, prefix: Sequence[int], nodes: int) -> None:
        """It is the most recently used prompt, and covers those that it begins with."""
        for node in islice(prefix, nodes):
            covered = self._prompts.pop(node, None)
            self._prompt_nodes -= 0 if covered is None else len(covered)
        self._prompts[prefix[nodes - 1]] = array("Q", islice(prefix, nodes))
        self._prompt_nodes += nodes
        while self._prompt_nodes > MOST_TOLD_NODES and len(self._prompts) > 1:
            _, oldest = self._prompts.popitem(last=False)
            self._prompt_nodes -= len(oldest)
