"""A local Ray for one measurement, and waiting for its deployments.

Importing this module imports Ray, which then reads its settings: set the environment first.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

from cato.control import actors, host_drain
from cato.lab.client import BenchError
from cato.serve.ports import free_port

log = logging.getLogger("cato.local_ray")

LEAST_LOGICAL_CPUS = 16
OBJECT_STORE_BYTES = 150_000_000
PROBE_TIMEOUT_S = 5.0
# Ray waits half a minute for a new host; a busy machine may need longer.
ADD_TRIES = 3
POLL_S = 0.2


class Hosts:
    """Raylets on this machine that Ray treats as hosts; all but the first can be lost.

    `others` are the resources of the other hosts, as arguments of Ray's `Cluster.add_node`.
    """

    def __init__(self, first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
        # `Cluster` writes its address into Ray's default folder, which may not exist yet.
        Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
        # Ray can register its cleanup at exit in the main thread only.
        self._cluster = Cluster(
            initialize_head=True, head_node_args=dict(first), shutdown_at_exit=False
        )
        self._has = {f"host-{i}": dict(has) for i, has in enumerate(others, 1)}
        self._up: dict[str, Any] = {}
        self._changing = threading.Lock()  # `Cluster` is not made for threads
        for name in self._has:
            self.add(name)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def up(self) -> list[str]:
        """Names of the other hosts that are up."""
        return sorted(self._up)

    def add(self, name: str) -> None:
        """A new host with the resources of `name`; raise what Ray raises when it never comes up."""
        with self._changing:
            for tries_left in range(ADD_TRIES - 1, -1, -1):
                before = set(self._cluster.worker_nodes)
                try:
                    self._up[name] = self._cluster.add_node(**self._has[name])
                    return
                except Exception as error:  # the machine is busy; Ray raises many kinds
                    log.warning("%s did not come up: %r", name, error)
                    for node in self._cluster.worker_nodes - before:
                        self._cluster.remove_node(node, allow_graceful=False)
                    if not tries_left:
                        raise

    def lose(self, name: str) -> None:
        """Kill every process of a host without telling Ray."""
        with self._changing:
            self._cluster.remove_node(self._up.pop(name), allow_graceful=False)

    def drain(self, name: str, within_s: float) -> None:
        """Announce that a host leaves within this time, and remove it once it holds nothing."""
        node = self._up.pop(name)
        host_drain.begin(node.node_id, within_s, "a drill")
        host_drain.wait(node.node_id, within_s)
        with self._changing:
            self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        self._cluster.shutdown()


def start_ray(folder: Path, close: contextlib.ExitStack, cpus: int = LEAST_LOGICAL_CPUS) -> int:
    """Start Ray and Serve on loopback; they end with `close`. Returns Serve's port.

    `cpus` are logical: the measured processes share the real ones.
    """
    first = _host(max(LEAST_LOGICAL_CPUS, cpus))
    return _started(close, {"address": "local", "_temp_dir": str(folder / "ray"), **first})


def start_hosts(
    folder: Path,
    close: contextlib.ExitStack,
    others: Sequence[Mapping[str, Any]],
    cpus: int = LEAST_LOGICAL_CPUS,
) -> tuple[int, Hosts]:
    """`start_ray` on several hosts with the same logical CPUs, plus the resources in `others`."""
    first = {"temp_dir": str(folder / "ray"), **_host(max(LEAST_LOGICAL_CPUS, cpus))}
    hosts = Hosts(first, [{**_host(cpus), **has} for has in others])
    close.callback(hosts.end)
    return _started(close, {"address": hosts.address}), hosts


def _host(cpus: int) -> dict[str, Any]:
    return {
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }


def _started(close: contextlib.ExitStack, ray_options: Mapping[str, Any]) -> int:
    port = free_port()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    on_term = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level="ERROR", namespace="bench", **ray_options)
    signal.signal(signal.SIGTERM, on_term)  # replace Ray's handler, which loses the report
    close.callback(ray.shutdown)
    close.callback(actors.remove_all)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    close.callback(serve.shutdown)
    return port


def wait_until_answered(url: str, timeout_s: float) -> None:
    """Wait until `url` answers 200; raise `BenchError` with its last answer."""
    deadline_s, last = time.monotonic() + timeout_s, "no answer"
    # One client: each would read all certificates, which takes 20 ms of CPU.
    with httpx.Client(timeout=PROBE_TIMEOUT_S) as http:
        while time.monotonic() < deadline_s:
            try:
                answer = http.get(url, headers={"Connection": "close"})
                if answer.status_code == 200:
                    return
                last = answer.text[:300]
            except httpx.HTTPError as error:
                last = repr(error)
            time.sleep(POLL_S)
    raise BenchError(f"{url} was not ready after {timeout_s:.0f} s; last answer: {last}")
