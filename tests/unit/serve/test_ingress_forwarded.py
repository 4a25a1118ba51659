"""For whom a proxy asks, and which proxies are believed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from ingress_kit import COMPLETION, a_slow_pool, running, until_busy
from starlette.datastructures import Headers

from cato.config.schema import IngressArgs
from cato.serve.access.control import AccessControl, KeyRule
from cato.serve.ingress.app import create_app
from cato.serve.ingress.forwarded import Proxies, named

HERE = "http://localhost"
PROXY = "10.0.0.9"
ANN, BOB = "203.0.113.7", "203.0.113.8"
PROMPT = {"model": "cato-completion", "prompt": "def f("}


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        (ANN, {}, ANN),
        (ANN, {"x-forwarded-for": BOB}, ANN),  # a client that claims to be another
        (ANN, {"forwarded": f"for={BOB}"}, ANN),
        (ANN, {"x-real-ip": BOB}, ANN),
        ("127.0.0.1", {"x-forwarded-for": ANN}, ANN),  # HAProxy
        ("127.0.0.1", {"x-forwarded-for": f"{BOB}, {ANN}"}, ANN),  # what it was sent, and for whom
        ("127.0.0.1", {"x-forwarded-for": f"{ANN}, {PROXY}"}, ANN),
        ("127.0.0.1", {"x-forwarded-for": f"{BOB}, {ANN}, {PROXY}"}, ANN),
        ("127.0.0.1", {"x-forwarded-for": PROXY, "forwarded": f"for={ANN};proto=https"}, ANN),
        ("127.0.0.1", {"x-forwarded-for": PROXY, "x-real-ip": ANN}, ANN),
        (PROXY, {"forwarded": 'for="[2001:db8::1]:4711";by=x, For=10.0.0.8'}, "2001:db8::1"),
        (PROXY, {"x-forwarded-for": f"{ANN}:4711"}, ANN),
        (PROXY, {}, PROXY),
        ("10.1.0.1", {"x-forwarded-for": ANN}, "10.1.0.1"),  # nobody configured it
        (f"::ffff:{PROXY}", {"x-forwarded-for": f"::ffff:{ANN}"}, ANN),  # at `host: "::"`
        ("::1", {"x-forwarded-for": "2001:db8::1"}, "2001:db8::1"),
    ],
)
def test_the_client_is_who_the_last_believed_proxy_names(
    peer: str, headers: dict[str, str], client: str
) -> None:
    assert Proxies.of(("10.0.0.0/24",)).client(peer, Headers(headers)) == client


def test_a_long_chain_is_cut() -> None:
    assert len(named(Headers({"x-forwarded-for": ", ".join(["127.0.0.1"] * 10_000)}))) == 20


def test_a_deployment_names_its_proxies() -> None:
    spec = IngressArgs(proxies=["10.0.0.0/8", "2001:db8::1"]).to_ingress()
    assert len(Proxies.of(spec.proxies).networks) == 2
    with pytest.raises(ValueError, match="does not appear to be"):
        IngressArgs(proxies=["proxy.example"])


@pytest.mark.parametrize(
    "headers",
    [
        {"x-real-ip": ANN},
        {"forwarded": f"for={ANN}"},
        {"forwarded": "for=unknown"},
        {"x-forwarded-for": f"{ANN}, 127.0.0.1"},
    ],
)
async def test_who_comes_through_a_proxy_of_this_machine_is_not_this_machine(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with running(tmp_path, a_slow_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        answer = await http.post("/v1/completions", json=PROMPT, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "loopback_only")


async def test_a_client_cannot_end_the_work_of_the_one_it_claims_to_be(tmp_path: Path) -> None:
    pool = a_slow_pool()
    slow = COMPLETION.replace("model: fast", "model: slow")
    headers = {"x-session-id": "s", "x-forwarded-for": ANN}
    async with running(tmp_path, pool, workflows=(slow,)) as kit:
        app = create_app(
            kit.service,
            max_body_bytes=100_000,
            ready=lambda: (True, ""),
            access=AccessControl(KeyRule.IGNORED),
        )
        proxied = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        direct = httpx.ASGITransport(app, client=(BOB, 1))
        async with (
            httpx.AsyncClient(
                transport=proxied, base_url="http://localhost", headers=headers
            ) as ann,
            httpx.AsyncClient(
                transport=direct, base_url="http://localhost", headers=headers
            ) as bob,
        ):
            first = asyncio.create_task(ann.post("/v1/completions", json=PROMPT))
            await until_busy(pool)
            forged = await bob.post("/v1/completions", json=PROMPT)
            assert (await first).status_code == forged.status_code == 200
            own = [asyncio.create_task(ann.post("/v1/completions", json=PROMPT)) for _ in "ab"]
            answers = await asyncio.gather(*own)
    assert sorted(a.status_code for a in answers) == [200, 499]
