"""Free ports of this machine."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range: a port there can be taken as the source of any connection between
# this choice and its use (seen: HAProxy then does not start).
PORTS = range(20_000, 32_000)
TRIES = 50


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    for port in random.sample(PORTS, TRIES):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {TRIES} ports between {PORTS.start} and {PORTS.stop} is free")
