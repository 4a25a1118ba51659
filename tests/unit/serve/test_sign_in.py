"""Tokens of an identity provider: which are taken, as what, and what becomes of them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, an_access, running
from sign_in_kit import ISSUER, SPEC, Provider
from test_keys import CHAT, PROMPT, a_key, bearer

from cato.config.access import SignInArgs
from cato.config.problems import validate
from cato.config.schema import IngressArgs
from cato.core.errors import AccessError, ConfigError
from cato.core.sign_in import person_of
from cato.core.tenancy import Access, KeyHistory, Role
from cato.serve.access.control import AccessControl
from cato.serve.access.provider import HttpProblem
from cato.serve.access.sign_in import (
    ASK_AGAIN_S,
    EXPIRED,
    KEPT_TOKENS,
    KEYS_AGE_S,
    USABLE_S,
    SignIn,
    is_token,
)


async def has_failed_once(provider: Provider, sign_in: SignIn, token: str) -> None:
    """The provider is down since its keys were read, and a request has waited for that to show."""
    await sign_in.person(token)
    provider.is_up = False
    provider.clock_s += 2 * KEYS_AGE_S + 1
    await sign_in.person(token)


async def refusal(sign_in: SignIn, token: str) -> str:
    with pytest.raises(AccessError) as refused:
        await sign_in.person(token)
    return refused.value.code


def b64(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def control_of(provider: Provider, access: Access = Access()) -> AccessControl:  # noqa: B008
    control = AccessControl(sign_in=provider.sign_in())
    control.learn(access)
    return control


# What a token gives


async def test_the_first_group_of_the_file_that_a_person_is_in_decides() -> None:
    provider = Provider()
    sign_in = provider.sign_in()
    user = await sign_in.person(provider.token())
    lead = await sign_in.person(provider.token(groups=["red", "red-leads", "x"]))
    operator = await sign_in.person(provider.token(groups="ops"))
    assert (user.subject, user.rights.tenant, user.rights.role) == ("oidc:u-1", "red", Role.USER)
    assert (user.rights.sla_class, user.rights.tasks) == ("standard", ("code-completion",))
    assert lead.rights.role is Role.TENANT_ADMIN
    assert (operator.rights.role, operator.rights.tenant) == (Role.OPERATOR, "platform")
    assert await refusal(sign_in, provider.token(groups=["blue"])) == "no_group"
    assert await refusal(sign_in, provider.token(groups=None)) == "no_group"
    assert await refusal(sign_in, provider.token(groups={"ops": 1})) == "no_group"


def test_groups_may_be_within_another_claim() -> None:
    spec = replace(SPEC, groups_claim="realm_access.roles")
    rights = spec.rights_of({"realm_access": {"roles": ["ops", 3]}})
    assert rights is not None
    assert rights.role is Role.OPERATOR
    assert spec.rights_of({"realm_access": "ops"}) is None
    flat = replace(SPEC, groups_claim="https://team.example/groups")
    assert flat.rights_of({"https://team.example/groups": ["ops"]}) is not None


def test_odd_subjects_and_names_can_stand_in_a_log_line() -> None:
    rights = SPEC.groups[0]
    odd = person_of({"sub": "=cmd|x\n", "email": "a\n@\x1b[31mb"}, rights, 0.0)
    assert odd.subject.removeprefix("oidc:").isalnum()
    assert odd.name == "a?@??31mb"


# Whether it is taken


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ({"iss": "https://sso.example/realms/other"}, "invalid_token"),
        ({"aud": "another-service"}, "invalid_token"),
        ({"aud": None}, "invalid_token"),
        ({"sub": None}, "invalid_token"),
        ({"exp": None}, "invalid_token"),
        ({"exp": "soon"}, "invalid_token"),
        ({"headers": {"typ": "logout+jwt"}}, "invalid_token"),
        ({"headers": {"crit": ["x"], "x": 1}}, "invalid_token"),
    ],
)
async def test_a_token_for_others_or_without_an_end_is_refused(
    claims: dict[str, Any], code: str
) -> None:
    provider = Provider()
    assert await refusal(provider.sign_in(), provider.token(**claims)) == code


async def test_clocks_may_differ_by_the_skew_and_no_more() -> None:
    provider, now_s = Provider(), int(time.time())
    sign_in = provider.sign_in()
    for claims in ({"exp": now_s - 20}, {"nbf": now_s + 20}, {"iat": now_s + 20}):
        assert (await sign_in.person(provider.token(**claims))).subject == "oidc:u-1"
    assert await refusal(sign_in, provider.token(exp=now_s - 40)) == EXPIRED
    assert await refusal(sign_in, provider.token(nbf=now_s + 90)) == "invalid_token"
    assert await refusal(sign_in, provider.token(iat=now_s + 90)) == "invalid_token"


async def test_a_token_that_was_taken_ends_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, now_s = Provider(), time.time()
    sign_in, token = provider.sign_in(), provider.token()
    await sign_in.person(token)
    monkeypatch.setattr(time, "time", lambda: now_s + 329)
    await sign_in.person(token)
    monkeypatch.setattr(time, "time", lambda: now_s + 331)
    assert await refusal(sign_in, token) == EXPIRED


async def test_confused_algorithms_are_refused() -> None:
    provider = Provider()
    sign_in = provider.sign_in()
    claims = jwt.decode(provider.token(), options={"verify_signature": False})
    public = provider.keys["k1"].public_key()
    encodings = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    for secret in (public.public_bytes(*encodings), json.dumps(provider.jwk("k1")).encode()):
        signed = f"{b64({'alg': 'HS256', 'typ': 'JWT', 'kid': 'k1'})}.{b64(claims)}"
        mac = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
        assert await refusal(sign_in, f"{signed}.{b64(mac)}") == "invalid_token"
    for none in ("none", "None", "NONE", "", None, ["RS256"]):
        unsigned = f"{b64({'alg': none, 'kid': 'k1'})}.{b64(claims)}"
        assert await refusal(sign_in, f"{unsigned}.{b64(b'x')}") == "invalid_token"
    provider.add_key("e1", curve=True)
    provider.clock_s += ASK_AGAIN_S
    assert (await sign_in.person(provider.token("e1", "ES256"))).subject == "oidc:u-1"
    relabelled = provider.token("e1", "ES256", headers={"kid": "k1"})
    assert await refusal(sign_in, relabelled) == "invalid_token"


async def test_a_key_within_the_token_is_not_believed() -> None:
    provider, thief = Provider(), Provider()
    forged = thief.token(groups=["ops"], headers={"jwk": thief.jwk("k1"), "jku": "https://x.y/"})
    assert await refusal(provider.sign_in(), forged) == "invalid_token"
    assert not any("x.y" in url for url in provider.asked)


async def test_only_the_algorithms_of_the_file_and_keys_of_some_length_are_taken() -> None:
    provider = Provider()
    narrow = provider.sign_in(replace(SPEC, algorithms=("ES256",)))
    assert await refusal(narrow, provider.token()) == "invalid_token"
    provider.add_key("short", bits=1024)
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        weak = provider.token("short")
    assert await refusal(provider.sign_in(), weak) == "invalid_token"


@pytest.mark.parametrize(
    "header", ["[" * 4000, '{"alg":' * 2000, "5", '{"alg": "RS256", "kid": 5}', "\\"]
)
async def test_broken_tokens_are_refused_and_nothing_else_happens(header: str) -> None:
    provider = Provider()
    token = f"eyJ{b64(header.encode())}.{b64({})}.{b64(b's')}"
    assert await refusal(provider.sign_in(), token) == "invalid_token"
    deep = f"{b64(header.encode())}.{b64({})}.{b64(b's')}"
    assert await refusal(provider.sign_in(), deep) == "invalid_token"


def test_what_is_no_token_is_left_to_keys() -> None:
    provider = Provider()
    assert is_token(provider.token())
    for text in ("", "none", a_key()[0], "sk-proj-1.2.3", "eyJ.x", "eyJ" + "a" * 20_000 + ".b.c"):
        assert not is_token(text)


# The provider's keys


async def test_keys_are_fetched_once_and_a_new_one_is_known_when_it_is_used() -> None:
    provider = Provider()
    sign_in = provider.sign_in()
    for _ in range(5):
        await sign_in.person(provider.token(sub=f"u-{_}"))
    assert len(provider.asked) == 2, "the configuration and the keys"
    provider.add_key("k2")
    provider.clock_s += ASK_AGAIN_S
    assert (await sign_in.person(provider.token("k2"))).subject == "oidc:u-1"
    assert len(provider.asked) == 4


async def test_made_up_keys_do_not_make_the_provider_busy() -> None:
    provider, thief = Provider(), Provider("made-up")
    sign_in = provider.sign_in()
    await sign_in.person(provider.token())
    provider.clock_s += ASK_AGAIN_S
    for i in range(50):
        forged = thief.token("made-up", sub=str(i))
        assert await refusal(sign_in, forged) == "invalid_token"
    assert len(provider.asked) == 4


async def test_a_key_that_was_taken_back_opens_nothing_though_its_tokens_were_known() -> None:
    provider = Provider()
    sign_in, token = provider.sign_in(), provider.token()
    await sign_in.person(token)
    provider.add_key("k2")
    del provider.keys["k1"]
    provider.clock_s += 2 * KEYS_AGE_S + 1
    assert await refusal(sign_in, token) == "invalid_token"


async def test_known_keys_stay_in_use_for_a_day_without_the_provider() -> None:
    provider = Provider()
    sign_in, token = provider.sign_in(), provider.token()
    await has_failed_once(provider, sign_in, token)
    provider.clock_s += USABLE_S
    assert await refusal(sign_in, token) == "sign_in_unavailable"
    provider.is_up = True
    provider.clock_s += ASK_AGAIN_S
    await sign_in.person(token)


class SlowProvider(Provider):
    """Does not answer before `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def ask(self, url: str, form: Mapping[str, str] | None = None) -> dict[str, Any]:
        is_up = self.is_up
        await self.answers.wait()
        if not is_up:
            self.asked.append(url)
            raise HttpProblem("down")
        return await super().ask(url, form)


async def test_after_a_failure_no_request_waits_for_the_provider() -> None:
    provider = SlowProvider()
    sign_in, token = provider.sign_in(), provider.token()
    await has_failed_once(provider, sign_in, token)
    provider.clock_s += ASK_AGAIN_S
    provider.answers.clear()
    asked = len(provider.asked)
    async with asyncio.timeout(10):
        for i in range(5):
            await sign_in.person(token)
            await sign_in.person(provider.token(sub=f"u-{i}"))
    provider.answers.set()
    assert sign_in._refresher is not None
    await sign_in._refresher
    assert len(provider.asked) == asked + 1, "one request tries for all"


async def test_after_a_failure_the_keys_are_refreshed_in_the_background() -> None:
    provider = SlowProvider()
    sign_in, token = provider.sign_in(), provider.token()
    await has_failed_once(provider, sign_in, token)
    provider.is_up = True
    provider.add_key("k2")
    del provider.keys["k1"]
    provider.clock_s += ASK_AGAIN_S
    await sign_in.person(token)
    assert sign_in._refresher is not None
    await sign_in._refresher
    assert await refusal(sign_in, token) == "invalid_token"


async def test_a_failure_a_while_ago_does_not_keep_a_request_from_waiting() -> None:
    provider = Provider()
    sign_in, token = provider.sign_in(), provider.token()
    await has_failed_once(provider, sign_in, token)
    provider.is_up = True
    provider.add_key("k2")
    del provider.keys["k1"]
    provider.clock_s += KEYS_AGE_S + 1
    assert await refusal(sign_in, token) == "invalid_token"


async def test_a_client_that_leaves_during_the_first_fetch_locks_nobody_out() -> None:
    provider = SlowProvider()
    sign_in = provider.sign_in()
    provider.answers.clear()
    first, second = (
        asyncio.create_task(sign_in.person(provider.token(sub=f"u-{i}"))) for i in range(2)
    )
    await asyncio.sleep(0)  # the first one fetches the keys, and the second one waits for them
    first.cancel()
    await asyncio.wait([first])
    provider.answers.set()
    assert (await second).subject == "oidc:u-1"
    assert (await sign_in.person(provider.token(sub="u-2"))).subject == "oidc:u-2"
    assert first.cancelled()
    assert len(provider.asked) == 2, "one fetch for all"


async def test_a_defect_in_the_background_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    provider = Provider()
    sign_in, token = provider.sign_in(), provider.token()
    await sign_in.person(token)
    provider.keys["k1"] = None
    provider.clock_s += KEYS_AGE_S + 1
    await sign_in.person(token)
    assert sign_in._refresher is not None
    await sign_in._refresher
    assert "cannot be read" in caplog.text
    await sign_in.person(token)


async def test_a_provider_that_calls_itself_otherwise_gives_no_keys() -> None:
    provider = Provider()
    sign_in = provider.sign_in(replace(SPEC, issuer="https://sso.example/realms/dev/"))
    assert await refusal(sign_in, provider.token()) == "sign_in_unavailable"


async def test_so_many_tokens_are_remembered_and_no_more() -> None:
    provider = Provider()
    sign_in = provider.sign_in()
    await sign_in.person(provider.token(sub="first"))
    sign_in._verified.update((str(i).encode(), None) for i in range(KEPT_TOKENS - 1))  # type: ignore[misc]
    await sign_in.person(provider.token(sub="last"))
    assert len(sign_in._verified) == KEPT_TOKENS


# At the door


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key"])
async def test_a_token_comes_in_the_headers_that_keys_come_in(
    tmp_path: Path, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    provider = Provider()
    good, bad = provider.token(), provider.token(aud="x")
    secret, key = a_key()
    async with (
        running(
            tmp_path,
            a_fast_pool(),
            workflows=(COMPLETION, GENERATION),
            access=control_of(provider, Access((key,))),
        ) as kit,
        kit.http() as http,
    ):

        def head(token: str) -> dict[str, str]:
            return {header: f"Bearer {token}" if header == "Authorization" else token}

        known = await http.post("/v1/completions", json=PROMPT, headers=head(good))
        other_task = await http.post("/v1/chat/completions", json=CHAT, headers=head(good))
        refused = await http.post("/v1/completions", json=PROMPT, headers=head(bad))
        by_key = await http.post("/v1/completions", json=PROMPT, headers=bearer(secret))
        without = await http.post("/v1/completions", json=PROMPT)
        used = await kit.records.usage("red")
    assert (known.status_code, by_key.status_code, without.status_code) == (200, 200, 401)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token")
    assert other_task.status_code == 403, "not a task of this group"
    assert [(u.key, u.tenant) for u in used] == [("oidc:u-1", "red")]
    for token in (good, bad):
        assert not any(part in caplog.text for part in token.split("."))


async def test_an_expired_token_says_so_in_the_dialect_of_the_client(tmp_path: Path) -> None:
    provider = Provider()
    old = bearer(provider.token(exp=int(time.time()) - 60))
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=control_of(provider)
        ) as kit,
        kit.http() as http,
    ):
        answer = await http.post("/t/completion/v1/messages", json={}, headers=old)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "expired" in answer.text


async def test_with_sign_in_this_machine_needs_a_token_or_a_key_too() -> None:
    provider = Provider()
    control = control_of(provider)
    with pytest.raises(AccessError, match="needs an API key"):
        control.caller("", is_local=True)
    person = await control.person(provider.token())
    assert control.caller("", is_local=False, person=person).tenant == "red"


async def test_tokens_open_the_door_of_a_deployment_that_lost_its_keys() -> None:
    provider = Provider()
    control = control_of(provider, Access(history=KeyHistory.KEYED))
    person = await control.person(provider.token())
    assert control.caller("", is_local=False, person=person).who == "oidc:u-1 (ada@example.com)"


# The status page


async def test_the_page_gets_a_token_for_a_code_and_asks_no_other_host(tmp_path: Path) -> None:
    provider = Provider()
    provider.given = {"access_token": "opaque", "id_token": provider.token(groups=["ops"])}
    code = {"code": "c", "verifier": "v" * 43, "redirect_uri": "http://localhost/ui"}
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=control_of(provider)
        ) as kit,
        kit.http() as http,
    ):
        flow = (await http.get("/ui/sign-in")).json()
        given = await http.post("/ui/sign-in", json=code)
        state = await http.get("/ui/state", headers=bearer(given.json()["token"]))
        provider.given = {"id_token": provider.token(groups=["strangers"])}
        stranger = await http.post("/ui/sign-in", json=code)
        provider.is_up = False
        down = await http.post("/ui/sign-in", json=code)
        broken = await http.post("/ui/sign-in", json={"code": "c"})
    assert flow == {
        "authorization_endpoint": "https://sso.example/authorize",
        "client_id": "cato-page",
        "scope": "openid profile email",
    }
    assert state.status_code == 200
    assert (stranger.status_code, down.status_code, broken.status_code) == (403, 401, 400)


async def test_without_sign_in_the_page_offers_none(tmp_path: Path) -> None:
    access = an_access(Access((a_key()[1],)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        assert (await http.get("/ui/sign-in")).json() == {}
        assert (await http.post("/ui/sign-in", json={"code": "c"})).status_code == 400


# The deployment file

SIGN_IN: dict[str, Any] = {
    "issuer": ISSUER,
    "audience": "cato",
    "groups": {"ops": {"tenant": "platform", "role": "operator"}},
}


def test_the_file_says_who_may_sign_in() -> None:
    spec = IngressArgs(sign_in={**SIGN_IN, "clock_skew": "10s"}).to_ingress().sign_in  # type: ignore[arg-type]
    assert spec is not None
    assert (spec.issuer, spec.audiences, spec.skew_s) == (ISSUER, ("cato",), 10.0)
    assert spec.groups[0].role is Role.OPERATOR
    assert not any(a.startswith("HS") for a in spec.algorithms)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"issuer": "http://sso.example"}, "https"),
        ({"groups": {}}, "at least 1"),
        ({"groups": {"g": {"tenant": "=x"}}}, "pattern"),
        ({"algorithms": ["HS256"]}, "RS256"),
        ({"algorithms": ["none"]}, "RS256"),
        ({"clock_skew": "1h"}, "300"),
    ],
)
def test_settings_that_would_let_in_more_are_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        IngressArgs(sign_in={**SIGN_IN, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("audience", "problem"),
    [
        ([], "audience: must have at least 1 entry (found an empty list)"),
        ("", "audience[0]: must not be empty (found '')"),
        (["a", ""], "audience[1]: must not be empty (found '')"),
        (5, "audience: must be text or a list of texts (found 5)"),
    ],
)
def test_a_wrong_audience_is_one_problem_in_plain_words(audience: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(SignInArgs, {**SIGN_IN, "audience": audience}, "f.yaml")
    assert [str(p) for p in caught.value.problems] == [f"f.yaml: {problem}"]


def test_an_audience_is_one_or_several() -> None:
    for audience, read in (("a", ("a",)), (["a", "b"], ("a", "b"))):
        args = validate(SignInArgs, {**SIGN_IN, "audience": audience}, "f.yaml")
        assert args.to_sign_in().audiences == read


def test_a_deployment_does_not_ignore_keys_and_ask_for_tokens() -> None:
    with pytest.raises(ValueError, match="serves everybody"):
        IngressArgs(keys="ignored", sign_in=SIGN_IN)  # type: ignore[arg-type]
