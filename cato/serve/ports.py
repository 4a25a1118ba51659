"""Free ports of this machine."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range: a port in that range can become a connection's source port between
# this choice and its use (seen: HAProxy then does not start). Serve's own defaults are above.
PORTS = range(20_000, 29_000)
# Ports per protocol for the replicas of all ingress deployments of one cluster.
INGRESS_PORTS = 50
BLOCK = 2 * INGRESS_PORTS + 20


class Ports:
    """Gives each port once; other processes that choose ports this way get others.

    What listens on a port does so seconds after the choice. So a process claims blocks of ports, by
    a name that the kernel frees when the process ends (an abstract Unix socket). Where a system has
    no such names, or all are taken, blocks are not claimed.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []
        self._left = range(0)

    def take(self, count: int) -> int:
        """The first of `count` consecutive ports that are free now; an `OSError` without any."""
        if count > BLOCK:
            raise ValueError(f"at most {BLOCK} ports in a row, not {count}")
        if first := self._of_block(count):
            return first
        blocks = [range(p, p + BLOCK) for p in range(PORTS.start, PORTS.stop - BLOCK + 1, BLOCK)]
        random.shuffle(blocks)
        for claimed in (True, False):
            for block in blocks:
                if claimed and not self._claim(block.start):
                    continue
                self._left = block
                if first := self._of_block(count):
                    return first
        raise OSError(f"no {count} free ports in a row between {PORTS.start} and {PORTS.stop}")

    def _of_block(self, count: int) -> int | None:
        for first in self._left[: len(self._left) - count + 1]:
            if all(_is_free(port) for port in range(first, first + count)):
                self._left = range(first + count, self._left.stop)
                return first
        return None

    def _claim(self, first: int) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0cato-ports-{first}")
        except OSError:
            claim.close()
            return False
        self._claims.append(claim)
        return True


_PORTS = Ports()


def free_port() -> int:
    """A loopback port that is free now."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now, each given once (`Ports`)."""
    return _PORTS.take(count)


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
