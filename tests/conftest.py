"""Environment of all tests: read by Ray and by engines when they are imported or started."""

from __future__ import annotations

import os
import socket
import tempfile

from hypothesis import settings

from cato.serve import haproxy


def _free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def ingress_ports(block: int) -> dict[str, str]:
    """Ports for the replicas of one cluster; two clusters on a machine must not share them."""
    base = 15000 + (os.getpid() * 200 + block * 100) % 14000
    ports = {}
    for protocol, start in (("HTTP", base), ("GRPC", base + 50)):
        ports[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"] = str(start)
        ports[f"RAY_SERVE_DIRECT_INGRESS_MAX_{protocol}_PORT"] = str(start + 49)
    return ports


# A folder of this test session's own, short enough for Unix sockets.
_RUN_DIR = tempfile.mkdtemp(prefix="cato-t-")
os.environ.update(
    CATO_RUN_DIR=_RUN_DIR,
    HF_HUB_OFFLINE="1",
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
    RAY_SERVE_ENABLE_HA_PROXY="1",
    RAY_SERVE_HAPROXY_BINARY_PATH=haproxy.path(),
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="1",
    RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=f"{_RUN_DIR}/haproxy.cfg",
    RAY_SERVE_HAPROXY_SOCKET_PATH=f"{_RUN_DIR}/haproxy-admin.sock",
    RAY_SERVE_HAPROXY_SERVER_STATE_BASE=_RUN_DIR,
    RAY_SERVE_HAPROXY_SERVER_STATE_FILE=f"{_RUN_DIR}/haproxy-state",
    RAY_SERVE_HAPROXY_METRICS_PORT=_free_port(),
    RAY_SERVE_HAPROXY_STATS_PORT=_free_port(),
    **ingress_ports(0),
)

settings.register_profile("cato", deadline=None)
settings.load_profile("cato")
