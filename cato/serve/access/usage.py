"""What was used, as a table for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields

from cato.core.tenancy import TurnUsage, Usage


def as_csv(used: Sequence[Usage] | Sequence[TurnUsage], kind: type[Usage | TurnUsage]) -> str:
    """A header and a line for each; `kind` is what all of them are."""
    names = [field.name for field in fields(kind)]
    out = io.StringIO()
    writer = csv.DictWriter(out, names)
    writer.writeheader()
    writer.writerows(asdict(u) for u in used)
    return out.getvalue()
