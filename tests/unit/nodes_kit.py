"""Builders for tests of workflow nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cato.core.errors import ExpressionError


@dataclass(frozen=True, slots=True)
class Fixed:
    """A template that is its own text."""

    source: str

    def render(self, names: Mapping[str, object]) -> str:
        return self.source


@dataclass(frozen=True, slots=True)
class Broken:
    """A template that cannot be rendered."""

    source: str = "{{ x.y }}"

    def render(self, names: Mapping[str, object]) -> str:
        raise ExpressionError(self.source, "'x' is undefined")
