"""Traces of agents' sessions, in the form of recorded ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def a_turn(prompt: int, hit: int, **more: Any) -> dict[str, Any]:
    return {"gap": 5.0, "in": prompt, "out": 50, "hit": hit} | more


def a_session(id: str, *turns: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "shared": [1280, 640], "turns": list(turns)}


def a_trace(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def even_sessions(folder: Path) -> Path:
    """A trace of six sessions of 40 turns, 3 s apart."""
    turns = [a_turn(9_000 + 500 * k, 8_500 + 500 * k, gap=3.0) for k in range(40)]
    turns[0] |= {"hit": 0, "base": None}
    return a_trace(folder, *(a_session(str(i), *turns) for i in range(6)))
