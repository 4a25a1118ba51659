"""The ways a user starts CATO: `cato serve`, `serve run`, and `serve deploy` on a Ray cluster.

Each runs in processes of its own, with ports of its own, beside the cluster of the other tests.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from cato.serve.keeper import STOP_TIMEOUT_S, marked
from cato.serve.ports import free_port, own_cluster
from tests.live.conftest import ROOT, small_index, wait_ready
from tests.live.test_tasks import INPUTS

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
BIN = Path(sys.executable).parent
# Serve's own end, and the keeper's look around.
GONE_WITHIN_S = STOP_TIMEOUT_S + 30.0


@pytest.fixture
def env() -> dict[str, str]:
    """An environment in which a second cluster does not meet the first one."""
    env = dict(os.environ)
    run = tempfile.mkdtemp(prefix="cato-c-")  # short, unlike `tmp_path`: it holds sockets
    env.update(own_cluster(run), CATO_RUN_DIR=run, XDG_STATE_HOME=run, CATO_HOME=str(ROOT))
    env.pop("RAY_ADDRESS", None)
    return env


def simulated_file(folder: Path, port: int, *, both: bool = False, **changes: Any) -> Path:
    """`deployments/simulated.yaml` on `port`, with a small index and one engine of one model, or of
    `both`; a second file in one folder replaces the first."""
    config = yaml.safe_load((ROOT / "deployments" / "simulated.yaml").read_text())
    config["http_options"]["port"] = port
    engines, ingress = config["applications"]
    engines.update(changes)
    # To index the standard library, as the file says, takes ten seconds of CPU.
    ingress["args"]["indexes"] = {"code": small_index(folder / "code")}
    pools, models = engines["args"]["pools"], engines["args"]["models"]
    if not both:
        large = models.pop(pools.pop("coder-large")["model"])
        models[pools["coder-fast"]["model"]]["aliases"] += large["aliases"]
    for pool in pools.values():
        for deployment in pool["deployments"].values():
            deployment["replicas"] = {"min": 1, "initial": 1, "max": 2}
            deployment["profile"] = "saber@gpu"
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def complete(url: str, model: str = "") -> dict[str, Any]:
    """The receipt of a task, or of a completion by `model`."""
    path, body = "tasks/code-summarization", {"inputs": INPUTS["code-summarization"]}
    if model:
        path, body = "completions", {"model": model, "prompt": "def f(", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = answer.json()["cato"]
    return receipt


def test_cato_serve_says_where_it_answers_and_ends_after_its_streams(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """Piped, on a port of the command line; other commands find it, and its cluster.

    A Ray that is said to run on this host is left alone.
    """
    port = free_port()
    another = socket.create_server(("127.0.0.1", 0))  # answers nothing
    env["RAY_TMPDIR"] = env["CATO_RUN_DIR"]
    noted = Path(env["RAY_TMPDIR"]) / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    noted.write_text(f"127.0.0.1:{another.getsockname()[1]}")
    process = subprocess.Popen(
        [str(BIN / "cato"), "serve", str(simulated_file(tmp_path, 1)), "--port", str(port)],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )

    def cato(*arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "cato"), *arguments],
            env={**env, "COLUMNS": "200"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = streamed = ""
    assert process.stdout is not None
    try:
        while "status page" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        receipt = complete(f"http://127.0.0.1:{port}")
        assert receipt["met"], "the first request of all"
        explained = cato("explain", receipt["request_id"])
        llm = next(n["llm"] for n in receipt["nodes"] if n["llm"])
        for word in ("summary", llm["replica"], "budget", "slack"):
            assert word in explained
        assert "fast-simulated" in cato("status")
        body = {"model": "simulated-1.5b", "prompt": "x", "max_tokens": 400, "stream": True}
        body |= {"ignore_eos": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            for text in answer.iter_text():
                if not streamed:
                    process.send_signal(signal.SIGTERM)
                streamed += text
    finally:
        if not streamed:
            process.terminate()
        process.communicate(timeout=120)
        another.close()
    assert streamed.endswith("data: [DONE]\n\n")
    assert f"http://127.0.0.1:{port}" in said
    assert re.search(r"\[ +\d+ s\] ", said), "progress"
    assert process.returncode == 0
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=2)


def a_cato_serve(tmp_path: Path, env: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    port = free_port()
    process = subprocess.Popen(
        [str(BIN / "cato"), "serve", str(simulated_file(tmp_path, port))],
        env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    wait_ready(url, 200, process)
    return process, url


# The keeper is alone only when both are killed; `make drills` kills each of them too.
VICTIMS = ["both", "cato serve", "its Serve"] if os.environ.get("CATO_DRILLS") else ["both"]


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_outlives_a_killed_cato_serve(
    tmp_path: Path, env: dict[str, str], victim: str
) -> None:
    process, url = a_cato_serve(tmp_path, env)
    started = psutil.Process(process.pid)
    mark = f"{process.pid}:{started.create_time()}"
    ours = marked(mark.__eq__)
    names = [p.name() for p in ours]
    assert "haproxy" in names
    assert "raylet" in names
    run = next(p for p in started.children() if "cato.serve.own_ray" in p.cmdline())
    if victim != "cato serve":
        run.kill()
    if victim != "its Serve":
        process.kill()
    process.communicate(timeout=GONE_WITHIN_S)
    gone, left = psutil.wait_procs(ours, timeout=GONE_WITHIN_S)
    assert not left, f"{len(gone)} of {len(ours)} ended"
    assert marked(mark.__eq__) == []
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass  # the port is free


def test_cato_serve_tells_why_a_pool_cannot_come_up_and_ends(
    tmp_path: Path, env: dict[str, str]
) -> None:
    path = simulated_file(tmp_path, free_port())
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "no-such-model"}')
    config = yaml.safe_load(path.read_text())
    args = config["applications"][0]["args"]
    args["models"]["simulated-1.5b"]["source"] = str(tmp_path / "weights")
    deployment = args["pools"]["coder-fast"]["deployments"]["fast-simulated"]
    deployment["engine"] = {"kind": "vllm", "zygote": True, "max_num_seqs": 4}
    path.write_text(yaml.safe_dump(config))
    said = subprocess.run(
        [str(BIN / "cato"), "serve", str(path)],
        env={**env, "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert said.returncode == 1
    assert "the engines failed to deploy: fast-simulated" in said.stdout
    assert "no-such-model" in said.stdout


@pytest.fixture
def ray_head(tmp_path: Path, env: dict[str, str]) -> Iterator[dict[str, str]]:
    """A Ray head node with a dashboard, as `serve deploy` needs it; yields its environment."""
    gcs, dashboard, client = free_port(), free_port(), free_port()
    temp = Path(f"/tmp/cato-r{os.getpid()}")
    head = subprocess.Popen(
        [
            str(BIN / "ray"),
            "start",
            "--head",
            "--block",
            f"--port={gcs}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}",
            f"--temp-dir={temp}",
            "--num-cpus=4",
            "--object-store-memory=100000000",
            "--include-dashboard=true",
        ],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    env = {
        **env,
        "RAY_ADDRESS": f"127.0.0.1:{gcs}",
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }
    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{env['RAY_DASHBOARD_ADDRESS']}/api/version", timeout=2).is_success:
                break
        except httpx.HTTPError:
            time.sleep(0.5)
    yield env
    started = psutil.Process(head.pid)
    processes = [started, *started.children(recursive=True)]
    head.terminate()
    _, left = psutil.wait_procs(processes, timeout=5)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.kill()
    head.wait()


def test_serve_deploy_on_a_cluster_restarts_what_has_changed_and_nothing_for_policies(
    tmp_path: Path, ray_head: dict[str, str]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    path = simulated_file(tmp_path, port, both=True)
    deploy = [str(BIN / "serve"), "deploy", str(path)]
    subprocess.run(deploy, env=ray_head, cwd=tmp_path, check=True, capture_output=True)
    wait_ready(url, 150)
    before = replicas(complete(url))

    change = {"pools": {"coder-large": {"routing": "power-of-two", "ordering": "fcfs"}}}
    asked = [{"name": "control-plane", "user_config": change}]
    simulated_file(tmp_path, port, both=True, deployments=asked)
    subprocess.run(deploy, env=ray_head, cwd=tmp_path, check=True, capture_output=True)
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        receipt = complete(url)
        if "in order of arrival" in reasons(receipt):
            break
        time.sleep(0.5)
    assert "in order of arrival" in reasons(receipt)
    assert replicas(receipt) == before

    fast = replicas(complete(url, "simulated-1.5b"))
    config = yaml.safe_load(path.read_text())
    large = config["applications"][0]["args"]["pools"]["coder-large"]["deployments"]
    large["large-simulated"]["replicas"]["start_first"] = True
    large["large-simulated"]["engine"]["max_num_seqs"] = 16
    path.write_text(yaml.safe_dump(config))
    subprocess.run(deploy, env=ray_head, cwd=tmp_path, check=True, capture_output=True)
    deadline_s = time.monotonic() + 120
    while replicas(complete(url)) == before:  # each is answered
        assert time.monotonic() < deadline_s, "no new engine"
        time.sleep(0.5)
    assert replicas(complete(url, "simulated-1.5b")) == fast, (
        "only the changed pool has new engines"
    )

    status = subprocess.run(
        [str(BIN / "cato"), "status"],
        env={**ray_head, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert "power-of-two" in status.stdout, status.stdout + status.stderr
    down = subprocess.run(
        [str(BIN / "cato"), "down"], env=ray_head, capture_output=True, text=True, check=True
    )
    assert "router:coder-large" in down.stdout


def replicas(receipt: dict[str, Any]) -> set[str]:
    return {n["llm"]["replica"] for n in receipt["nodes"] if n["llm"]}


def reasons(receipt: dict[str, Any]) -> str:
    return " ".join(r for n in receipt["nodes"] if n["llm"] for r in n["llm"]["reasons"])
