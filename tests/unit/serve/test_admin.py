"""Administration over HTTP and in the shell: who may change what, and the log of it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import COMPLETION, a_fast_pool, an_access, running
from test_keys import PROMPT, a_key, bearer
from typer.testing import CliRunner

from cato.cli import app as cli
from cato.control.profiler import Profiler
from cato.core.administration import AddKey, EndKey, OpenWithoutKeys, SetTenant
from cato.core.tenancy import ApiKey, Role, Tenant
from cato.serve.access import administration
from cato.serve.access.administration import check_may_give
from cato.serve.access.caller import Caller
from cato.serve.access.control import AccessControl
from cato.serve.ingress.bounds import NAMES
from cato.store.errors import StoreError
from cato.store.store import MetadataStore

LEAD = {"role": Role.TENANT_ADMIN}


class Office:
    """A deployment with a store, and clients that have its keys."""

    def __init__(self, http: httpx.AsyncClient, store: MetadataStore) -> None:
        self.http = http
        self.store = store

    async def ask(
        self, whom: str, method: str, path: str, body: object = None
    ) -> tuple[int, dict[str, Any]]:
        answer = await self.http.request(
            method, f"/v1/admin/{path}", headers=bearer(whom), json=body
        )
        return answer.status_code, answer.json()


@contextlib.asynccontextmanager
async def an_office(folder: Path, *keys: ApiKey) -> AsyncIterator[Office]:
    store = MetadataStore.open(folder / "m.db")
    for key in keys:
        store.administer(AddKey(key), "cli:t@h")
    access = an_access(store.access("2026-11"))
    async with (
        running(folder, a_fast_pool(), workflows=(COMPLETION,), access=access, store=store) as kit,
        kit.http() as http,
    ):
        yield Office(http, store)
    store.close()


async def test_an_operator_makes_limits_rotates_ends_and_forgets_keys(tmp_path: Path) -> None:
    boss, key = a_key("platform", role=Role.OPERATOR, name="boss")
    async with an_office(tmp_path, key) as office:
        wanted = {"tenant": "red", "name": "ci", "sla": "batch", "tasks": ["code-completion"]}
        status, made = await office.ask(boss, "POST", "keys", {**wanted, "days": 30})
        assert status == 200
        used = await office.http.post(
            "/v1/completions", json=PROMPT, headers=bearer(made["secret"])
        )
        assert used.status_code == 200, "known at once where it was made"
        _, rotated = await office.ask(boss, "POST", f"keys/{made['id']}/rotate", {"hours": 0})
        assert (rotated["name"], rotated["sla_class"]) == ("ci", "batch")
        _, of_old = await office.ask(boss, "DELETE", f"keys/{made['id']}")
        assert not of_old["is_valid"]
        _, limits = await office.ask(boss, "PUT", "tenants/red", {"requests_per_minute": 60})
        assert (limits["requests_per_minute"], limits["weight"], limits["keys"]) == (60, 1.0, 1)
        _, tenants = await office.ask(boss, "GET", "tenants")
        assert [t["name"] for t in tenants["data"]] == ["platform", "red"]
        status, _ = await office.ask(boss, "POST", f"keys/{rotated['id']}/end")
        assert status == 200
        _, keys = await office.ask(boss, "GET", "keys")
        log = office.store.audit()
    assert [(k["tenant"], k["is_valid"]) for k in keys["data"]] == [
        ("platform", True),
        ("red", False),
    ]
    assert not any("secret" in k or "digest" in k for k in keys["data"])
    assert [e.action for e in log] == [
        "key.end", "tenant.limit", "key.delete", "key.create", "key.end", "key.create",
        "key.create",
    ]  # fmt: skip
    assert {e.who for e in log[:-1]} == {f"key:{key.id} (boss)"}
    limited = log[1]
    assert (limited.before, limited.after and limited.after["requests_per_minute"]) == (None, 60)


async def test_a_tenant_admin_manages_the_keys_of_its_tenant_alone(tmp_path: Path) -> None:
    lead, lead_key = a_key("red", **LEAD)
    _, other = a_key("blue")
    _, boss = a_key("red", role=Role.OPERATOR)
    async with an_office(tmp_path, lead_key, other, boss) as office:
        status, made = await office.ask(lead, "POST", "keys", {"name": "mine"})
        assert (status, made["tenant"], made["role"]) == (200, "red", "user")
        for body in ({"tenant": "blue"}, {"role": "operator"}, {"bounds": {NAMES[0]: 1000}}):
            status, refused = await office.ask(lead, "POST", "keys", body)
            assert (status, refused["error"]["code"]) == (403, "beyond_own_rights"), body
        for path in (f"keys/{other.id}/rotate", f"keys/{other.id}/end"):
            status, refused = await office.ask(lead, "POST", path, {})
            assert (status, refused["error"]["code"]) == (404, "key_not_found")
        for path in (f"keys/{boss.id}/rotate", f"keys/{boss.id}/end"):
            status, _ = await office.ask(lead, "POST", path, {})
            assert status == 403, "an operator's key is no tenant admin's"
        assert (await office.ask(lead, "PUT", "tenants/red", {}))[0] == 403
        _, tenants = await office.ask(lead, "GET", "tenants")
        _, keys = await office.ask(lead, "GET", "keys")
        _, log = await office.ask(lead, "GET", "audit")
    assert [t["name"] for t in tenants["data"]] == ["red"]
    assert {k["tenant"] for k in keys["data"]} == {"red"}
    assert {e["tenant"] for e in log["data"]} == {"red"}


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({"sla_class": "standard"}, {"sla": "interactive"}),
        ({"tasks": ("code-completion",)}, {}),
        ({"models": ("sim-fast",)}, {"models": []}),
    ],
)
async def test_a_tenant_admin_gives_no_more_than_it_has(
    tmp_path: Path, own: dict[str, Any], wanted: dict[str, Any]
) -> None:
    lead, key = a_key("red", **LEAD, **own)
    async with an_office(tmp_path, key) as office:
        status, refused = await office.ask(lead, "POST", "keys", wanted)
        assert (status, refused["error"]["code"]) == (403, "beyond_own_rights")
        within = {"sla": "standard", "tasks": ["code-completion"], "models": ["sim-fast"]}
        assert (await office.ask(lead, "POST", "keys", within))[0] == 200


async def test_keys_made_with_a_key_that_ends_end_no_later(tmp_path: Path) -> None:
    ends_at_s = time.time() + 10 * 86_400
    lead, key = a_key("red", **LEAD, expires_at_s=ends_at_s)
    _, old = a_key("red")
    async with an_office(tmp_path, key, old) as office:
        status, refused = await office.ask(lead, "POST", "keys", {"days": 11})
        assert (status, refused["error"]["code"], refused["error"]["param"]) == (
            403, "beyond_own_rights", "days",
        )  # fmt: skip
        assert "days" in refused["error"]["message"]
        _, same = await office.ask(lead, "POST", "keys", {})
        _, sooner = await office.ask(lead, "POST", "keys", {"days": 9})
        _, rotated = await office.ask(lead, "POST", f"keys/{old.id}/rotate", {})
    assert same["expires_at_s"] == rotated["expires_at_s"] == ends_at_s
    assert sooner["expires_at_s"] < ends_at_s


async def test_keys_made_with_a_token_or_an_operators_key_may_outlive_it(tmp_path: Path) -> None:
    boss, key = a_key("platform", role=Role.OPERATOR, expires_at_s=time.time() + 60)
    async with an_office(tmp_path, key) as office:
        _, made = await office.ask(boss, "POST", "keys", {"tenant": "red"})
    assert made["expires_at_s"] is None
    person = Caller(
        "oidc:u-1", "red", "batch", role=Role.TENANT_ADMIN, expires_at_s=time.time() + 60
    )
    check_may_give(person, ApiKey("id", "", "red", sla_class="batch"))


async def test_a_tenant_admin_makes_no_more_changes_and_keys_than_the_store_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration, "MOST_KEYS", 10)
    monkeypatch.setattr(administration, "CHANGES_PER_MINUTE", 30.0)
    lead, key = a_key("red", **LEAD)
    boss, boss_key = a_key("blue", role=Role.OPERATOR)
    async with an_office(tmp_path, key, boss_key) as office:
        asked = [(await office.ask(lead, "POST", "keys", {}))[0] for _ in range(40)]
        assert asked.count(200) == 9
        assert asked[9:29] == [400] * 20
        assert 429 in asked[30:]
        assert len(office.store.audit()) < 40
        for _ in range(40):
            assert (await office.ask(boss, "POST", "keys", {"tenant": "red"}))[0] == 200


async def test_narrow_bounds_of_a_tenant_admin_pass_to_the_keys_that_it_makes(
    tmp_path: Path,
) -> None:
    lead, key = a_key("red", **LEAD, bounds=((NAMES[0], 2),))
    async with an_office(tmp_path, key) as office:
        _, made = await office.ask(lead, "POST", "keys", {})
    assert made["bounds"] == {NAMES[0]: 2}


async def test_users_and_those_without_a_key_administer_nothing(tmp_path: Path) -> None:
    user, key = a_key("red")
    async with an_office(tmp_path, key) as office:
        for path in ("tenants", "keys", "audit"):
            assert (await office.ask(user, "GET", path))[0] == 403


async def test_without_any_key_the_machines_own_clients_cannot_make_the_first(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answer = await http.post("/v1/admin/keys", json={"tenant": "a", "role": "operator"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_admin")


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "keys", {"tenant": "=1+1"}, "tenant"),
        ("POST", "keys", {"tenant": "a", "role": "root"}, "role"),
        ("POST", "keys", {"tenant": "a", "sla": "now"}, "sla"),
        ("POST", "keys", {"tenant": "a", "tasks": ["no-task"]}, "task"),
        ("POST", "keys", {"tenant": "a", "models": ["no-model"]}, "model"),
        ("POST", "keys", {"tenant": "a", "bounds": {"x": 1}}, "bounds"),
        ("POST", "keys", {"tenant": "a", "bounds": {NAMES[0]: 10**18}}, "bounds"),
        ("POST", "keys", {"tenant": "a", "name": "two\nlines"}, "name"),
        ("POST", "keys", {"tenant": "a", "name": "x" * 101}, "name"),
        ("POST", "keys", {"tenant": "a", "days": -1}, "days"),
        ("POST", "keys", {"tenant": "a", "digest": "x"}, "digest"),
        ("PUT", "tenants/a", {"requests_per_minute": 0}, "requests_per_minute"),
        ("PUT", "tenants/a", {"weight": 0.0001}, "weight"),
        ("PUT", "tenants/a", {"weight": 10**19}, "weight"),
        ("PUT", "tenants/%20", {}, "tenant"),
        ("GET", "audit?limit=0", None, "limit"),
        ("GET", "audit?limit=5000", None, "limit"),
        ("GET", "audit?below=x", None, "below"),
    ],
)
async def test_what_makes_no_sense_changes_nothing(
    tmp_path: Path, method: str, path: str, body: object, param: str
) -> None:
    boss, key = a_key("platform", role=Role.OPERATOR)
    async with an_office(tmp_path, key) as office:
        status, refused = await office.ask(boss, method, path, body)
        changes = office.store.audit()
    assert status in (400, 404)
    assert refused["error"]["param"] == param
    assert len(changes) == 1, "the key that was there"


# The log


def test_the_log_cannot_be_changed_by_anybody_who_writes_to_the_store(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    store.administer(SetTenant(Tenant("red", 5)), "cli:a@h")
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "m.db")) as raw:
        for statement in ("UPDATE audit SET who = 'x'", "DELETE FROM audit"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                raw.execute(statement)


def test_a_change_that_fails_is_not_logged_and_one_that_is_not_logged_fails(
    tmp_path: Path,
) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    _, key = a_key("red")
    store.administer(AddKey(key), "cli:a@h")
    with pytest.raises(StoreError):
        store.administer(AddKey(key), "cli:a@h")
    assert len(store.audit()) == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "m.db")) as raw:
        raw.execute("ALTER TABLE audit RENAME TO gone")
    with pytest.raises(StoreError):
        store.administer(SetTenant(Tenant("red", 5)), "cli:a@h")
    assert store.tenants() == ()
    store.close()


def test_the_log_has_no_digest_of_a_key_and_tells_what_differs(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    _, key = a_key("red")
    store.administer(AddKey(key), "cli:a@h")
    store.administer(EndKey(key.id, 5.0), "key:x", within="red")
    assert store.administer(EndKey(key.id, 1.0), "key:x", within="blue") is None
    store.administer(OpenWithoutKeys(), "cli:a@h")
    opened, ended, created = store.audit()
    store.close()
    assert key.digest not in json.dumps([ended.before, ended.after, created.after])
    assert ended.before is not None
    assert ended.after == {**ended.before, "expires_at_s": 5.0}
    assert (opened.action, opened.before, opened.after) == ("keys.open", None, None)


def test_pages_of_the_log_follow_each_other(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    for n in range(1, 6):
        store.administer(SetTenant(Tenant("red", n)), "cli:a@h")
    newest = store.audit(limit=2)
    older = store.audit(limit=2, below=newest[-1].id)
    store.close()
    found = [e.after and e.after["requests_per_minute"] for e in (*newest, *older)]
    assert found == [5, 4, 3, 2]


def test_the_shell_is_logged_with_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ada")
    at = ["--store", str(tmp_path / "m.db")]
    shell = CliRunner()

    def keys(*args: str) -> str:
        done = shell.invoke(cli, ["keys", *args, *at])
        assert done.exit_code == 0, done.output
        return done.stdout

    made = keys("create", "--tenant", "red").strip()
    keys("limit", "red", "--requests-per-minute", "9")
    keys("rotate", made.split("_")[1])
    log = [json.loads(line) for line in keys("audit", "--json").splitlines()]
    assert [e["action"] for e in log] == ["key.create", "key.end", "tenant.limit", "key.create"]
    assert all(e["who"].startswith("cli:ada@") for e in log)
    assert "tenant.limit" in keys("audit")


async def test_the_profiler_makes_changes_and_who_asks_next_is_told(tmp_path: Path) -> None:
    profiler, control = Profiler(tmp_path / "m.db"), AccessControl()
    secret, key = a_key("red")
    first = await profiler.access()
    await profiler.administer(AddKey(key), "key:boss", None)
    second = await profiler.access()
    assert first is not None
    assert second is not None
    assert (len(first.keys), len(second.keys)) == (0, 1)
    control.learn(second)
    assert control.caller(secret, is_local=False).tenant == "red"
    assert (await profiler.audit("red", 10, None))[0].who == "key:boss"
    await profiler.close()


async def test_a_store_that_is_gone_is_a_reason_to_ask_again_later(tmp_path: Path) -> None:
    boss, key = a_key("platform", role=Role.OPERATOR)
    access = an_access(replace(MetadataStore.open(tmp_path / "m.db").access("x"), keys=(key,)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        answer = await http.get("/v1/admin/keys", headers=bearer(boss))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert "retry-after" in answer.headers
