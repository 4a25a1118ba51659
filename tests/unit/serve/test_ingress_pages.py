"""Web pages in a browser of this machine get nothing without a key, unless they are named."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from ingress_kit import COMPLETION, a_fast_pool, an_access, running
from test_keys import a_key, bearer

from cato.config.schema import IngressArgs
from cato.core.tenancy import Access
from cato.serve.access.control import AccessControl, KeyRule
from cato.serve.ingress.app import create_app
from cato.serve.ingress.pages import Pages

PROMPT = {"model": "cato-completion", "prompt": "def f("}
EVIL, IDE = "https://evil.example", "https://ide.example"


def a_browser(kit: object, access: AccessControl, pages: Pages = Pages()) -> httpx.AsyncClient:  # noqa: B008
    app = create_app(
        kit.service,  # type: ignore[attr-defined]
        max_body_bytes=100_000,
        ready=lambda: (True, ""),
        access=access,
        pages=pages,
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example:8000"}, "unknown_host"),  # DNS rebinding
        ({"host": "localhost.evil.example"}, "unknown_host"),
        ({"origin": EVIL}, "foreign_page"),
        ({"origin": "null"}, "foreign_page"),
        ({"origin": "http://localhost:3000"}, "foreign_page"),  # another server of this machine
        ({"sec-fetch-site": "cross-site"}, "foreign_page"),
        ({"sec-fetch-site": "same-site"}, "foreign_page"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/ui/state", "/metrics", "/v1/usage"])
async def test_a_foreign_page_gets_nothing_without_a_key(
    tmp_path: Path, headers: dict[str, str], code: str, path: str
) -> None:
    secret, key = a_key()
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        method = "POST" if path == "/v1/completions" else "GET"
        content = {"json": PROMPT} if method == "POST" else {}
        async with a_browser(kit, an_access()) as http:
            refused = await http.request(method, path, headers=headers, **content)  # type: ignore[arg-type]
        async with a_browser(kit, an_access(Access((key,)))) as http:
            keyed = await http.request(method, path, headers=headers | bearer(secret), **content)  # type: ignore[arg-type]
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
    assert keyed.status_code != 403 or keyed.json()["error"]["code"] != code


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_that_a_page_could_send_unasked_is_refused_without_a_key(
    tmp_path: Path, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = json.dumps(PROMPT).encode()
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        a_browser(kit, an_access()) as http,
    ):
        refused = await http.post("/v1/completions", content=body, headers=headers)
        declared = {"content-type": "application/json; charset=utf-8"}
        served = await http.post("/v1/completions", content=body, headers=declared)
        empty = await http.post("/v1/health")
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "not_json")
    assert served.status_code == empty.status_code == 200


async def test_an_upload_without_a_key_is_told_what_can_be_done(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        a_browser(kit, an_access()) as http,
    ):
        upload = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"x")}}
        refused = await http.post("/v1/files", **upload)
        let_in = await http.post("/v1/files", **upload, headers={"authorization": "Bearer none"})
    assert refused.status_code == 415
    assert "`Authorization: Bearer none`" in refused.json()["error"]["message"]
    assert let_in.json()["error"]["code"] == "batches_off"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000"},
        {"host": "[::1]:8000"},
        {"host": "localhost"},
        {"host": "10.1.2.3:8000"},
        {"host": "cato.internal:8000"},
        {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},  # typed into the address line
        {"origin": IDE, "sec-fetch-site": "cross-site"},
    ],
)
async def test_people_their_own_pages_and_named_ones_are_served(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    pages = Pages((IDE,), ("cato.internal",))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        a_browser(kit, an_access(), pages) as http,
    ):
        assert (await http.post("/v1/completions", json=PROMPT, headers=headers)).is_success


async def test_a_deployment_without_keys_refuses_foreign_pages_but_knows_no_names(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        a_browser(kit, AccessControl(KeyRule.IGNORED)) as http,
    ):
        by_name = await http.post("/v1/completions", json=PROMPT, headers={"host": "cato.team"})
        foreign = await http.post("/v1/completions", json=PROMPT, headers={"origin": EVIL})
    assert (by_name.status_code, foreign.status_code) == (200, 403)


async def test_only_named_pages_may_read_answers(tmp_path: Path) -> None:
    secret, key = a_key()
    asked = {
        "origin": IDE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        access = an_access(Access((key,)))
        async with a_browser(kit, access, Pages((IDE,))) as http:
            before = await http.options("/v1/completions", headers=asked)
            foreign = await http.options("/v1/completions", headers=asked | {"origin": EVIL})
            answer = await http.post(
                "/v1/completions", json=PROMPT, headers=bearer(secret) | {"origin": IDE}
            )
        async with a_browser(kit, access) as http:
            unnamed = await http.post(
                "/v1/completions", json=PROMPT, headers=bearer(secret) | {"origin": IDE}
            )
        async with a_browser(kit, an_access(), Pages(("*",))) as http:
            any_page = await http.post("/v1/completions", json=PROMPT, headers={"origin": IDE})
    assert before.is_success
    assert before.headers["access-control-allow-origin"] == IDE
    assert answer.headers["access-control-allow-origin"] == IDE
    assert "access-control-allow-origin" not in foreign.headers
    assert "access-control-allow-origin" not in unnamed.headers
    assert any_page.status_code == 403


async def test_notes_of_readiness_are_not_for_pages(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        app = create_app(
            kit.service,
            max_body_bytes=100_000,
            ready=lambda: (False, "starting\nsecret trouble"),
            access=an_access(),
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            own = await http.get("/readyz")
            rebound = await http.get("/readyz", headers={"host": "evil.example"})
    assert "secret trouble" in own.json()["reason"]
    assert "secret trouble" not in rebound.json()["reason"]


def test_a_deployment_names_pages_and_hosts() -> None:
    spec = IngressArgs(origins=[IDE, "*"], hosts=["cato.internal"]).to_ingress()
    assert (spec.origins, spec.hosts) == ((IDE, "*"), ("cato.internal",))
    for wrong in ("ide.example", "https://ide.example/", "https://IDE.example"):
        with pytest.raises(ValueError, match=r"such as https://ide\.example"):
            IngressArgs(origins=[wrong])
    with pytest.raises(ValueError, match=r"such as cato\.internal"):
        IngressArgs(hosts=["cato.internal:8000"])
