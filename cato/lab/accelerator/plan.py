"""What is measured, in which order, and what the device or the time left does not allow. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cato.core.errors import InputError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to measure. `minutes` is what it takes on a card with a 7B model, expected, not
    measured. A `served` one needs CATO, the others an engine alone."""

    letter: str
    title: str
    minutes: float
    served: bool = False


ITEMS = (
    Item("a", "the engine alone: start, sweep, profile, memory, sleep", 6.0),
    Item("b", "profile through CATO, and a mixed run as it predicts it", 2.5, served=True),
    Item("c", "what a call costs: engine, plain Serve, CATO", 2.5, served=True),
    Item("d", "schedulers on a mix, as the simulator predicts them", 4.0, served=True),
    Item("e", "an engine killed under streams", 2.0, served=True),
    Item("f", "two models in one slot: waking against loading", 3.5),
    Item("g", "adapters in one batch", 2.5),
    Item("h", "prompts computed, cached, and from the host's memory", 3.0),
)
# CATO, Serve and the engine, before the first of a file's served items.
START_MINUTES = 1.5
# The small form takes so much of that; most of it is starting engines.
QUICK_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Step:
    """An item for the deployment file `file`."""

    item: Item
    file: str

    @property
    def key(self) -> str:
        return f"{self.item.letter} {self.file}"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a deployment file wants to run on, and what there is."""

    accelerator: str
    engine: str
    models: int
    cards: int


def steps(files: Sequence[str], only: Collection[str] = ()) -> tuple[Step, ...]:
    """All steps in their order: engines alone first, for their profiles; then what CATO serves,
    file by file, so that each file is deployed once; then the rest. Raise `UnknownNameError`."""
    letters = [item.letter for item in ITEMS]
    for letter in only:
        if letter not in letters:
            raise UnknownNameError("item", letter, tuple(letters))
    chosen = [item for item in ITEMS if not only or item.letter in only]
    first = [item for item in chosen if item is ITEMS[0]]
    served = [item for item in chosen if item.served]
    last = [item for item in chosen if item not in (*first, *served)]
    return (
        *(Step(item, file) for item in first for file in files),
        *(Step(item, file) for file in files for item in served),
        *(Step(item, file) for item in last for file in files),
    )


def why_not(item: Item, subject: Subject) -> str:
    """Why it cannot be measured there; empty when it can."""
    if subject.engine != "vllm":
        return f"the engine is {subject.engine}: there is nothing to measure"
    if subject.accelerator == "gpu" and not subject.cards:
        return "the file asks for a GPU, and NVIDIA's driver shows none"
    if item.letter == "f" and subject.models < 2:
        return "the file has one model, and a slot is shared by two"
    return ""


def expected_minutes(item: Item, *, quick: bool, is_started: bool) -> float:
    """`is_started`: CATO runs with the step's file."""
    minutes = item.minutes + (START_MINUTES if item.served and not is_started else 0.0)
    return minutes * (QUICK_SHARE if quick else 1.0)


def too_long(expected: float, left: float | None) -> str:
    """Why it does not begin with `left` minutes of the budget; empty when it does."""
    if left is None or expected <= left:
        return ""
    return f"takes about {expected:.1f} min, and {max(0.0, left):.1f} are left"


def letters_of(text: str) -> tuple[str, ...]:
    """`a,c` as letters, in any order; raise `InputError` for none."""
    found = tuple(dict.fromkeys(x.strip() for x in text.split(",") if x.strip()))
    if text and not found:
        raise InputError(f"--only: {text!r} names no item")
    return found


def done_of(past: Iterable[dict[str, object]]) -> frozenset[str]:
    """Keys of what an earlier run has measured; the rest is tried again."""
    return frozenset(str(step["key"]) for step in past if step["status"] == "done")
