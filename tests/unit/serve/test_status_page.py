"""The status page: what it is told, and who may see what."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingress_kit import (
    COMPLETION,
    GENERATION,
    Kit,
    a_fast_pool,
    a_pool,
    an_access,
    running,
    until_busy,
)
from kits.builders import a_profile, a_report
from kits.local_slots import LocalSharedPool
from store_kit import a_receipt
from test_shared_pool import GO, JAVA, QUICK, ask
from test_shared_pool import a_pool as a_shared_pool

from cato.control.shared_pool import SharedPool
from cato.core.commands import Refuse
from cato.core.errors import CapacityError
from cato.core.events import ReplicaLost, Ticked
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.receipt import Excuse
from cato.core.residency import Resident
from cato.core.tenancy import Access, ApiKey
from cato.core.topology import PoolPolicies, SharedPoolPolicies
from cato.policies.registry import policies_of
from cato.serve.access.keys import new_key
from cato.serve.ui.routes import HERE
from cato.telemetry.decisions import MAX_RULES, OTHER, Decided, DecisionBook, rule_of, slack_now
from cato.telemetry.overview import FleetState, overview
from cato.telemetry.recent import BIN_S, LATELY_S, SHOWN_RUNS, RecentOverview, RecentRuns
from cato.telemetry.recent_sessions import WINDOW_S

PROMPT = {"model": "cato-completion", "prompt": "def f("}
STATE = "/ui/state"


async def state(kit: Kit, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with kit.http() as http:
        answer = await http.get(STATE, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def complete(kit: Kit, key: str | None = None) -> str:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with kit.http() as http:
        answer = await http.post("/v1/completions", json=PROMPT, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def test_no_name_or_id_of_the_page_has_two_meanings() -> None:
    scripts = [(HERE / name).read_text() for name in ("page.js", "admin.js")]
    defined = re.compile(r"^(?:async )?(?:function|const|let) (\w+)", re.MULTILINE)
    names = [name for script in scripts for name in defined.findall(script)]
    ids = re.findall(r' id="([^"]+)"', (HERE / "page.html").read_text())
    assert names
    assert ids
    for found in (names, ids):
        assert sorted(set(found)) == sorted(found)


async def test_a_run_is_seen_as_attainment_as_a_line_and_as_a_decision(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit:
        id = await complete(kit)
        seen = await state(kit)
    (task,) = seen["tasks"]
    assert (task["task"], task["metric"], task["target_s"]) == ("code-completion", "ttft", 10)
    assert sum(p["runs"] for p in task["points"]) == sum(p["met"] for p in task["points"]) == 1
    (line,) = seen["runs"]
    assert (line["request_id"], line["met"]) == (id, True)
    (decided,) = seen["decisions"]
    assert decided["kind"] == "dispatch"
    assert (decided["run_id"], decided["task"], decided["node"]) == (id, "code-completion", "fill")
    assert decided["replica"] == "sim-fast#0"
    assert decided["reason"]
    (pool,) = seen["pools"]
    assert pool["dispatched"] == 1
    assert pool["slack_least_s"] == pool["slack_median_s"] == decided["slack_s"]
    assert 9 < decided["slack_s"] <= 10, "of a target of 10 s"


async def test_a_requests_own_target_does_not_become_the_tasks(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        async with kit.http() as http:
            headers = {"X-CATO-Deadline-Ms": "5000"}
            answer = await http.post("/v1/completions", json=PROMPT, headers=headers)
        assert answer.status_code == 200, answer.text
        (task,) = (await state(kit))["tasks"]
    assert task["target_s"] == 10


def test_figures_of_now_are_of_five_minutes_and_of_what_one_may_see() -> None:
    recent = RecentRuns()
    for i in range(100):
        ttft_s, at_s = (i + 1) / 100, 1000.0 + i
        mine = replace(a_receipt(id=f"r{i}"), tenant="red", ttft_s=ttft_s, output_tokens=30)
        recent.record(mine, at_s)
    recent.record(replace(a_receipt(id="b"), tenant="blue", output_tokens=3000), 1100.0)
    red, all_ = (recent.overview(t, 1100.0) for t in ("red", None))
    assert (red.lately.ttft_p50_s, red.lately.ttft_p95_s) == (0.5, 0.95)
    assert red.lately.output_tokens_per_s == 10
    assert [t.tenant for t in red.tenants] == ["red"]
    assert {(t.tenant, t.runs) for t in all_.tenants} == {("red", 100), ("blue", 1)}
    assert recent.overview("red", 1350.0).tenants[0].runs == 50, "older ones are forgotten"
    assert recent.overview("red", 5000.0).lately.ttft_p50_s is None


async def test_a_dead_replica_stays_visible_with_the_reason(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", replicas=2)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        before = (await state(kit))["pools"][0]["replicas"]
        await pool.kill(ReplicaId("sim-fast#1"))
        after = (await state(kit))["pools"][0]["replicas"]
    assert [(r["id"], r["state"]) for r in before] == [
        ("sim-fast#0", "ready"),
        ("sim-fast#1", "ready"),
    ]
    assert [(r["id"], r["state"], r["note"]) for r in after] == [
        ("sim-fast#0", "ready", ""),
        ("sim-fast#1", "gone", "killed"),
    ]


def test_a_replica_says_how_its_last_engine_was_lost() -> None:
    core = a_core()
    core.handle(a_report("a"))
    resident = Resident(
        ReplicaId("a"), PoolName("p"), DeploymentName("d"), ModelName("m"), HostId("h"), "cpu", 1,
        "ready", 3.0, restarts=1, lost="vLLM hung: no token of 3 answers; it was killed",
    )  # fmt: skip
    seen = overview(
        [core.picture(0.0)], FleetState(residents=(resident,)), RecentOverview(), tenant=None
    )
    (replica,) = seen.pools[0].replicas
    assert (replica.state, replica.restarts, replica.note) == ("ready", 1, resident.lost)


async def test_what_runs_takes_places(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", prefill_s=30.0, slots=4)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        task = kit.service.run_task("code-completion", {"prefix": "a"}, request_id="r")
        await until_busy(pool)
        (replica,) = (await state(kit))["pools"][0]["replicas"]
        task.cancel("the test is over")
        await task.wait()
    assert (replica["held"], replica["slots"], replica["prefilling"]) == (1, 4, 1)


async def test_a_tenant_sees_its_own_runs_and_the_whole_fleet(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("red", "blue")}
    access = Access(tuple(ApiKey(id, digest, name) for name, (_, id, digest) in keys.items()))
    async with running(
        tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=an_access(access)
    ) as kit:
        ids = {name: await complete(kit, key) for name, (key, _, _) in keys.items()}
        for name, (key, _, _) in keys.items():
            seen = await state(kit, key)
            assert [r["request_id"] for r in seen["runs"]] == [ids[name]]
            assert [d["run_id"] for d in seen["decisions"]] == [ids[name]]
            assert sum(p["runs"] for t in seen["tasks"] for p in t["points"]) == 1
            assert seen["pools"][0]["dispatched"] == 2


async def test_the_page_needs_no_key_its_data_does(tmp_path: Path) -> None:
    _, id, digest = new_key()
    access = an_access(Access((ApiKey(id, digest, "red"),)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        for path, kind in {"": "html", "/page.js": "javascript", "/page.css": "css"}.items():
            answer = await http.get(f"/ui{path}")
            assert answer.status_code == 200
            assert kind in answer.headers["content-type"]
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert (await http.get(STATE)).status_code == 401
        assert (await http.get("/ui/")).headers["location"] == "../ui"


def test_the_page_asks_no_other_host() -> None:
    folder = Path(__file__).parents[3] / "cato" / "serve" / "ui"
    for path in (folder / f for f in ("page.html", "page.js", "admin.js", "page.css")):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", ""), f"{path.name} names a host"
        assert "innerHTML" not in text


# Recent runs


def test_runs_are_forgotten_after_half_an_hour() -> None:
    recent = RecentRuns()
    recent.record(a_receipt(id="old"), 1000.0)
    recent.record(a_receipt(id="new"), 1000.0 + WINDOW_S)
    now_s = 1000.0 + WINDOW_S + BIN_S + 1
    found = recent.overview(None, now_s)
    assert [r.request_id for r in found.runs] == ["new"]
    assert sum(p.runs for p in found.tasks[0].points) == 1
    assert recent.overview(None, now_s + WINDOW_S).tasks == ()


def test_what_is_not_shown_any_more_is_not_kept_though_nobody_looks() -> None:
    recent = RecentRuns()
    for i in range(5000):
        turn = replace(a_receipt(id=f"r{i}"), session=f"s{i}")
        recent.record(turn, 1000.0 + i)
    assert len(recent._lately) <= LATELY_S + 1
    assert len(recent._sessions) <= WINDOW_S + 1


def test_missed_runs_come_first_then_the_slowest_and_cancelled_ones_are_no_news() -> None:
    recent = RecentRuns()
    for id, met, status in (
        ("quick", True, "done"),
        ("late", False, "done"),
        ("left", False, "cancelled"),
        ("refused", False, "refused"),
    ):
        recent.record(a_receipt(id=id, met=met, status=status), 1000.0)
    found = [r.request_id for r in recent.overview(None, 1001.0).runs]
    assert found[:2] == ["late", "refused"]
    assert set(found[2:]) == {"quick", "left"}


def test_an_excused_run_says_so_and_is_not_among_the_missed_ones() -> None:
    recent = RecentRuns()
    recent.record(a_receipt(id="quick"), 1000.0)
    for id, status, excuse in (
        ("newer", "cancelled", Excuse.SUPERSEDED),
        ("wrong", "failed", Excuse.CLIENT_ERROR),
        ("late", "done", Excuse.NONE),
    ):
        receipt = a_receipt(id=id, met=False, status=status)
        recent.record(replace(receipt, excuse=excuse, e2e_s=9.0, achieved_s=None), 1000.0)
    first, *others = recent.overview(None, 1001.0).runs
    assert (first.request_id, first.excuse) == ("late", "")
    assert {r.request_id: r.excuse for r in others} == {
        "quick": "", "newer": "superseded", "wrong": "client_error",
    }  # fmt: skip


def test_a_miss_outlives_many_runs_that_are_in_time() -> None:
    recent = RecentRuns()
    recent.record(a_receipt(id="late", met=False), 1000.0)
    for i in range(1000):
        recent.record(a_receipt(id=f"ok-{i}"), 1001.0)
    found = recent.overview(None, 1002.0).runs
    assert found[0].request_id == "late"
    assert len(found) == SHOWN_RUNS


# Decisions


def test_a_rule_is_a_reason_without_its_numbers() -> None:
    assert rule_of("urgent, 0.123 s of slack; 3 ahead on r#1") == "urgent, N s of slack"
    assert rule_of("hopeless by 1.5e-05 s") == "hopeless by N s"


def a_core() -> PoolOrchestrator:
    return PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies(), a_profile()))


def test_reasons_that_hold_names_do_not_make_series_without_end() -> None:
    book, core = DecisionBook(PoolName("p")), a_core()
    for i in range(1000):
        refused = Refuse(InvocationId("i"), f"because of {'x' * i}", 1.0)
        book.note(0.0, Ticked(0.0), (refused,), core)
    counts = book.all().counts or {}
    assert len(counts) == MAX_RULES + 1
    assert counts["refuse", OTHER] == 1000 - MAX_RULES


def test_the_slack_of_a_pool_is_that_of_the_last_minute() -> None:
    def dispatched(ago_s: float, slack_s: float | None) -> Decided:
        return Decided(1000.0 - ago_s, PoolName("p"), "dispatch", "", slack_s=slack_s)

    decisions = [dispatched(61, -9), dispatched(50, 1), dispatched(1, 3), dispatched(0, None)]
    assert slack_now(decisions, 1000.0) == (2, 1)
    assert slack_now(decisions[:1], 1000.0) is None


def test_a_lost_replica_outlives_any_number_of_dispatches() -> None:
    book, core = DecisionBook(PoolName("p")), a_core()
    book.note(0.0, a_report("a"), core.handle(a_report("a")), core)
    book.note_silent(1.0, [])
    for i in range(1000):
        book.add(Decided(2.0 + i, PoolName("p"), "dispatch", "in order of arrival"), "")
    newest = book.all().newest
    assert newest[0].kind == "lost"
    assert [d.at_s for d in newest] == sorted(d.at_s for d in newest)


def test_a_silent_replica_is_noted_once() -> None:
    book, core = DecisionBook(PoolName("p")), a_core()
    for id in ("a", "b"):
        book.note(0.0, a_report(id), core.handle(a_report(id)), core)
    for _ in range(2):
        book.note_silent(1.0, [ReplicaId("a")])
    assert [(d.kind, d.replica) for d in book.all().newest] == [("lost", "b")]


def test_a_replica_that_leaves_as_planned_is_not_lost() -> None:
    book, core = DecisionBook(PoolName("p")), a_core()
    for id in ("a", "b"):
        book.note(0.0, a_report(id), core.handle(a_report(id)), core)
    gone = ReplicaLost(1.0, ReplicaId("a"), "left the deployment")
    for _ in range(2):
        book.note_left(1.0, ReplicaId("a"), gone.reason)
        book.note(1.0, gone, core.handle(gone), core)
    book.note_silent(2.0, core.replicas)
    decisions = book.all()
    assert [(d.kind, d.replica) for d in decisions.newest] == [("left", "a")]
    assert decisions.counts == {("left", "left the deployment"): 1}
    fleet = FleetState(decisions={PoolName("p"): decisions})
    seen = overview([core.picture(2.0)], fleet, RecentOverview(), tenant="somebody", now_s=2.0)
    assert [d.kind for d in seen.decisions] == ["left"]
    assert [r.id for r in seen.pools[0].replicas] == ["b"]


def test_the_decision_to_leave_hides_an_earlier_loss_of_the_replica() -> None:
    book, core = DecisionBook(PoolName("p")), a_core()
    lost = ReplicaLost(1.0, ReplicaId("a"), "its link ended")
    for event in (a_report("a"), lost, a_report("a")):
        book.note(1.0, event, core.handle(event), core)
    book.note_left(2.0, ReplicaId("a"), "left the deployment")
    core.handle(lost)
    fleet = FleetState(decisions={PoolName("p"): book.all()})
    seen = overview([core.picture(3.0)], fleet, RecentOverview(), tenant=None, now_s=3.0)
    assert seen.pools[0].replicas == ()


# Shared pools


async def test_refusals_of_a_shared_pool_are_counted() -> None:
    spec = a_shared_pool(JAVA, policies=SharedPoolPolicies("lru", "batched", max_queued=1))
    async with LocalSharedPool(spec, {JAVA: QUICK}) as pool:
        asked = [asyncio.ensure_future(ask(pool, f"{n}", JAVA)) for n in range(9)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = sum(isinstance(a, CapacityError) for a in answers)
        picture = pool.present_books().picture()
    assert 0 < refused < 9
    assert picture.counts.refused == refused
    fleet = FleetState(shared_pools=(picture,))
    assert overview([], fleet, RecentOverview(), tenant=None).pools[0].refused == refused


async def test_the_loads_of_a_shared_pool_are_decisions_with_what_had_to_go() -> None:
    models = (JAVA, GO)
    async with LocalSharedPool(a_shared_pool(*models), dict.fromkeys(models, QUICK)) as pool:
        await ask(pool, "1", JAVA)
        await ask(pool, "2", GO)
        books = pool.present_books()
        fleet = FleetState(
            decisions={books.spec.name: books.decisions.all()},
            residents=books.residents(),
            shared_pools=(books.picture(),),
        )
    seen = overview([], fleet, RecentOverview(), tenant="somebody")
    assert [d.kind for d in seen.decisions] == ["load", "load"], "dispatches are their tenant's"
    newest = seen.decisions[0]
    assert newest.reason.startswith("go: ")
    assert newest.reason.endswith("evicts java")
    untouched = overview(
        [], FleetState(shared_pools=(SharedPool(books.spec, books.profiles).picture(),)),
        RecentOverview(), tenant=None,
    )  # fmt: skip
    assert untouched.pools[0].note == "0 loads, 0 evictions, 0 failures"
    (shared,) = seen.pools
    (slot,) = shared.replicas
    assert (slot.model, slot.state, slot.deployment) == ("go", "ready", "cards-slots")
    assert shared.slack_least_s is not None
    assert "2 loads, 1 evictions" in shared.note
    everything = overview([], fleet, RecentOverview(), tenant=None)
    assert sorted(d.kind for d in everything.decisions) == ["dispatch", "dispatch", "load", "load"]


def test_tenants_see_that_a_deployment_failed_and_operators_why() -> None:
    fleet = FleetState(warnings=("the last deployment failed\nConfigError: key is wrong",))
    seen = {t: overview([], fleet, RecentOverview(), tenant=t).warnings for t in (None, "red")}
    assert seen == {None: fleet.warnings, "red": ("the last deployment failed",)}
