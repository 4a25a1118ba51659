"""The real HAProxy under `cato-haproxy`: killed, reloaded, left alone and badly configured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from kits.processes import is_alive

from cato.serve import haproxy, haproxy_supervisor
from cato.serve.haproxy_supervisor import Supervisor
from cato.serve.ports import free_port

pytestmark = pytest.mark.skipif(
    not Path(haproxy.path()).exists(), reason="cato is not installed as a package"
)

# What Serve writes before it knows what runs.
CONFIG = """global
    maxconn 10
    stats socket SOCKET mode 666 level admin expose-fd listeners
defaults
    mode http
    timeout client 5s
    timeout connect 5s
    timeout server 5s
frontend f
    bind 127.0.0.1:PORT
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "not found"
"""
# Another process: nothing tells when it is there.
WITHIN_S = 60.0


class Place:
    """A folder with a configuration, and those who run it."""

    def __init__(self, folder: Path) -> None:
        self.file, self.asked_at = folder / "haproxy.cfg", folder / "admin.sock"
        self.port = free_port()
        self.env = dict(os.environ, **{haproxy.VARIABLE: haproxy.path()})
        self.processes: list[subprocess.Popen[bytes]] = []
        self.write()

    def write(self) -> None:
        """Serve does it before each start."""
        text = CONFIG.replace("SOCKET", str(self.asked_at)).replace("PORT", str(self.port))
        self.file.write_text(text)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [haproxy.path(), "-db", "-f", str(self.file), *arguments]
        process = subprocess.Popen(command, env=self.env, stderr=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def pid_told(self) -> int:
        """The process id that Serve is told; 0 if nobody answers."""
        with socket.socket(socket.AF_UNIX) as asked, contextlib.suppress(OSError):
            asked.settimeout(5.0)
            asked.connect(str(self.asked_at))
            asked.sendall(b"show info\n")
            lines = asked.makefile().readlines()
            return next((int(n[5:]) for n in lines if n.startswith("Pid: ")), 0)
        return 0

    def get(self) -> httpx.Response | None:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=5.0)
        except httpx.HTTPError:
            return None


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for process in place.processes:
        process.kill()
        process.wait()


def until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def haproxy_of(pid: int) -> psutil.Process:
    (child,) = psutil.Process(pid).children()
    return child


def test_an_haproxy_that_is_killed_is_replaced_and_serve_does_not_notice(place: Place) -> None:
    process = place.start()
    until(lambda: place.pid_told() == process.pid)
    for _ in range(3):
        killed = haproxy_of(process.pid)
        killed.kill()
        until(lambda: psutil.Process(process.pid).children() not in ([], [killed]))  # noqa: B023
        until(lambda: place.get() is not None)
        assert place.pid_told() == process.pid
    assert place.asked_at.stat().st_mode & 0o777 == 0o600


def test_an_haproxy_that_is_killed_while_it_starts_is_replaced(place: Place) -> None:
    process = place.start()
    supervisor = psutil.Process(process.pid)
    while not (children := supervisor.children()):
        assert process.poll() is None
    children[0].kill()
    until(lambda: place.pid_told() == process.pid)
    assert place.get() is not None


def test_before_routes_are_known_clients_are_told_to_come_again(place: Place) -> None:
    process = place.start()
    until(lambda: place.pid_told() == process.pid)
    answer = place.get()
    assert answer is not None
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert json.loads(answer.text)["error"]["code"] == "starting"


def test_what_the_disk_does_not_take_is_used_from_memory(place: Place) -> None:
    """No second name fits beside this one. An HAProxy that starts again reads it, too."""
    place.file = place.file.with_name("x" * 255)
    place.write()
    first = place.start().pid
    until(lambda: place.pid_told() == first)  # before that, its end would be a failed start
    killed = haproxy_of(first)
    killed.kill()
    until(lambda: [p for p in psutil.Process(first).children() if p.pid != killed.pid])
    until(place.get)
    answer = place.get()
    assert answer is not None
    assert answer.headers["Retry-After"] == "1"
    assert "http-buffer-request" not in place.file.read_text()


def test_a_reload_replaces_the_one_before_and_is_supervised_too(place: Place) -> None:
    old = place.start()
    until(lambda: place.pid_told() == old.pid)
    place.write()
    new = place.start("-sf", str(old.pid), "-x", str(place.asked_at))
    until(lambda: place.pid_told() == new.pid)
    assert old.wait(WITHIN_S) == 0
    haproxy_of(new.pid).kill()
    until(lambda: place.get() is not None)
    assert place.pid_told() == new.pid


def test_an_haproxy_whose_supervisor_is_killed_ends(place: Place) -> None:
    process = place.start()
    until(lambda: place.pid_told() == process.pid)
    child = haproxy_of(process.pid)
    process.kill()
    process.wait()
    psutil.wait_procs([child], timeout=WITHIN_S)
    assert not child.is_running()


def test_a_configuration_that_is_wrong_ends_at_once_with_haproxys_words(place: Place) -> None:
    place.file.write_text(place.file.read_text().replace("mode http", "mode nonsense"))
    assert place.start().wait(WITHIN_S) != 0


STARTS = """import os, subprocess, sys, time
os.setpgid(0, 0)  # as Ray starts its workers
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def manager(place: Place) -> Iterator[tuple[psutil.Process, psutil.Process, int]]:
    """What stands for the host's raylet, for the actor that it runs, and the supervisor's id."""
    nested = [sys.executable, "-c", STARTS]
    command = [*nested, *nested, haproxy.path(), "-db", "-f", str(place.file)]
    raylet = subprocess.Popen(command, env=place.env, stdout=subprocess.PIPE)
    place.processes.append(raylet)
    until(place.pid_told)
    (actor,) = psutil.Process(raylet.pid).children()
    supervisor = place.pid_told()
    yield psutil.Process(raylet.pid), actor, supervisor
    for pid in (actor.pid, supervisor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_without_its_actor_it_serves_on_until_the_next_one_takes_over(
    place: Place, manager: tuple[psutil.Process, psutil.Process, int]
) -> None:
    _, actor, supervisor = manager
    os.killpg(actor.pid, signal.SIGKILL)  # as Ray does when a worker dies
    until(lambda: not is_alive(actor.pid))
    assert place.pid_told() == supervisor
    assert place.get() is not None
    place.write()
    new = place.start()
    until(lambda: place.pid_told() == new.pid)
    until(lambda: not is_alive(supervisor))


def test_without_its_host_it_ends(
    place: Place, manager: tuple[psutil.Process, psutil.Process, int]
) -> None:
    raylet, actor, supervisor = manager
    raylet.kill()
    actor.kill()
    place.processes[0].wait()
    until(lambda: not is_alive(supervisor))
    until(lambda: place.get() is None)


class Fake:
    """A process that ends when it gets a signal."""

    def __init__(self) -> None:
        self.pid, self.returncode = 1, None
        self._ended = asyncio.Event()

    def send_signal(self, number: int) -> None:
        self.returncode = -number
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_signal_between_two_haproxys_ends_the_supervisor_too(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    started, may_start = [Fake()], asyncio.Event()
    may_start.set()

    async def start(*_: object, **__: object) -> Fake:
        await may_start.wait()
        return started[-1]

    async def is_up() -> bool:
        return started[-1].returncode is None

    supervisor = Supervisor([], str(place.asked_at))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(supervisor, "_is_up", is_up)
    monkeypatch.setattr(haproxy_supervisor, "_LEAST_LIFE_S", 0.0 if is_begun else 60.0)
    supervising = asyncio.create_task(supervisor._supervise(None))
    while not place.asked_at.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    may_start.clear()
    started[0].send_signal(signal.SIGKILL)
    started.append(Fake())
    for _ in range(10):  # it pauses before the next one, or has begun to start it
        await asyncio.sleep(0)
    supervisor._leave(signal.SIGTERM)
    may_start.set()
    async with asyncio.timeout(5):
        assert await supervising != 0
