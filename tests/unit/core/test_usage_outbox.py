"""Usage is counted once, whatever is lost between an ingress and the store."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.core import usage_outbox
from cato.core.tenancy import CardTime, Usage
from cato.core.usage_outbox import UsageOutbox, UsageParcel


def used(tokens: int = 1, *, tenant: str = "a") -> Usage:
    return Usage("2026-11-30", tenant, "k", "t", "m", 1, tokens, 0, 0)


def tokens(parcels: tuple[UsageParcel, ...]) -> list[int]:
    return [sum(u.prompt_tokens for u in p.usage) for p in parcels]


def test_a_parcel_is_sent_once_and_kept_until_the_store_has_it() -> None:
    outbox = UsageOutbox("ingress")
    outbox.kept("first", 0)
    outbox.add([used(1), used(2), used(4, tenant="b")])
    (parcel,) = parcels = outbox.parcels()
    assert (parcel.number, len(parcel.usage), tokens(parcels)) == (1, 2, [7])
    outbox.sent(parcels, "first", "first")
    assert outbox.parcels() == ()
    outbox.add([used(8)])
    assert tokens(outbox.parcels()) == [8]
    outbox.kept("second", 0)
    assert tokens(outbox.parcels()) == [7, 8]
    outbox.kept("second", 1)
    assert tokens(outbox.parcels()) == [8]


def test_accelerator_time_is_summed_up_in_parcels_too() -> None:
    outbox = UsageOutbox("control plane")
    outbox.kept("first", 0)
    outbox.hold([CardTime("2026-11-30", "m", 60.0), CardTime("2026-11-30", "n", 1.0)])
    outbox.hold([CardTime("2026-11-30", "m", 62.0)])
    (parcel,) = outbox.parcels()
    assert parcel.held == (CardTime("2026-11-30", "m", 122.0), CardTime("2026-11-30", "n", 1.0))
    outbox.kept("first", 1)
    assert outbox.parcels() == ()


def test_parcels_for_a_receiver_that_is_gone_go_to_the_next_in_order() -> None:
    outbox = UsageOutbox("ingress")
    outbox.kept("first", 0)
    outbox.add([used(1)])
    outbox.sent(outbox.parcels(), "first", "first")
    outbox.add([used(2)])
    outbox.sent(outbox.parcels(), "first", "second")  # it has refused them
    assert [p.number for p in outbox.parcels()] == [1, 2]
    assert outbox.receiver == "second"


def test_parcels_that_were_refused_are_sent_again_though_news_came_first() -> None:
    outbox = UsageOutbox("ingress")
    outbox.kept("first", 0)
    outbox.add([used(1)])
    parcels = outbox.parcels()
    outbox.kept("second", 0)  # before the answer of the second, which has refused them
    outbox.sent(parcels, "first", "second")
    assert [p.number for p in outbox.parcels()] == [1]


def test_while_the_store_is_away_few_parcels_hold_all_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage_outbox, "MAX_SEALED", 3)
    outbox = UsageOutbox("ingress")
    outbox.kept("first", 0)
    for _ in range(50):
        outbox.add([used()])
        outbox.sent(outbox.parcels(), "first", "first")
    outbox.kept("second", 0)
    assert tokens(outbox.parcels()) == [1, 1, 1]
    outbox.kept("second", 3)
    assert tokens(outbox.parcels()) == [47]


@dataclass
class Receiver:
    """A Profiler: parcels wait in its queue until the store has them, and are lost with it."""

    id: str
    queue: list[UsageParcel] = field(default_factory=list)
    kept: int = 0

    def take(self, parcels: tuple[UsageParcel, ...], to: str) -> str:
        if to == self.id:
            self.queue += parcels
        return self.id


@dataclass
class Store:
    number: int = 0
    tokens: int = 0

    def write(self, receiver: Receiver, *, says_so: bool) -> None:
        """Without `says_so`, its answer is lost: the receiver writes all again."""
        for parcel in receiver.queue:
            if parcel.number > self.number:
                self.number = parcel.number
                self.tokens += sum(u.prompt_tokens for u in parcel.usage)
        if says_so and receiver.queue:
            receiver.kept = receiver.queue[-1].number
            receiver.queue.clear()


@dataclass
class Call:
    """A call of the outbox that has not been answered yet."""

    parcels: tuple[UsageParcel, ...]
    to: str
    answered: str = ""


EVENTS = st.sampled_from(
    ("use", "call", "arrive", "answer", "lose", "write", "write twice", "restart", "ask", "news")
)
"""Calls and news reach the receiver of that time, and their answers come back later, or never."""


@settings(max_examples=1_000)
@given(st.lists(EVENTS, max_size=80))
def test_each_token_is_counted_once_whatever_is_lost(events: list[str]) -> None:
    outbox, store, receiver, n = UsageOutbox("ingress"), Store(), Receiver("r0"), 0
    call: Call | None = None
    news = (receiver.id, 0)
    last = ["lose", "ask", "news", *["call", "arrive", "answer"] * 2, "write", "ask", "news"]
    for event in [*events, *last]:
        match event, call:
            case "use", _:
                n += 1
                outbox.add([used()])
            case "call", None:
                call = Call(outbox.parcels(), outbox.receiver)
            case "arrive", Call(answered=""):
                call.answered = receiver.take(call.parcels, call.to)
            case "answer", Call(answered=str(answered)) if answered:
                outbox.sent(call.parcels, call.to, answered)
                call = None
            case "lose", _:
                call = None
            case "write", _:
                store.write(receiver, says_so=True)
            case "write twice", _:
                store.write(receiver, says_so=False)
            case "restart", _:
                receiver = Receiver(f"{receiver.id}+")
            case "ask", _:
                news = (receiver.id, receiver.kept)
            case "news", _:
                outbox.kept(*news)
        assert store.tokens <= n
    assert store.tokens == n
    assert outbox.parcels() == ()
