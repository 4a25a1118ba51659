"""Replicas that Serve lists now, and those it listed before, as seen by this process.

The request router fills it (its own module is pickled by value, so state must live elsewhere);
the ingress reads it to tell a pool's router which replicas have left and which are listed. Serve
unlists a replica for a moment while it reconfigures it, and then lists the same id again.
"""

from __future__ import annotations

from collections.abc import Set

# Replicas of a deployment that are remembered after they have left. More than drain at a time; an
# autoscaled pool would add thousands a week.
MAX_LEFT = 1_000

_serving: dict[str, frozenset[str]] = {}
_left: dict[str, dict[str, None]] = {}  # the latest last


def note(deployment: str, replicas: frozenset[str]) -> None:
    """Serve now lists `replicas` for `deployment`."""
    before = _serving.get(deployment, frozenset())
    left = {id: None for id in _left.get(deployment, ()) if id not in replicas}
    left |= dict.fromkeys(sorted(before - replicas))
    _left[deployment] = dict.fromkeys(list(left)[-MAX_LEFT:])
    _serving[deployment] = replicas


def listed(deployment: str) -> frozenset[str]:
    """All replicas of `deployment` that Serve lists; empty when it has listed none yet."""
    return _serving.get(deployment, frozenset())


def left(deployment: str) -> Set[str]:
    """The replicas of `deployment` that Serve listed before and no longer does; the latest
    `MAX_LEFT`."""
    return _left.get(deployment, {}).keys()


def has_left(deployment: str, replica: str) -> bool:
    """True when the replica was listed before and no longer is."""
    return replica in left(deployment)
