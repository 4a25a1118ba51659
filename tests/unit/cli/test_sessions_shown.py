"""Sessions as operators and tenants see them: `cato explain`, `cato top`, `/ui`, metrics."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, an_access, running
from store_kit import a_receipt, an_execution, facts
from test_cli_client import cato

from cato.cli.explain import rendered_session
from cato.core.ids import RunId
from cato.core.receipt import SUPERSEDED, Excuse, Placement
from cato.core.tenancy import Access, ApiKey, turn_usage
from cato.serve.access.keys import new_key
from cato.serve.ingress.receipts import as_json
from cato.telemetry.recent import RecentRuns
from cato.telemetry.recent_sessions import KEPT_SESSIONS, SHOWN_SESSIONS, WINDOW_S

FLOWS = (COMPLETION, GENERATION)
TOOL = {"name": "Read", "input_schema": {"type": "object"}}


async def talk(
    http: httpx.AsyncClient, session: str, turns: int = 1, key: str = "", **headers: str
) -> list[dict[str, Any]]:
    """The receipts of `turns` of a session."""
    receipts = []
    said = [{"role": "user", "content": "Fix the bug. " * 50}]
    auth = {"Authorization": f"Bearer {key}"} if key else {}
    for n in range(turns):
        body = {"model": "fast", "max_tokens": 8, "messages": said, "tools": [TOOL]}
        sent = {"x-cato-session": session, **auth, **headers}
        answer = await http.post("/v1/messages", json=body, headers=sent)
        assert answer.status_code == 200, answer.text
        receipts.append(answer.json()["cato"])
        said += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"Go {n}."}]
    return receipts


async def test_explain_shows_the_turns_of_a_session_by_its_name_or_a_calls_id(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit,
        kit.http() as http,
        kit.server() as url,
    ):
        receipts = await talk(http, "mine", 3)
        id = receipts[0]["request_id"]
        by_name = await cato("explain", "mine", "--url", url)
        plain = await cato("explain", "mine", "--json", "--url", url)
        by_call = await cato("explain", id, "--session", "--json", "--url", url)
        receipt = await cato("explain", id, "--json", "--url", url)
        nothing = await cato("explain", "none", "--url", url)
        completion = await http.post(
            "/v1/completions", json={"model": "cato-completion", "prompt": "a"}
        )
        no_turn = await cato(
            "explain", completion.headers["x-request-id"], "--session", "--url", url
        )
    turns = json.loads(plain.stdout)["turns"]
    assert by_call.stdout == plain.stdout
    assert [t["turn"] for t in turns] == [1, 2, 3]
    assert [t["placement"] for t in turns] == ["new", "home", "home"]
    assert turns[0]["think_s"] is None
    assert all(t["think_s"] >= 0 for t in turns[1:])
    assert all(
        t["uncached_prompt_tokens"] == t["prompt_tokens"] - t["cached_prompt_tokens"] > 0
        for t in turns
    )
    assert all("expected cost" in t["reason"] and t["ttft_s"] > 0 for t in turns)
    assert "3 turns stored" in by_name.stdout
    assert json.loads(receipt.stdout)["request_id"] == id
    assert nothing.exit_code == no_turn.exit_code == 1
    assert "No receipt has this request id" in nothing.stderr
    assert "was not a turn of a session" in no_turn.stderr


async def test_no_name_is_asked_for() -> None:
    for name in ("", " "):
        result = await cato("explain", name)
        assert result.exit_code == 2
        assert "give the x-request-id of an answer" in " ".join(result.output.split())


async def test_a_tenant_sees_its_own_sessions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: new_key() for name in ("red", "blue")}
    access = an_access(
        Access(tuple(ApiKey(id, digest, name) for name, (_, id, digest) in keys.items()))
    )
    async with (
        running(tmp_path, a_fast_pool(), workflows=FLOWS, access=access) as kit,
        kit.http() as http,
        kit.server() as url,
    ):
        await talk(http, "shared-name", 2, keys["red"][0])
        await talk(http, "shared-name", 1, keys["blue"][0])
        await talk(http, "reds-own", 1, keys["red"][0])
        for tenant, turns, names in (
            ("red", 2, {"shared-name", "reds-own"}), ("blue", 1, {"shared-name"}),
        ):  # fmt: skip
            headers = {"Authorization": f"Bearer {keys[tenant][0]}"}
            seen = (await http.get("/ui/state", headers=headers)).json()["sessions"]
            assert {s["session"] for s in seen["newest"]} == names
            assert seen["count"] == len(names)
            monkeypatch.setenv("CATO_API_KEY", keys[tenant][0])
            shown = await cato("explain", "shared-name", "--json", "--url", url)
            assert len(json.loads(shown.stdout)["turns"]) == turns
        refused = await cato("explain", "reds-own", "--url", url)
    assert refused.exit_code == 1


async def test_top_and_the_page_show_working_sets_beside_memory(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit,
        kit.http() as http,
        kit.server() as url,
    ):
        await talk(http, "mine", 2, **{"X-CATO-Session-Deadline-Ms": "3600000"})
        top = await cato("top", "--once", "--url", url)
        seen = (await http.get("/ui/state")).json()
        page = (await http.get("/metrics")).text
    (replica,) = seen["pools"][0]["replicas"]
    assert replica["sessions"] == 1
    assert 0 < replica["working_set_tokens"] < replica["kv_tokens"] == 10**9
    (line,) = seen["sessions"]["newest"]
    assert (line["session"], line["turns"], line["met"], line["moved"]) == ("mine", 2, 2, 0)
    assert line["slack_s"] > 0
    for words in ("1 sessions in 30 minutes", "mine", "1 sessions:"):
        assert words in top.stdout
    for sample in (
        'cato_session_turns_total{placement="new",pool="sim-fast-pool"} 1.0',
        'cato_session_turns_total{placement="home",pool="sim-fast-pool"} 1.0',
        'cato_session_think_seconds_count{client=""} 1.0',
        'cato_session_slack_seconds_count{client=""} 2.0',
        "cato_replica_sessions{",
    ):
        assert sample in page


def test_a_moved_turn_says_from_where_and_a_late_session_by_how_much() -> None:
    turn = {
        "session": "s", "parent": "", "turn": 7, "kind": "main", "think_s": 3.0, "status": "done",
        "prompt_tokens": 100, "cached_prompt_tokens": 0, "uncached_prompt_tokens": 100,
        "output_tokens": 5, "replica": "b", "home": "a", "placement": "moved", "ttft_s": 1.0,
        "met": False, "reason": "8 s at home", "session_slack_s": -12.0, "excuse": "",
    }  # fmt: skip
    head, table, why = rendered_session([turn]).renderables
    assert "12 s too late" in str(head)
    cells = [str(next(iter(column.cells))) for column in table.columns]  # type: ignore[union-attr]
    assert {"moved from a", "late", "b"} <= set(cells)
    assert str(why) == "turn 7, moved from a: 8 s at home"


def test_a_superseded_turn_is_shown_as_excused_and_not_in_red() -> None:
    replaced = a_receipt(id="r1", status="cancelled", met=False, problem=SUPERSEDED)
    replaced = replace(replaced, session="mine", turn=1, excuse=Excuse.SUPERSEDED)
    cut = replace(replaced, request_id=RunId("r2"), turn=2, excuse=Excuse.NONE)
    turns = [asdict(turn_usage(as_json(receipt))) for receipt in (replaced, cut)]
    _, table, *_ = rendered_session(turns).renderables
    (column,) = (c for c in table.columns if c.header == "SLO")  # type: ignore[union-attr]
    told, in_red = column.cells
    assert (str(told), told.style) == ("excused: superseded", "")  # type: ignore[union-attr]
    assert (str(in_red), in_red.style) == ("cancelled", "red")  # type: ignore[union-attr]


def test_lists_of_sessions_are_bounded_and_forget_what_is_old() -> None:
    recent = RecentRuns()
    for n in range(KEPT_SESSIONS + 5):
        call = facts(placement=Placement.MOVED, cached_prompt_tokens=50)
        receipt = a_receipt(an_execution(llm=call), id=f"r{n}")
        recent.record(replace(receipt, session=f"s{n}"), 1000.0 + n / 10)
    found = recent.overview(None, 1300.0).sessions
    assert found.count == KEPT_SESSIONS
    assert found.prompt_tokens == 2 * found.cached_prompt_tokens
    assert [s.session for s in found.newest[:2]] == ["s2004", "s2003"]
    assert len(found.newest) == SHOWN_SESSIONS
    assert found.newest[0].moved == 1
    assert recent.overview(None, 1300.0 + WINDOW_S).sessions.count == 0
