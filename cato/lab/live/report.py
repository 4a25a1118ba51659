"""Results of `cato bench live` as JSON and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cato.lab.intervals import Interval, mean_interval
from cato.lab.live.client import Seen
from cato.lab.live.rounds import Run, Settings, Subject
from cato.sim.tasks import SimTask

# Above this CPU load the numbers say more about the machine than about the policies.
BUSY = 0.8
SHOWN_PROBLEMS = 5
# With fewer rounds a bootstrap underestimates how they differ.
ENOUGH_SEEDS = 5
BIN_S = 10.0
METRICS = ("ttft", "e2e")


def as_json(
    runs: Sequence[Run],
    subject: Subject,
    settings: Settings,
    facts: Mapping[str, object],
    command: str,
    deployment: str,
) -> dict[str, Any]:
    """Everything except single tasks; attainment in [0, 1], differences in points, times in ms."""
    experiment = subject.experiment
    by_workload = {w: [r for r in runs if r.workload == w] for w in experiment.workloads}
    receipts = [s.receipt for r in runs for s in r.seen if s.receipt is not None]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "command": command,
        "machine": dict(facts),
        "simulated_engines": all(r["simulated"] for r in receipts)
        if receipts
        else not experiment.is_real,
        "settings": {
            "deployment": deployment,
            "seeds": list(settings.seeds),
            "tasks": settings.tasks,
            "slowdown": settings.slowdown,
            "warm_up": settings.warm_up,
            "ours": experiment.ours,
        },
        "workloads": {
            workload: _workload(found, experiment.ours) | _offered(found, subject)
            for workload, found in by_workload.items()
        },
        "lost": sum(_lost(runs)),
        "problems": _problems(s for r in runs for s in r.seen),
        "other_lengths": sum(_has_other_lengths(s) for r in runs for s in r.seen),
        "cached_prompts": sum(_has_cached_prompt(s) for r in runs for s in r.seen),
        **_cpu(runs),
    }


def _cpu(runs: Sequence[Run]) -> dict[str, float]:
    """Fractions of all cores: the whole machine, and this benchmark alone."""
    return {
        "cpu": _rounded(_mean([x for r in runs for x in r.cpu.samples])),
        "own_cpu": _rounded(_mean([r.cpu.own for r in runs])),
    }


def _lost(runs: Iterable[Run]) -> list[bool]:
    return [s.is_lost for r in runs for s in r.seen]


def _problems(seen: Iterable[Seen]) -> list[str]:
    return list(dict.fromkeys(s.problem for s in seen if s.problem))[:SHOWN_PROBLEMS]


def _has_other_lengths(seen: Seen) -> bool:
    """Whether the engine's answer had another length than the simulator assumed."""
    if seen.receipt is None:
        told = seen.output_tokens
        return bool(told) and told != seen.task.sim.nodes[-1].output_tokens
    sent = {f"call_{i}": n.output_tokens for i, n in enumerate(seen.task.sim.nodes)}
    nodes = [n for n in seen.receipt["nodes"] if n["llm"] is not None]
    return any(n["llm"]["output_tokens"] != sent[n["node"]] for n in nodes)


def _has_cached_prompt(seen: Seen) -> bool:
    nodes = [] if seen.receipt is None else seen.receipt["nodes"]
    return any(n["llm"] is not None and n["llm"]["cached_prompt_tokens"] > 0 for n in nodes)


def _workload(runs: Sequence[Run], ours: str) -> dict[str, Any]:
    arms = list(dict.fromkeys(r.arm.name for r in runs))
    by_arm = {arm: [r for r in runs if r.arm.name == arm] for arm in arms}
    return {
        "arms": {arm: _arm(found) for arm, found in by_arm.items()},
        "differences": {
            f"{ours} - {arm}": _compared(by_arm[ours], by_arm[arm])
            for arm in arms
            if ours in by_arm and arm != ours
        },
        "runs": [
            {
                "arm": r.arm.name,
                "seed": r.seed,
                "attainment": _rounded(_mean(_met(r))),
                "simulated": None if r.predicted is None else _rounded(_mean(_expected(r))),
                **_cpu([r]),
                **({"replicas": _series(r)} if r.replicas else {}),
                "late_ms_p95": _ms(float(np.percentile([s.late_s for s in r.seen], 95))),
            }
            for r in runs
        ],
    }


def _offered(runs: Sequence[Run], subject: Subject) -> dict[str, Any]:
    """Data for the plots of a scaled fleet: work that arrives, in replicas, for the first seed.

    Per pool rows of (second, mean over `BIN_S` around it).
    """
    if subject.experiment.cold_start_s is None:
        return {}
    tasks = [s.task.sim for s in runs[0].seen]
    edges = np.arange(0.0, tasks[-1].arrived_at_s + BIN_S, BIN_S)
    offered = {}
    for pool in sorted(subject.used):
        service_s = subject.profiles[pool].service_s
        work_s = [
            sum(service_s(n.prompt_tokens, n.output_tokens) for n in t.nodes if n.pool == pool)
            for t in tasks
        ]
        sums, _ = np.histogram([t.arrived_at_s for t in tasks], edges, weights=work_s)
        offered[pool] = [
            [float(e) + BIN_S / 2, _rounded(float(w) / BIN_S)]
            for e, w in zip(edges, sums, strict=False)
        ]
    return {"offered": offered}


def _groups(runs: Sequence[Run]) -> list[list[str]] | None:
    """The session of each turn, by run: turns of a session are correlated; None without sessions.

    A sub-agent's calls belong to the session that started it.
    """
    if not any(s.task.sim.session for r in runs for s in r.seen):
        return None
    return [[s.task.sim.session.partition("/")[0] for s in r.seen] for r in runs]


def _met(run: Run) -> list[float]:
    return [float(s.is_met) for s in run.seen]


def _met_at_client(run: Run) -> list[float]:
    return [float(s.is_met_at_client) for s in run.seen]


def _has_receipts(runs: Iterable[Run]) -> bool:
    """Whether attainment is that of CATO's receipts; otherwise clients saw it."""
    return any(s.receipt is not None for r in runs for s in r.seen)


def _expected(run: Run) -> list[float]:
    assert run.predicted is not None, f"{run.arm.name} is not simulated"
    return [float(o.is_met) for o in run.predicted.outcomes]


def _arm(runs: Sequence[Run]) -> dict[str, Any]:
    seen = [s for r in runs for s in r.seen]
    found: dict[str, Any] = {
        "tasks": len(seen),
        "judged_by": "receipts" if _has_receipts(runs) else "clients",
        "attainment": _interval(mean_interval([_met(r) for r in runs], groups=_groups(runs))),
        "attainment_at_client": _interval(
            mean_interval([_met_at_client(r) for r in runs], groups=_groups(runs))
        ),
        "by_task": _by_task(seen),
        "lost": sum(_lost(runs)),
        **_cpu(runs),
        **{metric: _times(seen, metric) for metric in METRICS},
    }
    if any(s.cached_tokens for s in seen):
        found["hit_rate"] = _hit_rate(runs)
    if all(r.predicted is not None for r in runs):
        found["simulated"] = _rounded(_mean([x for r in runs for x in _expected(r)]))
        found["live_minus_simulated"] = _points(runs, _met, runs, _expected)
    if all(r.replicas for r in runs):
        found["mean_replicas"] = _rounded(_mean([_mean_replicas(r) for r in runs]))
        known = [r.predicted.replicas for r in runs if r.predicted is not None]
        found["simulated_replicas"] = _rounded(_mean([x for x in known if x is not None]))
    return found


def _hit_rate(runs: Sequence[Run]) -> dict[str, float]:
    """Fraction of the answered calls' prompt tokens that engines found cached."""
    live = [s for r in runs for s in r.seen if not s.problem]
    simulated = [
        o for r in runs if r.predicted is not None for o in r.predicted.outcomes if o.is_finished
    ]
    found = {"live": sum(s.cached_tokens for s in live) / _prompts(s.task.sim for s in live)}
    if simulated:
        cached = sum(o.cached_tokens for o in simulated)
        found["simulated"] = cached / _prompts(o.task for o in simulated)
    return {name: _rounded(value) for name, value in found.items()}


def _prompts(tasks: Iterable[SimTask]) -> int:
    return max(1, sum(n.prompt_tokens for t in tasks for n in t.nodes))


def _mean_replicas(run: Run) -> float:
    """Mean replicas of all pools, ready or ordered, while tasks arrived."""
    until_s = run.seen[-1].task.sim.arrived_at_s
    return sum(
        _mean([max(p.ready, p.wanted) for p in points if p.at_s < until_s])
        for points in run.replicas.values()
    )


def _series(run: Run) -> dict[str, list[list[float]]]:
    """Per pool rows of (second, ready, wanted, calls waiting or running)."""
    return {
        name: [[round(p.at_s, 1), p.ready, p.wanted, p.calls] for p in points]
        for name, points in run.replicas.items()
    }


def _compared(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    # Two clients are compared where one arm has no receipts: a client also waits for HTTP.
    met = _met if _has_receipts(ours) and _has_receipts(theirs) else _met_at_client
    found = {
        "points": _points(ours, met, theirs, met),
        "points_at_client": _points(ours, _met_at_client, theirs, _met_at_client),
    }
    if all(r.predicted is not None for r in (*ours, *theirs)):
        found["simulated_points"] = _points(ours, _expected, theirs, _expected)
    return found


_Values = Callable[[Run], list[float]]


def _points(
    left: Sequence[Run], of_left: _Values, right: Sequence[Run], of_right: _Values
) -> dict[str, float]:
    """Mean difference in percentage points, paired by seed and task."""
    right_by_seed = {r.seed: of_right(r) for r in right}
    rounds = [
        [100 * (a - b) for a, b in zip(of_left(r), right_by_seed[r.seed], strict=True)]
        for r in left
    ]
    return _interval(mean_interval(rounds, groups=_groups(left)))


def _by_task(seen: Sequence[Seen]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for s in seen:
        by_name.setdefault(s.task.sim.name, []).append(float(s.is_met))
    return {name: _rounded(_mean(values)) for name, values in sorted(by_name.items())}


def _times(seen: Sequence[Seen], metric: str) -> dict[str, float]:
    values = [getattr(s, f"{metric}_s") for s in seen if not s.problem]
    if not values:
        return {}
    p50, p95 = np.nanpercentile(values, (50, 95))
    return {"p50_ms": _ms(float(p50)), "p95_ms": _ms(float(p95))}


def _interval(found: Interval) -> dict[str, float]:
    return {
        "value": _rounded(found.value),
        "low": _rounded(found.low),
        "high": _rounded(found.high),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _rounded(value: float) -> float:
    return round(value, 4)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


# Tables


def tables(report: Mapping[str, Any]) -> Group:
    """The report as tables."""
    shown: list[Any] = [_head(report)]
    for name, workload in report["workloads"].items():
        arms = workload["arms"]
        shown += [_arms(name, arms), _differences(workload["differences"])]
        shown.append(_times_table(name, arms))
    return Group(*shown, _remarks(report))


def _head(report: Mapping[str, Any]) -> Text:
    machine, settings = report["machine"], report["settings"]
    kind = "simulated engines" if report["simulated_engines"] else "real engines"
    seeds = ", ".join(map(str, settings["seeds"]))
    return Text(
        f"{report['experiment']}, live, {kind}: {report['title']}\n"
        f"{report['command']}\n"
        f"{machine['date']}  {machine['cores']} cores, {machine['processor']}; "
        f"Python {machine['python']}, Ray {machine['ray']}, {machine['transport']}\n"
        f"{settings['deployment']}; seeds {seeds} of {settings['tasks']} tasks, all times "
        f"x {settings['slowdown']:g}, warm-up of {settings['warm_up']} tasks; arms in turns; "
        f"CPU {report['cpu']:.0%}, {report['own_cpu']:.0%} by this benchmark\n"
    )


def _arms(name: str, arms: Mapping[str, Any]) -> Table:
    table = _table(f"{name}: SLO attainment [%], with its 95 % interval")
    for title in ("live", "at client", "simulate", "live - simulate", "lost"):
        table.add_column(title, justify="right", no_wrap=True)
    for arm, values in arms.items():
        has_prediction = "simulated" in values
        table.add_row(
            Text(arm),
            Text(_percent(values["attainment"])),
            Text(f"{100 * values['attainment_at_client']['value']:.1f}"),
            f"{100 * values['simulated']:.1f}" if has_prediction else "-",
            Text(_signed(values["live_minus_simulated"]) if has_prediction else "-"),
            str(values["lost"]),
        )
    return table


def _times_table(name: str, arms: Mapping[str, Any]) -> Table:
    table = _table(f"{name}: times at the client [s]; CPU of the machine, and by this benchmark")
    has_hits = any("hit_rate" in values for values in arms.values())
    for title in ("TTFT p50", "p95", "E2E p50", "p95", "CPU", "own"):
        table.add_column(title, justify="right", no_wrap=True)
    has_replicas = any("mean_replicas" in values for values in arms.values())
    if has_replicas:
        table.add_column("replicas", justify="right", no_wrap=True)
    if has_hits:
        table.add_column("cached", justify="right", no_wrap=True)
    for arm, values in arms.items():
        table.add_row(
            Text(arm),
            *(
                f"{values[metric][p] / 1000:.2f}" if values[metric] else "-"
                for metric in METRICS
                for p in ("p50_ms", "p95_ms")
            ),
            f"{values['cpu']:.0%}",
            f"{values['own_cpu']:.0%}",
            *((_replicas(values),) if has_replicas else ()),
            *((_hits(values),) if has_hits else ()),
        )
    return table


def _hits(values: Mapping[str, Any]) -> str:
    """The fraction of cached prompt tokens, and the simulator's."""
    rate = values.get("hit_rate")
    if rate is None:
        return "-"
    return " ".join([f"{rate['live']:.1%}", *(f"({x:.1%})" for x in [rate.get("simulated")] if x)])


def _replicas(values: Mapping[str, Any]) -> str:
    """Mean replicas, and the simulator's."""
    live = f"{values['mean_replicas']:.1f}"
    return f"{live} ({values['simulated_replicas']:.1f})" if values["simulated_replicas"] else live


def _table(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    return table


def _percent(found: Mapping[str, float]) -> str:
    value, low, high = (100 * found[k] for k in ("value", "low", "high"))
    return f"{value:.1f} [{low:.0f}, {high:.0f}]"


def _signed(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.1f} [{found['low']:+.0f}, {found['high']:+.0f}]"


def _differences(differences: Mapping[str, Any]) -> Table:
    table = _table("differences in points, paired by seed and task")
    for title in ("live", "at client", "simulate"):
        table.add_column(title, justify="right", no_wrap=True)
    for pair, values in differences.items():
        simulated = values.get("simulated_points")
        table.add_row(
            Text(pair),
            Text(_signed(values["points"])),
            Text(_signed(values["points_at_client"])),
            Text(_signed(simulated) if simulated else "-"),
        )
    return table


def _remarks(report: Mapping[str, Any]) -> Text:
    remarks = Text()
    if report["lost"]:
        remarks.append(f"{report['lost']} tasks were lost:\n", style="red")
        remarks.append("".join(f"  {p}\n" for p in report["problems"]))
    if report["other_lengths"]:
        remarks.append(
            f"{report['other_lengths']} answers had other lengths than simulated\n",
            style="yellow",
        )
    if report["cached_prompts"]:
        remarks.append(
            f"{report['cached_prompts']} prompts were cached by an earlier arm: switch "
            "prefix_caching off\n",
            style="yellow",
        )
    busy = [
        f"{r['arm']} (seed {r['seed']}, {w})"
        for w, found in report["workloads"].items()
        for r in found["runs"]
        if r["cpu"] > BUSY
    ]
    if busy:
        remarks.append(
            f"the machine was more than {BUSY:.0%} busy during {', '.join(busy)}: these numbers "
            "say more about the machine than about the policies; use a larger --slowdown\n",
            style="yellow",
        )
    seeds = len(report["settings"]["seeds"])
    if seeds == 1:
        remarks.append(
            "one seed: the intervals show the spread of its tasks only and are too narrow\n",
            style="yellow",
        )
    elif seeds < ENOUGH_SEEDS:
        remarks.append(
            f"{seeds} seeds: the intervals know little of how rounds differ and may be too narrow; "
            f"take {ENOUGH_SEEDS}\n",
            style="yellow",
        )
    judged: dict[str, set[str]] = {}
    for workload in report["workloads"].values():
        for arm, values in workload["arms"].items():
            judged.setdefault(values["judged_by"], set()).add(arm)
    if len(judged) > 1:
        remarks.append(
            f"{', '.join(sorted(judged['clients']))}: without receipts, so live attainment is what "
            "clients saw, and so are both sides of the differences\n",
            style="dim",
        )
    if report["simulated_engines"]:
        remarks.append("engines are simulated: timings of a profile, no model\n", style="dim")
    return remarks
