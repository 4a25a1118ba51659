"""Recorded agent sessions, and users who play them one after another in a closed loop.

Trace format (one JSON object per line, gzipped or not): `id`, `shared` (tool and system tokens),
and `turns` with `in`, `out`, `hit`, `gap`, `gap_after` (`tool_use`: a tool ran). Optional: `base`
(the turn whose prompt it continues), `after` (the turns that it waits for), `agent` and `shared` of
a sub-agent. Prompts become chains of blocks of 64 tokens; sessions with equal tools and system
prompts share these.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.session_slo import SessionBook, turn_times_s
from cato.core.slo import SloMetric
from cato.core.snapshot import PREFIX_BLOCK_TOKENS
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.tasks import Outcome, SimNode, SimTask

AGENT = TaskName("agent")
# Longer think times are capped: the user has gone. Traces contain gaps of days.
MAX_GAP_S = 600.0
BETWEEN_SESSIONS_S = 30.0
# Users start at different times.
FIRST_ARRIVALS_S = 60.0
# A turn is in time when its first token comes within the larger of these and its answer keeps pace.
LEAST_TTFT_S, TTFT_FACTOR, TPOT_S = 2.0, 2.0, 0.04
# Claude Code disconnects and retries when it has no first token by then.
PATIENCE_S = 300.0
# Quantile of planned turns; one in a hundred is longer.
LONGEST_ANSWER_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class Turn:
    """One call. `base`: index of the turn whose first `hit_tokens` prompt tokens it repeats."""

    gap_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    base: int | None
    after: tuple[int, ...]
    agent: int
    tools_tokens: int
    system_tokens: int
    # The gap is the run time of a tool or sub-agents, not a person's think time.
    follows_tool: bool


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """The calls of one agent and its sub-agents, in order of start."""

    id: str
    turns: tuple[Turn, ...]

    def within(self, window_tokens: int) -> RecordedSession:
        """The session up to its first turn that exceeds the model's window."""
        for i, turn in enumerate(self.turns):
            if turn.prompt_tokens + turn.output_tokens > window_tokens:
                return RecordedSession(self.id, self.turns[:i])
        return self


def read_sessions(path: Path) -> list[RecordedSession]:
    """The sessions of a trace, by SHA-256 of their ids; raise `InputError`."""
    opened = gzip.open if path.suffix == ".gz" else open
    found = []
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    found.append(_session(json.loads(line)))
                except (KeyError, TypeError, ValueError, IndexError) as exc:
                    rule = f"{type(exc).__name__}: {exc}"
                    raise InputError(f"{path}, line {number}: no session ({rule})") from exc
    except OSError as exc:
        raise InputError(f"{path}: {exc}") from exc
    if not found:
        raise InputError(f"{path}: no sessions")
    return sorted(found, key=lambda s: sha256(s.id.encode()).hexdigest())


def _session(row: dict[str, Any]) -> RecordedSession:
    previous: dict[int, int] = {}
    turns = []
    for i, turn in enumerate(row["turns"]):
        agent = int(turn.get("agent", 0))
        before = previous.get(agent)
        base = turn.get("base", before)
        after = turn.get("after", [] if before is None else [before])
        if any(not 0 <= j < i for j in after) or (base is not None and not 0 <= base < i):
            raise ValueError(f"turn {i} follows a turn that is not before it")
        tools, system = turn.get("shared") or (row["shared"] if i == 0 else (0, 0))
        hit = int(turn["hit"]) if base is not None else 0
        turns.append(
            Turn(
                float(turn["gap"]),
                int(turn["in"]),
                max(1, int(turn["out"])),
                hit,
                base,
                tuple(after),
                agent,
                int(tools),
                int(system),
                turn.get("gap_after") in ("tool_use", "sub_agents"),
            )
        )
        previous[agent] = i
    return RecordedSession(str(row["id"]), tuple(turns))


@dataclass(frozen=True, slots=True)
class TurnRules:
    """A turn's SLO, and its client's patience; `scale` multiplies all times."""

    pool: PoolName
    profile: Profile
    length: LengthBelief
    scale: float = 1.0

    @property
    def expected_tokens(self) -> int:
        return max(1, round(self.length.left_mean(0)))

    def task(
        self, playing: Playing, index: int, now_s: float, draw: float
    ) -> tuple[SimTask, float, int]:
        """The task of a turn that begins now, its unloaded answer time with the session's blocks
        cached, and the number of those tokens."""
        turn, profile = playing.recorded.turns[index], self.profile
        blocks = playing.blocks(index)
        reused = min(turn.hit_tokens // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS, len(blocks) * 64)
        reused = min(reused, turn.prompt_tokens - 1)
        warm_s = profile.first_token_s(turn.prompt_tokens, 1, reused)
        context_tokens = turn.prompt_tokens + turn.output_tokens / 2
        answer_s = (turn.output_tokens - 1) * profile.decode_step_s(1, context_tokens)
        node = SimNode(
            self.pool,
            turn.prompt_tokens,
            turn.output_tokens,
            self.expected_tokens,
            self.length,
            blocks=blocks,
            calls_tool=playing.calls_tool(index),
        )
        task = SimTask(
            f"s{playing.number}-{index}",
            AGENT,
            now_s,
            SloMetric.TTFT,
            max(self.scale * LEAST_TTFT_S, TTFT_FACTOR * warm_s),
            (node,),
            (draw,),
            tpot_target_s=self.scale * TPOT_S,
            patience_s=self.scale * PATIENCE_S,
            session=f"s{playing.number}/{turn.agent}",
        )
        return task, warm_s + answer_s, reused


class Playing:
    """One session that a user plays: which turns have ended, and the blocks of their prompts.

    `then` is called at its end. Turns before the `first` count as ended.
    """

    def __init__(
        self,
        recorded: RecordedSession,
        number: int,
        began_at_s: float,
        target_s: float,
        then: Callable[[], None],
        first: int = 0,
    ) -> None:
        self.recorded = recorded
        self.number = number
        self.began_at_s = began_at_s
        self.target_s = target_s
        self.then = then
        self._first = first
        self.ended: set[int] = set(range(first))
        self.left = len(recorded.turns) - first
        self._blocks: dict[int, tuple[int, ...]] = {}
        self.followers: dict[int, list[int]] = {}
        for i, turn in enumerate(recorded.turns):
            for j in turn.after:
                self.followers.setdefault(j, []).append(i)

    def first_turns(self) -> list[int]:
        """Turns that wait for no other."""
        return [
            i
            for i, turn in enumerate(self.recorded.turns)
            if i not in self.ended and self.ended.issuperset(turn.after)
        ]

    def gap_s(self, index: int, scale: float) -> float:
        """Gap before the turn, after the turns that it waits for; 0 at the start of a session."""
        turn = self.recorded.turns[index]
        if index == 0 or (turn.after and max(turn.after) < self._first):
            return 0.0
        return min(scale * MAX_GAP_S, turn.gap_s)

    def end(self, index: int) -> list[int]:
        """A turn has its answer: returns the turns that now wait only for their gaps."""
        self.ended.add(index)
        self.left -= 1
        turns = self.recorded.turns
        followers = self.followers.get(index, ())
        return [i for i in followers if self.ended.issuperset(turns[i].after)]

    def calls_tool(self, index: int) -> bool:
        turns = self.recorded.turns
        return any(turns[i].follows_tool for i in self.followers.get(index, ()))

    def blocks(self, index: int) -> tuple[int, ...]:
        """Names of the whole blocks of a prompt; the turns before it must all have been asked."""
        turn = self.recorded.turns[index]
        kept: tuple[int, ...] = ()
        if turn.base is not None:
            kept = self._of(turn.base)[: -(-turn.hit_tokens // PREFIX_BLOCK_TOKENS)]
        own = []
        for block in range(len(kept), turn.prompt_tokens // PREFIX_BLOCK_TOKENS):
            end = (block + 1) * PREFIX_BLOCK_TOKENS
            if end <= turn.tools_tokens:
                own.append(-(turn.tools_tokens << 16 | block))
            elif end <= turn.tools_tokens + turn.system_tokens:
                own.append(-(turn.tools_tokens << 40 | turn.system_tokens << 16 | block))
            else:
                own.append(self.number << 32 | index << 16 | block)
        self._blocks[index] = (*kept, *own)
        return self._blocks[index]

    def _of(self, index: int) -> tuple[int, ...]:
        known = self._blocks.get(index)
        return self.blocks(index) if known is None else known


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """The turns of one session that a user plays, from `first` on.

    `number` names the session and its own blocks of prompts. `begins_s`: when the turns from
    `first` on would begin if each had the replica alone.
    """

    recorded: RecordedSession
    number: int
    first: int
    begins_s: tuple[float, ...]

    def play(self, now_s: float, then: Callable[[], None]) -> Playing:
        return Playing(self.recorded, self.number, now_s, inf, then, self.first)


@dataclass(frozen=True, slots=True)
class UserPlan:
    """A user's turns, independent of policies and delays: runs compare turn by turn."""

    start_s: float
    parts: tuple[PlannedSession, ...]


def plans_of(
    sessions: Sequence[RecordedSession],
    users: int,
    profile: Profile,
    until_s: float,
    seed: int,
    scale: float = 1.0,
) -> list[UserPlan]:
    """For each user the turns that begin by `until_s` when each has a replica alone.

    Users start in the middle of a session. `scale` multiplies all times except those of the
    profile, which is scaled already.
    """
    rng = np.random.default_rng([seed, users, 3])
    known = [s for s in (s.within(profile.context_tokens) for s in sessions) if s.turns]
    plans, number = [], 0
    for start_s in rng.uniform(0.0, min(FIRST_ARRIVALS_S, until_s / scale), users):
        parts: list[PlannedSession] = []
        now_s = scale * float(start_s)
        for i in rng.permutation(len(known)):
            number += 1
            first = 0 if parts else int(rng.integers(len(known[i].turns)))
            part, now_s = _planned(known[i], number, first, profile, (now_s, until_s), scale)
            if not part.begins_s:
                break
            parts.append(part)
            now_s += scale * BETWEEN_SESSIONS_S
        plans.append(UserPlan(scale * float(start_s), tuple(parts)))
    return plans


def _planned(
    recorded: RecordedSession,
    number: int,
    first: int,
    profile: Profile,
    between_s: tuple[float, float],
    scale: float,
) -> tuple[PlannedSession, float]:
    """The turns of a session that begin in time, and when the last one has its answer."""
    start_s, until_s = between_s
    turns = tuple(
        replace(
            t,
            gap_s=scale * min(MAX_GAP_S, t.gap_s),
            output_tokens=min(t.output_tokens, LONGEST_ANSWER_TOKENS),
        )
        for t in recorded.turns
    )
    ends_s: dict[int, float] = {}
    begins_s: list[float] = []
    for i, turn in enumerate(turns[first:], first):
        awaited = [ends_s[j] for j in turn.after if j in ends_s]
        begin_s = max(awaited) + turn.gap_s if awaited else start_s
        if begin_s >= until_s:
            break
        cached = min(turn.hit_tokens, turn.prompt_tokens - 1) if i > first else 0
        alone_s = profile.service_s(turn.prompt_tokens, turn.output_tokens, 1, cached)
        ends_s[i] = begin_s + alone_s
        begins_s.append(begin_s)
    kept = RecordedSession(recorded.id, turns[: first + len(begins_s)])
    return PlannedSession(kept, number, first, tuple(begins_s)), max(ends_s.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class PlayedSession:
    """A session that was played to its end."""

    recorded: RecordedSession
    began_at_s: float
    ended_at_s: float


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """A turn and its outcome. `unloaded_s`: its answer alone, with its session's blocks cached."""

    outcome: Outcome
    gap_s: float
    unloaded_s: float
    reused_tokens: int


class Users:
    """Users who play the sessions of a seeded shuffle one after another on a pool."""

    def __init__(
        self,
        sessions: Sequence[RecordedSession],
        users: int,
        pool: PoolSetup,
        length: LengthBelief,
        seed: int,
        change: Callable[[SimTask], SimTask] | None = None,
        alongside: Sequence[SimTask] = (),
        session_target_s: Callable[[RecordedSession], float] | None = None,
        plans: Sequence[UserPlan] = (),
        scale: float = 1.0,
    ) -> None:
        """`change`: applied to turns before they begin. `alongside`: further tasks with their own
        arrivals; `alongside` later holds their outcomes. With `session_target_s` each turn gets its
        part of it, by the rule of live ingresses; `sessions` holds the outcomes. With `plans` each
        user plays its own plan, with times multiplied by `scale`.
        """
        profile = pool.profiles[0]
        cut = [s.within(profile.context_tokens) for s in sessions]
        self._sessions = [s for s in cut if s.turns]
        if not self._sessions:
            raise InputError(f"no session has a turn within {profile.context_tokens} tokens")
        self._rules = TurnRules(pool.name, profile, length, scale)
        self._plans = plans
        self._users = users
        self._change = change
        self._coming = alongside
        self._rng = np.random.default_rng([seed, users])
        self._upcoming: list[RecordedSession] = []
        self._begun = 0
        self._playing: dict[str, tuple[Playing, int]] = {}
        self.played: dict[str, PlayedTurn] = {}
        self.alongside: list[Outcome] = []
        self.sessions: list[PlayedSession] = []
        self._book = SessionBook()
        self._session_target_s = session_target_s
        self.fleet = Fleet([pool], on_end=self._ended)

    def run(self, until_s: float) -> list[PlayedTurn]:
        """All turns begun by then, in order of start."""
        for plan in self._plans:
            self.fleet.kernel.at(plan.start_s, self._next_part, iter(plan.parts))
        users = 0 if self._plans else self._users
        for start_s in self._rng.uniform(0.0, FIRST_ARRIVALS_S, users):
            self.fleet.kernel.at(float(start_s), self._next_session)
        for task in self._coming:
            self.fleet.kernel.at(task.arrived_at_s, self._begin_alongside, task)
        self.fleet.kernel.run(until_s)
        return list(self.played.values())

    def _begin_alongside(self, task: SimTask) -> None:
        self.alongside.append(self.fleet.begin(task))

    def _next_session(self) -> None:
        if not self._upcoming:
            order = self._rng.permutation(len(self._sessions))
            self._upcoming = [self._sessions[i] for i in order]
        self._begun += 1
        recorded = self._upcoming.pop()
        target_s = inf if self._session_target_s is None else self._session_target_s(recorded)
        now_s = self.fleet.kernel.now_s
        playing = Playing(recorded, self._begun, now_s, target_s, self._next_session)
        for index in playing.first_turns():
            self._schedule(playing, index)

    def _next_part(self, parts: Iterator[PlannedSession]) -> None:
        planned = next(parts, None)
        if planned is not None:
            playing = planned.play(self.fleet.kernel.now_s, partial(self._next_part, parts))
            for index in playing.first_turns():
                self._schedule(playing, index)

    def _schedule(self, playing: Playing, index: int) -> None:
        gap_s = playing.gap_s(index, self._rules.scale)
        self.fleet.kernel.at(self.fleet.kernel.now_s + gap_s, self._begin, playing, index, gap_s)

    def _begin(self, playing: Playing, index: int, gap_s: float) -> None:
        turn = playing.recorded.turns[index]
        draw = float(self._rng.random())
        task, alone_s, reused = self._rules.task(playing, index, self.fleet.kernel.now_s, draw)
        if playing.target_s < inf:
            task = self._within_session(task, playing, turn, reused)
        if self._change is not None:
            task = self._change(task)
        self._playing[task.id] = playing, index
        # Registered before it begins: a refusal comes at once.
        outcome = self.fleet.begin(task)
        self.played[task.id] = PlayedTurn(outcome, gap_s, alone_s, reused)

    def _within_session(self, task: SimTask, playing: Playing, turn: Turn, reused: int) -> SimTask:
        """The task with its part of the session's time as target, as a live ingress computes it."""
        new_tokens = turn.prompt_tokens - reused
        begun = self._book.begin(
            task.session,
            AGENT,
            task.arrived_at_s,
            times_s=turn_times_s(
                self._rules.profile, turn.prompt_tokens, new_tokens, self._rules.expected_tokens
            ),
            target_s=playing.target_s,
            parent=f"s{playing.number}/0" if turn.agent else "",
        )
        assert begun.share is not None, "it has a target"
        answer_s = self._rules.expected_tokens * TPOT_S
        return replace(task, target_s=begun.share.first_token_s(task.target_s, answer_s))

    def _ended(self, outcome: Outcome) -> None:
        if outcome.task.id not in self._playing:
            return  # an `alongside` task
        now_s = self.fleet.kernel.now_s
        self._book.ended(outcome.task.session, now_s, is_answered=outcome.is_finished)
        playing, index = self._playing.pop(outcome.task.id)
        for follower in playing.end(index):
            self._schedule(playing, follower)
        if playing.left == 0:
            self.sessions.append(PlayedSession(playing.recorded, playing.began_at_s, now_s))
            between_s = self._rules.scale * BETWEEN_SESSIONS_S
            self.fleet.kernel.at(now_s + between_s, playing.then)
