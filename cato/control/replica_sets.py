"""Replicas that Serve lists now, and those it listed before, as seen by this process.

The request router fills it (its own module is pickled by value, so state must live elsewhere);
the ingress reads it to tell a pool's router which replicas have left and which are listed. Serve
unlists a replica for a moment while it reconfigures it, and then lists the same id again.
"""

from __future__ import annotations

_serving: dict[str, frozenset[str]] = {}
_left: dict[str, frozenset[str]] = {}


def note(deployment: str, replicas: frozenset[str]) -> None:
    """Serve now lists `replicas` for `deployment`."""
    before = _left.get(deployment, frozenset()) | _serving.get(deployment, frozenset())
    _left[deployment] = before - replicas
    _serving[deployment] = replicas


def listed(deployment: str) -> frozenset[str]:
    """All replicas of `deployment` that Serve lists; empty when it has listed none yet."""
    return _serving.get(deployment, frozenset())


def left(deployment: str) -> frozenset[str]:
    """The replicas of `deployment` that Serve listed before and no longer does."""
    return _left.get(deployment, frozenset())


def has_left(deployment: str, replica: str) -> bool:
    """True when the replica was listed before and no longer is."""
    return replica in left(deployment)
