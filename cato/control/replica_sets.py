"""Replicas that Serve lists now, and those it listed before, as seen by this process.

The request router fills it (its own module is pickled by value, so state must live elsewhere);
the ingress reads it to tell a pool's router which replicas have left.
"""

from __future__ import annotations

_serving: dict[str, frozenset[str]] = {}
_left: dict[str, set[str]] = {}


def note(deployment: str, replicas: frozenset[str]) -> None:
    """Serve now lists `replicas` for `deployment`."""
    gone = _serving.get(deployment, frozenset()) - replicas
    _serving[deployment] = replicas
    if gone:
        _left.setdefault(deployment, set()).update(gone)


def has_left(deployment: str, replica: str) -> bool:
    """True when the replica was listed before and no longer is."""
    return replica in _left.get(deployment, ())


def left(deployment: str) -> frozenset[str]:
    """All replicas of `deployment` that were listed before and no longer are."""
    return frozenset(_left.get(deployment, ()))
