"""A Ray on this machine for one measurement, and waiting for what is deployed there.

Importing this module imports Ray, which reads its settings then: set the environment first.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from pathlib import Path

import httpx
import ray
from ray import serve

from cato.bench.client import BenchError
from cato.control import actors
from cato.serve.ports import free_port

LEAST_LOGICAL_CPUS = 16
OBJECT_STORE_BYTES = 150_000_000
PROBE_TIMEOUT_S = 5.0
POLL_S = 0.2


def start_ray(folder: Path, close: contextlib.ExitStack, cpus: int = LEAST_LOGICAL_CPUS) -> int:
    """A Ray and a Serve of our own on loopback, which end with `close`; returns Serve's port.

    `cpus` are logical: what is measured shares the real ones.
    """
    port = free_port()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    on_term = signal.getsignal(signal.SIGTERM)
    ray.init(
        address="local",
        num_cpus=max(LEAST_LOGICAL_CPUS, cpus),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
        namespace="bench",
        _temp_dir=str(folder / "ray"),
    )
    signal.signal(signal.SIGTERM, on_term)  # Ray has put its own there, which loses the report
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
    """Until `url` answers 200; raise `BenchError` with what it said last."""
    deadline_s, last = time.monotonic() + timeout_s, "no answer"
    while time.monotonic() < deadline_s:
        try:
            answer = httpx.get(url, timeout=PROBE_TIMEOUT_S)
            if answer.status_code == 200:
                return
            last = answer.text[:300]
        except httpx.HTTPError as error:
            last = repr(error)
        time.sleep(POLL_S)
    raise BenchError(f"{url} was not ready after {timeout_s:.0f} s: {last}")
