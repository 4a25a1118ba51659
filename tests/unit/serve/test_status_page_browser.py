"""The status page in a real browser: drawn, readable, and behind its key.

Needs Debian's `chromium` and the PyPI package `playwright`; with `CATO_SCREENSHOTS=FOLDER` the
pictures are kept there for somebody to look at.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from ingress_kit import COMPLETION, GENERATION, SLOW, a_pool, an_access, running, until
from sign_in_kit import Provider
from store_kit import a_receipt

from cato.core.administration import AddKey
from cato.core.ids import ReplicaId
from cato.core.prices import Prices, TokenPrice
from cato.core.receipt import Excuse
from cato.core.tenancy import Access, ApiKey, Role
from cato.serve.access.control import AccessControl
from cato.serve.access.keys import new_key
from cato.store.store import MetadataStore

playwright = pytest.importorskip("playwright.async_api", reason="`playwright` is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="`chromium` is not installed"),
]

TRANSLATION = """
name: code-translation
description: Look, translate in parts, put together.
sla: {metric: e2e, target: 400ms}
inputs:
  code: {type: str}
nodes:
  look: {type: analyze, source: "{{ code }}", language: python}
  draft: {type: llm, model: slow, needs: [look], prompt: "{{ code }}", max_tokens: 20}
  check: {type: llm, model: slow, needs: [draft], prompt: "{{ draft.text }}", max_tokens: 10}
stream: check
output: check
"""
# A phone, and a desk.
WIDTHS = (390, 1440)


@contextlib.asynccontextmanager
async def a_page(width: int = WIDTHS[-1], **options: Any) -> AsyncIterator[Any]:
    """A page of `width` pixels in which any script error fails the test."""
    async with playwright.async_playwright() as engine:
        browser = await engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": 900}, **options)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        await browser.close()
        assert errors == []


async def shot(page: Any, name: str) -> None:
    folder = os.environ.get("CATO_SCREENSHOTS")
    if folder:
        await page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


async def check_layout(page: Any) -> None:
    """Nothing is wider than the window, and no text of a chart lies on another."""
    width = page.viewport_size["width"]
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    overlaps = await page.evaluate("""() => {
      const found = [];
      for (const svg of document.querySelectorAll("svg")) {
        const texts = [...svg.querySelectorAll("text")]
          .map((t) => [t.textContent, t.getBoundingClientRect()]);
        texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
          const across = p.left < q.right && q.left < p.right;
          if (across && p.top + 2 < q.bottom && q.top + 2 < p.bottom) found.push([a, b]);
        }));
      }
      return found;
    }""")
    assert overlaps == []


@pytest.mark.parametrize("width", WIDTHS)
async def test_idle_loaded_and_with_a_dead_replica(tmp_path: Path, width: int) -> None:
    fast = a_pool("sim-fast", "fast", step_s=0.002, prefill_s=0.02, replicas=2, slots=4)
    slow = a_pool("sim-slow", "slow", step_s=0.01, prefill_s=0.05, replicas=2, slots=2)
    async with (
        running(tmp_path, fast, slow, workflows=(COMPLETION, GENERATION, TRANSLATION, SLOW)) as kit,
        kit.server() as url,
        a_page(width) as page,
    ):
        await page.goto(url)
        await page.wait_for_selector("#fleet tbody tr")
        assert "No run has ended" in await page.inner_text("#runs")
        assert "4 of 4" in await page.inner_text("#figures")
        assert "No session had a turn" in await page.inner_text("#sessions")
        assert "cato task code-completion" in await page.inner_text("#tasks")
        await check_layout(page)
        await shot(page, f"idle-{width}")

        tasks = [
            kit.service.run_task(name, inputs, request_id=f"req-{name}-{i}")
            for i in range(12)
            for name, inputs in (
                ("code-completion", {"prefix": "def f("}),
                ("code-generation", {"instruction": "sort a list"}),
                ("code-translation", {"code": "def f(x):\n    return x\n"}),
            )
        ]
        await asyncio.gather(*(t.wait() for t in tasks))
        held = [
            kit.service.run_task("slow", {"instruction": "wait"}, request_id=f"held-{i}")
            for i in range(6)
        ]
        await until(lambda: slow.orchestrator.picture(0.0).queued > 0, within_s=5)
        await page.reload()
        await page.wait_for_selector("tr.run")
        await page.wait_for_selector("#receipt svg[role=img] rect.first")
        assert await page.locator("#receipt svg[role=img] text.name").count() == 3, "nodes"
        assert "50 %" in await page.locator("#tasks svg").first.text_content()
        assert "code-translation" in await page.inner_text("#tasks")
        assert "4 of 12" in await page.inner_text("#figures"), "all places of the slow pool"
        assert "late" in await page.inner_text("#runs")
        assert "slack" in await page.inner_text("#decisions")
        assert "without a key" in await page.inner_text("#tenants")
        assert "p95" in await page.inner_text("#figures")
        await check_layout(page)
        await shot(page, f"loaded-{width}")

        await page.click("tr.run:last-child button")
        last = await page.get_attribute("tr.run:last-child button", "title")
        await page.locator("#receipt", has_text=last).wait_for()
        await slow.kill(ReplicaId("sim-slow#1"))
        await page.locator("#fleet", has_text="gone").wait_for()
        assert "killed" in await page.inner_text("#fleet")
        assert "✕ lost" in await page.inner_text("#decisions")
        await check_layout(page)
        await shot(page, f"one-replica-dead-{width}")
        for task in held:
            task.cancel("the test is over")
            await task.wait()


RUN = {
    "request_id": "req-1", "task": "code-completion", "status": "cancelled", "metric": "ttft",
    "target_s": 1.0, "achieved_s": None, "met": False, "e2e_s": 0.1, "queue_s": 0.1,
    "output_tokens": 0, "ended_at_s": 0.0, "excuse": "superseded",
}  # fmt: skip
LEFT = {
    "at_s": 0.0, "pool": "sim-fast", "kind": "left", "reason": "left the deployment", "run_id": "",
    "task": "", "node": "", "attempt": 1, "replica": "sim-fast#1", "queue_s": None, "slack_s": None,
}  # fmt: skip


async def colours(page: Any, selector: str) -> list[str]:
    found: list[str] = await page.locator(selector).evaluate_all(
        "(all) => all.map((e) => e.className.trim())"
    )
    return found


async def test_excused_runs_and_planned_ends_of_replicas_have_no_colour(tmp_path: Path) -> None:
    async def state(route: Any) -> None:
        answer = await route.fetch()
        changes = {"runs": [RUN, RUN | {"request_id": "req-2", "excuse": ""}], "decisions": [LEFT]}
        await route.fulfill(response=answer, json=await answer.json() | changes)

    async def receipt(route: Any) -> None:
        found = a_receipt(id="req-1", status="cancelled", met=False, problem="a newer one came")
        await route.fulfill(json=replace(found, excuse=Excuse.SUPERSEDED).as_dict())

    async with (
        running(tmp_path, a_pool("sim-fast", "fast"), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        a_page() as page,
    ):
        await page.route("**/ui/state", state)
        await page.route("**/v1/requests/req-1", receipt)
        await page.goto(f"{url}/ui")
        await page.wait_for_selector("#receipt svg[role=img]")
        assert "excused: superseded" in await page.inner_text("#runs")
        assert await colours(page, "#runs span.state") == ["state", "state warn"]
        assert "excused: superseded" in await page.inner_text("#receipt")
        assert "missed" not in await page.inner_text("#receipt")
        assert await page.locator("#receipt .bad").count() == 0
        assert "○ left" in await page.inner_text("#decisions")
        assert await colours(page, "#decisions span.state") == ["state"]
        assert "that count for the SLO" in await page.inner_text("#figures"), "others are excused"
        await shot(page, "excused")


async def test_a_server_that_hangs_does_not_look_healthy(tmp_path: Path) -> None:
    asked: list[str] = []

    async def hang(route: Any) -> None:
        asked.append(route.request.url)

    async with (
        running(tmp_path, a_pool("sim-fast", "fast"), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        a_page() as page,
    ):
        await page.add_init_script("""
          const after = AbortSignal.timeout.bind(AbortSignal);
          AbortSignal.timeout = (ms) => after(ms / 20);
        """)
        await page.goto(f"{url}/ui")
        await page.wait_for_selector("#health.good")
        await page.route("**/ui/state", hang)
        await page.wait_for_selector("#health.bad")
        assert "no answer within 10 s" in await page.inner_text("#health")
        await until(lambda: len(asked) > 1, within_s=10)
        await page.unroute("**/ui/state")
        await page.wait_for_selector("#health.good")


async def test_a_scrolled_fleet_stays_where_it_is(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_pool("sim-fast", "fast"), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        a_page(WIDTHS[0]) as page,
    ):
        await page.goto(f"{url}/ui")
        await page.wait_for_selector("#fleet tbody tr")
        await page.evaluate("document.querySelector('.wide').scrollLeft = 100")
        row = await page.query_selector("#fleet tbody tr")
        await page.wait_for_function("(row) => !row.isConnected", arg=row)
        assert await page.evaluate("document.querySelector('.wide').scrollLeft") == 100
        await check_layout(page)


async def test_the_key_is_typed_once_and_forgotten_on_demand(tmp_path: Path) -> None:
    key, id, digest = new_key()
    access = an_access(Access((ApiKey(id, digest, "red"),)))
    pool = a_pool("sim-fast", "fast")
    async with (
        running(tmp_path, pool, workflows=(COMPLETION,), access=access) as kit,
        kit.server() as url,
        a_page(color_scheme="dark") as page,
    ):
        await page.goto(f"{url}/ui")
        await page.wait_for_selector("#key-form:not([hidden])")
        assert "needs an API key" in await page.inner_text("#health")
        assert "cato keys create --role operator" in await page.inner_text("#key-form")
        assert await page.is_hidden("#main")
        await shot(page, "key")
        await page.fill("#key", key)
        await page.press("#key", "Enter")
        await page.wait_for_selector("#fleet tbody tr")
        assert await page.is_hidden("#key-form")
        assert key not in await page.content()
        await check_layout(page)
        await shot(page, "dark")
        await page.click("#forget-key")
        await page.wait_for_selector("#key-form:not([hidden])")


async def test_what_a_server_says_never_becomes_markup(tmp_path: Path) -> None:
    pool = a_pool("<img src=x onerror=alert(1)>", "fast")
    async with (
        running(tmp_path, pool, workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        a_page() as page,
    ):
        await page.goto(f"{url}/ui")
        await page.wait_for_selector("#fleet tbody tr")
        assert "<img" in await page.inner_text("#fleet")
        assert await page.query_selector("#fleet img") is None


async def test_an_operator_manages_tenants_and_keys_and_sees_what_changed(tmp_path: Path) -> None:
    secret, id, digest = new_key()
    store = MetadataStore.open(tmp_path / "m.db")
    store.administer(AddKey(ApiKey(id, digest, "platform", role=Role.OPERATOR)), "cli:t@h")
    access = an_access(store.access("2026-11"))
    pool = a_pool("sim-fast", "fast")
    prices = Prices("EUR", {"sim-fast": TokenPrice(1000.0, 1000.0, 1000.0)})
    async with (
        running(
            tmp_path,
            pool,
            workflows=(COMPLETION,),
            access=access,
            store=store,
            prices=prices,
        ) as kit,
        kit.server() as url,
        a_page() as page,
    ):
        task = kit.service.run_task("code-completion", {"prefix": "a"}, request_id="r")
        await task.wait()
        await page.goto(f"{url}/ui")
        await page.fill("#key", secret)
        await page.press("#key", "Enter")
        await page.wait_for_selector("#admin:not([hidden]) #limits tbody tr")
        for summary in await page.query_selector_all("#admin details:not([open]) summary"):
            await summary.click()
        await page.fill("#key-maker [name=tenant]", "red")
        await page.fill("#key-maker [name=name]", "<b>ci</b>")
        await page.fill("#key-maker [name=tasks]", "code-completion")
        await page.click("#key-maker button")
        await page.wait_for_selector("#new-secret:not([hidden])")
        made = (await page.inner_text("#new-secret .code")).strip()
        assert await page.query_selector("#keys b") is None, "names are no markup"
        red = page.locator("#limits tr", has_text="red")
        await red.locator("[name=requests_per_minute]").fill("60")
        await red.locator("button").click()
        await page.locator("#audit", has_text="tenant.limit").wait_for()
        assert "requests_per_minute: null → 60" in await page.inner_text("#audit")
        assert "EUR" in (await page.inner_text("#usage thead")).upper()
        assert "sim-fast" in await page.inner_text("#usage")
        async with page.expect_download() as saved:
            await page.click("#usage-csv")
        text = Path(await (await saved.value).path()).read_text()
        assert text.startswith("day,model,task,requests,")
        await check_layout(page)
        await shot(page, "administration")
        page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
        await page.locator("#keys tr", has_text="red").locator("button", has_text="End").click()
        await page.locator("#keys", has_text="(ended)").wait_for()
    assert [t.requests_per_minute for t in store.tenants()] == [60]
    assert not store.api_keys()[1].is_valid(time.time())
    assert made.startswith("cato_")
    store.close()


async def test_a_user_is_offered_no_administration(tmp_path: Path) -> None:
    key, id, digest = new_key()
    access = an_access(Access((ApiKey(id, digest, "red"),)))
    async with (
        running(
            tmp_path, a_pool("sim-fast", "fast"), workflows=(COMPLETION,), access=access
        ) as kit,
        kit.server() as url,
        a_page() as page,
    ):
        await page.goto(f"{url}/ui")
        await page.fill("#key", key)
        async with page.expect_response("**/v1/admin/tenants") as asked:
            await page.press("#key", "Enter")
        assert (await asked.value).status == 403
        await page.wait_for_selector("#fleet tbody tr")
        assert await page.is_hidden("#admin")


async def test_a_person_signs_in_and_out_on_the_page(tmp_path: Path) -> None:
    provider = Provider()
    provider.given = {"id_token": provider.token(groups=["ops"])}
    access = AccessControl(sign_in=provider.sign_in())
    access.learn(Access())
    asked: list[dict[str, list[str]]] = []

    async def authorize(route: Any) -> None:
        """The provider's page, where somebody has just typed a password."""
        query = parse_qs(urlsplit(route.request.url).query)
        asked.append(query)
        back = f"{query['redirect_uri'][0]}?code=c&state={query['state'][0]}"
        await route.fulfill(status=302, headers={"location": back})

    async with (
        running(
            tmp_path, a_pool("sim-fast", "fast"), workflows=(COMPLETION,), access=access
        ) as kit,
        kit.server() as url,
        a_page() as page,
    ):
        await page.route("https://sso.example/**", authorize)
        await page.goto(f"{url}/ui?state=forged&code=stolen")
        await page.wait_for_selector("#sign-in:not([hidden])")
        assert await page.evaluate("sessionStorage.getItem('cato-key')") is None
        await page.click("#sign-in")
        await page.wait_for_selector("#fleet tbody tr")
        assert await page.is_hidden("#sign-in")
        assert page.url == f"{url}/ui", "the code is not left in the address"
        assert asked[0]["code_challenge_method"] == ["S256"]
        assert asked[0]["redirect_uri"] == [f"{url}/ui"]
        await page.click("#forget-key")
        await page.wait_for_selector("#sign-in:not([hidden])")
