"""The picture of KV caches, and where sessions are at home."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.core.ids import ReplicaId
from cato.core.kv_events import NodeNews
from cato.core.pool.caches import CachePicture
from cato.core.pool.sessions import MEMORY_S, Homes
from cato.core.snapshot import PREFIX_BLOCK_TOKENS

A, B = ReplicaId("a"), ReplicaId("b")


def a_picture(nodes: int = 100) -> CachePicture:
    picture = CachePicture()
    for id in (A, B):
        picture.add(id, nodes * PREFIX_BLOCK_TOKENS)
    return picture


def a_prompt(nodes: int, name: int = 1) -> tuple[int, ...]:
    return tuple(range(1000 * name, 1000 * name + nodes))


def test_a_prompt_is_held_where_it_was_sent_as_far_as_it_is_the_same() -> None:
    picture = a_picture()
    picture.use(A, "s", a_prompt(10))
    picture.use(B, "t", (*a_prompt(4), 7, 8, 9))
    longer = (*a_prompt(10), 5, 6)
    assert picture.cached_nodes(A, longer) == 10
    assert picture.cached_nodes(B, longer) == 4
    assert picture.cached_nodes(ReplicaId("unknown"), longer) == 0


def test_the_prompt_used_longest_ago_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    picture = a_picture(nodes=20)
    for name in (1, 2, 3):
        picture.use(A, str(name), a_prompt(8, name))
    assert [picture.cached_nodes(A, a_prompt(8, n)) for n in (1, 2, 3)] == [4, 8, 8]
    picture.use(A, "1", a_prompt(8, 1))
    assert [picture.cached_nodes(A, a_prompt(8, n)) for n in (1, 2, 3)] == [8, 4, 8]


def test_a_shorter_cache_forgets_at_once_and_a_lost_replica_everything() -> None:
    picture = a_picture()
    picture.use(A, "s", a_prompt(50))
    picture.add(A, 20 * PREFIX_BLOCK_TOKENS)
    assert picture.cached_nodes(A, a_prompt(50)) == 20
    picture.remove(A)
    picture.add(A, 20 * PREFIX_BLOCK_TOKENS)
    assert picture.cached_nodes(A, a_prompt(50)) == 0


def test_a_report_of_less_than_was_believed_forgets_what_was_used_before() -> None:
    picture = a_picture()
    for name in (1, 2, 3):
        picture.use(A, str(name), a_prompt(20, name))
    second = a_prompt(20, 2)
    age = picture.age_of(A, second, 20)
    picture.use(A, "2", second)
    picture.correct(A, 20 * PREFIX_BLOCK_TOKENS, age, cached_tokens=0)
    assert picture.cached_nodes(A, a_prompt(20, 1)) == 0
    assert picture.cached_nodes(A, second) == 20  # it was computed again
    assert picture.cached_nodes(A, a_prompt(20, 3)) == 20


def test_a_report_of_one_engine_block_less_is_no_news() -> None:
    picture = a_picture()
    picture.use(A, "1", a_prompt(20, 1))
    picture.use(A, "2", a_prompt(20, 2))
    age = picture.age_of(A, a_prompt(20, 2), 20)
    picture.correct(A, 20 * PREFIX_BLOCK_TOKENS, age, 19 * PREFIX_BLOCK_TOKENS)
    assert picture.cached_nodes(A, a_prompt(20, 1)) == 20


def test_nodes_that_are_gone_are_not_held_and_come_back_with_the_next_prompt() -> None:
    picture = a_picture()
    picture.use(A, "s", a_prompt(10))
    picture.use(B, "s", a_prompt(10))
    picture.hear(A, NodeNews(gone=(a_prompt(10)[6], 5, a_prompt(10)[9])))
    assert picture.cached_nodes(A, a_prompt(10)) == 6
    assert picture.cached_nodes(B, a_prompt(10)) == 10
    picture.use(A, "s", a_prompt(12))
    assert picture.cached_nodes(A, a_prompt(12)) == 12


def test_a_cleared_cache_holds_what_is_told_afterwards() -> None:
    picture = a_picture()
    picture.use(A, "s", a_prompt(10))
    picture.hear(A, NodeNews(cleared=True, held=(a_prompt(4),)))
    assert picture.cached_nodes(A, a_prompt(10)) == 4
    picture.hear(ReplicaId("unknown"), NodeNews(gone=a_prompt(4), held=(a_prompt(4),)))
    assert picture.cached_nodes(A, a_prompt(10)) == 4


def test_the_picture_knows_what_lies_in_host_memory_until_it_is_used_or_gone() -> None:
    picture = a_picture()
    prompt = a_prompt(10)
    for id in (A, B):
        picture.use(id, "s", prompt)
    picture.hear(A, NodeNews(moved=prompt[7:]))
    assert (picture.cached_nodes(A, prompt), picture.host_nodes(A, prompt, 10)) == (10, 3)
    assert picture.host_nodes(B, prompt, 10) == 0
    assert picture.host_nodes(A, prompt, 8) == 1
    picture.hear(A, NodeNews(gone=prompt[9:]))
    assert (picture.cached_nodes(A, prompt), picture.host_nodes(A, prompt, 9)) == (9, 2)
    picture.use(A, "s", prompt)
    assert picture.host_nodes(A, prompt, 10) == 0
    picture.hear(A, NodeNews(moved=prompt[7:]))
    picture.remove(A)
    assert picture._in_host == {}


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 20)),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_news_in_any_order_leaves_books_that_agree(news: list[tuple[int, int, int, int]]) -> None:
    """Also news of nodes whose followers stay, which engines do not send in order."""
    picture = a_picture(nodes=15)
    for kind, shared, own, node in news:
        prefix = (*range(shared), *(1000 * shared + i for i in range(own)))
        match kind:
            case 0:
                picture.hear(A, NodeNews(gone=(node,)))
            case 1:
                picture.hear(A, NodeNews(moved=(node,)))
            case _:
                picture.use(A, "s" if kind == 2 else "", prefix)
                if len(prefix) <= 15:
                    assert picture.cached_nodes(A, prefix) == len(prefix)
        cache = picture._caches[A]
        runs = {id(run): run for run in cache.runs.values()}
        assert sorted(n for run in runs.values() for n in run.nodes) == sorted(cache.runs)
        assert len(cache.runs) <= (22 if cache.is_told else 15)
        assert picture._holders.keys() == cache.runs.keys() >= picture._in_host.keys()
        assert all(cache.touched.values())
        lasts = {run.last for run in runs.values()}
        assert lasts <= cache.touched.keys()


class _Naive:
    """Each node with the number of its last prompt; the oldest, deepest goes first."""

    def __init__(self, nodes: int) -> None:
        self.nodes, self.used, self.numbers = nodes, dict[int, tuple[int, int]](), count()

    def use(self, prefix: tuple[int, ...]) -> None:
        number = next(self.numbers)
        self.used |= {node: (number, -depth) for depth, node in enumerate(prefix)}
        while len(self.used) > self.nodes:
            del self.used[min(self.used, key=self.used.__getitem__)]

    def cached(self, prefix: tuple[int, ...]) -> int:
        return next((i for i, p in enumerate(prefix) if p not in self.used), len(prefix))


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9)),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_prompts_leave_what_least_recently_used_leaves(
    prompts: list[tuple[bool, int, int, int]],
) -> None:
    """Prompts branch off a common one, so that all share beginnings."""
    picture, naive = a_picture(nodes=15), {A: _Naive(15), B: _Naive(15)}
    for on_a, name, shared, own in prompts:
        id = A if on_a else B
        prefix = (*range(shared), *(100 * name + 1000 * shared + i for i in range(own)))
        for replica in (A, B):
            assert picture.cached_nodes(replica, prefix) == naive[replica].cached(prefix)
        picture.use(id, f"s{name}" if name > 1 else "", prefix)
        if prefix:
            naive[id].use(prefix)


def test_memory_is_bounded_by_capacity_however_many_prompts_there_are() -> None:
    picture = a_picture(nodes=50)
    for name in range(2000):
        picture.use(A, "", (1, 2, 3, name % 40 + 10))
        picture.use(A, f"s{name}", (1, 2, 3))
    cache = picture._caches[A]
    assert len(cache.runs) <= 50
    assert len(cache.touched) <= 2 * 50 + 65
    assert len(cache.by_session) <= 2 * len(cache.touched) + 65


def test_answers_do_not_correct_a_cache_of_which_the_engine_tells() -> None:
    picture = a_picture(nodes=20)
    older = a_prompt(8, 2)
    picture.use(A, "t", older)
    picture.use(A, "s", a_prompt(10))
    picture.hear(A, NodeNews(gone=a_prompt(10)[8:]))
    age = picture.age_of(A, a_prompt(8), 8)
    picture.correct(A, 8 * PREFIX_BLOCK_TOKENS, age, cached_tokens=0)
    assert picture.cached_nodes(A, a_prompt(10)) == 8
    assert picture.cached_nodes(A, older) == 8
    picture.use(A, "s", a_prompt(40))
    assert picture.cached_nodes(A, a_prompt(40)) == 30  # half more than the profile's 20
    picture.hear(A, NodeNews(cleared=True))
    picture.use(A, "s", a_prompt(40))
    assert picture.cached_nodes(A, a_prompt(40)) == 20


def test_tokens_between_two_prompts_of_a_session_are_those_that_engines_counted() -> None:
    homes = Homes()
    homes.note("s", A, 0, 0.0)
    homes.count("s", 10, 1050)
    homes.note("s", B, 0, 1.0)
    homes.count("s", 20, 2050)
    home = homes.of("s")
    assert home is not None
    assert home.tokens(5, 30, 3000) == pytest.approx(500)
    assert home.tokens(10, 30, 3000) == pytest.approx(1000)
    assert home.tokens(15, 30, 3000) == pytest.approx(1500)
    assert 2000 < home.tokens(25, 30, 3000) < 2500
    homes.count("s", 15, 1600)  # a shorter prompt: what came after it is forgotten
    home = homes.of("s")
    assert home is not None
    assert [nodes for nodes, _ in home.ends] == [10, 15]


def test_a_session_is_at_home_where_its_last_call_went() -> None:
    homes = Homes()
    homes.note("s", A, 1000, 0.0)
    homes.note("t", A, 500, 1.0)
    assert homes.working_set(A).tokens == 1500
    homes.note("s", B, 1200, 2.0)
    home = homes.of("s")
    assert home is not None
    assert home.replica_id == B
    assert (homes.working_set(A).tokens, homes.working_set(B).tokens) == (500, 1200)
    assert (homes.working_set(A).sessions, homes.working_set(B).sessions) == (1, 1)


def test_a_session_that_was_not_seen_for_long_has_no_home() -> None:
    homes = Homes()
    homes.note("old", A, 1000, 0.0)
    homes.note("new", A, 10, MEMORY_S)
    homes.forget_old(MEMORY_S + 1.0)
    assert (homes.of("old"), len(homes), homes.working_set(A).tokens) == (None, 1, 10)


@pytest.mark.parametrize("lost", [A, B])
def test_a_lost_replica_leaves_its_sessions_without_a_home(lost: ReplicaId) -> None:
    homes = Homes()
    homes.note("s", A, 1000, 0.0)
    homes.lose(lost)
    assert (homes.of("s") is None) == (lost == A)
    assert homes.working_set(lost).tokens == 0
