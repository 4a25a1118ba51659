"""Splitting an SLO over a DAG keeps to the slack, on every path, whatever the weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.core.budgets import longest_after, longest_before, split_slack

FEWER = settings(max_examples=50)  # small graphs: most of what can differ is soon drawn


@dataclass(frozen=True, slots=True)
class Dag:
    order: list[str]
    needs: dict[str, list[str]]
    weight_s: dict[str, float]

    def paths(self) -> list[list[str]]:
        """Every path from a node without needs to one that nothing needs."""
        ends: dict[str, list[list[str]]] = {}
        for node in self.order:
            before = [p for n in self.needs[node] if n in ends for p in ends[n]] or [[]]
            ends[node] = [[*p, node] for p in before]
        needed = {n for needs in self.needs.values() for n in needs}
        return [p for node in self.order if node not in needed for p in ends[node]]

    def length_s(self, path: list[str]) -> float:
        return sum(self.weight_s[n] for n in path)


@st.composite
def dags(draw: st.DrawFn) -> Dag:
    order = [f"n{i}" for i in range(draw(st.integers(1, 6)))]
    finished = ["finished"] * draw(st.integers(0, 1))
    needs = {
        node: draw(st.lists(st.sampled_from([*order[:i], *finished] or [""]), unique=True))
        for i, node in enumerate(order)
    }
    needs = {node: [n for n in ns if n] for node, ns in needs.items()}
    weights = st.one_of(st.just(0.0), st.sampled_from([0.5, 1.0, 5.0, 15.0]), st.floats(1e-3, 100))
    return Dag(order, needs, {node: draw(weights) for node in order})


totals_s = st.one_of(st.just(0.0), st.floats(0.01, 1000))


@FEWER
@given(dags(), totals_s)
def test_the_budgets_of_any_path_sum_to_at_most_the_slack(dag: Dag, total_s: float) -> None:
    budgets_s = split_slack(dag.order, dag.needs, dag.weight_s, total_s)
    assert all(b >= 0 for b in budgets_s.values())
    for path in dag.paths():
        assert sum(budgets_s[n] for n in path) <= total_s * (1 + 1e-9)


@FEWER
@given(dags(), totals_s)
def test_the_budgets_of_the_critical_path_sum_to_all_of_the_slack(dag: Dag, total_s: float) -> None:
    budgets_s = split_slack(dag.order, dag.needs, dag.weight_s, total_s)
    critical = max(dag.paths(), key=lambda path: (dag.length_s(path), len(path)))
    assert sum(budgets_s[n] for n in critical) == pytest.approx(total_s)


@FEWER
@given(dags(), totals_s)
def test_each_share_is_the_nodes_part_of_the_longest_path_through_it(
    dag: Dag, total_s: float
) -> None:
    budgets_s = split_slack(dag.order, dag.needs, dag.weight_s, total_s)
    paths = dag.paths()
    for node in dag.order:
        longest_s = max(dag.length_s(p) for p in paths if node in p)
        if longest_s > 0:
            assert budgets_s[node] == pytest.approx(total_s * dag.weight_s[node] / longest_s)


@FEWER
@given(dags())
def test_longest_paths_before_and_after_match_all_paths_tried(dag: Dag) -> None:
    before_s = longest_before(dag.order, dag.needs, dag.weight_s)
    after_s = longest_after(dag.order, dag.needs, dag.weight_s)
    paths = dag.paths()
    for node in dag.order:
        through = [p for p in paths if node in p]
        assert before_s[node] == pytest.approx(
            max(dag.length_s(p[: p.index(node)]) for p in through)
        )
        assert after_s[node] == pytest.approx(
            max(dag.length_s(p[p.index(node) + 1 :]) for p in through)
        )


@FEWER
@given(dags(), st.floats(1, 100), st.floats(0, 1))
def test_slack_that_the_first_node_leaves_is_all_carried_to_the_rest(
    dag: Dag, total_s: float, used: float
) -> None:
    first, rest = dag.order[0], dag.order[1:]
    spent_s = used * split_slack(dag.order, dag.needs, dag.weight_s, total_s)[first]
    again_s = split_slack(rest, dag.needs, dag.weight_s, total_s - spent_s)
    for path in dag.paths():
        later = [n for n in path if n != first]
        assert sum(again_s[n] for n in later) <= (total_s - spent_s) * (1 + 1e-9)
    if rest:
        left = Dag(rest, {n: [m for m in dag.needs[n] if m in rest] for n in rest}, dag.weight_s)
        critical = max(left.paths(), key=lambda path: (left.length_s(path), len(path)))
        assert sum(again_s[n] for n in critical) == pytest.approx(total_s - spent_s)


def test_the_published_example() -> None:
    order, needs = ["a", "b", "c"], {"a": [], "b": ["a"], "c": ["b"]}
    budgets_s = split_slack(order, needs, {"a": 5.0, "b": 15.0, "c": 5.0}, 50.0)
    assert budgets_s == pytest.approx({"a": 10.0, "b": 30.0, "c": 10.0})


def test_nodes_of_which_nothing_is_known_share_evenly_along_their_path() -> None:
    order, needs = ["a", "b", "c"], {"a": [], "b": ["a"], "c": ["b"]}
    budgets_s = split_slack(order, needs, dict.fromkeys(order, 0.0), 9.0)
    assert budgets_s == pytest.approx(dict.fromkeys(order, 3.0))


def test_an_unknown_path_beside_a_known_one_shares_evenly_too() -> None:
    order = ["a", "b", "known"]
    needs: dict[str, list[str]] = {"a": [], "b": ["a"], "known": []}
    budgets_s = split_slack(order, needs, {"a": 0.0, "b": 0.0, "known": 5.0}, 9.0)
    assert budgets_s == pytest.approx({"a": 4.5, "b": 4.5, "known": 9.0})
