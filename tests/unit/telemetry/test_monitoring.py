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
from kits.builders import a_profile
from prometheus_client.parser import text_string_to_metric_families

from cato.core.ids import PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.slots import LoadCounts, SharedPoolPicture
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of
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


async def test_only_answers_that_are_streamed_have_a_time_per_token(tmp_path: Path) -> None:
    asked = {"model": "fast", "prompt": "a", "max_tokens": 30}
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        for body, is_streamed in ((asked, False), ({**asked, "stream": True}, True)):
            answer = await http.post("/v1/completions", json=body)
            receipt = (await http.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
            page = (await http.get("/metrics")).text
            (node,) = receipt["nodes"]
            assert (receipt["tpot_s"] is not None) is is_streamed
            assert (node["llm"]["engine_ttft_s"] is not None) is is_streamed
            assert ('cato_tpot_seconds_count{task="model:sim-fast"} 1.0' in page) is is_streamed
            assert (
                'cato_invocation_tpot_seconds_count{pool="sim-fast-pool"} 1.0' in page
            ) is is_streamed


def a_shared_pool(refused: int) -> SharedPoolPicture:
    return SharedPoolPicture(PoolName("cards"), 0, (), (), (), LoadCounts(refused=refused))


def test_refusals_of_shared_pools_are_in_the_same_family_as_those_of_other_pools() -> None:
    other = PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies(), a_profile())).picture(0.0)
    page = render_fleet([other], FleetState(shared_pools=(a_shared_pool(refused=3),)))
    families = [f for f in text_string_to_metric_families(page.decode()) if "refused" in f.name]
    (refused,) = families
    assert {s.labels["pool"]: s.value for s in refused.samples} == {"p": 0, "cards": 3}


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


def rule(name: str) -> dict[str, Any]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = (rule for group in groups for rule in group["rules"])
    found: dict[str, Any] = next(r for r in rules if name in (r.get("alert"), r.get("record")))
    return found


@pytest.mark.parametrize("name", sorted(records()))
def test_the_miss_ratio_is_of_the_counted_runs_alone(name: str) -> None:
    """Superseded runs are excused and never counted, so there is nothing to subtract."""
    window = name.rpartition("rate")[2]
    missed, counted = rule(name)["expr"].strip().split("/")
    assert missed.strip() == f'sum by (task) (rate(cato_slo_runs_total{{met="false"}}[{window}]))'
    assert counted.strip() == f"sum by (task) (rate(cato_slo_runs_total[{window}]))"


@pytest.mark.parametrize("name", ["CatoSloBurnsFast", "CatoSloBurns"])
def test_a_burn_of_a_few_runs_pages_nobody(name: str) -> None:
    assert re.search(
        r"and sum by \(task\) .*increase\(cato_slo_runs_total.* > 20$", rule(name)["expr"]
    )


def test_the_drift_of_an_idle_pool_is_no_alert() -> None:
    assert (
        "and on (pool) rate(cato_queue_seconds_count[30m]) > 0"
        in rule("CatoPredictionsDrift")["expr"]
    )


def test_a_shared_pool_without_a_slot_is_an_alert() -> None:
    alert = rule("CatoSharedPoolWithoutSlot")
    assert alert["expr"] == "sum by (pool) (cato_shared_pool_slots) == 0"
    assert alert["for"] == "2m"


def test_a_target_that_is_down_is_named_and_says_nothing_of_the_others() -> None:
    assert (
        rule("CatoDown")["annotations"]["summary"]
        == "{{ $labels.instance }} does not answer Prometheus"
    )


# Metrics from receipts: a call of a shared pool has the name `POOL/MODEL` of its model's part.
BY_PART = re.compile(r"cato_(queue|dispatch|invocation|pool_slo)_")


def test_the_choice_of_pools_has_shared_pools_and_their_models() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    query = next(v for v in board["templating"]["list"] if v["name"] == "pool")["query"]["query"]
    metrics = re.search(r'__name__=~"([^"]*)"', query)
    assert metrics is not None
    assert metrics[1].split("|") == ["cato_pool_queued", "cato_shared_pool_slots"]
    of_calls = [e for _, e in EXPRESSIONS if "$pool" in e and BY_PART.search(e)]
    assert of_calls
    for expression in of_calls:
        matched = re.findall(r'pool=~"([^"]*)"', expression)
        assert set(matched) == {"($pool)(/.*)?"}, expression


@pytest.mark.parametrize("title", ["Attainment by task", "Attainment of runs by pool"])
def test_attainment_is_0_and_not_empty_before_a_run_has_met_its_slo(title: str) -> None:
    (expression,) = (e for where, e in EXPRESSIONS if where == f"dashboard: {title}")
    assert re.match(
        r"\(sum by .*met=\"true\".* or 0 \* sum by [^/]*\) / sum by",
        expression.replace("(/.*)?", ""),
    )


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
