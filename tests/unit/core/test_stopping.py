"""`cato serve` lets requests end before it stops, and leaves nothing behind when it is killed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from ingress_kit import COMPLETION, a_slow_pool, an_access, running, until, until_busy
from typer import Exit
from typer.testing import CliRunner

from cato.cli import app as cli
from cato.cli import serve
from cato.config.places import RUN_DIR_VARIABLE
from cato.config.serve_options import HttpArgs
from cato.serve.draining import Drain, drain, forget
from cato.serve.ingress.app import create_app
from cato.serve.keeper import MARK_VARIABLE, STOP_TIMEOUT_S
from cato.serve.served import Served

MARK = "1:2.0"
SLOW = {"model": "slow", "prompt": "x", "max_tokens": 60, "stream": True, "ignore_eos": True}


async def test_what_runs_ends_before_the_stop_and_nothing_new_begins(tmp_path: Path) -> None:
    pool, asked = a_slow_pool(), Drain(tmp_path, MARK)
    following = asyncio.create_task(asked.follow())
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        app = create_app(
            kit.service,
            max_body_bytes=100_000,
            ready=lambda: (True, ""),
            access=an_access(),
            drain=asked,
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            stream = asyncio.create_task(http.post("/v1/completions", json=SLOW))
            await until_busy(pool)
            assert not await asyncio.to_thread(drain, tmp_path, MARK, 0.5)  # too short
            stopping = asyncio.create_task(asyncio.to_thread(drain, tmp_path, MARK, 60.0))
            await until(lambda: asked.is_asked, within_s=5)
            refused = await http.post("/v1/completions", json=SLOW)
            alive = await http.get("/livez")
            assert await stopping
            whole = await stream
            forget(tmp_path, MARK)
            await until(lambda: not asked.is_asked, within_s=5)
    following.cancel()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
    assert refused.headers["retry-after"] == "5"
    assert alive.status_code == 200
    assert whole.text.endswith("data: [DONE]\n\n")


def test_an_ingress_that_was_killed_in_a_drain_is_not_waited_for(tmp_path: Path) -> None:
    drain(tmp_path, MARK, 0.0)
    (folder,) = tmp_path.iterdir()
    killed = subprocess.Popen(["sleep", "600"])
    (folder / str(killed.pid)).touch()
    assert not drain(tmp_path, MARK, 0.1)
    killed.kill()
    killed.wait()
    assert drain(tmp_path, MARK, 0.1)


def test_a_file_that_cannot_be_written_ends_no_ingress_and_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    served = tmp_path / "served-1-2.0.new"
    served.mkdir()
    with serve.console.capture() as said:
        serve._record(Served(MARK, "http://127.0.0.1:8000", "a.yaml", ""))
    assert "will not find this `cato serve`" in " ".join(said.get().split())

    folder = tmp_path / "draining-1-2.0"
    folder.touch()
    with serve.console.capture() as said:
        serve._drain(MARK, 0.0)
    assert "Running requests are cut off" in " ".join(said.get().split())

    folder.unlink()
    (folder / str(os.getpid())).mkdir(parents=True)  # in the place of the ingress' file
    asked = Drain(tmp_path, MARK)
    for _ in range(2):
        asked.look()
    assert asked.is_asked
    assert len([r for r in caplog.records if "may be cut off" in r.message]) == 1


# Stands in for `cato serve`: what it starts starts a process that ignores every signal that it can,
# in a session of its own, as Ray's actor starts HAProxy.
SERVE = """
import os, subprocess, sys, time
from cato.serve.keeper import MARK_VARIABLE, new_mark, start_keeper
mark = new_mark()
deaf = "import signal as s, time; [s.signal(n, s.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
child = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], "
    "start_new_session=True); print(p.pid, flush=True); time.sleep(600)"
)
run = subprocess.Popen([sys.executable, "-c", child, deaf], env={**os.environ, MARK_VARIABLE: mark})
keeper = start_keeper(mark, run.pid)
print(run.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["all", "child"])
def test_nothing_is_left_after_a_kill(victim: str) -> None:
    serve = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert serve.stdout is not None
    pids = [int(serve.stdout.readline()) for _ in range(2)]
    left = [psutil.Process(pid) for pid in pids]
    if victim == "child":  # what ran the rest dies first
        min(left, key=lambda p: p.create_time()).kill()
    serve.kill()
    # A shell's background job, and all that it starts, ignores SIGINT: then they are killed.
    gone, alive = psutil.wait_procs(left, timeout=STOP_TIMEOUT_S + 30)
    serve.wait()
    for process in alive:
        process.kill()
    assert len(gone) == 2


def test_an_address_of_another_host_is_not_said_to_be_taken() -> None:
    with pytest.raises(Exit), serve.console.capture() as said:
        serve._check_free("http://192.0.2.1:8000")  # for documentation (RFC 5737)
    assert "Cannot listen at http://192.0.2.1:8000: Cannot assign" in said.get()


def test_an_ipv6_address_is_looked_at_as_such() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:
        url = HttpArgs(host="::1", port=listener.getsockname()[1]).url
        with pytest.raises(Exit), serve.console.capture() as said:
            serve._check_free(url)
    assert f"Something already answers at {url}" in " ".join(said.get().split())
    serve._check_free(url)


def test_a_second_start_says_what_ends_what_is_left() -> None:
    env = {**os.environ, MARK_VARIABLE: "999999999:1.0"}
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    code += "print(s.getsockname()[1], flush=True); s.accept()"
    left = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert left.stdout is not None
        url = f"http://127.0.0.1:{int(left.stdout.readline())}"
        with pytest.raises(Exit), serve.console.capture() as said:
            serve._check_free(url)
        assert "`cato down --left` ends them" in " ".join(said.get().split())
        assert CliRunner().invoke(cli, ["down", "--left"]).exit_code == 0
        assert left.wait(10) != 0
        serve._check_free(url)
    finally:
        left.kill()
        left.wait()
