"""Every endpoint of the OpenAPI document: an operator sees all tenants, a tenant only itself.

Two tenants, red and blue, have done and configured the same things. Whatever blue asks for, by
whatever name of red's, no answer holds anything of red's and nothing of red's is changed. An
endpoint that is added must say here what its path may name.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from ingress_kit import COMPLETION, Kit, a_fast_pool, running
from sign_in_kit import SPEC, Provider
from test_batches import a_line, a_room, begun, jsonl
from test_keys import bearer

from cato.core.administration import AddKey, SetTenant
from cato.core.sign_in import GroupRights
from cato.core.tenancy import ApiKey, Role, Tenant
from cato.serve.access.control import AccessControl
from cato.serve.access.keys import new_key
from cato.store.store import MetadataStore

PROMPT = {"model": "cato-completion", "prompt": "def f("}
CHAT = {"model": "sim-fast", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
SESSION = "session-of-{}"
REQUEST = "request-of-{}"
# What a path names, of a tenant or of all.
NAMED = {
    "{request_id}": REQUEST,
    "{tenant}": "{}",
    "{key}": "{key}",
    "{file_id}": "{file_id}",
    "{batch_id}": "{batch_id}",
    "{task}": "code-completion",
    "{model}": "sim-fast",
}
# Query parameters by which a tenant could name another's things.
QUERIES = {"/v1/usage": ("", "?by=tenant,key", f"?session={SESSION}", "?format=csv")}
# Bodies that change something where they may; any other takes an empty one.
BODIES: dict[tuple[str, str], dict[str, object]] = {
    ("put", "/v1/admin/tenants/{tenant}"): {"requests_per_minute": 1},
    ("post", "/v1/admin/keys"): {"tenant": "red"},
    ("post", "/v1/events"): {"type": "select", "completion_id": REQUEST},
}
# Whose answers hold what all tenants did; every other one is the same for all tenants.
OF_TENANTS = {
    ("get", "/v1/files"),
    ("get", "/v1/files/{file_id}"),
    ("get", "/v1/batches"),
    ("get", "/v1/batches/{batch_id}"),
    ("get", "/v1/usage"),
    ("get", "/v1/requests/{request_id}"),
    ("get", "/v1/admin/tenants"),
    ("get", "/v1/admin/keys"),
    ("get", "/v1/admin/audit"),
}
# A tenant's own also for operators: the content of its files is prompts and answers.
OWN = {("get", "/v1/files/{file_id}/content")}
# Routes that the document leaves out: other names of some in it, the page's own, and pages.
HIDDEN = {
    ("post", "/score"),
    ("post", "/rerank"),
    ("post", "/v2/rerank"),
    ("get", "/v1/responses/{id}"),
    ("delete", "/v1/responses/{id}"),
    ("post", "/v1/responses/{id}/cancel"),
    ("get", "/v1/responses/{id}/input_items"),
    ("post", "/v1/responses/compact"),
    ("post", "/v1/responses/input_tokens"),
    *(("head", path) for path in ("/metrics", "/health", "/livez", "/readyz", "/v1/models", "/")),
    ("get", "/ui/state"),
    ("get", "/ui/sign-in"),
    ("post", "/ui/sign-in"),
    ("get", "/"),
    ("get", "/docs"),
    ("get", "/ui/"),
    *((m, f"/ui{file}") for m in ("get", "head") for file in ("", "/page.js", "/admin.js")),
    *((m, "/ui/page.css") for m in ("get", "head")),
}
METHODS = {"get", "put", "post", "delete", "patch"}


class Town:
    """Tenants red and blue with a user's and an admin's key and token each, and an operator."""

    def __init__(
        self, kit: Kit, http: httpx.AsyncClient, store: MetadataStore, credentials: dict[str, str]
    ) -> None:
        self.app = kit.app
        self.http = http
        self.store = store
        self.credentials = credentials
        # The ids of its file and its batch.
        self.kept: dict[str, dict[str, str]] = {"red": {}, "blue": {}}

    def marks(self, tenant: str) -> set[str]:
        """What stands in an answer that holds something of the tenant's."""
        ids = {k.id for k in self.store.api_keys() if k.tenant == tenant}
        named = {SESSION.format(tenant), REQUEST.format(tenant), f'"{tenant}"', f",{tenant},"}
        return named | ids | {*self.kept[tenant].values()}

    async def ask(
        self, whom: str, method: str, path: str, of: str
    ) -> AsyncIterator[tuple[str, httpx.Response]]:
        """What `whom` is answered at `path` in each way of naming what is of the tenant `of`."""
        key = next(k for k in self.store.api_keys() if k.tenant == of)
        for query in QUERIES.get(path, ("",)):
            url = path
            for part in [p for p in path.split("/") if p.startswith("{")]:
                assert part in NAMED, f"{path}: say in NAMED what {part} may be"
                url = url.replace(part, NAMED[part].format(of, key=key.id, **self.kept[of]))
            body = {
                k: v.format(of) if isinstance(v, str) else v
                for k, v in BODIES.get((method, path), {}).items()
            }
            answer = await self.http.request(
                method,
                url + query.format(of),
                json=None if method == "get" else body,
                headers=bearer(self.credentials[whom]),
            )
            yield url, answer


@contextlib.asynccontextmanager
async def a_town(folder: Path) -> AsyncIterator[Town]:
    store, provider = MetadataStore.open(folder / "m.db"), Provider()
    groups = [GroupRights("ops", "platform", Role.OPERATOR)]
    credentials = {"operator's token": provider.token(groups=["ops"], sub="op")}
    for tenant in ("red", "blue"):
        store.administer(SetTenant(Tenant(tenant, tokens_per_month=10**9)), "cli:t@h")
        for role in (Role.USER, Role.TENANT_ADMIN):
            secret, id, digest = new_key()
            store.administer(AddKey(ApiKey(id, digest, tenant, role=role)), "cli:t@h")
            credentials[f"{tenant} {role}'s key"] = secret
            groups.append(GroupRights(f"{tenant}-{role}", tenant, role))
            token = provider.token(groups=[f"{tenant}-{role}"], sub=f"{role}-of-{tenant}")
            credentials[f"{tenant} {role}'s token"] = token
    secret, id, digest = new_key()
    store.administer(AddKey(ApiKey(id, digest, "platform", role=Role.OPERATOR)), "cli:t@h")
    credentials["operator's key"] = secret
    access = AccessControl(sign_in=provider.sign_in(replace(SPEC, groups=tuple(groups))))
    access.learn(store.access("2026-11"))
    async with (
        running(
            folder,
            a_fast_pool(),
            workflows=(COMPLETION,),
            access=access,
            store=store,
            batches=a_room(folder),
        ) as kit,
        kit.http() as http,
    ):
        town = Town(kit, http, store, credentials)
        for tenant in ("red", "blue"):
            http.headers.update(bearer(credentials[f"{tenant} user's key"]))
            batch = await begun(http, jsonl(a_line("f")))
            del http.headers["Authorization"]
            file_id = batch["input_file_id"]
            town.kept[tenant] = {"file_id": file_id, "batch_id": batch["id"]}
            for call in ("key", "token"):
                mine = bearer(credentials[f"{tenant} user's {call}"])
                named = {**mine, "x-request-id": REQUEST.format(tenant)}
                done = await http.post("/v1/completions", json=PROMPT, headers=named)
                in_session = {**mine, "X-CATO-Session": SESSION.format(tenant)}
                said = await http.post("/v1/chat/completions", json=CHAT, headers=in_session)
                assert (done.status_code, said.status_code) == (200, 200), said.text
        yield town
    store.close()


async def operations(town: Town) -> list[tuple[str, str]]:
    document = (
        await town.http.get("/openapi.json", headers=bearer(town.credentials["operator's key"]))
    ).json()
    return [(m, path) for path, found in document["paths"].items() for m in found if m in METHODS]


BLUE = [
    f"blue {role}'s {how}" for role in (Role.USER, Role.TENANT_ADMIN) for how in ("key", "token")
]


@pytest.mark.parametrize("whom", BLUE)
async def test_a_tenant_sees_and_changes_nothing_of_another(tmp_path: Path, whom: str) -> None:
    async with a_town(tmp_path) as town:
        before = (town.store.api_keys(), town.store.tenants(), town.store.audit())
        red = town.marks("red")
        asked = await operations(town)
        for method, path in asked:
            async for url, answer in town.ask(whom, method, path, "red"):
                leaked = {mark for mark in red if mark in answer.text}
                assert not leaked, f"{method} {url} tells {whom} of {leaked}: {answer.text[:500]}"
                assert answer.status_code < 500, f"{method} {url}: {answer.text}"
        after = (town.store.api_keys(), town.store.tenants(), town.store.audit())
        assert [k for k in after[0] if k.tenant == "red"] == [
            k for k in before[0] if k.tenant == "red"
        ]
        assert after[1] == before[1]
        assert [e for e in after[2] if e.tenant == "red"] == [
            e for e in before[2] if e.tenant == "red"
        ]
        for path in ("/v1/files/{file_id}", "/v1/batches/{batch_id}"):
            async for url, answer in town.ask("red user's key", "get", path, "red"):
                assert (answer.status_code, answer.json().get("cancelling_at")) == (200, None), url
        assert {path for _, path in asked} >= {path for _, path in OF_TENANTS}


@pytest.mark.parametrize("whom", ["operator's key", "operator's token"])
async def test_an_operator_sees_all_tenants(tmp_path: Path, whom: str) -> None:
    async with a_town(tmp_path) as town:
        for method, path in sorted(OF_TENANTS):
            for tenant in ("red", "blue"):
                texts = [a.text async for _, a in town.ask(whom, method, path, tenant)]
                for text in texts:
                    assert any(m in text for m in town.marks(tenant)), f"{path}: {text[:300]}"
        metrics = await town.http.get("/metrics", headers=bearer(town.credentials[whom]))
        assert metrics.status_code == 200


@pytest.mark.parametrize("whom", BLUE)
async def test_a_tenant_sees_its_own(tmp_path: Path, whom: str) -> None:
    async with a_town(tmp_path) as town:
        for method, path in sorted(OF_TENANTS):
            is_for_admins = path.startswith("/v1/admin")
            async for url, answer in town.ask(whom, method, path, "blue"):
                if is_for_admins and "tenant-admin" not in whom:
                    assert answer.status_code == 403, url
                else:
                    found = any(m in answer.text for m in town.marks("blue"))
                    assert found, f"{answer.url}: {answer.text[:300]}"


async def test_other_answers_are_the_same_for_all_tenants(tmp_path: Path) -> None:
    """So that an endpoint that shows what a tenant did must be named in `OF_TENANTS`."""
    async with a_town(tmp_path) as town:
        for method, path in await operations(town):
            if method != "get" or (method, path) in OF_TENANTS | OWN:
                continue
            for role in (Role.USER, Role.TENANT_ADMIN):
                told = [
                    (answer.status_code, answer.text)
                    for tenant in ("red", "blue")
                    async for _, answer in town.ask(f"{tenant} {role}'s key", method, path, "red")
                ]
                assert told[0] == told[1], f"{path} differs between tenants: {told}"


async def test_every_route_is_in_the_document_or_known_to_be_hidden(tmp_path: Path) -> None:
    async with a_town(tmp_path) as town:
        routes = {
            (method.lower(), route.path_format)
            for route in town.app.routes
            if isinstance(route, APIRoute)
            for method in route.methods
        }
        document = set(await operations(town))
    assert routes - document == HIDDEN
    assert document <= routes


async def test_hidden_names_are_as_closed_as_those_in_the_document(tmp_path: Path) -> None:
    async with a_town(tmp_path) as town:
        state = {
            whom: await town.http.get("/ui/state", headers=bearer(town.credentials[whom]))
            for whom in ("blue user's key", "blue tenant-admin's token", "operator's key")
        }
        marks = {mark: state[whom].text.count(mark) for whom in state for mark in town.marks("red")}
        for whom in ("blue user's key", "blue tenant-admin's token"):
            assert not [m for m in town.marks("red") if m in state[whom].text], marks
            head = await town.http.head("/metrics", headers=bearer(town.credentials[whom]))
            assert head.status_code == 403
        assert any(m in state["operator's key"].text for m in town.marks("red"))
        head = await town.http.head("/v1/models", headers=bearer("x"))
        assert head.status_code == 401
        for path in ("/score", "/rerank", "/v2/rerank", "/ui/state", "/metrics"):
            method = "GET" if path in ("/ui/state", "/metrics") else "POST"
            answer = await town.http.request(method, path, headers=bearer("x"))
            assert answer.status_code == 401, path


async def test_nobody_without_a_key_or_a_token_is_told_anything(tmp_path: Path) -> None:
    open_ = {"/health", "/livez", "/readyz"}
    async with a_town(tmp_path) as town:
        town.credentials["nobody"] = "x"
        for method, path in await operations(town):
            async for url, answer in town.ask("nobody", method, path, "red"):
                assert answer.status_code == (200 if path in open_ else 401), url
