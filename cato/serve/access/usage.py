"""Usage and cost as table rows and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import date

from cato.core.errors import InputError
from cato.core.tenancy import LAST_DAY, TurnUsage, Usage

GROUPS = ("day", "tenant", "key", "task", "model")
"""Columns that usage can be grouped by."""
SUMS = tuple(f.name for f in fields(Usage) if f.name not in GROUPS)
TURN_COLUMNS = tuple(f.name for f in fields(TurnUsage))

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)

Row = dict[str, object]


def groups_of(text: str, name: str) -> tuple[str, ...]:
    """Some of `GROUPS`, each once; raise `InputError`, which calls the text `name`."""
    by = tuple(text.split(","))
    if len(set(by)) != len(by) or not set(by) <= set(GROUPS):
        raise InputError(f"{name} must be a comma-separated list of {', '.join(GROUPS)}", name)
    return by


def days_of(since: str | None, until: str | None, prefix: str = "") -> tuple[str, str]:
    """The first and the last day, in order; None: no bound.

    Raise `InputError`, which calls them `since` and `until` after `prefix`.
    """
    first = _day_of(since, "", f"{prefix}since")
    last = _day_of(until, LAST_DAY, f"{prefix}until")
    if first > last:
        rule = f"{prefix}until ({last}) must not be before {prefix}since ({first})"
        raise InputError(rule, f"{prefix}until")
    return first, last


def _day_of(text: str | None, otherwise: str, name: str) -> str:
    """A day of the calendar; None means `otherwise`. Raise `InputError`, which calls it `name`."""
    if text is None:
        return otherwise
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text).isoformat()
    except ValueError:  # such as 2026-02-30
        pass
    raise InputError(f"{name} must be a date such as 2026-11-30", name)


def columns(by: Sequence[str]) -> tuple[str, ...]:
    """Columns of usage rows grouped `by` some of `GROUPS`."""
    return (*by, *SUMS, "cost")


def summed(
    used: Sequence[Usage], costs: Sequence[float | None], by: Sequence[str] = GROUPS
) -> list[Row]:
    """One row per value of `by`, sorted. The cost is None if nothing in it has a price."""
    rows: dict[tuple[str, ...], Row] = {}
    for one, cost in zip(used, costs, strict=True):
        name = tuple(getattr(one, group) for group in by)
        row = rows.setdefault(
            name, {**dict(zip(by, name, strict=True)), **dict.fromkeys(SUMS, 0), "cost": None}
        )
        for column in SUMS:
            row[column] += getattr(one, column)
        if cost is not None:
            row["cost"] = cost + (row["cost"] or 0.0)  # type: ignore[operator]
    for row in rows.values():
        if row["cost"] is not None:
            row["cost"] = round(row["cost"], 6)  # type: ignore[call-overload]
    return [rows[name] for name in sorted(rows)]


def turn_rows(turns: Sequence[TurnUsage]) -> list[Row]:
    return [asdict(turn) for turn in turns]


def as_csv(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> str:
    """A header of `names` and a line for each row."""
    out = io.StringIO()
    writer = csv.DictWriter(out, names)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
