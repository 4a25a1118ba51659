"""Runs a fault drill: clients that know every answer, scheduled faults, and a report."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

from cato.lab.chaos.clients import HANG_S, Clients, Outcome, Struck, Target
from cato.lab.chaos.hostile_callers import HostileCallers
from cato.lab.chaos.overload import ArrivingClients
from cato.lab.chaos.plan import CUT_CONNECTIONS, Fault, Plan, Planned, schedule
from cato.lab.chaos.real_engines import RealClients

# A component broken on purpose must be repaired before it is broken again.
VICTIM_WITHIN_S = 180.0
# Router state and engines are empty this long after the last answer.
EMPTY_WITHIN_S = 30.0
POLL_S = 0.1
SAMPLE_S = 2.0
# Shorter observations of a process say nothing about its slope.
LEAST_SAMPLES = 10
# Processes grow at the start: imports, caches, connection pools.
WARM_UP_SHARE = 0.3
# Bad outcomes shown of each kind, and kept in the JSON report.
SHOWN, MOST_BAD = 5, 1000


class MissedError(Exception):
    """The target of a fault was already gone, because of an earlier one."""


class Stage(Protocol):
    """The system under test: an application that answers, and ways to break it."""

    @property
    def target(self) -> Target: ...

    @property
    def possible(self) -> frozenset[Fault]: ...

    async def victims(self, fault: Fault) -> Sequence[str]:
        """Current targets of `fault`: replicas that accept work, or hosts."""
        ...

    async def strike(self, fault: Fault, victim: str, pause_s: float) -> None:
        """Inject `fault` into `victim`, if it has one. Returns when done; raise `MissedError` when
        there was nothing left to hit."""
        ...

    async def queued(self) -> int:
        """Number of invocations that wait for a lease."""
        ...

    async def leaks(self) -> Sequence[str]:
        """Leftovers in router state and engines; empty when idle."""
        ...

    def memory(self) -> dict[str, int]:
        """Resident bytes of the application's processes, by name."""
        ...


@dataclass(slots=True)
class Drill:
    """One run of a plan. `say` receives progress messages."""

    plan: Plan
    stage: Stage
    say: Callable[[str], None] = lambda _: None
    struck: list[Struck] = field(default_factory=list)
    skipped: Counter[Fault] = field(default_factory=Counter)
    _ingress_kills_s: list[float] = field(default_factory=list)
    _memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    _longest_queue: int = 0
    _broken: list[str] = field(default_factory=list)  # failures of the drill itself

    async def run(self) -> dict[str, Any]:
        """Returns the report; never raises for the application's behaviour."""
        clients = self._clients()
        asking = asyncio.create_task(clients.run())
        beginning = asyncio.create_task(clients.begun.wait())
        await asyncio.wait([asking, beginning], return_when=asyncio.FIRST_COMPLETED)
        beginning.cancel()
        started_s = time.monotonic()
        watching = asyncio.create_task(self._watch())
        hostile = self._hostile_callers()
        attacking = [] if hostile is None else [asyncio.create_task(hostile.run())]
        try:
            await self._strike_all(clients, started_s)
            await asyncio.sleep(max(0.0, self.plan.asked_s - (time.monotonic() - started_s)))
            self.say("waiting for the last answers")
            clients.stop()
            if hostile is not None:
                hostile.stop()
            await asyncio.wait([asking, *attacking], timeout=2 * HANG_S)
        finally:
            watching.cancel()
            hung = clients.under_way
            if asking.done() and (error := asking.exception()) is not None:
                self._broken.append(f"the clients ended with {_first(error)!r}")
            asking.cancel()
            for attack in attacking:
                attack.cancel()
            await asyncio.wait([asking, watching, *attacking])
        asked_s = time.monotonic() - started_s
        found = {} if hostile is None else hostile.report(clients)
        return self._report(clients, hung, await self._leaks(), asked_s, found)

    def _hostile_callers(self) -> HostileCallers | None:
        if self.plan.hostile is None:
            return None
        return HostileCallers(self.plan.hostile, self.stage.target.url)

    def _clients(self) -> Clients:
        plan = self.plan
        fields: dict[str, Any] = {
            "target": self.stage.target,
            "streams": plan.streams,
            "tokens": plan.tokens,
            "dialects": plan.dialects,
            "seed": plan.seed,
            "ingress_killed_since": lambda at_s: any(k >= at_s - 5 for k in self._ingress_kills_s),
            "keeps_all": plan.overload is not None or plan.hostile is not None,
        }
        if plan.is_real:
            return RealClients(**fields)
        if plan.overload is None:
            return Clients(**fields)
        return ArrivingClients(plan.overload, plan.capacity_per_s, **fields)

    async def _strike_all(self, clients: Clients, started_s: float) -> None:
        late_s = 0.0
        planned = schedule(self.plan, self.stage.possible)
        for number, next_ in enumerate(planned, 1):
            due_s = started_s + next_.at_s + late_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if time.monotonic() - started_s > self.plan.within_s:
                self.say(f"time is up; {len(planned) - number + 1} faults were not injected")
                return
            self.say(f"fault {number} of {len(planned)}: {next_.fault}")
            victim = await self._victim(next_)
            if victim is None:
                self.skipped[next_.fault] += 1
                continue
            struck = Struck(next_, victim, time.monotonic())
            if next_.fault in CUT_CONNECTIONS:
                self._ingress_kills_s.append(struck.at_s)
            clients.strike(struck)
            try:
                await self.stage.strike(next_.fault, victim, self.plan.pause_s)
                self.struck.append(struck)
            except MissedError as missed:
                self.say(f"missed: {missed}")
                self.skipped[next_.fault] += 1
            # After a delay the schedule keeps its gaps instead of sending a burst.
            late_s = max(late_s, time.monotonic() - started_s - next_.at_s)

    async def _victim(self, planned: Planned) -> str | None:
        """A fault's victim, once there are two candidates (None: too late); "" if it has none."""
        if not planned.fault.hits_one_of_several:
            return ""
        deadline_s = time.monotonic() + VICTIM_WITHIN_S
        while time.monotonic() < deadline_s:
            victims = sorted(await self.stage.victims(planned.fault))
            if len(victims) >= 2:
                return victims[int(planned.victim * len(victims))]
            await asyncio.sleep(POLL_S)
        return None

    async def _leaks(self) -> list[str]:
        deadline_s = time.monotonic() + EMPTY_WITHIN_S
        while True:
            held = list(await self.stage.leaks())
            if not held or time.monotonic() > deadline_s:
                return held
            await asyncio.sleep(POLL_S)

    async def _watch(self) -> None:
        while True:
            now_s = time.monotonic()
            self._longest_queue = max(self._longest_queue, await self.stage.queued())
            for name, size in self.stage.memory().items():
                self._memory.setdefault(name, []).append((now_s, size))
            await asyncio.sleep(SAMPLE_S)

    def _report(
        self,
        clients: Clients,
        hung: int,
        leaks: list[str],
        asked_s: float,
        hostile: dict[str, Any],
    ) -> dict[str, Any]:
        kinds = Counter(clients.kinds)
        kinds["hung"] += hung
        bad = [o for o in clients.outcomes if o.kind in ("wrong", "failed", "hung")]
        refused = Counter(o.problem for o in clients.outcomes if o.kind == "refused")
        by_fault = {
            fault.value: _distribution([s for s in self.struck if s.planned.fault is fault])
            for fault in Fault
        }
        first_s = self.struck[0].at_s if self.struck else 0.0
        overload: dict[str, Any] = {}
        if isinstance(clients, ArrivingClients):
            overload = clients.report(self._longest_queue)
        return {
            "seed": self.plan.seed,
            "seconds": round(asked_s, 1),
            "streams": self.plan.streams,
            "faults": len(self.struck),
            "skipped": {fault.value: n for fault, n in self.skipped.items()},
            "calls": dict(sorted(kinds.items())),
            "refused": dict(refused),
            "output_tokens": clients.output_tokens,
            "ttft_s": _percentiles(clients.first_token_s),
            "recovery_s": {name: d for name, d in by_fault.items() if d["faults"]},
            # Each fault: its kind, seconds after the first one, and the longest stall.
            "each": [
                (s.planned.fault.value, round(s.at_s - first_s, 1), s.recovery_s)
                for s in self.struck
            ],
            # Calls that ended badly, with their start in the same seconds.
            "bad": [
                (o.kind, o.dialect.value, o.problem, o.request_id, round(o.began_s - first_s, 1))
                for o in bad[:MOST_BAD]
            ],
            "leaks": leaks,
            "overload": overload,
            "hostile": hostile,
            "memory": {n: s for n, m in self._memory.items() if (s := slope(m)) is not None},
            "problems": [*self._broken, *map(_shown, _some_of_each(bad))],
            "passed": not any(
                (bad, hung, leaks, self._broken, overload.get("broken"), hostile.get("broken"))
            ),
        }


def _first(error: BaseException) -> BaseException:
    """The first exception of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def slope(samples: Sequence[tuple[float, int]]) -> dict[str, Any] | None:
    """MB at the end, growth in MB per hour (a line fitted after the initial growth), and MB at up
    to 61 moments of the whole time.

    Theil-Sen: the median of the slopes of pairs, robust against single spikes. None
    for too few samples.
    """
    settled = list(samples)[ceil(len(samples) * WARM_UP_SHARE) :]
    if len(settled) < LEAST_SAMPLES:
        return None
    half = len(settled) // 2
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0])
        for a, b in zip(settled[: len(settled) - half], settled[half:], strict=True)
        if b[0] > a[0]
    )
    per_s = slopes[len(slopes) // 2]
    return {
        "mb": round(settled[-1][1] / 1e6, 1),
        "mb_per_hour": round(per_s * 3600 / 1e6, 2),
        "seconds": round(settled[-1][0] - settled[0][0], 1),
        "each_mb": [round(size / 1e6, 1) for _, size in samples[:: ceil(len(samples) / 61)]],
    }


def _some_of_each(bad: Sequence[Outcome]) -> list[Outcome]:
    """The first few outcomes of each kind, so that the most frequent kind hides no other."""
    kinds = sorted({o.kind for o in bad})
    return [o for kind in kinds for o in [b for b in bad if b.kind == kind][:SHOWN]]


def _shown(outcome: Outcome) -> str:
    return f"{outcome.kind} {outcome.dialect} {outcome.request_id}: {outcome.problem}"


def _distribution(struck: Sequence[Struck]) -> dict[str, float]:
    waits = [s.recovery_s for s in struck if s.recovery_s is not None]
    return {"faults": len(struck), **_percentiles(waits)}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, ceil(share * len(ordered)) - 1)], 3)

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": round(ordered[-1], 3)}
