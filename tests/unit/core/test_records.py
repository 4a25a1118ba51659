"""The failure model and the threat model: every row says which test or drill tries it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cato.lab.chaos.plan import Fault, load_plan

ROOT = Path(__file__).resolve().parents[3]
RECORDS = ROOT / "cato" / "core" / "decisions"
FAILURES, THREATS = RECORDS / "0008-failure-model.md", RECORDS / "0009-threat-model.md"
TEST = re.compile(r"`((?:[\w/]+/)?test_\w+\.py)")
DRILL = re.compile(r"`(deployments/drills/[\w-]+\.yaml)`")
# Nothing is promised of it.
UNPROMISED = {"head node"}


def rows(record: Path) -> dict[str, str]:
    """First cell -> all of the row."""
    lines = [line for line in record.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    found = {line.strip("| ").split(" | ")[0]: line for line in lines[2:]}
    assert len(found) == len(lines) - 2, "two rows are about the same"
    return found


@pytest.mark.parametrize("record", [FAILURES, THREATS], ids=lambda record: record.stem)
def test_every_row_names_a_test_or_a_drill(record: Path) -> None:
    found = rows(record)
    assert len(found) > 20
    without = {first for first, row in found.items() if not (TEST.search(row) or DRILL.search(row))}
    assert without == (UNPROMISED if record is FAILURES else set())


@pytest.mark.parametrize("record", sorted(RECORDS.glob("*.md")), ids=lambda record: record.stem)
def test_every_test_and_drill_that_a_record_names_is_there(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    for name in TEST.findall(text):
        path = ROOT / name
        if not name.startswith("tests/"):
            path = next((ROOT / "tests").rglob(Path(name).name), path)
        assert path.is_file(), f"{record.name} names {name}"
        assert "def test_" in path.read_text(encoding="utf-8"), name
    for name in DRILL.findall(text):
        assert (ROOT / name).is_file(), f"{record.name} names {name}"


def test_every_fault_is_tried_by_a_drill() -> None:
    """A plan without a mix draws all that its stage can do."""
    drills = [load_plan(path) for path in sorted((ROOT / "deployments" / "drills").glob("*.yaml"))]
    tried = {
        fault for plan in drills if plan.faults for fault, weight in plan.mix.items() if weight
    }
    assert tried == set(Fault)
