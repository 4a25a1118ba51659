"""Order, cycles and ancestors of random graphs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cato.workflows import graph

FEWER = settings(max_examples=50)  # small graphs: most of what can differ is soon drawn

Needs = dict[str, list[str]]


@st.composite
def dags(draw: st.DrawFn) -> Needs:
    """Nodes in any order, each needing some of those before it in a hidden one."""
    hidden = [f"n{i}" for i in range(draw(st.integers(0, 7)))]
    needs = {
        id: draw(st.lists(st.sampled_from(hidden[:i]), unique=True)) if i else []
        for i, id in enumerate(hidden)
    }
    return {id: needs[id] for id in draw(st.permutations(hidden))}


@st.composite
def graphs(draw: st.DrawFn) -> Needs:
    ids = [f"n{i}" for i in range(draw(st.integers(0, 8)))]
    some = st.lists(st.sampled_from(ids), unique=True, max_size=3) if ids else st.just([])
    return {id: draw(some) for id in ids}


@FEWER
@given(dags())
def test_every_node_comes_after_what_it_needs(needs: Needs) -> None:
    order = graph.topological_order(needs)
    assert sorted(order) == sorted(needs)
    assert all(order.index(n) < order.index(id) for id in needs for n in needs[id])
    assert graph.cycles(needs) == []


@FEWER
@given(st.lists(st.integers(0, 99).map(str), unique=True))
def test_nodes_without_needs_keep_the_order_of_the_file(ids: list[str]) -> None:
    assert graph.topological_order({id: [] for id in ids}) == ids


@FEWER
@given(dags())
def test_an_order_that_is_already_right_is_kept(needs: Needs) -> None:
    order = graph.topological_order(needs)
    assert graph.topological_order({id: needs[id] for id in order}) == order


@FEWER
@given(graphs())
def test_a_graph_has_an_order_or_a_cycle_that_is_really_one(needs: Needs) -> None:
    cycles = graph.cycles(needs)
    assert bool(cycles) == (len(graph.topological_order(needs)) < len(needs))
    for cycle in cycles:
        for id, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert after in needs[id]


@FEWER
@given(graphs())
def test_only_members_of_cycles_are_their_own_ancestors(needs: Needs) -> None:
    ancestors = graph.ancestors(needs)
    own = {id for id in needs if id in ancestors[id]}
    assert {id for cycle in graph.cycles(needs) for id in cycle} <= own
    assert bool(own) == bool(graph.cycles(needs))
    for id in needs:
        for need in needs[id]:
            assert {need, *ancestors[need]} <= ancestors[id]


def test_depth_counts_the_nodes_of_the_longest_chain() -> None:
    assert graph.depth({}) == 0
    assert graph.depth({"c": ["a", "b"], "b": ["a"], "a": []}) == 3
