"""The KV blocks of an engine: what is shared, held, kept and lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cato.core.prefix_cache import Holding, PrefixCache, block_hashes

BLOCK = 4


def hashes_of(tokens: Sequence[int], root: str = "") -> list[int]:
    whole = len(tokens) // BLOCK * BLOCK
    return block_hashes(root, (bytes(tokens[i : i + BLOCK]) for i in range(0, whole, BLOCK)))


def a_cache(blocks: int) -> PrefixCache:
    return PrefixCache(blocks * BLOCK, BLOCK)


def run(cache: PrefixCache, tokens: Sequence[int]) -> int:
    """Serve a prompt to its end, without an answer; the tokens that were cached."""
    holding = cache.admit(hashes_of(tokens), len(tokens), len(tokens))
    assert holding is not None
    cache.compute(holding, len(tokens))
    cache.release(holding)
    return holding.cached_tokens


def test_the_same_prompt_again_is_cached_but_for_its_last_block() -> None:
    cache = a_cache(10)
    prompt = list(range(12))
    assert run(cache, prompt) == 0
    assert run(cache, prompt) == 8  # the last token is always computed, so its block is
    assert run(cache, [*prompt, 12]) == 12


def test_a_longer_prompt_shares_whole_blocks_of_its_beginning() -> None:
    cache = a_cache(10)
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert run(cache, [1, 2, 3, 4, 5, 6, 0, 0, 9]) == 4


def test_what_an_answer_added_is_cached_too() -> None:
    cache = a_cache(10)
    said = list(range(11))
    holding = cache.admit(hashes_of(said), 6, 11)
    assert holding is not None
    cache.compute(holding, 6)
    assert cache.cached_tokens(hashes_of(said), 11) == 4
    cache.compute(holding, 10)  # of the last token there are no keys and values yet
    cache.release(holding)
    assert cache.cached_tokens(hashes_of(said), 11) == 8


def test_roots_keep_equal_prompts_apart() -> None:
    cache = a_cache(10)
    run(cache, list(range(8)))
    assert cache.cached_tokens(hashes_of(range(8), "adapter"), 9) == 0


def test_the_longest_free_is_lost_first_and_of_one_prompt_its_end() -> None:
    cache = a_cache(6)
    first, second = [1] * 12, [2] * 12
    run(cache, first)
    run(cache, second)
    run(cache, [3] * 8)
    assert cache.cached_tokens(hashes_of(first), 13) == 4
    assert cache.cached_tokens(hashes_of(second), 13) == 12


def test_use_makes_a_prompt_young_again() -> None:
    cache = a_cache(6)
    first, second = [1] * 12, [2] * 12
    run(cache, first)
    run(cache, second)
    run(cache, first)
    run(cache, [3] * 8)
    assert cache.cached_tokens(hashes_of(first), 13) >= 8
    assert cache.cached_tokens(hashes_of(second), 13) == 4


def test_blocks_of_running_requests_are_not_given_to_others() -> None:
    cache = a_cache(4)
    prompt = [1] * 12
    holding = cache.admit(hashes_of(prompt), 12, 12)
    assert holding is not None
    cache.compute(holding, 12)
    assert cache.admit(hashes_of([2] * 8), 8, 8) is None
    shared = cache.admit(hashes_of(prompt), 12, 16)  # two shared, two of its own: one too many
    assert shared is None
    assert run(cache, [2] * 4) == 0
    assert cache.cached_tokens(hashes_of(prompt), 13) == 12


def test_free_content_is_lost_only_when_space_is_used_not_when_it_is_promised() -> None:
    cache = a_cache(4)
    run(cache, [1] * 12)
    holding = cache.admit((), 4, 16)
    assert holding is not None
    cache.compute(holding, 4)
    assert cache.cached_tokens(hashes_of([1] * 12), 13) == 12
    cache.compute(holding, 8)
    assert cache.cached_tokens(hashes_of([1] * 12), 13) == 8


def test_host_memory_keeps_what_the_cache_lost_until_it_is_full_itself() -> None:
    cache = PrefixCache(4 * BLOCK, BLOCK, host_tokens=4 * BLOCK)
    prompts = [[n] * 13 for n in range(3)]  # three whole blocks each
    for prompt in prompts:
        run(cache, prompt)
    holding = cache.admit(hashes_of(prompts[1]), 13, 13)
    assert holding is not None
    assert (holding.cached_tokens, holding.loaded_tokens) == (12, 12)
    cache.release(holding)
    assert cache.cached_tokens(hashes_of(prompts[0]), 13) < 12  # the oldest made room
    again = cache.admit(hashes_of(prompts[1]), 13, 13)
    assert again is not None
    assert (again.cached_tokens, again.loaded_tokens) == (12, 0)


@given(st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=8))
def test_with_room_for_all_hits_are_the_longest_common_beginnings(prompts: list[list[int]]) -> None:
    cache = a_cache(100)
    served: list[list[int]] = []
    for prompt in prompts:
        if not prompt:
            continue
        common = max((shared(prompt, other) for other in served), default=0)
        expected = min(common, len(prompt) - 1) // BLOCK * BLOCK
        assert run(cache, prompt) == expected
        served.append(prompt)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning, of whole blocks of both."""
    n = 0
    while n < min(len(one), len(other)) // BLOCK * BLOCK and one[n] == other[n]:
        n += 1
    return n


@dataclass(slots=True)
class PlainHolding:
    hashes: Sequence[int]
    cached_tokens: int
    reserved: int
    allocated: int
    filled: int
    loaded_tokens: int


@dataclass(slots=True)
class PlainCache:
    """The definition: block by block."""

    blocks: int
    host_blocks: int
    held: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    promised: int = 0
    partial: int = 0

    def hits(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        most = min(len(hashes), max(0, prompt_tokens - 1) // BLOCK)
        for i in range(most):
            if hashes[i] not in self.held and hashes[i] not in self.free + self.host:
                return i
        return most

    def admit(self, hashes: Sequence[int], prompt_tokens: int, tokens: int) -> PlainHolding | None:
        hits, reserved = self.hits(hashes, prompt_tokens), -(-tokens // BLOCK)
        unheld = sum(h not in self.held for h in hashes[:hits])
        loaded = sum(h in self.host for h in hashes[:hits]) * BLOCK
        if len(self.held) + self.promised + unheld + reserved - hits > self.blocks:
            return None
        for block in hashes[:hits]:
            self.hold(block)
        self.promised += reserved - hits
        self.make_room()
        return PlainHolding(hashes, hits * BLOCK, reserved, hits, hits, loaded)

    def compute(self, holding: PlainHolding, tokens: int) -> None:
        allocated = max(holding.allocated, -(-tokens // BLOCK))
        self.partial += allocated - holding.allocated
        holding.allocated = allocated
        self.make_room()
        whole = min(tokens // BLOCK, len(holding.hashes))
        for block in holding.hashes[holding.filled : whole]:
            self.hold(block)
            self.promised -= 1
            self.partial -= 1
        holding.filled = max(holding.filled, whole)

    def release(self, holding: PlainHolding) -> None:
        self.promised -= holding.reserved - holding.filled
        self.partial -= holding.allocated - holding.filled
        for block in reversed(holding.hashes[: holding.filled]):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                self.free.append(block)

    def hold(self, block: int) -> None:
        for line in (self.free, self.host):
            if block in line:
                line.remove(block)
        self.held[block] = self.held.get(block, 0) + 1

    def make_room(self) -> None:
        while len(self.held) + self.partial + len(self.free) > self.blocks:
            block = self.free.pop(0)
            if self.host_blocks:
                self.host = [*self.host, block][-self.host_blocks :]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class Blocks(RuleBasedStateMachine):
    """Requests come, compute, and end in any order: runs of blocks do as blocks alone would."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.plain = PrefixCache(8 * BLOCK, BLOCK), PlainCache(8, 0)
        # With its tokens and how many are computed.
        self.running: list[tuple[Holding, PlainHolding, list[int], int]] = []
        self.seen: list[list[int]] = []

    @initialize(host_blocks=st.sampled_from([0, 1, 3, 50]))
    def host(self, host_blocks: int) -> None:
        self.cache = PrefixCache(8 * BLOCK, BLOCK, host_tokens=host_blocks * BLOCK)
        self.plain = PlainCache(8, host_blocks)

    @rule(tokens=TOKENS, more=st.integers(0, 8))
    def admit(self, tokens: list[int], more: int) -> None:
        said = tokens + [0] * more
        self.seen.append(said)
        known = self.cache.cached_tokens(hashes_of(said), len(tokens))
        holding = self.cache.admit(hashes_of(said), len(tokens), len(said))
        plain = self.plain.admit(hashes_of(said), len(tokens), len(said))
        assert (holding is None) == (plain is None)
        if holding is None or plain is None:
            return
        assert holding.cached_tokens == plain.cached_tokens == known < len(tokens)
        assert holding.loaded_tokens == plain.loaded_tokens
        self.running.append((holding, plain, said, known))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.running) - 1))
        holding, plain, said, done = self.running[i]
        done = data.draw(st.integers(done, len(said)))
        self.cache.compute(holding, done)
        self.plain.compute(plain, done)
        self.running[i] = (holding, plain, said, done)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.running) - 1))
        holding, plain, _, _ = self.running.pop(i)
        self.cache.release(holding)
        self.plain.release(plain)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.plain.free, self.plain.host = [], []

    @invariant()
    def the_same_is_held_and_found(self) -> None:
        cache, plain = self.cache, self.plain
        assert cache.held_blocks == len(plain.held) + plain.promised <= cache.capacity_blocks
        for said in self.seen:
            hashes = hashes_of(said)
            found = cache.cached_tokens(hashes, len(said) + 1)
            assert found == plain.hits(hashes, len(said) + 1) * BLOCK

    @invariant()
    def what_a_running_request_has_computed_is_there(self) -> None:
        for holding, _, said, done in self.running:
            assert holding.filled == done // BLOCK
            assert self.cache.cached_tokens(hashes_of(said), done + 1) >= done // BLOCK * BLOCK


TestBlocks = Blocks.TestCase
