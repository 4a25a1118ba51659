"""A host that is about to go: its replicas start elsewhere, take no more, and end what they have.

Ray Serve moves replicas off a node that Ray calls draining; Ray ends the node's processes when they
are idle, and at the deadline at the latest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cato.control import ray_private
from cato.core.errors import InputError

POLL_S = 0.5


def begin(node: str, within_s: float, why: str) -> None:
    """Tell Ray that `node` goes within this time; raise `InputError` when it must not or cannot."""
    is_head = ray_private.nodes().get(node)
    if is_head is None:
        raise InputError(f"no host {node} in the cluster")
    if is_head:
        raise InputError("this is the head: with it goes the cluster, and nothing can be moved")
    if problem := ray_private.drain(node, time.time() + within_s, why):
        raise InputError(f"Ray does not drain this host: {problem}")


def wait(node: str, within_s: float, say: Callable[[str], None] = lambda _: None) -> bool:
    """Whether the last replica of `node` ended within this time."""
    until_s, said = time.monotonic() + within_s, ""
    while left := ray_private.replicas_on(node):
        if time.monotonic() > until_s:
            return False
        if (now := f"{len(left)} replicas end: {', '.join(left)}") != said:
            say(now)
            said = now
        time.sleep(POLL_S)
    return True
