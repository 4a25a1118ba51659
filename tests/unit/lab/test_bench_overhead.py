"""What `cato bench overhead` prints of a measurement."""

from __future__ import annotations

from rich.console import Console

from cato.lab.bench.client import Timing
from cato.lab.bench.overhead import ARMS, CATO, ENGINE, HTTP_ONLY, PLAIN, Measurement, Settings
from cato.lab.bench.report import as_json, tables


def shown(found: Measurement) -> str:
    """The printed tables of one measurement."""
    facts = dict.fromkeys(("date", "cores", "processor", "python", "ray", "load_average"), "")
    settings = Settings(("simulated",), 2, 1, (1,), 16, 0)
    console = Console(width=120, record=True)
    console.print(tables(as_json([found], settings, facts, "cato bench overhead")))
    return console.export_text()


def test_a_call_is_shown_with_its_cpu_by_process_its_messages_and_the_goals() -> None:
    found = Measurement("simulated", 32)
    for arm in (*ARMS, HTTP_ONLY):
        found.rounds[arm] = [[Timing(0.004, 0.005, "r")] * 2]
    found.wall_s = {arm: 0.01 * n for n, arm in enumerate((*ARMS, HTTP_ONLY), 1)}
    found.messages = 9
    found.cpu_s = {CATO: {"ReplicaRouter": 0.006, "idle": 1e-6}, PLAIN: {"plain": 0.008}}
    text = shown(found)
    assert "messages of a call over links: 4.5" in text
    assert "calls/s of plain Serve / CATO: 1.50 (goal: at most 1)" in text
    assert "CPU of a call, CATO / plain Serve: 0.75 (goal: at most 0.5)" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert [cell.strip() for cell in lines["ReplicaRouter"].split("│")[2:5]] == [
        "0.00",
        "0.00",
        "3.00",
    ]
    assert [cell.strip() for cell in lines["plain"].split("│")[2:5]] == ["0.00", "4.00", "0.00"]
    assert "idle" not in lines


def test_one_call_at_a_time_is_compared_by_latency() -> None:
    found = Measurement("simulated", 1)
    taken_s = {ENGINE: (0.001, 0.002), PLAIN: (0.004, 0.006), CATO: (0.005, 0.004)}
    for arm in (*ARMS, HTTP_ONLY):
        found.rounds[arm] = [[Timing(*taken_s.get(arm, (0.001, 0.001)), "r")] * 2]
        found.wall_s[arm] = 0.01
    text = shown(found)
    assert "TTFT p50 of CATO / plain Serve: 1.25 (goal: at most 1)" in text
    assert "E2E p50 of CATO / plain Serve: 0.67 (goal: at most 0.85)" in text
    assert "E2E over the engine's, CATO / plain Serve: 0.50 (goal: at most 0.9)" in text
