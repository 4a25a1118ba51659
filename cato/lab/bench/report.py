"""Results of `cato bench overhead` as tables and JSON, with facts about the machine."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cato.lab.bench.overhead import (
    ARMS,
    CATO,
    ENGINE,
    HTTP_ONLY,
    PLAIN,
    Measurement,
    Settings,
    breakdown,
)
from cato.lab.intervals import Interval, Rounds, paired_difference, summary

METRICS = ("ttft", "e2e")
# Processes that take less per call are not shown.
LEAST_CPU_MS = 0.01
LABELS = {
    ENGINE: "engine",
    PLAIN: "plain Serve",
    CATO: "CATO",
    HTTP_ONLY: "HTTP alone",
}
PAIRS = ((PLAIN, ENGINE), (CATO, PLAIN), (CATO, ENGINE))


def machine_facts() -> dict[str, object]:
    """Facts needed to compare numbers across machines."""
    import ray

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "ray": ray.__version__,
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def as_json(
    results: Sequence[Measurement], settings: Settings, facts: dict[str, object], command: str
) -> dict[str, Any]:
    """Everything except single samples; times in milliseconds."""
    return {
        "command": command,
        "machine": facts,
        "settings": {
            "requests": settings.requests,
            "rounds": settings.rounds,
            "output_tokens": settings.output_tokens,
            "seed": settings.seed,
        },
        "results": [_result(m, settings.seed) for m in results],
    }


def _result(measurement: Measurement, seed: int) -> dict[str, Any]:
    arms = {arm: measurement.rounds[arm] for arm in (*ARMS, HTTP_ONLY)}
    return {
        "engine": measurement.engine,
        "concurrency": measurement.concurrency,
        "arms": {
            arm: {metric: _summary(_values(rounds, metric)) for metric in METRICS}
            for arm, rounds in arms.items()
        },
        "calls_per_s": {
            arm: round(sum(map(len, arms[arm])) / wall_s, 1)
            for arm, wall_s in measurement.wall_s.items()
        },
        "messages_per_call": round(measurement.messages / sum(map(len, arms[CATO])), 2),
        "cpu_ms_per_call": {
            arm: {
                name: round(1000 * used / sum(map(len, arms[arm])), 3)
                for name, used in sorted(measurement.cpu_s.get(arm, {}).items())
                if used > 0
            }
            for arm in arms
        },
        "differences_p50": {
            f"{arm} - {baseline}": {
                metric: _difference(
                    paired_difference(
                        _values(arms[arm], metric), _values(arms[baseline], metric), seed=seed
                    )
                )
                for metric in METRICS
            }
            for arm, baseline in PAIRS
        },
        "breakdown": [
            {"part": p.name, "p50_ms": _ms(p.p50_s), "p90_ms": _ms(p.p90_s)}
            for p in breakdown(measurement)
        ],
        "receipts": len(measurement.receipts),
    }


def _values(rounds: list[Any], metric: str) -> Rounds:
    return [[getattr(timing, f"{metric}_s") for timing in r] for r in rounds]


def _summary(rounds: Rounds) -> dict[str, float]:
    s = summary(rounds)
    return {
        "count": s.count,
        "mean_ms": _ms(s.mean),
        "p50_ms": _ms(s.p50),
        "p90_ms": _ms(s.p90),
        "p99_ms": _ms(s.p99),
    }


def _difference(d: Interval) -> dict[str, float]:
    return {"ms": _ms(d.value), "low_ms": _ms(d.low), "high_ms": _ms(d.high)}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


def tables(report: dict[str, Any]) -> Group:
    """The report as tables."""
    machine, settings = report["machine"], report["settings"]
    head = Text(
        f"{machine['date']}  {machine['cores']} cores, {machine['processor']}; "
        f"Python {machine['python']}, Ray {machine['ray']}, vLLM {machine.get('vllm', '-')}\n"
        f"{settings['rounds']} rounds of {settings['requests']} requests for each arm in turns, "
        f"{settings['output_tokens']} output tokens, seed {settings['seed']}; "
        f"load average {machine['load_average']}\n"
    )
    shown: list[Any] = [head]
    for result in report["results"]:
        shown += [_arms(result), _differences(result), _verdict(result)]
        shown += [_processes(result), _parts(result)]
    return Group(*shown)


def _arms(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['engine']} engine, concurrency {result['concurrency']}; ms")
    table.add_column("")
    for metric in ("TTFT", "E2E"):
        for name in ("p50", "p90", "p99"):
            table.add_column(f"{metric}\n{name}", justify="right")
    for name in ("CPU\na call", "calls\n/s"):
        table.add_column(name, justify="right")
    for arm, values in result["arms"].items():
        cells = [
            f"{values[metric][f'{p}_ms']:.2f}" for metric in METRICS for p in ("p50", "p90", "p99")
        ]
        if arm == HTTP_ONLY:
            cells[3:] = ["", "", ""]
        cells += [f"{_cpu_ms(result, arm):.2f}", f"{result['calls_per_s'][arm]:.0f}"]
        table.add_row(LABELS[arm], *cells, style="dim" if arm == HTTP_ONLY else "")
    return table


def _processes(result: dict[str, Any]) -> Table:
    """CPU time of a call by process; those of the same name together, the largest first."""
    table = Table(title="CPU of a call by process; ms")
    table.add_column("")
    for arm in ARMS:
        table.add_column(LABELS[arm], justify="right")
    used = [result["cpu_ms_per_call"][arm] for arm in ARMS]
    most = {name: max(arm.get(name, 0.0) for arm in used) for arm in used for name in arm}
    for name in sorted(most, key=lambda name: -most[name]):
        if most[name] >= LEAST_CPU_MS:
            table.add_row(Text(name), *(f"{arm.get(name, 0.0):.2f}" for arm in used))
    return table


def _differences(result: dict[str, Any]) -> Table:
    table = Table(title="difference of p50 and its 95 % interval; ms")
    table.add_column("")
    for metric in ("TTFT", "E2E"):
        table.add_column(metric, justify="right")
    for pair, values in result["differences_p50"].items():
        arm, _, baseline = pair.partition(" - ")
        cells = [
            f"{values[m]['ms']:+.2f}  [{values[m]['low_ms']:+.2f}, {values[m]['high_ms']:+.2f}]"
            for m in METRICS
        ]
        table.add_row(Text(f"{LABELS[arm]} - {LABELS[baseline]}"), *map(Text, cells))
    return table


def _verdict(result: dict[str, Any]) -> Text:
    """Each goal with the measured value, green if it is reached."""
    told = Text()
    for goal, value, most in _goals(result):
        style = "green" if value <= most else "red"
        told.append(f"{goal}: {value:.2f} (goal: at most {most:g})\n", style=style)
    return told.append(f"messages of a call over links: {result['messages_per_call']:.1f}\n")


def _goals(result: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Name, value and goal of what CATO's calls are compared by."""
    if result["concurrency"] == 1:
        p50 = {a: {m: v[m]["p50_ms"] for m in METRICS} for a, v in result["arms"].items()}
        for metric, most in (("ttft", 1.0), ("e2e", 0.85)):
            name = f"{metric.upper()} p50 of CATO / plain Serve"
            yield name, p50[CATO][metric] / p50[PLAIN][metric], most
        added = {a: p50[a]["e2e"] - p50[ENGINE]["e2e"] for a in (CATO, PLAIN)}
        yield "E2E over the engine's, CATO / plain Serve", added[CATO] / (added[PLAIN] or 1.0), 0.9
    else:
        rates = result["calls_per_s"]
        yield "calls/s of plain Serve / CATO", rates[PLAIN] / rates[CATO], 1.0
        used = {arm: _cpu_ms(result, arm) for arm in (CATO, PLAIN)}
        yield "CPU of a call, CATO / plain Serve", used[CATO] / (used[PLAIN] or 1.0), 0.5


def _cpu_ms(result: dict[str, Any], arm: str) -> float:
    """CPU time of a call without the client's."""
    used: dict[str, float] = result["cpu_ms_per_call"][arm]
    return sum(ms for name, ms in used.items() if name != "client")


def _parts(result: dict[str, Any]) -> Table:
    table = Table(title=f"one call of CATO, from {result['receipts']} receipts; ms")
    table.add_column("part")
    table.add_column("p50", justify="right")
    table.add_column("p90", justify="right")
    for part in result["breakdown"]:
        table.add_row(part["part"], f"{part['p50_ms']:.2f}", f"{part['p90_ms']:.2f}")
    return table
