"""Recent activity: attainment per task over the last half hour, the slowest runs, and sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from cato.core.ids import TaskName
from cato.core.receipt import SlaReceipt
from cato.telemetry.recent_sessions import NO_SESSIONS, WINDOW_S, RecentSessions, RecentTurns

BIN_S = 10.0
# Newest runs kept of all, and as many of those that missed their SLO. A receipt is about 5 kB.
KEPT_RUNS = 200
SHOWN_RUNS = 40
# Current figures cover the last five minutes and at most this many runs, about 250 B each.
LATELY_S = 300.0
KEPT_LATELY = 20_000
SHOWN_TENANTS = 20


@dataclass(slots=True)
class _Bin:
    """Runs that ended in the `BIN_S` seconds from `at_s`."""

    at_s: float
    runs: int = 0
    met: int = 0
    ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """Runs that ended in the `BIN_S` seconds from `at_s` (since the epoch).

    `met` met their SLO; `worst_ttft_s` is the longest time to first token, 0 without any token.
    """

    at_s: float
    runs: int
    met: int
    worst_ttft_s: float


@dataclass(frozen=True, slots=True)
class TaskHistory:
    """A task's runs of the last half hour, oldest first; `metric` and `target_s` of the newest."""

    task: TaskName
    metric: str
    target_s: float
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class RunLine:
    """A finished run in a list; its receipt has the rest. `ended_at_s` is since the epoch."""

    request_id: str
    task: TaskName
    status: str
    metric: str
    target_s: float
    achieved_s: float | None
    met: bool
    e2e_s: float
    queue_s: float
    output_tokens: int
    ended_at_s: float
    excuse: str = ""

    @property
    def slowness(self) -> float:
        """Achieved over target; a run without the metric counts with its whole duration."""
        achieved_s = self.e2e_s if self.achieved_s is None else self.achieved_s
        return achieved_s / self.target_s if self.target_s > 0 else achieved_s


@dataclass(frozen=True, slots=True)
class Lately:
    """Figures of the last five minutes: quantiles of the time to first token (None without any),
    output tokens per second, and prompt tokens in total and cached."""

    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    output_tokens_per_s: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantLine:
    """Resource use of a tenant's runs in the last five minutes."""

    tenant: str
    runs: int
    met: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """A run that ended; `counts`: it met or missed its SLO, and was not excused."""

    tenant: str
    ended_at_s: float
    counts: bool
    met: bool
    ttft_s: float | None
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RecentOverview:
    """Tasks by name; missed runs first, then the slowest relative to their targets; sessions;
    current figures; tenants by tokens used, largest first."""

    tasks: tuple[TaskHistory, ...] = ()
    runs: tuple[RunLine, ...] = ()
    sessions: RecentSessions = NO_SESSIONS
    lately: Lately = Lately()
    tenants: tuple[TenantLine, ...] = ()


class RecentRuns:
    """Fed with receipts; drops those older than half an hour."""

    def __init__(self) -> None:
        self._bins: dict[tuple[str, TaskName], deque[_Bin]] = {}
        self._slos: dict[tuple[str, TaskName], tuple[str, float]] = {}
        self._newest: deque[tuple[str, RunLine]] = deque(maxlen=KEPT_RUNS)
        self._missed: deque[tuple[str, RunLine]] = deque(maxlen=KEPT_RUNS)
        self._sessions = RecentTurns()
        self._lately: deque[_Sample] = deque(maxlen=KEPT_LATELY)

    def record(self, receipt: SlaReceipt, ended_at_s: float) -> None:
        """Add a run that ended at `ended_at_s` (since the epoch); calls must be in that order."""
        line = (receipt.tenant, _line(receipt, ended_at_s))
        self._newest.append(line)
        self._lately.append(_sample(receipt, ended_at_s))
        self._forget_old(ended_at_s)
        if receipt.session:
            self._sessions.record(receipt, ended_at_s)
        if receipt.excuse:
            return  # neither met nor missed
        if not receipt.met:
            self._missed.append(line)
        name = (receipt.tenant, receipt.task)
        self._slos[name] = (receipt.metric, receipt.target_s)
        bins = self._bins.setdefault(name, deque())
        at_s = ended_at_s - ended_at_s % BIN_S
        if not bins or bins[-1].at_s < at_s:
            bins.append(_Bin(at_s))
        last = bins[-1]
        last.runs += 1
        last.met += receipt.met
        last.ttft_s = max(last.ttft_s, receipt.ttft_s or 0.0)
        while bins[0].at_s < at_s - WINDOW_S:
            bins.popleft()

    def _forget_old(self, now_s: float) -> None:
        """Also without an overview, which may never be asked for."""
        while self._lately and self._lately[0].ended_at_s < now_s - LATELY_S:
            self._lately.popleft()
        self._sessions.forget_old(now_s)

    def overview(self, tenant: str | None, now_s: float) -> RecentOverview:
        """Overview of what `tenant` may see; None: everything."""
        since_s = now_s - WINDOW_S
        for name in [n for n, bins in self._bins.items() if bins[-1].at_s < since_s]:
            del self._bins[name], self._slos[name]
        lines = {
            (whose, line.request_id): line
            for whose, line in (*self._missed, *self._newest)
            if tenant in (None, whose) and line.ended_at_s >= since_s
        }
        # Excused runs and those abandoned by their client come last, whatever they took.
        slowest = sorted(
            lines.values(),
            key=lambda r: (
                r.met or r.excuse != "" or r.status == "cancelled",
                -r.slowness,
                r.request_id,
            ),
        )
        return RecentOverview(
            tuple(self._tasks(tenant, since_s)),
            tuple(slowest[:SHOWN_RUNS]),
            self._sessions.overview(tenant, since_s),
            *self._figures(tenant, now_s),
        )

    def _figures(self, tenant: str | None, now_s: float) -> tuple[Lately, tuple[TenantLine, ...]]:
        self._forget_old(now_s)
        mine = [s for s in self._lately if tenant in (None, s.tenant)]
        ttfts = sorted(s.ttft_s for s in mine if s.ttft_s is not None)
        # Shorter than five minutes if not all runs in them are kept.
        span_s = LATELY_S if len(self._lately) < KEPT_LATELY else now_s - self._lately[0].ended_at_s
        lately = Lately(
            _quantile(ttfts, 0.5),
            _quantile(ttfts, 0.95),
            sum(s.output_tokens for s in mine) / max(1.0, span_s),
            sum(s.prompt_tokens for s in mine),
            sum(s.cached_prompt_tokens for s in mine),
        )
        lines: dict[str, TenantLine] = {}
        for s in mine:
            known = lines.get(s.tenant, TenantLine(s.tenant, 0, 0, 0, 0))
            lines[s.tenant] = TenantLine(
                s.tenant,
                known.runs + s.counts,
                known.met + (s.counts and s.met),
                known.prompt_tokens + s.prompt_tokens,
                known.output_tokens + s.output_tokens,
            )
        by_tokens = sorted(
            lines.values(), key=lambda t: (-t.prompt_tokens - t.output_tokens, t.tenant)
        )
        return lately, tuple(by_tokens[:SHOWN_TENANTS])

    def _tasks(self, tenant: str | None, since_s: float) -> Iterator[TaskHistory]:
        mine = [name for name in self._bins if tenant in (None, name[0])]
        for task in sorted({task for _, task in mine}):
            sums: dict[float, _Bin] = {}
            names = [name for name in mine if name[1] == task]
            for bin in (b for name in names for b in self._bins[name] if b.at_s >= since_s):
                total = sums.setdefault(bin.at_s, _Bin(bin.at_s))
                total.runs += bin.runs
                total.met += bin.met
                total.ttft_s = max(total.ttft_s, bin.ttft_s)
            newest = max(names, key=lambda name: self._bins[name][-1].at_s)
            points = (Point(b.at_s, b.runs, b.met, b.ttft_s) for _, b in sorted(sums.items()))
            yield TaskHistory(task, *self._slos[newest], tuple(points))


def _sample(receipt: SlaReceipt, ended_at_s: float) -> _Sample:
    calls = [node.llm for node in receipt.nodes if node.llm is not None]
    return _Sample(
        receipt.tenant,
        ended_at_s,
        not receipt.excuse,
        receipt.met,
        receipt.ttft_s,
        sum(c.prompt_tokens for c in calls),
        sum(c.cached_prompt_tokens for c in calls),
        receipt.output_tokens,
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest of the sorted `values` that at least `share` of them do not exceed."""
    return values[max(0, ceil(share * len(values)) - 1)] if values else None


def _line(receipt: SlaReceipt, ended_at_s: float) -> RunLine:
    return RunLine(
        receipt.request_id,
        receipt.task,
        receipt.status,
        receipt.metric,
        receipt.target_s,
        receipt.achieved_s,
        receipt.met,
        receipt.e2e_s,
        receipt.queue_s,
        receipt.output_tokens,
        ended_at_s,
        receipt.excuse,
    )
