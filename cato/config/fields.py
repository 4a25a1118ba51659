"""Field types of deployment and workflow files (durations, sizes, names) and their base model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields as fields_of
from fractions import Fraction
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from cato.core.topology import RESERVED_PREFIX

C = TypeVar("C")


class StrictModel(BaseModel):
    """Base of all file schemas: unknown keys are errors, and types are not coerced."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def made(self, kind: type[C], **others: object) -> C:
        """A core value of `kind` from the fields of the same names and `others`. Lists become
        tuples.

        Fields carry their unit; the file's key is an alias: `idle_timeout` for `idle_timeout_s`.
        """
        known = {f.name for f in fields_of(kind)}  # type: ignore[arg-type]
        own = {name: getattr(self, name) for name in type(self).model_fields if name in known}
        frozen = {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()}
        return kind(**frozen | others)

    def given(self) -> dict[str, Any]:
        """The fields that the file sets, with their values."""
        return {name: getattr(self, name) for name in self.model_fields_set}


NonEmpty = Annotated[str, Field(min_length=1)]


def matching(pattern: str, rule: str) -> AfterValidator:
    """A check that the whole text matches `pattern`; `rule` is the error message."""
    expression = re.compile(pattern)

    def check(value: str) -> str:
        if not expression.fullmatch(value):
            raise ValueError(rule)
        return value

    return AfterValidator(check)


_AMOUNT = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_QUANTITY = re.compile(f"({_AMOUNT})([A-Za-zµ]+)")
_SECONDS = {
    "us": Fraction(1, 1_000_000),
    "µs": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_BYTES = {
    "B": Fraction(1),
    **{f"{p}B": Fraction(1000**n) for n, p in enumerate(("k", "M", "G", "T"), start=1)},
    **{f"{p}iB": Fraction(1024**n) for n, p in enumerate(("K", "M", "G", "T"), start=1)},
}
_BYTES["KB"] = _BYTES["kB"]


def _quantity(value: object, units: Mapping[str, Fraction], rule: str) -> Fraction:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(rule)
    return Fraction(match[1]) * units[match[2]]


def parse_duration(value: object) -> float:
    """Seconds in `200ms`, `1.5s`, `2m`. Raise ValueError, also for a number without a unit."""
    rule = "must be a duration with a unit, such as 200ms, 1.5s or 2m"
    return float(_quantity(value, _SECONDS, rule))


def parse_size(value: object) -> int:
    """Bytes in `256MiB`, `4GB` or a whole number of bytes; raise ValueError."""
    rule = "must be a size, such as 256MiB or 4GB, or a whole number of bytes"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    amount = _quantity(value, _BYTES, rule)
    if amount.denominator != 1:
        raise ValueError(rule)
    return int(amount)


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{_AMOUNT}({'|'.join(_SECONDS)})$",
            "examples": ["200ms", "1.5s", "2m"],
        }
    ),
]
"""A field that reads `200ms`, `1.5s`, `2m` and holds seconds."""

ByteSize = Annotated[int, BeforeValidator(parse_size)]
"""A field that reads `256MiB`, `4GB` or a number and holds bytes."""

Name = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
        "a name has at most 63 letters, digits, '.', '_' and '-', "
        "and starts with a letter or digit",
    ),
]
"""A pool, deployment or index. Becomes part of Serve's and Ray's names, which use '#' as a
separator."""

PublicName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}",
        "a model name has at most 128 letters, digits, '.', '_', ':', '/' and '-', "
        "and starts with a letter or digit",
    ),
    matching(
        rf"(?!{RESERVED_PREFIX}).*", f"names with {RESERVED_PREFIX!r} belong to the workflows"
    ),
]
"""A model name, as clients send it."""

Alias = Annotated[
    str,
    matching(
        r"[A-Za-z0-9*?][A-Za-z0-9._:/*?-]{0,127}",
        "an alias has at most 128 letters, digits, '.', '_', ':', '/' and '-'; a pattern also has "
        "'*' (any characters) and '?' (one character)",
    ),
    matching(r"(?!.*\*\*).*", "write '*' instead of '**': it matches the same"),
    matching(
        rf"(?!{RESERVED_PREFIX}).*", f"names with {RESERVED_PREFIX!r} belong to the workflows"
    ),
]
"""Another name of a model, or a pattern of such names."""


def _as_text(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


Word = Annotated[str, BeforeValidator(_as_text)]
"""An argument or environment value; a number becomes text."""
