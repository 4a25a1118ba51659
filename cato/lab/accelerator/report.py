"""Tables of the accelerator measurements, and which claims they confirm."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cato.core.words import counted
from cato.measure.check import GOOD
from cato.policies.schedulers import FORESIGHT

# Claims to confirm on an accelerator.
ADDED_MS = 0.0
POINTS_OFF = 3.0
WAKE_RATIO = 5.0
MIXED_RATIO = 1.10
STATUS_STYLES = {"done": "green", "failed": "red", "cut off": "yellow"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One number; `holds` says whether its claim holds, None without a claim."""

    letter: str
    file: str
    what: str
    value: str
    holds: bool | None = None


def findings(report: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Findings of all finished steps, in order. On a CPU the numbers only show that the command
    works, so no claims are judged."""
    readers = {
        "a": _alone, "b": _predicted, "c": _overhead, "d": _mix,
        "e": _killed, "f": _two_models, "g": _adapters, "h": _host_memory,
    }  # fmt: skip
    return tuple(
        Finding(step["letter"], step["file"], what, value, holds if step["on"] != "cpu" else None)
        for step in sorted(report["steps"], key=lambda s: s["letter"])
        if step["status"] == "done"
        for what, value, holds in readers[step["letter"]](step["result"])
    )


Rows = Iterator[tuple[str, str, bool | None]]


def _alone(found: Mapping[str, Any]) -> Rows:
    compiled = "cached" if found["had_compiled"] else "not cached"
    yield "start", f"{found['start_s']:.1f} s (compiled code {compiled})", None
    yield "KV cache reported by the engine", f"{found['kv_capacity_tokens']} tokens", None
    held = f"{found['memory_bytes'] / 1e9:.2f} GB of the {found['memory_is_of']}"
    yield "weights, KV cache and other memory", held, None
    if found["profile"] is None:
        yield "profile", found["problem"], False
    for row in _ends(found["fit"]):
        text = f"{row['measured_s'] * 1000:.2f} ms, fitted {row['predicted_s'] * 1000:.2f}"
        yield f"{row['what']}, {row['batch']} x {row['tokens']} tokens", text, None
    if (sleep := found["sleep"]) is not None:
        wake_s = statistics.median(sleep["wake_s"])
        text = f"{statistics.median(sleep['sleep_s']):.2f} s, {wake_s:.2f} s"
        yield "time to sleep, to wake", text, None
        yield "GPU memory held while asleep", f"{sleep['asleep_bytes'] / 1e9:.2f} GB", None


def _ends(fit: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The smallest and the largest of each kind."""
    for what in dict.fromkeys(row["what"] for row in fit):
        rows = [row for row in fit if row["what"] == what]
        yield rows[0]
        if len(rows) > 1:
            yield rows[-1]


def _predicted(found: Mapping[str, Any]) -> Rows:
    for kind, verdict in found["verdicts"].items():
        text = f"{verdict['error']:.1%}; between two runs {verdict['repeat_error']:.1%}"
        yield f"mixed run, {kind}: median error", text, verdict["error"] <= GOOD


def _overhead(found: Mapping[str, Any]) -> Rows:
    for result in found["results"]:
        added = result["differences_p50"]["cato - plain"]
        for metric in ("ttft", "e2e"):
            arms = {name: arm[metric]["p50_ms"] for name, arm in result["arms"].items()}
            d = added[metric]
            text = (
                f"{d['ms']:+.2f} ({d['low_ms']:+.2f} to {d['high_ms']:+.2f}) ms; engine "
                f"{arms['engine']:.2f}, plain {arms['plain']:.2f}, CATO {arms['cato']:.2f}"
            )
            what = f"CATO - plain, {metric.upper()} p50, {result['concurrency']} at a time"
            yield what, text, d["low_ms"] <= ADDED_MS


def _mix(found: Mapping[str, Any]) -> Rows:
    for name, workload in found["workloads"].items():
        for arm, values in workload["arms"].items():
            live = 100 * values["attainment"]["value"]
            text, off = f"{live:.1f} %", None
            if "simulated" in values:
                predicted = 100 * values["simulated"]
                off = abs(live - predicted) <= POINTS_OFF
                text += f", predicted {predicted:.1f} %"
            yield f"{name}: {arm}", text, off
        compared = {
            arm: values["points"]["value"]
            for arm, values in workload["differences"].items()
            if arm.startswith(FORESIGHT)
        }
        if compared:
            worst = min(compared, key=lambda arm: compared[arm])
            yield f"{name}: {worst}", f"{compared[worst]:+.1f} points", None


def _killed(found: Mapping[str, Any]) -> Rows:
    n = found["streams"]
    yield "whole answers", f"{found['whole']} of {n}", found["whole"] == n
    text = f"{found['changed_before']} of {n}"
    yield "changed text sent before the kill", text, found["changed_before"] == 0
    text = f"{found['other_after']}; undisturbed {found['other_undisturbed']}"
    yield "continue differently (batch numerics)", text, None
    text = f"{found['engine_back_s']:.1f} s; last answer after {found['last_answer_s']:.1f} s"
    yield f"engine back after a kill under {found['running']} streams", text, None


def _two_models(found: Mapping[str, Any]) -> Rows:
    for name, row in found["models"].items():
        woken = statistics.median(row["wake_s"]) if row["wake_s"] else None
        text = f"{row['load_s']:.2f} s"
        if woken is not None:
            text += f"; awake again in {woken:.2f} s, {row['ratio']:.1f} times faster"
        really = found["really_sleeps"]
        holds = (row["ratio"] or 0.0) >= WAKE_RATIO if really else None
        yield f"{name}: load time", text if really else f"{text} (a CPU only pauses)", holds
        yield f"{name}: same answers after waking", str(row["same_answers"]), row["same_answers"]


def _adapters(found: Mapping[str, Any]) -> Rows:
    for row in found["steps"]:
        kinds = {"none": row["none_s"], "one": row["one_s"], "mixed": row["mixed_s"]}
        known = [f"{k} {s * 1000:.2f} ms" for k, s in kinds.items() if s is not None]
        holds = None
        if row["one_s"] and row["mixed_s"]:
            holds = row["mixed_s"] <= MIXED_RATIO * row["one_s"]
        yield f"decode step of {row['batch']}: adapters", ", ".join(known), holds


def _host_memory(found: Mapping[str, Any]) -> Rows:
    for row in found["prompts"]:
        text = f"computed {row['computed_s'] * 1000:.1f} ms, cached {row['cached_s'] * 1000:.1f}"
        holds = None
        if found["host_gib"]:
            text += f", from host memory {row['pushed_out_s'] * 1000:.1f}"
            holds = row["pushed_out_s"] < row["computed_s"]
        else:
            text += " (vLLM offloads on accelerators only)"
        yield f"TTFT of a prompt of {row['tokens']} tokens", text, holds


def tables(report: Mapping[str, Any]) -> Group:
    """The report as tables."""
    run = report["runs"][-1]
    cards = ", ".join(f"{c['name']} (driver {c['driver']})" for c in run["cards"]) or "no GPU"
    head = Text(
        f"{run['date']}  {cards}; {run['cores']} cores, {run['processor']}; "
        f"Python {run['python']}, Ray {run['ray']}, vLLM {run['vllm']}\n"
        f"{report['form']} form, seed {report['seed']}, {counted(len(report['runs']), 'run')}\n"
    )
    steps = Table("", "file", "", "minutes", "", box=SIMPLE_HEAD)
    for step in sorted(report["steps"], key=lambda s: s["letter"]):
        style = STATUS_STYLES.get(step["status"], "dim")
        steps.add_row(
            f"{step['letter']} {step['title']}",
            step["file"],
            Text(step["status"], style=style),
            f"{step['minutes']:.1f}",
            Text(step["reason"]),
        )
    found = Table("", "file", "", "", "holds", box=SIMPLE_HEAD)
    for row in findings(report):
        holds = "" if row.holds is None else "yes" if row.holds else "no"
        style = {"yes": "green", "no": "red"}.get(holds, "")
        cells = (row.letter, row.file, row.what, row.value)
        found.add_row(*map(Text, cells), Text(holds, style=style))
    return Group(head, steps, found)
