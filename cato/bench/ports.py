"""Free ports of this machine."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range: a port there can be taken as the source of any connection between
# this choice and its use (seen: HAProxy then does not start). Serve's own defaults are above.
PORTS = range(20_000, 29_000)
TRIES = 50


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on now."""
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
