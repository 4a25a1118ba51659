"""A recorded pool: the calls, outcomes and replicas in the log of its router's events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from cato.core.errors import InputError
from cato.core.events import (
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    ReplicaLost,
    ReplicaReported,
    Ticked,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.orchestrator import SILENCE_S
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.sim.tasks import OfferedTask, Outcome, SimNode
from cato.telemetry.event_log import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask(OfferedTask):
    """A recorded call; `cancelled_at_s` is when its client left (inf: it stayed)."""

    cancelled_at_s: float = inf


@dataclass(frozen=True, slots=True)
class ReplicaSpan:
    """A replica that accepted work from `from_s` to `until_s` (inf: to the end of the log)."""

    profile: Profile
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class History:
    """Contents of a log, in seconds since its first event; `outcomes` as recorded."""

    pool: PoolName
    names: PoolPolicies
    profile: Profile
    tasks: tuple[RecordedTask, ...]
    outcomes: tuple[Outcome, ...]
    replicas: tuple[ReplicaSpan, ...]


@dataclass(slots=True)
class _Call:
    """A call between its offer and its end."""

    offered_at_s: float
    first: Invocation
    latest: Invocation
    first_token_at_s: float | None = None
    ended_at_s: float | None = None
    output_tokens: int | None = None
    withdrawn_at_s: float = inf


def history_of(recording: Recording) -> History:
    """Raise `InputError` for a log without calls."""
    calls = _calls(recording)
    if not calls:
        raise InputError("the log has no calls: nothing was asked of this pool while it was kept")
    begin_s = recording.steps[0].event.now_s
    # Calls that were cancelled or superseded have no outcome.
    calls.sort(key=lambda c: c.offered_at_s)
    pairs = [_task_and_outcome(recording.pool, c, begin_s) for c in calls]
    return History(
        recording.pool,
        recording.names,
        recording.profile,
        tuple(task for task, _ in pairs),
        tuple(outcome for _, outcome in pairs if outcome is not None),
        tuple(_replicas(recording, begin_s)),
    )


def _calls(recording: Recording) -> list[_Call]:
    found: dict[InvocationId, _Call] = {}
    for step in recording.steps:
        match step.event:
            case InvocationOffered(now_s=now_s, invocation=invocation):
                fresh = _Call(now_s, invocation, invocation)
                call = found.setdefault(invocation.id, fresh)
                if invocation.attempt > call.latest.attempt:
                    call.latest = invocation
            case FirstTokenSent(now_s=now_s, invocation_id=id) if id in found:
                if found[id].first_token_at_s is None:
                    found[id].first_token_at_s = now_s
            case InvocationEnded(now_s=now_s, invocation_id=id) as ended if id in found:
                if ended.outcome == "done":
                    found[id].ended_at_s = now_s
                    found[id].output_tokens = found[id].latest.generated + ended.output_tokens
            case InvocationWithdrawn(now_s=now_s, invocation_id=id) as left if id in found:
                is_present = found[id].latest.attempt <= left.attempt
                if is_present and found[id].ended_at_s is None:
                    found[id].withdrawn_at_s = now_s
            case _:
                pass
    _withdraw_superseded(found.values())
    return list(found.values())


def _withdraw_superseded(calls: Iterable[_Call]) -> None:
    """Mark calls superseded by a newer run of their buffer: routers drop them silently."""
    latest: dict[str, list[_Call]] = {}
    for call in calls:
        buffer, run, at_s = call.first.buffer, call.first.run_id, call.offered_at_s
        if not buffer:
            continue
        older = [c for c in latest.get(buffer, []) if c.first.run_id != run]
        for c in older:
            if c.ended_at_s is None or c.ended_at_s > at_s:
                c.withdrawn_at_s = min(c.withdrawn_at_s, at_s)
        kept = [c for c in latest.get(buffer, []) if c.first.run_id == run]
        latest[buffer] = [*kept, call]


def _task_and_outcome(
    pool: PoolName, call: _Call, begin_s: float
) -> tuple[RecordedTask, Outcome | None]:
    first = call.first
    offered = replace(
        first,
        arrived_at_s=first.arrived_at_s - begin_s,
        began_at_s=first.began_at_s - begin_s,
        deadline_s=first.deadline_s - begin_s,
        # The recorded withdrawal is known; another policy's would be the same, at the same time.
        buffer="",
    )
    # A call that never finished has the length that was believed.
    tokens = call.output_tokens if call.output_tokens is not None else first.expected_tokens
    is_first = first.until_first_token
    node = SimNode(pool, max(1, first.prompt_tokens), max(1, tokens), first.expected_tokens)
    task = RecordedTask(
        id=first.id,
        name=first.task,
        arrived_at_s=call.offered_at_s - begin_s,
        metric=SloMetric.TTFT if is_first else SloMetric.E2E,
        target_s=first.deadline_s - call.offered_at_s - first.downstream_s,
        nodes=(node,),
        draws=(first.draw,),
        tenant=first.tenant,
        offered=offered,
        cancelled_at_s=call.withdrawn_at_s - begin_s,
    )
    if call.withdrawn_at_s < inf:
        return task, None
    outcome = Outcome(task)
    if call.ended_at_s is not None:
        outcome.ended_at_s = call.ended_at_s - begin_s
        # An answer that is not streamed shows no first token.
        first_s = call.ended_at_s if call.first_token_at_s is None else call.first_token_at_s
        outcome.first_token_at_s = first_s - begin_s
    else:
        outcome.refused = True
    return task, outcome


def _replicas(recording: Recording, begin_s: float) -> Iterable[ReplicaSpan]:
    """When each replica accepted work; one that was silent too long ended, as for its router."""
    open_: dict[ReplicaId, tuple[float, float, Profile]] = {}
    for step in recording.steps:
        now_s = step.event.now_s
        match step.event:
            case ReplicaReported(replica_id=id, accepting=True) as report:
                profile = replace(report.profile, max_running=report.max_running)
                since_s = open_[id][0] if id in open_ else now_s
                open_[id] = (since_s, now_s, profile)
            case ReplicaReported(replica_id=id) | ReplicaLost(replica_id=id) if id in open_:
                since_s, _, profile = open_.pop(id)
                yield ReplicaSpan(profile, since_s - begin_s, now_s - begin_s)
            case Ticked():
                for id in [i for i, (_, seen_s, _) in open_.items() if now_s - seen_s > SILENCE_S]:
                    since_s, _, profile = open_.pop(id)
                    yield ReplicaSpan(profile, since_s - begin_s, now_s - begin_s)
            case _:
                pass
    for since_s, _, profile in open_.values():
        yield ReplicaSpan(profile, since_s - begin_s, inf)
