"""Users who play recorded agent sessions one after another in a closed loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan

import numpy as np

from cato.core.errors import InputError, retry_s
from cato.core.length import LengthBelief
from cato.core.session_slo import SessionBook, turn_times_s
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.playing import AGENT, RETRIES, TPOT_S, Playing, TurnRules
from cato.sim.session_plans import BETWEEN_SESSIONS_S, FIRST_ARRIVALS_S, PlannedSession, UserPlan
from cato.sim.session_traces import RecordedSession, Turn
from cato.sim.tasks import Outcome, SimTask


@dataclass(frozen=True, slots=True)
class PlayedSession:
    """A session that was played to its end."""

    recorded: RecordedSession
    began_at_s: float
    ended_at_s: float


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """A turn and the outcome of its first request.

    `unloaded_s`: its answer alone, with its session's blocks cached. `took_s`: until its answer,
    over all its requests (nan: it has none).
    """

    outcome: Outcome
    gap_s: float
    unloaded_s: float
    reused_tokens: int
    took_s: float = nan


class Users:
    """Users who play the sessions of a seeded shuffle one after another on a pool.

    A client whose request is refused, or that leaves without a first token, asks again: a turn
    counts once, as its first request went, and its user goes on when it has its answer.
    """

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
        first_within_s: float = FIRST_ARRIVALS_S,
    ) -> None:
        """`change`: applied to turns before they begin. `alongside`: further tasks with their own
        arrivals; `alongside` later holds their outcomes. With `session_target_s` each turn gets its
        part of it, by the rule of live ingresses; `sessions` holds the outcomes. With `plans` each
        user plays its own plan, with times multiplied by `scale`. `first_within_s`: in which users
        without plans begin.
        """
        profile = pool.profiles[0]
        block_tokens = max(1, pool.cache_block_tokens)
        memory = profile.kv_capacity_tokens // block_tokens * block_tokens
        window = min(profile.context_tokens, memory)
        cut = [s.within(window) for s in sessions]
        self._sessions = [s for s in cut if s.turns]
        if not self._sessions:
            raise InputError(f"no session has a turn within {window} tokens")
        self._rules = TurnRules(pool.name, profile, length, scale)
        self._plans = plans
        self._users = users
        self._first_within_s = first_within_s
        self._change = change
        self._coming = alongside
        self._rng = np.random.default_rng([seed, users])
        self._upcoming: list[RecordedSession] = []
        self._begun = 0
        # By request: its turn, and how often it was asked before.
        self._playing: dict[str, tuple[Playing, int, int]] = {}
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
        for start_s in self._rng.uniform(0.0, self._first_within_s, users):
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

    def _begin(self, playing: Playing, index: int, gap_s: float, tried: int = 0) -> None:
        turn = playing.recorded.turns[index]
        draw = float(self._rng.random())
        task, alone_s, reused = self._rules.task(playing, index, self.fleet.kernel.now_s, draw)
        if playing.target_s < inf:
            task = self._within_session(task, playing, turn, reused)
        if self._change is not None:
            task = self._change(task)
        if tried:
            task = replace(task, id=f"{task.id}-again-{tried}")
        self._playing[task.id] = playing, index, tried
        # Registered before it begins: a refusal comes at once.
        outcome = self.fleet.begin(task)
        if not tried:
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
        playing, index, tried = self._playing.pop(outcome.task.id)
        if not outcome.is_finished and tried < RETRIES:
            again_s = now_s + (retry_s(outcome.retry_after_s) if outcome.refused else 0.0)
            self.fleet.kernel.at(again_s, self._begin, playing, index, 0.0, tried + 1)
            return
        if outcome.is_finished:
            id = playing.turn_id(index)
            first = self.played[id]
            self.played[id] = replace(first, took_s=now_s - first.outcome.task.arrived_at_s)
        for follower in playing.end(index):
            self._schedule(playing, follower)
        if playing.left == 0:
            self.sessions.append(PlayedSession(playing.recorded, playing.began_at_s, now_s))
            between_s = self._rules.scale * BETWEEN_SESSIONS_S
            self.fleet.kernel.at(now_s + between_s, playing.then)
