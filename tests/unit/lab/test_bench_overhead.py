"""What `cato bench overhead` prints of a measurement."""

from __future__ import annotations

from rich.console import Console

from cato.lab.bench.client import Timing
from cato.lab.bench.overhead import ARMS, CATO, HTTP_ONLY, PLAIN, Measurement, Settings
from cato.lab.bench.report import as_json, tables


def test_cpu_of_a_call_is_shown_by_process() -> None:
    found = Measurement("simulated", 1)
    for arm in (*ARMS, HTTP_ONLY):
        found.rounds[arm] = [[Timing(0.004, 0.005, "r")] * 2]
    found.cpu_s = {CATO: {"ReplicaRouter": 0.006, "idle": 1e-6}, PLAIN: {"plain": 0.008}}
    facts = dict.fromkeys(("date", "cores", "processor", "python", "ray", "load_average"), "")
    settings = Settings(("simulated",), 2, 1, (1,), 16, 0)
    console = Console(width=120, record=True)
    console.print(tables(as_json([found], settings, facts, "cato bench overhead")))
    lines = {
        line.split("│")[1].strip(): line
        for line in console.export_text().splitlines()
        if "│" in line
    }
    assert [cell.strip() for cell in lines["ReplicaRouter"].split("│")[2:5]] == [
        "0.00",
        "0.00",
        "3.00",
    ]
    assert [cell.strip() for cell in lines["plain"].split("│")[2:5]] == ["0.00", "4.00", "0.00"]
    assert "idle" not in lines
