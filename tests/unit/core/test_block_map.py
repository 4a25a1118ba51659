"""Which nodes of prompts an engine's blocks hold, and that routers' pictures follow the events."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from cato.core.block_map import COPIES_PER_BLOCK, MESSAGE_NODES, BlockMap, most_copies_of
from cato.core.ids import ReplicaId
from cato.core.kv_events import (
    BlocksCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    KvTier,
    NodeNews,
)
from cato.core.pool.caches import CachePicture
from cato.core.prefix_cache import PrefixCache
from cato.core.snapshot import PREFIX_BLOCK_TOKENS

A = ReplicaId("a")
SIZE = 128  # tokens per engine block: two nodes
ANSWER = 4  # nodes


def told(blocks: BlockMap) -> list[NodeNews]:
    """All news once the last events of ended calls are in."""
    return [news for _ in range(3) if (news := blocks.take()) is not None]


def gone(blocks: BlockMap) -> list[int]:
    return [node for news in told(blocks) for node in news.gone]


def a_map(*, nodes: int = 8, tokens: int = 8 * PREFIX_BLOCK_TOKENS) -> BlockMap:
    """One call with nodes 1, 2, ... stored in blocks 100, 101, ..., and ended."""
    blocks = BlockMap()
    serve(blocks, "first", tuple(range(1, nodes + 1)), tokens)
    assert gone(blocks) == []
    return blocks


def serve(
    blocks: BlockMap,
    call: str,
    prefix: tuple[int, ...],
    tokens: int,
    *,
    cached: int = 0,
    parent: int | None = None,
    first: int = 100,
) -> None:
    """The engine computes the whole blocks of a prompt after its `cached` tokens."""
    blocks.begin(call, prefix, tokens)
    hashes = tuple(range(first, first + (tokens - cached) // SIZE))
    if hashes:
        blocks.heard(BlocksStored(hashes, parent, SIZE, call))
    blocks.end(call, tokens, cached)


def test_a_removed_block_takes_its_nodes_and_a_second_copy_keeps_them() -> None:
    blocks = a_map()
    blocks.heard(BlocksRemoved((103,)))
    assert gone(blocks) == [7, 8]
    blocks.heard(BlocksStored((102,), 101, SIZE, "unknown"))  # computed twice at once
    blocks.heard(BlocksRemoved((102,)))
    assert gone(blocks) == []
    blocks.heard(BlocksRemoved((102,)))
    assert gone(blocks) == [5, 6]


def test_blocks_that_are_told_more_often_than_they_are_removed_do_not_stay_for_ever() -> None:
    blocks = BlockMap(most_copies=most_copies_of(8 * SIZE, SIZE))
    most, cleared = 0, 0
    for n in range(30):
        hashes = tuple(range(100 * n, 100 * n + 8))
        for call in (f"a{n}", f"b{n}"):
            blocks.begin(call, tuple(range(1000 * n, 1000 * n + 16)), 8 * SIZE)
            blocks.heard(BlocksStored(hashes, None, SIZE, call))
            blocks.end(call, 8 * SIZE, 0)
        blocks.heard(BlocksRemoved(hashes))
        cleared += sum(news.cleared for news in told(blocks))
        most = max(most, len(blocks._blocks))
    assert cleared
    assert most <= COPIES_PER_BLOCK * 8
    assert len(blocks._nodes) <= 2 * most


def test_a_cache_full_of_copies_is_believed() -> None:
    """Each hash may be the only one of its block, or one of two."""
    blocks = BlockMap(most_copies=most_copies_of(4 * SIZE, SIZE))
    for n in range(4):
        serve(blocks, f"call-{n}", (1, 2), SIZE)
    assert told(blocks) == []
    for n in range(50):
        blocks.heard(BlocksRemoved((100,)))
        serve(blocks, f"again-{n}", (1, 2), SIZE)
    blocks.heard(BlocksRemoved((100,) * 3))
    assert told(blocks) == []
    blocks.heard(BlocksRemoved((100,)))
    assert gone(blocks) == [1, 2]
    assert most_copies_of(0, 16) == most_copies_of(4096, 0) == float("inf")


def test_the_end_of_a_prompt_that_fills_no_block_is_not_in_the_cache() -> None:
    blocks = BlockMap()
    serve(blocks, "first", (1, 2, 3), 200)
    assert gone(blocks) == [3]


def test_a_prompt_that_was_cancelled_before_its_end_is_held_as_far_as_it_was_computed() -> None:
    blocks = BlockMap()
    blocks.begin("first", tuple(range(1, 9)), 512)
    blocks.heard(BlocksStored((100,), None, SIZE, "first"))
    blocks.end("first", None, None)
    assert gone(blocks) == [3, 4, 5, 6, 7, 8]


def test_blocks_that_are_told_shortly_after_the_end_of_their_call_count() -> None:
    blocks = BlockMap()
    blocks.begin("first", (1, 2, 3, 4), 256)
    blocks.heard(BlocksStored((100,), None, SIZE, "first"))
    blocks.end("first", 256, 0)
    assert blocks.take() is None
    blocks.heard(BlocksStored((101,), 100, SIZE, "first"))
    assert gone(blocks) == []
    blocks.heard(BlocksRemoved((101,)))
    assert gone(blocks) == [3, 4]


def test_a_block_that_left_before_the_end_of_its_call_was_known_holds_nothing() -> None:
    blocks = BlockMap()
    serve(blocks, "first", (1, 2, 3, 4), 256)
    blocks.heard(BlocksRemoved((101,)))
    assert gone(blocks) == [3, 4]


def test_nodes_between_two_counts_of_the_engine_lie_between_them() -> None:
    """The first prompt has 80 tokens per node, what the second one adds has 40."""
    blocks = BlockMap()
    serve(blocks, "first", (1, 2, 3, 4), 360)
    assert gone(blocks) == [4]
    longer = (1, 2, 3, 4, 5, 6, 7)
    serve(blocks, "second", longer, 420, cached=256, parent=101, first=102)
    assert gone(blocks) == [7]
    blocks.heard(BlocksRemoved((102,)))
    assert gone(blocks) == [4, 5, 6]


def test_nodes_of_a_running_call_are_told_when_it_ends_without_them() -> None:
    blocks = a_map()
    blocks.begin("again", tuple(range(1, 9)), 512)
    blocks.heard(BlocksRemoved((103, 102)))
    assert gone(blocks) == []
    blocks.heard(BlocksStored((102,), 101, SIZE, "again"))
    blocks.end("again", None, None)
    assert gone(blocks) == [7, 8]


def test_an_answers_blocks_hold_the_next_turns_nodes() -> None:
    """The first call's answer fills block 104, which the second prompt finds cached."""
    blocks = a_map()
    blocks.heard(BlocksStored((104,), 103, SIZE, "first"))
    second = tuple(range(1, 13))
    serve(blocks, "second", second, 768, cached=640, parent=104, first=105)
    assert gone(blocks) == []
    blocks.heard(BlocksRemoved((105, 104)))
    assert gone(blocks) == [9, 10, 11, 12]


def test_blocks_move_to_host_memory_and_leave_it() -> None:
    blocks = a_map()
    blocks.heard(BlocksCopied((102, 103)))
    blocks.heard(BlocksRemoved((103, 102)))
    assert told(blocks) == [NodeNews(moved=(5, 6, 7, 8))]
    blocks.heard(BlocksRemoved((103,), KvTier.HOST))
    assert gone(blocks) == [7, 8]
    blocks.heard(BlocksStored((102,), 101, SIZE, "other"))  # loaded again
    blocks.heard(BlocksRemoved((102,), KvTier.HOST))
    assert told(blocks) == []


def test_an_engine_that_does_not_tell_of_its_host_memory_has_moved_what_it_removes() -> None:
    blocks = BlockMap(offloads=True)
    serve(blocks, "first", (1, 2, 3, 4), 256)
    blocks.heard(BlocksRemoved((101,)))
    assert told(blocks) == [NodeNews(moved=(3, 4))]


def test_lost_events_clear_the_picture_and_later_blocks_that_follow_unknown_ones_say_nothing() -> (
    None
):
    blocks = a_map()
    blocks.heard(BlocksCleared())
    assert told(blocks) == [NodeNews(cleared=True)]
    longer = (*range(1, 9), 9, 10)
    serve(blocks, "second", longer, 640, cached=512, parent=103, first=104)
    blocks.heard(BlocksRemoved((104, 103)))
    assert told(blocks) == []


def test_an_engine_that_names_no_calls_is_not_believed_to_hold_nothing() -> None:
    blocks = BlockMap()
    blocks.begin("first", (1, 2), 128)
    blocks.heard(BlocksStored((100,), None, SIZE))
    blocks.end("first", 128, 0)
    assert told(blocks) == []


def test_a_new_router_is_told_the_longest_prompts_in_messages_of_bounded_size() -> None:
    blocks = a_map()
    serve(blocks, "second", (*range(1, 9), 9, 10), 640, cached=512, parent=103, first=104)
    serve(blocks, "other", (1, 2, 70, 71), 256, cached=128, parent=100, first=200)
    assert gone(blocks) == []
    assert list(blocks.whole()) == [NodeNews(held=((*range(1, 11),), (1, 2, 70, 71)))]
    blocks.heard(BlocksRemoved((104,)))
    assert next(blocks.whole()).held[0] == tuple(range(1, 9))
    for n in range(10):
        prefix = tuple(range(1000 * n + 100, 1000 * n + 1100))
        serve(blocks, f"long-{n}", prefix, 64_000, first=10_000 * (n + 1))
        told(blocks)
    sizes = [sum(map(len, news.held)) for news in blocks.whole()]
    assert len(sizes) > 1
    assert max(sizes) < MESSAGE_NODES + 1000


@pytest.mark.parametrize("host_nodes", [0, 60])
@pytest.mark.parametrize("seed", range(4))
def test_the_picture_of_sessions_is_right_for_every_turn_though_it_counts_no_answers(
    seed: int, host_nodes: int
) -> None:
    """Answers fill the engine's cache, too, so predictions alone expect too much of it."""
    told_right, predicted_right, turns = played(seed, host_nodes)
    assert told_right == turns
    assert predicted_right < 0.9 * turns


def played(seed: int, host_nodes: int) -> tuple[int, int, int]:
    """Right beliefs with and without events, and all turns, of sessions played at random."""
    random, size = Random(seed), PREFIX_BLOCK_TOKENS
    blocks = BlockMap()
    cache = PrefixCache(80 * size, size, host_nodes * size, blocks.heard)
    pictures = [CachePicture(), CachePicture()]
    for picture in pictures:
        picture.add(A, (80 + host_nodes) * size)
    sessions: list[list[int]] = [[s + 1, s + 101] for s in range(8)]
    right, turns = [0, 0], 0
    for n in range(300):
        session = random.choice(sessions)
        if len(session) > 40:
            session[2:] = []
        session += [10_000 + 10 * n, 10_001 + 10 * n]
        prefix, answer = tuple(session), [10_002 + 10 * n + i for i in range(ANSWER)]
        tokens = len(prefix) * size + 1
        known = [p.cached_nodes(A, prefix) for p in pictures]
        in_host = pictures[0].host_nodes(A, prefix, known[0])
        for picture in pictures:
            picture.use(A, "", prefix)
        blocks.begin(f"call-{n}", prefix, tokens)
        holding = cache.admit([*prefix, *answer], tokens, tokens + ANSWER * size, f"call-{n}")
        assert holding is not None
        cached = holding.cached_tokens
        turns += 1
        loaded = holding.loaded_tokens // size
        # Only the engine knows an answer before the next turn repeats it.
        is_right = [0 <= cached // size - nodes <= ANSWER for nodes in known]
        right[0] += is_right[0] and 0 <= loaded - in_host <= ANSWER
        right[1] += is_right[1]
        cache.compute(holding, tokens + ANSWER * size)
        cache.release(holding)
        blocks.end(f"call-{n}", tokens, cached)
        for news in told(blocks):
            pictures[0].hear(A, news)
        session += answer if random.random() < 0.5 else []
        check(pictures[0])
    fresh = CachePicture()
    fresh.add(A, (80 + host_nodes) * size)
    for news in blocks.whole():
        fresh.hear(A, news)
    for session in sessions:
        assert fresh.cached_nodes(A, session) == pictures[0].cached_nodes(A, session)
    return right[0], right[1], turns


def check(picture: CachePicture) -> None:
    """The picture's own books agree."""
    cache = picture._caches[A]
    nodes: Sequence[int] = [
        n for r in {id(r): r for r in cache.runs.values()}.values() for n in r.nodes
    ]
    assert sorted(nodes) == sorted(cache.runs)
    assert cache.runs.keys() == picture._holders.keys()
    assert picture._in_host.keys() <= picture._holders.keys()
    assert all(cache.touched.values())
