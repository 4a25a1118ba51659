"""Health of the metadata store, for operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreState:
    """`why` is the problem when not `is_ok`; `dropped` counts records lost since the start."""

    is_ok: bool
    why: str
    queued: int
    dropped: int
