"""Values that are made by the thousand: frozen for the type checker, plain at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A slotted dataclass whose instances nobody changes: mypy refuses the assignment.

    Python would refuse it too, for ten times the price of making one: 1.8 us instead of 0.2 for an
    `Invocation`, and each call makes a dozen such values.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
