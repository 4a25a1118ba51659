"""Plans the accelerator measurements: order, expected time, and reasons to skip. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cato.core.errors import InputError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement. `minutes` is an estimate for a card with a 7B model. A `served` item needs
    CATO, the others a bare engine."""

    letter: str
    title: str
    minutes: float
    served: bool = False


ITEMS = (
    Item("a", "bare engine: start, sweep, profile, memory, sleep", 6.0),
    Item("b", "profile through CATO, and its prediction of a mixed run", 2.5, served=True),
    Item("c", "overhead per call: engine, plain Serve, CATO", 2.5, served=True),
    Item("d", "schedulers on a mix, with the simulator's prediction", 4.0, served=True),
    Item("e", "engine killed under streams", 2.0, served=True),
    Item("f", "two models in one slot: waking versus loading", 5.0),
    Item("g", "adapters in one batch", 2.5),
    Item("h", "prompts computed, cached, and from host memory", 3.0),
)
# Start of CATO, Serve and the engine, before the first served item of a file.
START_MINUTES = 2.0
# Fraction of the full form's time that the quick form takes; most of it is starting engines.
QUICK_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Step:
    """An item to measure with the deployment file `file`."""

    item: Item
    file: str

    @property
    def key(self) -> str:
        return f"{self.item.letter} {self.file}"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a deployment file needs, and what the machine has."""

    accelerator: str
    engine: str
    models: int
    cards: int


def steps(files: Sequence[str], only: Collection[str] = ()) -> tuple[Step, ...]:
    """All steps in order: bare engines first, for their profiles; then served items, file by file,
    so that each file is deployed once; then the rest. Raise `UnknownNameError`."""
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
    """Why it cannot be measured here; empty when it can."""
    if subject.engine != "vllm":
        return f"the engine is {subject.engine}, not a real one"
    if subject.accelerator == "gpu" and not subject.cards:
        return "the file asks for a GPU, and NVIDIA's driver shows none"
    if item.letter == "f" and subject.models < 2:
        return "the file has only one model; this needs two"
    return ""


def expected_minutes(item: Item, *, quick: bool, is_started: bool) -> float:
    """`is_started`: CATO already runs with the step's file."""
    minutes = item.minutes + (START_MINUTES if item.served and not is_started else 0.0)
    return minutes * (QUICK_SHARE if quick else 1.0)


def too_long(expected: float, left: float | None) -> str:
    """Why it is skipped with `left` minutes of the budget; empty when it is not."""
    if left is None or expected <= left:
        return ""
    return f"takes about {expected:.1f} min; {max(0.0, left):.1f} min are left"


def letters_of(text: str) -> tuple[str, ...]:
    """Parses `a,c` in any order; raise `InputError` when a letter is unknown or none is given."""
    found = tuple(dict.fromkeys(x.strip() for x in text.split(",") if x.strip()))
    if text and not found:
        raise InputError(f"--only: {text!r} names no item; give letters such as a,c")
    return found


def done_of(past: Iterable[dict[str, object]]) -> frozenset[str]:
    """Keys of the items that an earlier run measured; others are tried again."""
    return frozenset(str(step["key"]) for step in past if step["status"] == "done")
