"""The KV blocks of an engine: what is shared, held, kept and lost."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class Blocks(RuleBasedStateMachine):
    """Requests come, compute, and end in any order; what the cache promises holds throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(8 * BLOCK, BLOCK, host_tokens=3 * BLOCK)
        self.running: list[tuple[Holding, list[int], int]] = []  # with its tokens and how many done

    @rule(tokens=TOKENS, more=st.integers(0, 8))
    def admit(self, tokens: list[int], more: int) -> None:
        said = tokens + [0] * more
        known = self.cache.cached_tokens(hashes_of(said), len(tokens))
        holding = self.cache.admit(hashes_of(said), len(tokens), len(said))
        if holding is None:
            assert self.running or self.cache.blocks_for(len(said)) > self.cache.capacity_blocks
            return
        assert holding.cached_tokens == known < len(tokens)
        assert known % BLOCK == 0
        self.running.append((holding, said, known))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.running) - 1))
        holding, said, done = self.running[i]
        done = data.draw(st.integers(done, len(said)))
        self.cache.compute(holding, done)
        self.running[i] = (holding, said, done)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        holding, said, done = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.cache.release(holding)
        assert self.cache.cached_tokens(hashes_of(said), done + 1) == done // BLOCK * BLOCK

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def blocks_are_never_more_than_there_are(self) -> None:
        cache = self.cache
        assert cache.held_blocks <= cache.capacity_blocks
        assert len(cache._held) + len(cache._free) + cache._partial <= cache.capacity_blocks
        assert 0 <= cache._partial <= cache._promised
        assert not cache._held.keys() & cache._free.keys()
        assert len(cache._host) <= 3
        assert not cache._host.keys() & (cache._held.keys() | cache._free.keys())

    @invariant()
    def holders_are_those_that_run(self) -> None:
        held: dict[int, int] = {}
        for holding, _, _ in self.running:
            for block in holding.hashes[: holding.filled]:
                held[block] = held.get(block, 0) + 1
        assert self.cache._held == held
        assert self.cache._promised == sum(h.reserved - h.filled for h, _, _ in self.running)

    @invariant()
    def what_a_running_request_has_computed_is_there(self) -> None:
        for holding, said, done in self.running:
            assert holding.filled == done // BLOCK
            assert self.cache.cached_tokens(hashes_of(said), done + 1) == done // BLOCK * BLOCK


TestBlocks = Blocks.TestCase
