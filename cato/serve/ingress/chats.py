"""Conversations on their way to an engine."""

from __future__ import annotations


def with_known_roles(messages: object) -> object:
    """Messages with the role `developer` under the name that chat templates know: `system`."""
    if not isinstance(messages, list):
        return messages
    return [
        {**m, "role": "system"} if isinstance(m, dict) and m.get("role") == "developer" else m
        for m in messages
    ]
