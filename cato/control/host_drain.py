"""Drain a host: its replicas start elsewhere, accept no new calls and finish running ones.

Ray Serve moves replicas off a node that Ray marks as draining. Ray ends the node's processes when
they are idle, at the latest at the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ray.exceptions import RayError

from cato.control import ray_private
from cato.core.errors import InputError

POLL_S = 0.5


def begin(node: str, within_s: float, why: str) -> None:
    """Tell Ray to drain `node` within this time; raise `InputError` when that is not possible."""
    is_head = ray_private.nodes().get(node)
    if is_head is None:
        raise InputError(f"no host {node} in the cluster")
    if is_head:
        raise InputError("this is the head node: draining it would end the cluster")
    if problem := ray_private.drain(node, time.time() + within_s, why):
        raise InputError(f"Ray refused to drain this host: {problem}")


def wait(node: str, within_s: float, say: Callable[[str], None] = lambda _: None) -> bool:
    """Whether the last replica of `node` ended within this time."""
    until_s, said = time.monotonic() + within_s, ""
    while now := _what_is_left(node):
        if time.monotonic() > until_s:
            return False
        if now != said:
            say(now)
            said = now
        time.sleep(POLL_S)
    return True


def _what_is_left(node: str) -> str:
    """In words; empty when no replica is left."""
    try:
        left = ray_private.replicas_on(node)
    except RayError:  # it is back within seconds
        return "Serve's controller is being restarted"
    return f"{len(left)} replicas still running: {', '.join(left)}" if left else ""
