"""Usage on its way from an ingress replica to the store, and accelerator time on its way there from
the control plane: counted once, whatever is lost.

A sender seals usage into numbered parcels and keeps each until the store has it. A receiver that
restarts is unknown: it gets every parcel again that the store may lack. The store keeps the highest
number of each sender in the same transaction as the usage, and skips the numbers up to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cato.core.tenancy import CardTime, Usage, add_card_time, add_usage

MAX_SEALED = 1_000
"""Parcels that wait for the store; beyond it usage is summed up in one that is still open."""


@dataclass(frozen=True, slots=True)
class UsageParcel:
    """Usage of `sender`, whose parcels are numbered from 1 and reach the store in order."""

    sender: str
    number: int
    usage: tuple[Usage, ...]
    held: tuple[CardTime, ...] = ()


class UsageOutbox:
    """The usage of one sender that the store may not have."""

    def __init__(self, sender: str) -> None:
        self.sender = sender
        self.receiver = ""
        self._open: dict[tuple[str, ...], Usage] = {}
        self._held: dict[tuple[str, str], CardTime] = {}
        self._sealed: deque[UsageParcel] = deque()
        self._number = 0
        self._sent = 0

    def add(self, usage: Iterable[Usage]) -> None:
        add_usage(self._open, usage)

    def hold(self, held: Iterable[CardTime]) -> None:
        """Add time for which accelerators were held."""
        add_card_time(self._held, held)

    def parcels(self) -> tuple[UsageParcel, ...]:
        """All parcels that the receiver does not have, oldest first; seals what is open.

        Call again only after `sent`, or after the attempt to send them has failed.
        """
        if (self._open or self._held) and len(self._sealed) < MAX_SEALED:
            self._number += 1
            usage, held = tuple(self._open.values()), tuple(self._held.values())
            self._sealed.append(UsageParcel(self.sender, self._number, usage, held))
            self._open, self._held = {}, {}
        return tuple(p for p in self._sealed if p.number > self._sent)

    def sent(self, parcels: tuple[UsageParcel, ...], to: str, answered: str) -> None:
        """The receiver `answered` has answered a call with `parcels` that were meant for `to`; if
        that is another one, it has not taken them. News of it may have come during the call."""
        if answered != self.receiver:
            self.receiver, self._sent = answered, 0
        if answered == to and parcels:
            self._sent = max(self._sent, parcels[-1].number)

    def kept(self, receiver: str, number: int) -> None:
        """`receiver` tells that the store has this sender's parcels up to `number`."""
        self.sent((), receiver, receiver)
        while self._sealed and self._sealed[0].number <= number:
            self._sealed.popleft()
