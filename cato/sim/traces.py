"""Reads recorded workloads: arrivals with lengths, and pairs of texts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import TextIO

from cato.core.errors import InputError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_GPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")

CHARS_PER_TOKEN = 3.5
"""`Profile.chars_per_token` of an unmeasured model."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request; `arrived_at_s` counts from the first row of its trace."""

    arrived_at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TokenPair:
    """Lengths of a pair of texts, such as a description and the code written from it."""

    source_tokens: int
    target_tokens: int

    def reversed(self) -> TokenPair:
        """The reverse task: summarization from pairs for generation."""
        return TokenPair(self.target_tokens, self.source_tokens)


def load_azure(path: Path) -> tuple[TraceRow, ...]:
    """A CSV file of the Azure LLM inference traces (Patel et al., "Splitwise", ISCA 2024).

    Raise `InputError` naming the line of an invalid row, and for rows not in order of arrival: a
    split by rows would then not be a split by time.
    """
    rows: list[TraceRow] = []
    first: datetime | None = None
    with _opened(path) as lines:
        reader = csv.reader(lines)
        header = tuple(next(reader, ()))
        if header != COLUMNS:
            raise InputError(
                f"{path}:1: the first line must be {','.join(COLUMNS)!r}, found "
                f"{','.join(header)!r}; use a CSV file of the Azure LLM inference traces"
            )
        for fields in reader:
            try:
                at, prompt, output = fields
                arrived_at, prompt_tokens, output_tokens = (
                    datetime.fromisoformat(at),
                    int(prompt),
                    int(output),
                )
            except ValueError as exc:
                raise InputError(
                    f"{path}:{reader.line_num}: expected a time and two token counts, "
                    f"found {','.join(fields)!r}; fix or remove the line"
                ) from exc
            if prompt_tokens < 0 or output_tokens < 1:
                raise InputError(
                    f"{path}:{reader.line_num}: {prompt_tokens} prompt and {output_tokens} output "
                    "tokens; a request has at least 0 and 1: remove the line"
                )
            first = first or arrived_at
            if (arrived_at.tzinfo is None) != (first.tzinfo is None):
                raise InputError(
                    f"{path}:{reader.line_num}: {at!r} and the first row's time must both name "
                    "their zone, or neither"
                )
            arrived_at_s = (arrived_at - first).total_seconds()
            if rows and arrived_at_s < rows[-1].arrived_at_s:
                raise InputError(
                    f"{path}:{reader.line_num}: arrives before the line above it; "
                    "sort the file by TIMESTAMP"
                )
            rows.append(TraceRow(arrived_at_s, prompt_tokens, output_tokens))
    if not rows:
        raise InputError(f"{path}: no requests after the first line")
    return tuple(rows)


def load_trace(path: Path) -> tuple[TraceRow, ...]:
    """An Azure or BurstGPT trace, told by its first line; raise `InputError` as `load_azure`."""
    is_burst_gpt = _header(path)[: len(BURST_GPT_COLUMNS)] == BURST_GPT_COLUMNS
    return load_burst_gpt(path) if is_burst_gpt else load_azure(path)


def is_azure(path: Path) -> bool:
    """Whether its first line is that of an Azure trace; raise `InputError` if there is no file."""
    return _header(path) == COLUMNS


def _header(path: Path) -> tuple[str, ...]:
    with _opened(path) as lines:
        return tuple(next(csv.reader(lines), ()))


def load_burst_gpt(path: Path) -> tuple[TraceRow, ...]:
    """A CSV file of BurstGPT (Wang et al., 2024): seconds, model, tokens in and out.

    Failed requests, which have no answer, are skipped. Raise `InputError` as `load_azure`.
    """
    rows: list[TraceRow] = []
    first_s: float | None = None
    with _opened(path) as lines:
        reader = csv.reader(lines)
        next(reader, None)
        for fields in reader:
            try:
                at_s, prompt, output = float(fields[0]), int(fields[2]), int(fields[3])
            except (ValueError, IndexError) as exc:
                raise InputError(
                    f"{path}:{reader.line_num}: expected seconds, a model and two token "
                    f"counts, found {','.join(fields)!r}; fix or remove the line"
                ) from exc
            if not isfinite(at_s):
                raise InputError(f"{path}:{reader.line_num}: {fields[0]!r} is no time; remove it")
            if output < 1:
                continue
            first_s = at_s if first_s is None else first_s
            if rows and at_s - first_s < rows[-1].arrived_at_s:
                raise InputError(
                    f"{path}:{reader.line_num}: arrives before the line above it; "
                    "sort the file by Timestamp"
                )
            rows.append(TraceRow(at_s - first_s, max(0, prompt), output))
    if not rows:
        raise InputError(f"{path}: no answered requests after the first line")
    return tuple(rows)


def load_pairs(path: Path, chars_per_token: float = CHARS_PER_TOKEN) -> tuple[TokenPair, ...]:
    """Lengths of text pairs; tokens are estimated from characters, at least one per text.

    A `.json` file holds one object per line with `nl` and `code` (CodeXGLUE text-to-code); the
    source is `nl`. Any other file is one side of two parallel files, whose names differ only in
    their suffix (CodeXGLUE code-to-code): `path` is the source, the other the target. Raise
    `InputError` naming the line that cannot be read.
    """
    texts = json_texts(path) if path.suffix == ".json" else parallel_texts(path)
    if not texts:
        raise InputError(f"{path}: no pairs in it")
    return tuple(
        TokenPair(token_count(source, chars_per_token), token_count(target, chars_per_token))
        for source, target in texts
    )


def token_count(text: str, chars_per_token: float = CHARS_PER_TOKEN) -> int:
    """Estimated from the characters, at least one."""
    return max(1, round(len(text) / chars_per_token))


def json_texts(path: Path) -> list[tuple[str, str]]:
    """`nl` and `code` of a file of CodeXGLUE text-to-code; raise `InputError` as `load_pairs`."""
    pairs: list[tuple[str, str]] = []
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as exc:
                raise InputError(
                    f"{path}:{number}: not JSON ({exc}); the file must hold one object a line"
                ) from exc
            match record:
                case {"nl": str(nl), "code": str(code)}:
                    pairs.append((nl, code))
                case _:
                    raise InputError(f"{path}:{number}: needs the texts 'nl' and 'code'")
    return pairs


def parallel_texts(path: Path) -> list[tuple[str, str]]:
    """Corresponding lines of two files; raise `InputError` as `load_pairs`."""
    others = sorted(p for p in path.parent.glob(f"{path.stem}.*") if p.name != path.name)
    if len(others) != 1:
        found = ", ".join(p.name for p in others) or "none"
        raise InputError(
            f"{path}: needs exactly one file beside it named {path.stem}.* that holds the other "
            f"texts, line by line; found {found}"
        )
    with _opened(path) as sources, _opened(others[0]) as targets:
        # Not `splitlines`: it would also split at form feeds inside code.
        left, right = list(sources), list(targets)
    if len(left) != len(right):
        raise InputError(
            f"{path} has {len(left)} lines and {others[0].name} has {len(right)}: "
            "parallel files pair line by line"
        )
    return [(s.rstrip("\r\n"), t.rstrip("\r\n")) for s, t in zip(left, right, strict=True)]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The file as UTF-8 text; `InputError` when it cannot be opened or decoded."""
    try:
        # Excel begins a CSV file with a byte order mark.
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield lines
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror}); check the path") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{path}: not UTF-8 text; convert the file") from exc
    except csv.Error as exc:
        raise InputError(f"{path}: no CSV file ({exc}); check the path") from exc
