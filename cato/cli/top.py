"""`cato top`: the status page in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cato.cli import rollout
from cato.cli.client import Url, answer, client
from cato.cli.explain import verdict
from cato.cli.simulation import a_table

RUNS_SHOWN = 6
DECISIONS_SHOWN = 8
SESSIONS_SHOWN = 6
BLOCKS = "▁▂▃▄▅▆▇█"
# Columns of a sparkline, which shows the last `WINDOW_S` seconds; fewer in a narrow terminal.
SPARK_CHARS, LEAST_SPARK_CHARS = 30, 10
WINDOW_S = 1800.0
# The same objective as in the alert rules.
GOAL = 0.95
# From this width on, the list of runs has all its times, and the fleet its notes in the table.
WIDE = 100
MIN_TASK_CHARS = 7
MIN_REASON_CHARS = 20
# Between two columns of a table.
GAP_CHARS = 3
# Decisions that are routine, and have no colour.
ROUTINE = ("dispatch", "left")
STATES = {"ready": ("● ", "green"), "gone": ("✕ ", "red"), "dead": ("✕ ", "red")}

Json = dict[str, Any]


def top(
    url: Url = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between refreshes.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
) -> None:
    """Watch pools, replicas, attainment, sessions, missed runs and decisions until Ctrl-C.

    Shows what the API key's tenant may see; without keys, everything.
    """
    console = Console(markup=False)
    with client(url) as http:
        if once:
            console.print(rendered(_look(http), console.width))
            return
        try:
            seen = _look(http)
            with Live(rendered(seen, console.width), console=console, screen=True) as live:
                while True:
                    time.sleep(every)
                    seen, warnings = look_again(http, seen)
                    shown = seen | {"warnings": [*seen["warnings"], *warnings]}
                    live.update(rendered(shown, console.width))
        except KeyboardInterrupt:
            return


def _look(http: httpx.Client) -> Json:
    return answer(http.get("/ui/state"))


def look_again(http: httpx.Client, before: Json) -> tuple[Json, list[str]]:
    """The state now; the one `before` with a warning while CATO does not answer, as in a restart.
    Ends the command when it refuses to."""
    try:
        response = http.get("/ui/state")
        if not response.is_server_error:
            return answer(response), []
        why = f"status {response.status_code}"
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
    return before, [f"no answer ({why}); this is what was seen last"]


def rendered(now: Json, width: int) -> Group:
    """The state of the deployment as text and tables, for a terminal of `width` columns."""
    parts: list[RenderableType] = [_head(now), *_fleet(now, width)]
    if now["rollouts"]:
        parts.append(rollout.rendered(now["rollouts"]))
    if now["tasks"]:
        parts.append(_tasks(now, width))
    if now["sessions"]["count"]:
        parts.append(_sessions(now))
    if now["runs"]:
        parts.append(_runs(now, width))
    if now["decisions"]:
        parts.append(_decisions(now, width))
    return Group(*parts)


def _head(now: Json) -> Text:
    scaled = {d["pool"] for d in now["deployments"]}
    counted = [p for p in now["pools"] if not scaled or p["name"] in scaled]
    replicas = [r for p in counted for r in p["replicas"]]
    ready = sum(r["state"] == "ready" for r in replicas)
    wanted = sum(d["wanted"] for d in now["deployments"]) or len(replicas)
    waiting = sum(p["queued"] for p in now["pools"])
    runs, met = _counts(now["tasks"], now["now_s"] - 300)
    text = Text(f"CATO at {time.strftime('%H:%M:%S', time.localtime(now['now_s']))}: ", "bold")
    text.append(f"{ready} of {wanted} replicas ready", "red" if ready < wanted else "green")
    text.append(f", {waiting} calls queued, ")
    if runs:
        style = "red" if met < GOAL * runs else "green"
        text.append(f"{100 * met / runs:.1f} %", style)
        text.append(f" of {runs} runs met their SLO in 5 minutes")
    else:
        text.append("no run ended in the last 5 minutes")
    if now["missing"]:
        text.append(f"\nno answer from: {', '.join(now['missing'])}", "yellow")
    if now["problem"]:
        text.append(f"\nold workflows still in use: {now['problem']}", "yellow")
    for warning in now["warnings"]:
        text.append(f"\n{warning}", "yellow")
    return text


def _counts(tasks: Sequence[Json], since_s: float) -> tuple[int, int]:
    points = [p for t in tasks for p in t["points"] if p["at_s"] >= since_s]
    return sum(p["runs"] for p in points), sum(p["met"] for p in points)


def _fleet(now: Json, width: int) -> list[RenderableType]:
    """Pools and replicas, with notes in a column, or below the table where it is narrow."""
    rows: list[tuple[str, tuple[str | Text, ...], Text]] = []
    for pool in now["pools"]:
        mine = [d for d in now["deployments"] if d["pool"] == pool["name"]]
        problems = [d["problem"] for d in mine if d["problem"]]
        slack = _duration(pool["slack_least_s"])
        cells: tuple[str | Text, ...] = (
            Text(pool["name"], "bold"), "", "", str(pool["queued"]), "", slack
        )  # fmt: skip
        rows.append((pool["name"], cells, Text("; ".join(filter(None, (pool["note"], *problems))))))
        for r in pool["replicas"]:
            sign, style = STATES.get(r["state"], ("◐ ", "yellow"))
            slots = f"{r['held']} of {r['slots']}" if r["slots"] else str(r["held"])
            wait, state = _duration(r["wait_s"]), Text(sign + r["state"], style)
            if r["state"] == "gone":
                slots = wait = ""
            note = Text(", ").join(
                filter(None, (_sessions_of(r), Text(r["model"]), Text(r["note"])))
            )
            rows.append((r["id"], (Text(f"  {r['id']}"), state, slots, "", wait, ""), note))
    is_wide = width >= WIDE
    table = a_table("Fleet")
    for name in ("pool, replica", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("slots", "queued", "wait", "slack"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("notes")
    for _, cells, note in rows:
        table.add_row(*cells, *((note,) if is_wide else ()))
    below = [] if is_wide else [Text(f"  {id}: ").append(note) for id, _, note in rows if note]
    return [table, *below]


def _sessions_of(replica: Json) -> Text:
    """The number of sessions, and their context tokens of the replica's KV capacity."""
    if not replica["sessions"]:
        return Text("")
    memory = replica["kv_tokens"] + replica["host_tokens"]
    is_short = replica["working_set_tokens"] > memory
    text = f"{_tokens(replica['working_set_tokens'])} of {_tokens(memory)} tokens"
    return Text(f"{replica['sessions']} sessions: {text}", "red" if is_short else "")


def _tokens(count: int) -> str:
    for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _sessions(now: Json) -> Table:
    found = now["sessions"]
    prompt, cached = found["prompt_tokens"], found["cached_prompt_tokens"]
    hits = f", {100 * cached / prompt:.1f} % of prompt tokens cached" if prompt else ""
    table = a_table(f"{found['count']} sessions in 30 minutes{hits}; turns: `cato explain NAME`")
    for name in ("session", "replica"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "met", "moved", "prompt", "cached", "slack"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in found["newest"][:SESSIONS_SHOWN]:
        share = s["cached_prompt_tokens"] / s["prompt_tokens"] if s["prompt_tokens"] else 0.0
        table.add_row(
            Text(s["session"]),
            Text(s["replica"] or "-"),
            str(s["turns"]),
            str(s["met"]),
            str(s["moved"]),
            _tokens(s["prompt_tokens"]),
            f"{100 * share:.1f} %",
            _duration(s["slack_s"]),
        )
    return table


def _tasks(now: Json, width: int) -> Table:
    rows = []
    for task in now["tasks"]:
        runs, met = _counts([task], now["now_s"] - WINDOW_S)
        share = met / runs if runs else 1.0
        slo = f"{task['metric']} {_duration(task['target_s'])}"
        told = Text(f"{100 * share:.1f} %", "red" if share < GOAL else "green")
        rows.append((task, slo, str(runs), told))
    # Numbers are whole: the line over time gets shorter first, then the tasks' names.
    names = ("SLO", "runs", "met")
    numbers = sum(max(len(n), *(len(r[i]) for r in rows)) for i, n in enumerate(names, start=1))
    left = width - numbers - GAP_CHARS * 5 - 1
    spark = left - max(len(task["task"]) for task, *_ in rows)
    spark = max(LEAST_SPARK_CHARS, min(SPARK_CHARS, spark))
    table = a_table("SLO attainment, last 30 minutes")
    table.add_column("task", no_wrap=True, max_width=max(MIN_TASK_CHARS, left - spark))
    table.add_column("SLO", no_wrap=True)
    for name in ("runs", "met"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("over time", no_wrap=True)
    for task, slo, runs_told, share_told in rows:
        line = _sparkline(task["points"], now["now_s"], spark)
        table.add_row(Text(task["task"]), slo, runs_told, share_told, line)
    return table


def _sparkline(points: Sequence[Json], now_s: float, chars: int) -> str:
    """Attainment over the last `WINDOW_S` seconds; blank where no run ended."""
    runs, met = [0] * chars, [0] * chars
    for point in points:
        ago = (now_s - point["at_s"]) / WINDOW_S
        i = min(chars - 1, int((1 - ago) * chars))
        if i >= 0:
            runs[i] += point["runs"]
            met[i] += point["met"]
    last = len(BLOCKS) - 1
    return "".join(
        BLOCKS[round(last * m / n)] if n else " " for n, m in zip(runs, met, strict=True)
    )


def _runs(now: Json, width: int) -> Table:
    table = a_table("Missed and slowest runs; details: `cato explain ID`")
    is_wide = width >= WIDE
    runs = now["runs"][:RUNS_SHOWN]
    verdicts = [verdict(r, "late" if r["status"] == "done" else r["status"]) for r in runs]
    times = {"achieved": "achieved_s", "target": "target_s"}
    if is_wide:
        times |= {"queues": "queue_s", "end to end": "e2e_s"}
    texts = {name: [_duration(r[key]) for r in runs] for name, key in times.items()}
    # A narrow table breaks a verdict between its words, and shortens the task: `cato explain`
    # needs the whole id.
    verdict_chars = max(
        len(w) for v in verdicts for w in ([v.plain] if is_wide else v.plain.split())
    )
    others = max(len(r["request_id"]) for r in runs) + max(len("SLO"), verdict_chars)
    others += sum(max(map(len, (name, *found))) for name, found in texts.items())
    others += GAP_CHARS * (3 + len(texts)) + 1
    table.add_column("id", overflow="fold")
    table.add_column("task", no_wrap=True, max_width=max(MIN_TASK_CHARS, width - others))
    table.add_column("SLO", max_width=verdict_chars, min_width=verdict_chars)
    for name in texts:
        table.add_column(name, justify="right", no_wrap=True)
    for run, met, *shown in zip(runs, verdicts, *texts.values(), strict=True):
        table.add_row(Text(run["request_id"]), Text(run["task"]), met, *shown)
    return table


def _decisions(now: Json, width: int) -> Table:
    rows = []
    for d in now["decisions"][:DECISIONS_SHOWN]:
        at = time.strftime("%H:%M:%S", time.localtime(d["at_s"]))
        kind = Text(d["kind"], "" if d["kind"] in ROUTINE else "yellow")
        slack = Text(_duration(d["slack_s"]))
        rows.append((Text(at), kind, Text(d["task"] or d["replica"]), slack, Text(d["reason"])))
    names = ("at", "decision", "", "slack")
    others = sum(max(len(n), *(len(r[i]) for r in rows)) for i, n in enumerate(names) if n)
    others += MIN_REASON_CHARS + GAP_CHARS * 5 + 1
    table = a_table("Latest decisions")
    for name in ("at", "decision"):
        table.add_column(name, no_wrap=True)
    table.add_column("task", no_wrap=True, max_width=max(MIN_TASK_CHARS, width - others))
    table.add_column("slack", justify="right", no_wrap=True)
    table.add_column("reason", min_width=MIN_REASON_CHARS)
    for row in rows:
        table.add_row(*row)
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"
