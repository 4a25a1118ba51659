"""API keys: what the store keeps of them, who is let in, and what a key may claim."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ingress_kit import (
    COMPLETION,
    GENERATION,
    SLOW,
    a_fast_pool,
    a_slow_pool,
    an_access,
    running,
    until,
    until_busy,
)
from kits.builders import a_parcel
from typer.testing import CliRunner

from cato.cli import app as cli
from cato.config.deploy_file import load_deploy_file
from cato.config.schema import IngressArgs
from cato.control.profiler import Profiler
from cato.core.administration import AddKey
from cato.core.errors import AccessError
from cato.core.ids import ModelName
from cato.core.tenancy import Access, ApiKey, Tenant, Usage
from cato.core.topology import AdapterSpec
from cato.core.usage_outbox import UsageParcel
from cato.serve.access.addresses import is_own
from cato.serve.access.control import AccessControl, KeyRule
from cato.serve.access.keys import digest_of, is_secret_of, new_key, parts
from cato.store.location import STORE_VARIABLE
from cato.store.store import MetadataStore

PROMPT = {"model": "cato-completion", "prompt": "def f("}
CHAT = {"model": "cato-generation", "messages": [{"role": "user", "content": "x"}]}
SIMULATED = Path(__file__).resolve().parents[3] / "deployments" / "simulated.yaml"
CHECKED = ("create", "--tenant", "a", "--deployment", str(SIMULATED))
FOREIGN = ("203.0.113.7", 40_000)


def a_key(tenant: str = "team-a", **rights: Any) -> tuple[str, ApiKey]:
    """A key, and what the store knows of it."""
    secret, id, digest = new_key()
    return secret, ApiKey(id, digest, tenant, **rights)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def foreign(app: Any) -> httpx.AsyncClient:
    """A client on another machine."""
    transport = httpx.ASGITransport(app, client=FOREIGN)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


# Keys


def test_a_key_shows_its_id_and_only_its_digest_is_kept() -> None:
    key, id, digest = new_key()
    found = parts(key)
    assert found is not None
    assert found[0] == id
    assert digest == digest_of(found[1])
    assert found[1] not in digest
    assert len({new_key()[0] for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "text", ["", "none", "sk-1234", "cato_0123456789_short", "cato_x_" + "a" * 43]
)
def test_what_is_no_key_has_no_parts(text: str) -> None:
    assert parts(text) is None


def test_no_secret_is_that_of_a_key_that_is_not_there() -> None:
    assert is_secret_of("s", digest_of("s"))
    assert not is_secret_of("t", digest_of("s"))
    assert not is_secret_of("s", None)


# Who is let in


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key"])
async def test_a_key_is_taken_from_the_header_that_a_client_knows(
    tmp_path: Path, header: str
) -> None:
    secret, key = a_key()
    value = f"Bearer {secret}" if header == "Authorization" else secret
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=an_access(Access((key,)))
        ) as kit,
        kit.http() as http,
    ):
        known = await http.post("/v1/completions", json=PROMPT, headers={header: value})
        unknown = await http.post("/v1/completions", json=PROMPT, headers={header: value[:-1]})
        without = await http.post("/v1/completions", json=PROMPT)
        anthropic = await http.post("/t/completion/v1/messages", json={})
        health = await http.get("/health")
    assert known.status_code == 200
    assert health.status_code == 200
    for refused in (unknown, without):
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert anthropic.json()["error"]["type"] == "authentication_error"


async def test_without_a_key_this_machine_alone_is_served_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as near,
        foreign(kit.app) as far,
    ):
        served = await near.post("/v1/completions", json=PROMPT, headers=bearer("none"))
        refused = await far.post("/v1/completions", json=PROMPT)
        through_a_proxy = await near.post(
            "/v1/completions", json=PROMPT, headers={"x-forwarded-for": "203.0.113.7"}
        )
        lied = await far.post(
            "/v1/completions", json=PROMPT, headers={"x-forwarded-for": "127.0.0.1"}
        )
        probed = await far.get("/readyz")
    assert (served.status_code, probed.status_code) == (200, 200)
    for answer in (refused, through_a_proxy, lied):
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "loopback_only"
        assert "cato keys create" in answer.json()["error"]["message"]
    assert "cato keys create" in caplog.text
    AccessControl(is_private=False).learn(None)
    assert "so nobody is served" in caplog.text


def test_an_address_of_another_machine_is_not_our_own() -> None:
    assert is_own("127.0.0.1")
    assert is_own("::1")
    assert is_own("::ffff:127.0.0.1")
    assert not is_own("203.0.113.7")
    assert not is_own("0.0.0.0")  # nobody has it
    assert not is_own("cato.example")


@pytest.mark.parametrize("end", [{"expires_at_s": 100.0}, {"digest": "0" * 64}])
def test_a_key_that_ended_or_changed_is_refused(end: dict[str, Any]) -> None:
    secret, key = a_key()
    control = AccessControl(clock=lambda: 100.0)
    control.learn(Access((key,)))
    assert control.caller(secret, is_local=False).key == key.id
    control.learn(Access((replace(key, **end),)))
    with pytest.raises(AccessError, match="not valid"):
        control.caller(secret, is_local=True)


def test_known_keys_stay_valid_while_the_store_is_down() -> None:
    secret, key = a_key()
    control = an_access(Access((key,)))
    control.learn(None)
    assert control.caller(secret, is_local=False).tenant == "team-a"
    with pytest.raises(AccessError):
        control.caller("", is_local=True)


def test_nothing_is_served_before_the_keys_are_known() -> None:
    control = AccessControl()
    with pytest.raises(AccessError) as refused:
        control.caller("", is_local=True)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 3.0)
    assert control.why_not_ready()
    control.learn(None)  # and the store cannot say: this machine alone
    assert control.caller("", is_local=True).key == ""
    with pytest.raises(AccessError):
        control.caller("", is_local=False)


def test_a_deployment_may_always_need_keys_or_never() -> None:
    required, ignored = AccessControl(KeyRule.REQUIRED), AccessControl(KeyRule.IGNORED)
    required.learn(Access())
    with pytest.raises(AccessError, match="needs an API key"):
        required.caller("", is_local=True)
    assert ignored.caller("", is_local=False).key == ""


@pytest.mark.parametrize("rule", list(KeyRule))
def test_a_deployment_file_names_the_rule(rule: KeyRule) -> None:
    assert KeyRule(IngressArgs(keys=rule.value).to_ingress().keys) is rule
    assert KeyRule(IngressArgs().to_ingress().keys) is KeyRule.AUTO


# What a key may claim


async def sla_of(http: httpx.AsyncClient, secret: str, body: Any, **headers: str) -> str:
    answer = await http.post("/v1/completions", json=body, headers=bearer(secret) | headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["X-CATO-SLA"]


@pytest.mark.parametrize(
    ("hints", "headers"),
    [
        ({}, {"X-CATO-SLA": "interactive"}),
        ({}, {"X-CATO-Deadline-Ms": "5000"}),
        ({}, {"x-stainless-read-timeout": "0.001"}),
        ({"cato": {"sla": "interactive", "deadline_ms": 5000}}, {}),
        ({"cato": {"sla": {"metric": "ttft", "target_ms": 1}}}, {}),
        ({"service_tier": "priority", "priority": -1000}, {}),
        ({"user": "team-b"}, {"X-CATO-Tenant": "team-b", "X-CATO-Priority": "-1000"}),
    ],
)
async def test_a_forged_class_number_priority_or_tenant_gains_nothing(
    tmp_path: Path, hints: dict[str, Any], headers: dict[str, str]
) -> None:
    secret, key = a_key(sla_class="standard")
    access = an_access(Access((key,)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        honest = await sla_of(http, secret, PROMPT)
        forged = await sla_of(http, secret, {**PROMPT, **hints}, **headers)
        (honest_receipt, forged_receipt) = kit.records.receipts.values()
        used = await kit.records.usage("team-b")
    assert forged == honest == "ttft=10000ms"
    assert forged_receipt.tenant == honest_receipt.tenant == "team-a"
    assert not used
    priorities = [r.nodes[0].llm.priority for r in (honest_receipt, forged_receipt)]  # type: ignore[union-attr]
    assert priorities[1] >= priorities[0]  # larger is later


async def test_infills_own_limits_are_claims_too(tmp_path: Path) -> None:
    secret, key = a_key(sla_class="standard")
    body = {"prompt": "x", "t_max_prompt_ms": 1}
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=an_access(Access((key,)))
        ) as kit,
        kit.http() as http,
    ):
        clamped = await http.post("/infill", json=body, headers=bearer(secret))
    assert clamped.headers["X-CATO-SLA"] == "ttft=10000ms"


async def test_a_key_for_batch_work_gives_way_whatever_it_says(tmp_path: Path) -> None:
    secret, key = a_key(sla_class="batch")
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=an_access(Access((key,)))
        ) as kit,
        kit.http() as http,
    ):
        hard_s = kit.service.workflow("code-completion").hard_deadline_s
        given = await sla_of(http, secret, PROMPT, **{"X-CATO-SLA": "interactive"})
    assert given == f"ttft={hard_s * 1000:g}ms"


async def test_an_interactive_key_gets_its_class_and_no_more(tmp_path: Path) -> None:
    secret, key = a_key(sla_class="interactive")
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=an_access(Access((key,)))
        ) as kit,
        kit.http() as http,
    ):
        given = await sla_of(http, secret, PROMPT, **{"X-CATO-Deadline-Ms": "790"})
    assert given == "ttft=800ms"


async def test_a_key_runs_and_calls_only_what_it_may(tmp_path: Path) -> None:
    secret, key = a_key(
        tasks=("code-completion",), models=("sim-fast",), default_task="code-completion"
    )
    access = an_access(Access((key,)))
    slow = a_slow_pool()
    async with (
        running(
            tmp_path, a_fast_pool(), slow, workflows=(COMPLETION, GENERATION), access=access
        ) as kit,
        kit.http() as http,
    ):
        http.headers.update(bearer(secret))
        task = await http.post("/v1/completions", json=PROMPT)
        default = await http.post("/v1/chat/completions", json={**CHAT, "model": "cato-auto"})
        alias = await http.post("/v1/completions", json={"model": "fast", "prompt": "x"})
        other = await http.post("/v1/completions", json={"model": "slow", "prompt": "x"})
        chat = await http.post("/v1/chat/completions", json=CHAT)
        native = await http.post("/v1/tasks/code-generation", json={"inputs": {"instruction": "x"}})
    assert [a.status_code for a in (task, default, alias)] == [200, 200, 200]
    assert default.headers["X-CATO-Task"] == "code-completion"
    assert other.json()["error"]["code"] == "model_not_permitted"
    for refused in (chat, native):
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "task_not_permitted"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TURN = {**CHAT, "messages": [{"role": "system", "content": "s"}, *CHAT["messages"]]}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS}),
        ("/v1/chat/completions", TURN),
        ("/v1/responses", {"model": "cato-generation", "instructions": "s", "input": "x"}),
        ("/v1/messages", {**CHAT, "system": "s", "max_tokens": 5}),
        ("/v1/messages/count_tokens", CHAT),
        ("/t/generation/v1/chat/completions", {**TURN, "model": "sim-slow"}),
        ("/tokenize", {"model": "cato-generation", "prompt": "x"}),
    ],
)
async def test_a_task_is_no_way_to_send_its_model_what_the_key_may_not(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    barred, barred_key = a_key(tasks=("code-generation",), models=("sim-slow",))
    free, free_key = a_key(tasks=("code-generation",), models=("sim-fast",))
    access = an_access(Access((barred_key, free_key)))
    pools = (a_fast_pool(), a_slow_pool())
    async with (
        running(tmp_path, *pools, workflows=(COMPLETION, GENERATION), access=access) as kit,
        kit.http() as http,
    ):
        refused = await http.post(path, json=body, headers=bearer(barred))
        passed = await http.post(path, json=body, headers=bearer(free))
        task = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(barred))
    assert refused.status_code == 403, refused.text
    assert "may not call this model" in refused.text
    assert passed.status_code != 403, passed.text
    assert task.status_code == 200  # what the task itself asks is the operator's


async def test_a_task_that_a_key_may_not_run_is_not_described_to_it(tmp_path: Path) -> None:
    secret, key = a_key(tasks=("code-completion",))
    access = an_access(Access((key,)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION), access=access) as kit,
        kit.http() as http,
    ):
        http.headers.update(bearer(secret))
        own = [await http.get(f"/v1/tasks/code-completion{end}") for end in ("", "/sla")]
        others = [await http.get(f"/v1/tasks/code-generation{end}") for end in ("", "/sla")]
    assert [a.status_code for a in own] == [200, 200]
    assert [a.json()["error"]["code"] for a in others] == ["task_not_permitted"] * 2


async def test_a_key_is_shown_what_it_may_use(tmp_path: Path) -> None:
    completes, completes_key = a_key(tasks=("code-completion",), models=("fast",))
    generates, generates_key = a_key(tasks=("code-generation",), models=("slow",))
    access = an_access(Access((completes_key, generates_key)))
    pools = (a_fast_pool(), a_slow_pool())
    async with (
        running(tmp_path, *pools, workflows=(COMPLETION, GENERATION), access=access) as kit,
        kit.http() as http,
    ):
        shown = {}
        for secret in (completes, generates):
            models = (await http.get("/v1/models", headers=bearer(secret))).json()["data"]
            tasks = (await http.get("/v1/tasks", headers=bearer(secret))).json()["data"]
            shown[secret] = ([m["id"] for m in models], [t["name"] for t in tasks])
        hidden = [
            await http.get(f"/v1/models/{name}", headers=bearer(completes))
            for name in ("slow", "cato-generation", "cato-auto")
        ]
        own = await http.get("/v1/models/qwen:cato-completion", headers=bearer(completes))
    assert shown[completes] == (["sim-fast", "fast", "cato-completion"], ["code-completion"])
    assert shown[generates] == (
        ["sim-slow", "slow", "cato-generation", "cato-auto"],
        ["code-generation"],
    )
    assert [h.status_code for h in hidden] == [404] * 3
    assert own.status_code == 200


async def test_another_key_cannot_end_the_work_of_a_buffer(tmp_path: Path) -> None:
    mine, my_key = a_key("team-a")
    forger, forgers_key = a_key("team-b")
    access = an_access(Access((my_key, forgers_key)))
    pool = a_slow_pool()
    body = {"model": "slow", "prompt": "x", "max_tokens": 20}
    named = {"X-CATO-Buffer": "scratch", "x-session-id": "s", "x-forwarded-for": "127.0.0.1"}
    async with (
        running(tmp_path, pool, workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        under_way = asyncio.create_task(
            http.post("/v1/completions", json=body, headers=named | bearer(mine))
        )
        await until_busy(pool)
        forged = await http.post("/v1/completions", json=body, headers=named | bearer(forger))
        assert forged.status_code == 200
        assert (await under_way).status_code == 200


async def test_a_key_sees_its_own_tenants_receipts_and_usage(tmp_path: Path) -> None:
    (mine, my_key), (other, other_key) = a_key("team-a"), a_key("team-b")
    access = an_access(Access((my_key, other_key)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        asked = await http.post("/v1/completions", json=PROMPT, headers=bearer(mine))
        path = f"/v1/requests/{asked.headers['x-request-id']}"
        seen = await http.get(path, headers=bearer(mine))
        unseen = await http.get(path, headers=bearer(other))
        used = await http.get("/v1/usage", headers=bearer(mine))
        table = await http.get("/v1/usage?format=csv", headers=bearer(mine))
        none = await http.get("/v1/usage", headers=bearer(other))
        wrong = await http.get("/v1/usage?format=xml", headers=bearer(mine))
    assert (seen.status_code, unseen.status_code, wrong.status_code) == (200, 404, 400)
    (row,) = used.json()["data"]
    usage = asked.json()["usage"]
    assert row["key"] == my_key.id
    assert (row["tenant"], row["task"], row["model"], row["requests"]) == (
        "team-a", "code-completion", "sim-fast", 1,
    )  # fmt: skip
    assert row["prompt_tokens"] == usage["prompt_tokens"]
    assert row["output_tokens"] == usage["completion_tokens"]
    header, line = table.text.splitlines()
    assert header.split(",") == list(row)
    assert line.split(",")[1:5] == ["team-a", my_key.id, "code-completion", "sim-fast"]
    assert none.json()["data"] == []


async def test_cancelled_work_is_counted_too(tmp_path: Path) -> None:
    pool = a_slow_pool()
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.http() as http:
        body = {"inputs": {"instruction": "x y z"}}
        asked = asyncio.create_task(http.post("/v1/tasks/slow", json=body))
        await until_busy(pool)
        await asyncio.sleep(0.1)
        asked.cancel()
        await until(lambda: len(kit.records.receipts) == 1, within_s=2)
        (row,) = await kit.records.usage(None)
    assert row.prompt_tokens > 0
    assert 0 < row.output_tokens < 3000


# The store and the command line


def run_keys(store: Path, *words: str) -> str:
    result = CliRunner().invoke(cli, ["keys", *words, "--store", str(store)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_keys_are_made_listed_rotated_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    made = run_keys(
        path,
        "create",
        "--tenant",
        "team-a",
        "--sla",
        "standard",
        "--task",
        "code-completion",
        "--deployment",
        str(SIMULATED),
    ).strip()
    run_keys(path, "limit", "team-a", "--requests-per-minute", "60")
    id = parts(made)[0]  # type: ignore[index]
    rotated = run_keys(path, "rotate", id, "--hours", "1").strip()
    new_id = parts(rotated)[0]  # type: ignore[index]
    listed = run_keys(path, "list")
    assert id in listed
    assert "60" in listed
    assert made not in listed
    run_keys(path, "revoke", new_id)
    store = MetadataStore.open(path)
    control = an_access(store.access("2026-11"))
    old, new = store.api_keys()
    assert (old.sla_class, old.tasks) == (new.sla_class, new.tasks)
    assert store.tenants() == (Tenant("team-a", requests_per_minute=60),)
    store.close()
    assert control.caller(made, is_local=False).tenant == "team-a"  # for one more hour
    with pytest.raises(AccessError):
        control.caller(rotated, is_local=False)


def test_names_of_a_key_are_those_of_its_deployment(tmp_path: Path) -> None:
    deployment = load_deploy_file(SIMULATED)
    models = [pool.model for pool in deployment.topology.pools]
    known = [name for model in models for name in model.names]
    added = AdapterSpec(ModelName("tuned"), "folder", ("mine",), 1)
    store = MetadataStore.open(tmp_path / "m.db")
    store.add_adapter(models[0].name, added)
    store.close()
    words = [word for name in (*known, "tuned", "mine") for word in ("--model", name)]
    run_keys(tmp_path / "m.db", *CHECKED, "--default-task", "code-generation", *words)
    run_keys(tmp_path / "m.db", "create", "--tenant", "a", "--model", "later", "--unchecked")
    store = MetadataStore.open(tmp_path / "m.db")
    checked, unchecked = store.api_keys()
    store.close()
    assert checked.models == (*known, "tuned", "mine")
    assert unchecked.models == ("later",)


@pytest.mark.parametrize("words", [(), ("--model", "later", "--unchecked"), ("--model", "MODEL")])
def test_a_key_of_a_deployment_is_kept_in_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    config = yaml.safe_load(SIMULATED.read_text(encoding="utf-8"))
    config["applications"][0]["args"]["store"] = str(tmp_path / "own.db")
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    name = load_deploy_file(file).topology.pools[0].model.name
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "other.db"))
    asked = ["keys", "create", "--tenant", "a", "--deployment", str(file)]
    result = CliRunner().invoke(cli, [*asked, *(name if w == "MODEL" else w for w in words)])
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "other.db").exists()
    with closing(MetadataStore.open(tmp_path / "own.db")) as store:
        assert len(store.api_keys()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("revoke", "0123456789"), "cato keys list"),
        (("rotate", "0123456789"), "cato keys list"),
        (("create", "--tenant", "a", "--sla", "urgent"), "interactive, standard, batch"),
        (("create", "--tenant", " "), "--tenant"),
        (("create", "--tenant", "a", "--task", "code-completion"), "--deployment"),
        (("create", "--tenant", "a", "--model", "m"), "--deployment"),
        ((*CHECKED, "--task", "code-completion", "--task", "x"), "no task 'x'; known: code-c"),
        ((*CHECKED, "--default-task", "x"), "no task 'x'"),
        ((*CHECKED, "--model", "x"), "no model 'x'"),
        ((*CHECKED, "--model", "cato-completion"), "no model 'cato-completion'"),
        (("create", "--tenant", "a", "--task", "x", "--default-task", "y"), "--default-task"),
    ],
)
def test_a_wrong_command_says_what_is_right(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    MetadataStore.open(tmp_path / "m.db").close()
    result = CliRunner().invoke(cli, ["keys", *words, "--store", str(tmp_path / "m.db")])
    assert result.exit_code == 1
    assert says in result.stderr


def test_usage_adds_up_in_the_store(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    one = Usage("2026-11-21", "team-a", "k", "t", "m", 1, 10, 2, 5)
    earlier = replace(one, day="2026-10-31")
    store.write([a_parcel(one, one), a_parcel(earlier)])
    store.write([a_parcel(one)])
    assert store.usage(None) == (
        earlier,
        replace(one, requests=3, prompt_tokens=30, cached_prompt_tokens=6, output_tokens=15),
    )
    assert store.usage("team-b") == ()
    assert store.access("2026-11").spent_tokens == {"team-a": 45}
    store.close()


@pytest.mark.parametrize(
    "words",
    [
        ("create", "--tenant", "a", "--days", "9999999"),
        ("create", "--tenant", "a", "--days", "nan"),
        ("create", "--tenant", "a", "--session-minutes", "1e300"),
        ("create", "--tenant", "a", "--bound", f"grammar_ms={10**20}"),
        ("create", "--tenant", "a", "--bound", f"grammar_ms={'9' * 5000}"),
        ("rotate", "0123456789", "--hours", "1e300"),
        ("limit", "a", "--tokens-per-month", str(10**20)),
        ("limit", "a", "--weight", "1e300"),
        ("limit", "a", "--weight", "nan"),
        ("audit", "--limit", str(10**20)),
    ],
)
def test_numbers_that_are_too_large_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["keys", *words, "--store", str(tmp_path / "m.db")])
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit)
    assert words[-2] in result.stderr
    assert not (tmp_path / "m.db").exists()


def test_a_key_that_ends_after_all_calendars_is_listed(tmp_path: Path) -> None:
    with closing(MetadataStore.open(tmp_path / "m.db")) as store:
        _, key = a_key(expires_at_s=1e13)
        store.administer(AddKey(key), "test")
    assert "never" in run_keys(tmp_path / "m.db", "list")


def test_names_like_markup_are_shown_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "m.db"
    for name in ("[/x]", "[red]x"):
        run_keys(path, "create", "--tenant", "t", "--name", name)
    with closing(MetadataStore.open(path)) as store:
        store.write([a_parcel(Usage("2026-11-21", "[/t]", "k", "[red]t", "m", 1, 10, 2, 5))])
    listed = run_keys(path, "list")
    assert "[/x]" in listed
    assert "[red]x" in listed
    assert "name=[/x]" in run_keys(path, "audit")
    assert "[red]t" in run_keys(path, "usage")


async def test_the_profiler_tells_the_keys_and_keeps_the_usage(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    made = run_keys(path, "create", "--tenant", "team-a").strip()
    profiler = Profiler(path)
    used = Usage("2026-11-21", "team-a", "k", "t", "m", 1, 10, 0, 5)
    parcel = UsageParcel("ingress", 1, (used,))
    receiver = await profiler.record((), (parcel,), "an earlier process")
    assert await profiler.usage("team-a") == ()
    for _ in range(2):  # sent again: the answer was lost
        await profiler.record((), (parcel,), receiver)
    assert await profiler.usage("team-a") == (used,)
    access = await profiler.access()
    assert access is not None
    assert an_access(access).caller(made, is_local=False).tenant == "team-a"
    await profiler.close()


async def test_nobody_is_told_that_there_are_no_keys_while_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    run_keys(path, "create", "--tenant", "team-a")
    profiler = Profiler(path)
    told = await asyncio.gather(*(profiler.access() for _ in range(5)))
    assert all(access is not None and access.keys for access in told)
    await profiler.close()


async def test_a_profiler_without_a_store_knows_no_keys(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = Profiler(tmp_path / "file" / "metadata.db")
    assert await profiler.access() is None
    await profiler.close()


# Secrets stay secret


async def test_no_key_is_in_a_log_a_metric_an_answer_or_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "store" / "metadata.db"
    made = run_keys(path, "create", "--tenant", "team-a").strip()
    wrong = made[:-4] + "0000"
    store = MetadataStore.open(path)
    control = an_access(store.access("2026-11"))
    seen = ""
    flows = tmp_path / "flows"
    flows.mkdir()
    async with (
        running(flows, a_fast_pool(), workflows=(COMPLETION,), access=control) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url, headers=bearer(made)) as http,
    ):
        answers = [
            await http.post("/v1/completions", json=PROMPT),
            await http.post("/v1/completions", json={"model": "nobody"}),
            await http.post("/v1/completions", json=PROMPT, headers=bearer(wrong)),
            await http.post("/v1/messages", json={}, headers={"x-api-key": made}),
            await http.get("/metrics"),
            await http.get("/v1/usage"),
            await http.get("/v1/models"),
        ]
        seen += "".join(f"{a.headers}{a.text}" for a in answers)
        receipts = list(kit.records.receipts.values())
        store.write([a_parcel(*await kit.records.usage(None))])
    store.close()
    assert answers[0].status_code == 200
    assert receipts
    seen += "".join(str(r.as_dict()) for r in receipts)
    seen += caplog.text + "".join(str(r.__dict__) for r in caplog.records)
    kept = b"".join(f.read_bytes() for f in path.parent.iterdir())
    for key in (made, wrong):
        secret = parts(key)[1]  # type: ignore[index]
        assert secret[:12] not in seen
        assert secret[:12].encode() not in kept
    assert parts(made)[0].encode() in kept  # type: ignore[index]  # the scan reads the right files
