"""A target below the measured baseline is told: by the API, the status page and the command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from ingress_kit import COMPLETION, a_fast_pool, running
from kits.builders import a_node, a_workflow
from typer.testing import CliRunner

from cato.cli import app
from cato.core.baseline import baseline_s, warning
from cato.core.budgets import NodeEstimate
from cato.core.estimates import FIRST_TOKEN_S, SERVICE_S, NodeMean
from cato.core.ids import NodeId, TaskName
from cato.core.slo import Slo, SloMetric
from cato.store.store import MetadataStore

CODE = TaskName("code-completion")  # of `COMPLETION`: TTFT 10 s
MEASURED = {
    NodeId("a"): NodeEstimate(5.0, 1.0),
    NodeId("b"): NodeEstimate(15.0, 2.0),
    NodeId("c"): NodeEstimate(3.0, 1.0),
}


class Sometimes:
    """A condition; nobody evaluates it here."""

    source = "sometimes"
    names: frozenset[str] = frozenset()

    def evaluate(self, names: Mapping[str, object]) -> object:
        raise AssertionError("a baseline runs nothing")


def test_the_baseline_is_the_longest_way_to_the_event() -> None:
    nodes = (a_node("a"), a_node("c"), a_node("b", "a", "c"))
    to_the_end = a_workflow(*nodes, slo=Slo(SloMetric.E2E, 19.0))
    assert baseline_s(to_the_end, MEASURED) == 20.0
    assert "19000 ms is below the measured baseline of 20000 ms" in warning(to_the_end, MEASURED)
    to_the_first = a_workflow(*nodes, slo=Slo(SloMetric.TTFT, 7.0), stream=("b",))
    assert baseline_s(to_the_first, MEASURED) == 7.0
    assert warning(to_the_first, MEASURED) == ""


@pytest.mark.parametrize("known", [{}, {NodeId("a"): MEASURED[NodeId("a")]}])
def test_nothing_is_said_before_all_that_always_runs_is_measured(
    known: dict[NodeId, NodeEstimate],
) -> None:
    assert baseline_s(a_workflow(a_node("a"), a_node("b", "a")), known) is None


def test_a_node_that_seldom_runs_counts_as_often_as_it_does() -> None:
    sometimes = a_node("b", "a", when=Sometimes())
    workflow = a_workflow(a_node("a"), sometimes)
    often = {**MEASURED, NodeId("b"): NodeEstimate(10.0, 1.0, runs=0.2)}
    assert baseline_s(workflow, often) == pytest.approx(5.0 + 0.2 * 10.0)


async def test_the_api_and_the_status_page_tell(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        before = (await http.get(f"/v1/tasks/{CODE}/sla")).json()
        assert (before["baseline_ms"], before["warning"]) == (None, "")
        assert (await http.get("/ui/state")).json()["warnings"] == []
        kit.records.measured[CODE] = {(NodeId("fill"), "sim-fast"): NodeEstimate(14.0, 12.0)}
        after = (await http.get(f"/v1/tasks/{CODE}/sla")).json()
        (told,) = (await http.get("/ui/state")).json()["warnings"]
    assert after["baseline_ms"] == 12_000
    assert "10000 ms is below" in told
    assert after["warning"] == told


def test_checking_workflows_warns_by_what_the_store_has_measured(tmp_path: Path) -> None:
    path, location = tmp_path / "completion.yaml", tmp_path / "metadata.db"
    path.write_text(COMPLETION, encoding="utf-8")
    store = MetadataStore.open(location)
    store.write(
        [
            NodeMean(CODE, NodeId("fill"), "sim-fast", SERVICE_S, 14.0, 5),
            NodeMean(CODE, NodeId("fill"), "sim-fast", FIRST_TOKEN_S, 12.0, 5),
        ]
    )
    store.close()

    def checked(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["workflows", "check", str(path), *options])
        return result.exit_code, result.output

    code, output = checked("--store", str(location))
    assert code == 0
    assert "10000 ms is below the measured baseline of 12000 ms" in output
    assert checked("--store", str(tmp_path / "none.db"))[0] == 1
