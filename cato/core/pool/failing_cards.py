"""Accelerators where loads failed, or copies died at once: for a while, others are tried first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from cato.core.eviction import CardId

# How long another accelerator is preferred to one where a load failed. A model tries again within
# seconds, and each try may cost minutes. Each further failure in a row doubles the time, up to the
# second value.
CARD_RETRY_S = 30.0
MAX_CARD_RETRY_S = 1800.0


@dataclass(slots=True)
class _Failing:
    retry_at_s: float = -inf
    delay_s: float = CARD_RETRY_S  # after the next failure in a row


class FailingCards:
    """The accelerators whose latest copy did not become steady."""

    def __init__(self) -> None:
        self._failing: dict[CardId, _Failing] = {}

    def __iter__(self) -> Iterator[CardId]:
        return iter(self._failing)

    def failed(self, cards: Iterable[CardId], now_s: float) -> None:
        """A load on `cards` failed, or its copy died before it was steady."""
        for card in cards:
            failing = self._failing.setdefault(card, _Failing())
            failing.retry_at_s = now_s + failing.delay_s
            failing.delay_s = min(MAX_CARD_RETRY_S, 2.0 * failing.delay_s)

    def cleared(self, cards: Iterable[CardId]) -> None:
        """A copy on `cards` is steady, or they are gone."""
        for card in cards:
            self._failing.pop(card, None)

    def resting(self, now_s: float) -> frozenset[CardId]:
        """The ones to be left alone while there is another choice."""
        return frozenset(c for c, failing in self._failing.items() if now_s < failing.retry_at_s)
