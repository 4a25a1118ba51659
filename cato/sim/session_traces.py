"""Recorded agent sessions, read from a trace.

Trace format (one JSON object per line, gzipped or not): `id`, `shared` (tool and system tokens),
and `turns` with `in`, `out`, `hit`, `gap`, `gap_after` (`tool_use`: a tool ran). Optional: `base`
(the turn whose prompt it continues), `after` (the turns that it waits for), `agent` and `shared` of
a sub-agent.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from cato.core.errors import InputError

# Longer think times are capped: the user has gone. Traces contain gaps of days.
MAX_GAP_S = 600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One call. `base`: index of the turn whose first `hit_tokens` prompt tokens it repeats."""

    gap_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    base: int | None
    after: tuple[int, ...]
    agent: int
    tools_tokens: int
    system_tokens: int
    # The gap is the run time of a tool or sub-agents, not a person's think time.
    follows_tool: bool


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """The calls of one agent and its sub-agents, in order of start."""

    id: str
    turns: tuple[Turn, ...]

    def within(self, window_tokens: int) -> RecordedSession:
        """The session up to its first turn that exceeds the model's window."""
        for i, turn in enumerate(self.turns):
            if turn.prompt_tokens + turn.output_tokens > window_tokens:
                return RecordedSession(self.id, self.turns[:i])
        return self


def read_sessions(path: Path) -> list[RecordedSession]:
    """The sessions of a trace, by SHA-256 of their ids; raise `InputError`."""
    opened = gzip.open if path.suffix == ".gz" else open
    found = []
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    found.append(_session(json.loads(line)))
                except (KeyError, TypeError, ValueError, IndexError, OverflowError) as exc:
                    rule = f"{type(exc).__name__}: {exc}"
                    raise InputError(f"{path}, line {number}: no session ({rule})") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{path}: not UTF-8 text; a compressed trace ends in .gz") from exc
    except (EOFError, zlib.error) as exc:
        after = f"after {len(found)} whole sessions"
        raise InputError(f"{path}: cut off or damaged {after} ({exc}); copy it again") from exc
    except OSError as exc:
        raise InputError(f"{path}: {exc}") from exc
    if not found:
        raise InputError(f"{path}: no sessions")
    return sorted(found, key=lambda s: sha256(s.id.encode()).hexdigest())


def _session(row: dict[str, Any]) -> RecordedSession:
    previous: dict[int, int] = {}
    turns = []
    for i, turn in enumerate(row["turns"]):
        agent = int(turn.get("agent", 0))
        before = previous.get(agent)
        base = turn.get("base", before)
        after = turn.get("after", [] if before is None else [before])
        if any(not 0 <= j < i for j in after) or (base is not None and not 0 <= base < i):
            raise ValueError(f"turn {i} follows a turn that is not before it")
        tools, system = turn.get("shared") or (row["shared"] if i == 0 else (0, 0))
        hit = int(turn["hit"]) if base is not None else 0
        gap_s, prompt_tokens, output_tokens = float(turn["gap"]), int(turn["in"]), int(turn["out"])
        if prompt_tokens < 1 or min(output_tokens, hit, tools, system) < 0 or hit > prompt_tokens:
            counts = f"in {prompt_tokens}, out {output_tokens}, hit {hit}, shared {tools}, {system}"
            raise ValueError(f"turn {i} has impossible token counts: {counts}")
        if not (gap_s >= 0 and isfinite(gap_s)):
            raise ValueError(f"turn {i} has a gap of {gap_s:g} s")
        turns.append(
            Turn(
                gap_s,
                prompt_tokens,
                max(1, output_tokens),
                hit,
                base,
                tuple(after),
                agent,
                int(tools),
                int(system),
                turn.get("gap_after") in ("tool_use", "sub_agents"),
            )
        )
        previous[agent] = i
    return RecordedSession(str(row["id"]), tuple(turns))
