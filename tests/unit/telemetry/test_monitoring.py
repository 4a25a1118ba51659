"""What is documented, drawn and alerted on exists, with these labels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ingress_kit import COMPLETION, a_fast_pool, running
from prometheus_client.parser import text_string_to_metric_families

from cato.core.ids import ReplicaId
from cato.store.state import StoreState
from cato.telemetry.metrics import render_fleet
from cato.telemetry.overview import FleetState
from cato.telemetry.run_metrics import RunMetrics

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "cato" / "telemetry" / "README.md"
RULES = ROOT / "deployments" / "monitoring" / "prometheus-rules.yaml"
DASHBOARD = ROOT / "deployments" / "monitoring" / "grafana-dashboard.json"
PROMTOOL = shutil.which("promtool")
ROW = re.compile(r"\| `(cato_\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)
# Labels that Prometheus, not CATO, sets.
FOREIGN = {"le", "job", "instance"}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels by name, as the document has them."""
    found = {}
    for name, kind, labels, unit, what_to_do in ROW.findall(DOCUMENT.read_text(encoding="utf-8")):
        assert unit.strip(), name
        assert what_to_do.strip(), name
        assert name not in found, f"{name} is there twice"
        found[name] = (kind, set(re.findall(r"`(\w+)`", labels)))
    return found


def exposed_name(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    page = RunMetrics().render((), StoreState(True, "", 0, 0)) + render_fleet([], FleetState())
    exist = {
        exposed_name(f.name, f.type): f.type for f in text_string_to_metric_families(page.decode())
    }
    assert {name: kind for name, (kind, _) in documented().items()} == exist


async def test_a_scrape_of_a_busy_ingress_parses_and_has_the_documented_labels(
    tmp_path: Path,
) -> None:
    pool = a_fast_pool()
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        for _ in range(3):
            await http.post("/v1/completions", json={"model": "cato-completion", "prompt": "a"})
        await pool.kill(ReplicaId("sim-fast#0"))
        page = (await http.get("/metrics")).text
    table, seen = documented(), set()
    for family in text_string_to_metric_families(page):
        name = exposed_name(family.name, family.type)
        if name.endswith("_created"):
            continue  # when a series began, beside each counter
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == table[name][1], name
            seen.add(sample.name)
    assert {
        "cato_slo_runs_total",
        "cato_dispatch_slack_seconds_bucket",
        "cato_invocation_ttft_seconds_count",
        "cato_tenant_tokens_total",
    } <= seen
    decisions = {
        (s.labels["decision"], s.labels["reason"]): s.value
        for f in text_string_to_metric_families(page)
        if f.name == "cato_decisions"
        for s in f.samples
    }
    assert decisions["lost", "killed"] == 1
    assert sum(n for (kind, _), n in decisions.items() if kind == "dispatch") == 3


def expressions() -> Iterator[tuple[str, str]]:
    """All PromQL of the rules and the dashboard, with where it stands."""
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield f"rules: {rule.get('alert') or rule['record']}", rule["expr"]
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"dashboard: {panel['title']}", target["expr"]


EXPRESSIONS = list(expressions())


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[w for w, _ in EXPRESSIONS])
def test_an_expression_names_metrics_and_labels_that_exist(where: str, expression: str) -> None:
    parser = pytest.importorskip("promql_parser", reason="`promql-parser` is not installed")
    tree = parser.parse(expression.replace("$__rate_interval", "5m"))
    table, recorded = documented(), records()
    found = [(n, labels) for n, labels in selectors(tree) if n != "up" and n not in recorded]
    assert found or recorded & {n for n, _ in selectors(tree)} or "up{" in expression, where
    known = set(FOREIGN)
    for name, labels in found:
        family = name if name in table else re.sub(r"_(bucket|sum|count)$", "", name)
        assert family in table, f"{where}: no metric {name}"
        kind, has = table[family]
        assert (family != name) == (kind == "histogram"), f"{where}: {name} is a {kind}"
        assert labels <= has | FOREIGN, f"{where}: {name} has no {labels - has}"
        known |= has
    lists = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    assert not found or set(re.findall(r"\w+", " ".join(lists))) <= known, where


def records() -> set[str]:
    """Names that the rules themselves record."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


def selectors(tree: Any) -> Iterator[tuple[str, set[str]]]:
    """Names and matched labels of all vectors in a parsed expression."""
    name = getattr(tree, "name", None)
    if hasattr(tree, "matchers") and name:
        yield name, {m.name for m in tree.matchers.matchers}
    for part in ("lhs", "rhs", "expr", "vector_selector", "vs", "param"):
        inner = getattr(tree, part, None)
        if inner is not None and not isinstance(inner, str | float):
            yield from selectors(inner)
    for inner in getattr(tree, "args", None) or ():
        yield from selectors(inner)


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[w for w, _ in EXPRESSIONS])
def test_an_expression_counts_the_deployment_once_however_many_targets(
    where: str, expression: str
) -> None:
    """Each target has all series: sums are ratios' or over the highest of the targets, and an
    operator between unaggregated series would find each several times."""
    parser = pytest.importorskip("promql_parser", reason="`promql-parser` is not installed")
    tree = parser.parse(expression.replace("$__rate_interval", "5m"))
    nodes = list(operations(tree))
    for node in nodes:
        sides = [s for s in (node.lhs, node.rhs) if not has_one_value(s)]
        if len(sides) == 2 and str(node.op) not in ("and", "or", "unless"):
            assert all(is_aggregated(side) for side in sides), where
    is_share = "histogram_quantile" in expression or any(str(node.op) == "/" for node in nodes)
    if where.startswith("dashboard") and not is_share:
        assert re.search(r"\b(max|min)( by \([^)]*\))? ?\(", expression), where


def bare(tree: Any) -> Any:
    """Without parentheses around it."""
    while type(tree).__name__ == "ParenExpr":
        tree = tree.expr
    return tree


def has_one_value(tree: Any) -> bool:
    tree = bare(tree)
    if type(tree).__name__ == "BinaryExpr":
        return has_one_value(tree.lhs) and has_one_value(tree.rhs)
    return type(tree).__name__ == "NumberLiteral"


def is_aggregated(tree: Any) -> bool:
    tree = bare(tree)
    if type(tree).__name__ == "BinaryExpr":
        return all(is_aggregated(s) for s in (tree.lhs, tree.rhs) if not has_one_value(s))
    is_recorded = str(getattr(tree, "name", "")) in records()
    return is_recorded or type(tree).__name__ == "AggregateExpr"


def operations(tree: Any) -> Iterator[Any]:
    tree = bare(tree)
    if type(tree).__name__ == "BinaryExpr":
        yield tree
        yield from operations(tree.lhs)
        yield from operations(tree.rhs)


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
                assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]


@pytest.mark.skipif(PROMTOOL is None, reason="`promtool` (Debian: prometheus) is not installed")
def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    assert PROMTOOL is not None
    for verb, path in (("check", RULES), ("test", RULES.with_suffix(".test.yaml"))):
        done = subprocess.run(
            [PROMTOOL, verb, "rules", str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_panels_of_the_dashboard_do_not_overlap_and_have_units() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"]
    assert len({p["id"] for p in panels}) == len(panels)
