"""Free ports of this machine."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range: a port in that range can become a connection's source port between
# this choice and its use (seen: HAProxy then does not start). Serve's own defaults are above.
PORTS = range(20_000, 29_000)
TRIES = 50
# Ports per protocol for the replicas of all ingress deployments of one cluster.
INGRESS_PORTS = 50


def free_port() -> int:
    """A loopback port that is free now."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now."""
    for first in random.sample(range(PORTS.start, PORTS.stop - count), TRIES):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} free ports in a row between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def own_cluster(folder: str) -> dict[str, str]:
    """Serve settings that isolate a cluster from other clusters on this machine.

    Without them both clusters number their ports from 30000 on, so that one's HAProxy can reach
    the other's replicas; without replicas it falls back to port 8500. `folder` must be short: it
    holds a Unix socket.
    """
    http = free_ports(2 * INGRESS_PORTS)
    grpc = http + INGRESS_PORTS
    return {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http + INGRESS_PORTS - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc + INGRESS_PORTS - 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/haproxy-admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/haproxy-state",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
