"""What goes wrong at the start is told at once, and to whom it concerns."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ingress_kit import COMPLETION, SLOW, a_fast_pool, an_access, running, workflows_of
from test_keys import foreign
from typer.testing import CliRunner

from cato.cli import app as cli
from cato.cli import greeting
from cato.cli import serve as serve_command
from cato.cli.greeting import steps_of_engines
from cato.config.deploy_file import load_deploy_file
from cato.core.errors import AccessError, ConfigError, StartingError, UnknownNameError
from cato.core.profile import UNMEASURED
from cato.core.tenancy import Access, ApiKey
from cato.lab.chaos.local_pools import LocalPools, LocalRecords
from cato.serve import own_ray
from cato.serve.access.control import AccessControl, KeyRule
from cato.serve.access.early import stored_access
from cato.serve.access.keys import new_key
from cato.serve.engines_app import (
    FAILED,
    ServedApplication,
    ServedPart,
    last_words,
    refusal,
    why_unplaceable,
)
from cato.serve.ingress.app import create_app
from cato.serve.keeper import MARK_VARIABLE, new_mark
from cato.serve.nodes.runner import NodeRunner
from cato.serve.pools import PoolInfo
from cato.serve.ports import free_port
from cato.serve.preflight import check_files
from cato.serve.service import TaskService
from cato.store.store import MetadataStore

ROOT = Path(__file__).resolve().parents[3]
HAPROXY = {"RAY_SERVE_HAPROXY_METRICS_PORT": "1", "RAY_SERVE_HAPROXY_STATS_PORT": "2"}
CHAT = {"model": "fast", "messages": [{"role": "user", "content": "x"}]}


# Another `cato serve` on this host


def test_the_ports_of_a_serve_that_has_only_been_started_are_left_to_it() -> None:
    """Its HAProxy listens half a minute later; both would number their replicas' ports alike."""
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK_VARIABLE: new_mark()})
    try:
        own = serve_command.beside_another(HAPROXY)
    finally:
        other.kill()
        other.wait()
    first, last = (own[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"] for end in ("MIN", "MAX"))
    assert 20_000 <= int(first) < int(last) < 29_000


# Files


def a_file(folder: Path, **changes: Any) -> Path:
    """The simulated deployment with its own profiles, and `changes` of the engines' args."""
    config = yaml.safe_load((ROOT / "deployments" / "simulated.yaml").read_text(encoding="utf-8"))
    (folder / "profiles").mkdir()
    for path in (ROOT / "profiles").glob("*.yaml"):
        (folder / "profiles" / path.name).write_bytes(path.read_bytes())
    config["applications"][0]["args"] |= {"profiles": str(folder / "profiles"), **changes}
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_the_steps_of_real_engines_are_told() -> None:
    def told(name: str) -> list[str]:
        deploy = load_deploy_file(ROOT / "deployments" / name)
        return steps_of_engines(deploy.topology)

    assert told("nvidia.yaml") == [
        "fast-gpu: steps of 2048 tokens, 256 of one prompt beside other calls",
        "large-gpu: steps of 2048 tokens, 256 of one prompt beside other calls",
    ]
    assert told("local-cpu.yaml") == ["demo-cpu: steps of 256 tokens"]
    assert told("simulated.yaml") == []


def test_who_needs_a_key_is_told_so_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = httpx.Response(403, json={"error": {"message": "No API key is configured"}})
    tasks = httpx.Response(200, json={"data": [{"name": "code-completion"}]})
    deploy = load_deploy_file(ROOT / "deployments" / "simulated.yaml")

    def told(answer: httpx.Response) -> str:
        monkeypatch.setattr(httpx, "get", lambda url, **_: answer)
        with greeting.console.capture() as said:
            greeting.greet("http://127.0.0.1:8000", deploy, Path("serve.log"))
        return said.get()

    without = told(refused)
    assert "note: No API key is configured" in without
    assert '-H "Authorization: Bearer $CATO_API_KEY"' in without
    with_tasks = told(tasks)
    assert "tasks: code-completion" in with_tasks
    assert "Bearer" not in with_tasks


def test_a_missing_folder_of_profiles_is_told_with_all_other_problems(tmp_path: Path) -> None:
    path = a_file(tmp_path, profiles=str(tmp_path / "none"), event_log="/dev/null/x")
    found = problems(path)
    assert any("/none: " in p for p in found)
    assert any("/dev/null/x" in p for p in found)


def problems(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_files(load_deploy_file(path))
    return [str(p) for p in caught.value.problems]


def test_a_profile_that_does_not_fit_its_name_ends_serve_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: object, **options: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(serve_command, "_answers", lambda url: False)
    path = a_file(tmp_path)
    profiles = tmp_path / "profiles"
    (profiles / "saber@gpu.yaml").rename(profiles / "agents@gpu.yaml")
    result = CliRunner().invoke(cli, ["serve", str(path)])
    assert result.exit_code == 2
    assert "agents@gpu.yaml" in result.output.replace("\n", "")
    assert "is named saber@gpu.yaml" in result.output.replace("\n", "")


def test_all_that_a_file_names_and_this_machine_lacks_is_told_at_once(tmp_path: Path) -> None:
    engine = {"kind": "vllm", "python": str(tmp_path / "python")}
    model = {"source": str(tmp_path / "weights"), "adapters": {"lora": {"source": str(tmp_path)}}}
    pools = {
        "main": {
            "model": "coder",
            "deployments": {
                "main-cpu": {"accelerator": "cpu", "profile": "nope", "engine": engine}
            },
        }
    }
    path = a_file(tmp_path, models={"coder": model}, pools=pools, store="mysql://x/y")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["applications"][1]["args"] |= {"workflows": "no-such", "indexes": {"code": "nowhere"}}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    told = problems(path)
    for part in (
        "main-cpu.profile: no file of this name",
        "no-such: not found",
        "nowhere: not found",
        "main-cpu.engine.python: no such program on this machine",
        "models.coder.source: not found",
        "models.coder.adapters.lora.source: a folder without the model's config.json",
        "store: ",
    ):
        assert [t for t in told if part in t], (part, told)
    assert len(told) == 7


def test_models_that_are_simulated_or_on_a_hub_are_not_looked_for(tmp_path: Path) -> None:
    check_files(load_deploy_file(a_file(tmp_path)))
    check_files(load_deploy_file(ROOT / "deployments" / "nvidia.yaml"))


@pytest.mark.parametrize(
    ("store", "rule"),
    [
        ("/proc/y/z.db", "no file can be made in /proc"),
        ("{folder}/text", "{folder}/text is not a CATO metadata store"),
        ("{folder}/text/m.db", "{folder}/text is not a folder"),
        ("{folder}", "it is not a file"),
    ],
)
def test_a_store_that_cannot_be_used_is_told_and_left_alone(
    tmp_path: Path, store: str, rule: str
) -> None:
    (tmp_path / "text").write_text("a: 1\n")
    path = a_file(tmp_path, store=store.format(folder=tmp_path))
    before = sorted(tmp_path.iterdir())
    (told,) = problems(path)
    assert rule.format(folder=tmp_path) in told
    assert f"{path}: store: " in told
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "text").read_text() == "a: 1\n"


@pytest.mark.parametrize("folder", ["/proc/x", "{folder}/text", "{folder}/text/log"])
def test_an_event_log_that_cannot_be_written_is_told(tmp_path: Path, folder: str) -> None:
    (tmp_path / "text").write_text("")
    (told,) = problems(a_file(tmp_path, event_log=folder.format(folder=tmp_path)))
    assert "event_log: " in told


def test_folders_that_can_be_made_are_no_problem_and_not_made(tmp_path: Path) -> None:
    new = tmp_path / "new"
    path = a_file(tmp_path, store=str(new / "deep" / "m.db"), event_log=str(new / "log"))
    check_files(load_deploy_file(path))
    assert not new.exists()


# A second Serve on this host


class Started(Exception):
    """Instead of Ray."""


def environment_of_serve(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **given: str
) -> tuple[dict[str, str], str]:
    """What `cato serve` would start Ray with, and what it prints before."""
    found: dict[str, str] = {}

    def start(*args: object, env: dict[str, str], **options: object) -> None:
        found.update(env)
        raise Started

    for name in [n for n in os.environ if n.startswith(("RAY_SERVE_", "RAY_ADDRESS"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CATO_RUN_DIR", str(folder / "run"))
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(serve_command, "_check_free", lambda url: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    result = CliRunner().invoke(cli, ["serve", str(a_file(folder))], env=given)
    assert isinstance(result.exception, Started), result.output
    return found, " ".join(result.output.split())


def test_a_second_serve_gets_haproxy_ports_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, statistics = names = tuple(serve_command.HAPROXY_PORTS)
    with socket.create_server(("127.0.0.1", 0)) as first:
        taken = first.getsockname()[1]
        monkeypatch.setitem(serve_command.HAPROXY_PORTS, metrics, taken)
        monkeypatch.setitem(serve_command.HAPROXY_PORTS, statistics, free_port())
        env, told = environment_of_serve(tmp_path, monkeypatch)
    assert f"perhaps by another `cato serve`: {taken}." in told
    assert (
        f"metrics are on port {env[metrics]}, and its statistics on port {env[statistics]}" in told
    )
    assert len({str(taken), *(env[n] for n in names)}) == 3
    assert env["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] != "30000", "those of the first"


def test_the_first_serve_keeps_the_documented_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in serve_command.HAPROXY_PORTS:
        monkeypatch.setitem(serve_command.HAPROXY_PORTS, name, free_port())
    monkeypatch.setattr(serve_command, "marked", lambda is_wanted: [])  # of whatever runs here
    env, told = environment_of_serve(tmp_path, monkeypatch)
    assert not serve_command.HAPROXY_PORTS.keys() & env.keys()
    assert "ports in use" not in told


@pytest.mark.parametrize("is_one_left", [False, True])
def test_ports_that_the_user_set_are_kept_though_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one_left: bool
) -> None:
    metrics, statistics = serve_command.HAPROXY_PORTS
    with socket.create_server(("127.0.0.1", 0)) as first:
        taken = first.getsockname()[1]
        for name in (metrics, statistics):
            monkeypatch.setitem(serve_command.HAPROXY_PORTS, name, taken)
        given = {metrics: str(taken), "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "30500"}
        if not is_one_left:
            given[statistics] = str(taken)
        env, told = environment_of_serve(tmp_path, monkeypatch, **given)
    assert given.items() <= env.items()
    assert ("ports in use" in told) == is_one_left
    assert (env[statistics] != str(taken)) == is_one_left
    assert "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT" not in env, "one end of the user's range"


def test_a_ray_that_runs_already_has_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        for name in serve_command.HAPROXY_PORTS:
            monkeypatch.setitem(serve_command.HAPROXY_PORTS, name, first.getsockname()[1])
        env, told = environment_of_serve(tmp_path, monkeypatch, RAY_ADDRESS="10.0.0.1:6379")
    assert not serve_command.HAPROXY_PORTS.keys() & env.keys()
    assert "ports in use" not in told


# What Serve says

TRACE = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:engines:fast.initialize_and_get_metadata() (pid=1)
  File "x.py", line 1, in y
    raise EngineError("no")
RuntimeError: Traceback (most recent call last):
  File "z.py", line 2, in w
cato.core.errors.EngineError: the engine ended with code 1:
  no such model"""


def served(**deployments: ServedPart) -> ServedApplication:
    return ServedApplication(ServedPart("DEPLOYING"), deployments)


def test_the_error_is_told_without_the_tracebacks_before_it() -> None:
    words = "cato.core.errors.EngineError: the engine ended with code 1:\n  no such model"
    assert last_words(TRACE) == words
    assert last_words("as it is") == "as it is"
    assert len(last_words("\n".join("x" * 1000)).splitlines()) == 20


def test_a_deployment_that_serve_gave_up_is_a_failure_with_its_own_message() -> None:
    app = served(fast=ServedPart(FAILED, TRACE), large=ServedPart("HEALTHY"))
    first, *rest = app.failure.splitlines()
    assert first == "the engines failed to deploy: fast"
    assert rest == [
        "fast: cato.core.errors.EngineError: the engine ended with code 1:",
        "  no such model",
    ]


def test_an_application_that_could_not_be_built_is_a_failure_too() -> None:
    problem = "cato.core.errors.ConfigError: 1 problem:\n  profiles/x.yaml: wrong"
    app = ServedApplication(ServedPart(FAILED, f"Traceback ...\n  File\n{problem}"))
    assert app.failure == f"the engines failed to deploy\n{problem}"


def test_a_refused_deployment_file_is_told_with_what_runs_on_and_what_to_do() -> None:
    problem = "cato.core.errors.ConfigError: 1 problem:\n  profiles/x.yaml: wrong"
    refused = ServedApplication(ServedPart(FAILED, f"Traceback ...\n  File\n{problem}"))
    first, _, details = refusal("engines", refused).partition("\n")
    assert first == (
        "the last deployment of the application engines failed, so what ran before it stays in "
        "use: correct the deployment file and deploy it again"
    )
    assert details == problem


def test_a_deployment_that_does_not_come_up_is_told_by_name() -> None:
    parts = {"fast": ServedPart(FAILED, TRACE), "large": ServedPart("HEALTHY")}
    told = refusal("engines", ServedApplication(ServedPart(FAILED, "x"), parts))
    assert told.startswith("the last deployment of the application engines failed (fast): correct")
    healthy = {"fast": ServedPart("HEALTHY")}
    assert refusal("engines", ServedApplication(ServedPart("RUNNING"), healthy)) == ""


def test_a_replica_that_is_lost_while_others_start_is_no_failed_deployment() -> None:
    """Serve replaces it: `cato serve` must wait, and nobody correct the file."""
    lost = ServedPart(FAILED, "A replica's health check failed.", "HEALTH_CHECK_FAILED")
    never = ServedPart(FAILED, "The deployment failed to start 3 times", "REPLICA_STARTUP_FAILED")
    app = ServedApplication(ServedPart(FAILED, "x"), {"fast": lost, "large": ServedPart("HEALTHY")})
    assert (app.failure, refusal("engines", app)) == ("", "")
    assert app.trouble == "fast: A replica's health check failed."
    both = ServedApplication(ServedPart(FAILED, "x"), {"fast": lost, "large": never})
    assert both.failure.splitlines()[0] == "the engines failed to deploy: large"


@pytest.mark.parametrize(
    ("part", "is_trouble"),
    [
        (ServedPart("UPDATING", "A replica failed to start with exception. Retrying ..."), True),
        (ServedPart("UNHEALTHY", "replica x did not answer"), True),
        (ServedPart("UPDATING", "1 replica waits for more than 30 s for resources"), True),
        (ServedPart("HEALTHY", ""), False),
    ],
)
def test_what_may_still_come_up_is_no_failure_but_its_trouble_is_told(
    part: ServedPart, is_trouble: bool
) -> None:
    app = served(fast=part)
    assert app.failure == ""
    assert app.trouble == (f"fast: {part.message}" if is_trouble else "")


def test_a_pool_that_no_host_can_hold_is_named_with_what_it_lacks() -> None:
    topology = load_deploy_file(ROOT / "deployments" / "nvidia.yaml").topology
    pools = {p.name: p.deployments for p in topology.pools}
    first, fast, large = why_unplaceable(pools, [{"CPU": 8.0}]).splitlines()
    assert first == "no host can hold a replica of: coder-fast, coder-large"
    assert fast == (
        "fast-gpu: a replica needs 1 CPU, 1 GPU on one host; the most any host has is 8 CPU, 0 GPU"
    )
    assert large.startswith("large-gpu: ")
    assert why_unplaceable(pools, [{"CPU": 8.0, "GPU": 1.0}]) == ""


def test_a_pool_comes_up_with_any_of_its_deployments() -> None:
    topology = load_deploy_file(ROOT / "deployments" / "mixed.yaml").topology
    pools = {p.name: p.deployments for p in topology.pools}
    assert why_unplaceable(pools, [{"CPU": 8.0}]) == ""


async def test_only_this_machine_is_told_the_details(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        app = create_app(
            kit.service,
            max_body_bytes=1000,
            ready=lambda: (False, "the engines failed to deploy: fast\n/secret/path"),
            access=an_access(),
        )
        near = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with near, foreign(app) as far:
            here, there = await near.get("/readyz"), await far.get("/readyz")
    assert (here.status_code, there.status_code) == (503, 503)
    assert here.json()["reason"] == "the engines failed to deploy: fast\n/secret/path"
    assert there.json()["reason"] == "the engines failed to deploy: fast"


# Keys before there is a Profiler


async def test_a_store_without_keys_lets_this_machine_in_before_the_profiler_is_there(
    tmp_path: Path,
) -> None:
    args = {"store": str(tmp_path / "metadata.db")}
    access = await stored_access(args, is_on_head_node=True)
    assert access == Access()
    assert not (tmp_path / "metadata.db").exists()
    control = AccessControl()
    control.learn(access)
    assert control.caller("", is_local=True).key == ""
    MetadataStore.open(tmp_path / "metadata.db").close()
    known = await stored_access(args, is_on_head_node=True)
    assert known is not None
    assert replace(known, month="") == Access()


async def test_a_store_with_a_key_lets_nobody_in_without_it(tmp_path: Path) -> None:
    location = tmp_path / "metadata.db"
    result = CliRunner().invoke(
        cli, ["keys", "create", "--tenant", "team"], env={"CATO_STORE": str(location)}
    )
    assert result.exit_code == 0, result.output
    access = await stored_access({"store": str(location)}, is_on_head_node=True)
    assert access is not None
    control = AccessControl()
    control.learn(access)
    with pytest.raises(AccessError, match="needs an API key"):
        control.caller("", is_local=True)


@pytest.mark.parametrize(
    ("store", "here"),
    [
        ("{folder}/metadata.db", False),  # another host's file
        ("metadata.db", True),  # relative to another folder, perhaps
        ("sqlite:///{folder}/metadata.db", True),
        ("mysql://host/x", True),
        ("{folder}", True),  # no database
    ],
)
async def test_where_the_store_cannot_be_seen_from_here_nobody_is_let_in(
    tmp_path: Path, store: str, here: bool
) -> None:
    location = store.format(folder=tmp_path)
    assert await stored_access({"store": location}, is_on_head_node=here) is None


@pytest.mark.parametrize("rule", [KeyRule.AUTO, KeyRule.REQUIRED])
async def test_while_keys_are_loading_the_answer_says_when_to_come_again(
    tmp_path: Path, rule: KeyRule
) -> None:
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=AccessControl(rule)
        ) as kit,
        kit.http() as http,
    ):
        answer = await http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "keys_unknown"
    assert answer.headers["Retry-After"] == "3"


# Models before there are engines


async def test_while_no_pool_is_known_models_are_not_unknown_but_starting(tmp_path: Path) -> None:
    async with running(tmp_path, workflows=(COMPLETION,)) as kit, kit.http() as http:
        answers = [
            await http.get("/v1/models"),
            await http.get("/v1/models/fast"),
            await http.post("/v1/chat/completions", json=CHAT),
            await http.post("/v1/messages", json={**CHAT, "max_tokens": 5}),
            await http.post("/v1/completions", json={"model": "fast", "prompt": "x"}),
            await http.post("/v1/completions", json={"model": "cato-completion", "prompt": "x"}),
        ]
    for answer in answers:
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "3"


class HalfKnown(LocalPools):
    """Pools of which some are not known yet."""

    def pool_of(self, model: str) -> PoolInfo:
        try:
            return super().pool_of(model)
        except UnknownNameError:
            raise StartingError("the pools are not known yet") from None


async def test_while_some_pools_are_not_known_other_models_are_starting(tmp_path: Path) -> None:
    async with HalfKnown(a_fast_pool()) as pools:
        service = TaskService(
            workflows_of(tmp_path, COMPLETION, SLOW), pools, NodeRunner({}),
            LocalRecords(pools), seed=1,
        )  # fmt: skip
        app = create_app(service, max_body_bytes=9999, ready=lambda: (True, ""), access=an_access())
        near = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with near:
            served = [
                await near.get("/v1/models"),
                await near.get("/v1/models/fast"),
                await near.post("/v1/completions", json={"model": "fast", "prompt": "x"}),
            ]
            starting = [
                await near.get("/v1/models/other"),
                await near.post("/v1/chat/completions", json={**CHAT, "model": "other"}),
                await near.post("/v1/completions", json={"model": "other", "prompt": "x"}),
                await near.post("/v1/messages", json={**CHAT, "model": "other", "max_tokens": 5}),
            ]
    assert [answer.status_code for answer in served] == [200] * len(served)
    for answer in starting:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")


async def test_another_name_of_a_model_that_is_not_known_yet_is_starting_not_forbidden(
    tmp_path: Path,
) -> None:
    secret, id, digest = new_key()
    key = ApiKey(id, digest, "a", models=("sim-large", "sim-fast"))
    async with HalfKnown(a_fast_pool()) as pools:
        service = TaskService(
            workflows_of(tmp_path, COMPLETION), pools, NodeRunner({}), LocalRecords(pools), seed=1
        )
        access = an_access(Access((key,)))
        app = create_app(service, max_body_bytes=9999, ready=lambda: (True, ""), access=access)
        near = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with near:
            near.headers["api-key"] = secret
            alias = await near.post("/v1/completions", json={"model": "large", "prompt": "x"})
            known = await near.post("/v1/completions", json={"model": "fast", "prompt": "x"})
    assert (alias.status_code, alias.headers["Retry-After"]) == (503, "3")
    assert known.status_code == 200


class Unmeasured(LocalPools):
    """Pools of which no replica has told its profile."""

    def all(self) -> list[PoolInfo]:
        return [replace(p, profile=UNMEASURED, is_measured=False) for p in super().all()]


async def test_a_context_that_is_not_known_yet_is_not_made_up(tmp_path: Path) -> None:
    async with Unmeasured(a_fast_pool()) as pools:
        service = TaskService(
            workflows_of(tmp_path, COMPLETION), pools, NodeRunner({}), LocalRecords(pools), seed=1
        )
        app = create_app(service, max_body_bytes=1000, ready=lambda: (True, ""), access=an_access())
        near = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with near:
            listed = (await near.get("/v1/models")).json()["data"]
    assert {m["id"]: m["max_model_len"] for m in listed} == {
        "sim-fast": None, "fast": None, "cato-completion": None,
    }  # fmt: skip


# Ray's own start


BUSY = """
import signal, subprocess
from cato.serve import own_ray

started = []

def init(**options):
    assert not options["include_dashboard"]
    assert all(process.wait(10) == -signal.SIGKILL for process in started)
    started.append(subprocess.Popen(["sleep", "600"]))
    if len(started) < own_ray.TRIES:
        raise RuntimeError("The current node timed out during startup.")

own_ray.ray.init = init
own_ray.start_ray()
assert started[-1].poll() is None
started[-1].kill()
print(len(started))
"""


def test_a_ray_that_does_not_come_up_is_started_again() -> None:
    """The processes of the try before are gone then. In a process of its own: all its children
    are."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(own_ray.TRIES)]
    assert done.stderr.count("timed out during startup") == own_ray.TRIES - 1
