"""Session SLOs: each turn's share of the time left to its whole session.

The target covers the time from the session's first call to the end of its last answer, think times
included. Each turn gets its share by the proportional rule of `cato.core.budgets`: the time left
after expected think times is split in proportion to predicted times. It is split again at every
turn, so time that one turn does not use goes to the next.

Assumption: sessions have no memory. In 319 recorded sessions of Claude Code 66 to 72 more turns
were expected on average, whether a session had had 1 turn or 100. So the number of turns to come is
geometric. Its mean is learned for each kind of client, as turns that followed another over sessions
that ended. Turns that can no longer end in time need no share: the median is taken of the numbers
that fit.

A share never makes a turn more urgent than usual. If the session has slack, its turns yield to
others; if it has none, they have the usual objective.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import expm1, log, log1p

from cato.core.pool.sessions import MEMORY_S
from cato.core.profile import Profile

# From those recorded sessions: mean turns to come, and mean think time between turns, capped at
# `MEMORY_S`. The initial values weigh as much as this many sessions and gaps.
PRIOR_LEFT_TURNS, PRIOR_SESSIONS = 70.0, 3.0
PRIOR_THINK_S, PRIOR_GAPS = 45.0, 20.0
# New tokens of an agent's turn; median of the recorded ones.
TURN_TOKENS = 764
# Learned values of a kind are halved after this many ended sessions: usage changes.
REMEMBERED_SESSIONS = 400.0
# Shares are planned for a number of turns that is exceeded with this probability. Planning for more
# makes early turns as urgent as late ones (0021).
CONFIDENCE = 0.5
# Sessions per ingress replica; each takes about 300 bytes.
MOST_SESSIONS, MOST_KINDS = 4_000, 100


@dataclass(frozen=True, slots=True)
class SessionBelief:
    """For a kind of client: mean number of turns after a turn, and mean time between turns."""

    left_turns: float = PRIOR_LEFT_TURNS
    think_s: float = PRIOR_THINK_S

    def turns_within(self, most: float) -> float:
        """Turns to come that are not exceeded with probability `CONFIDENCE`.

        Given that there are no more than `most`.
        """
        if self.left_turns <= 0 or most <= 0:
            return 0.0
        goes_on = log(self.left_turns / (1.0 + self.left_turns))
        is_within = CONFIDENCE * -expm1(goes_on * (most + 1.0))
        return min(most, max(0.0, log1p(-is_within) / goes_on - 1.0))


@dataclass(frozen=True, slots=True)
class SessionShare:
    """A turn's share of its session's time.

    At its arrival `left_s` of the session's `target_s` are left, of which the turn may take
    `budget_s`; None if it can no longer end in time, even alone. `later_s` are expected to pass
    after it, for `later_turns`.
    """

    target_s: float
    left_s: float
    budget_s: float | None
    later_turns: float
    later_s: float

    def first_token_s(self, usual_s: float, answer_s: float) -> float:
        """The target for the turn's first token.

        `usual_s` is the usual target; the tokens after the first may take `answer_s`.
        """
        return usual_s if self.budget_s is None else max(usual_s, self.budget_s - answer_s)

    def slack_s(self, spent_s: float) -> float:
        """The session's spare time once the turn has taken `spent_s`."""
        return self.left_s - spent_s - self.later_s


def share_of_turn(
    target_s: float, left_s: float, own_s: float, next_s: float, belief: SessionBelief
) -> SessionShare:
    """The share of a turn with a predicted time of `own_s`; each later turn takes `next_s`."""
    each_s = next_s + belief.think_s
    if own_s >= left_s:
        later = belief.left_turns
        return SessionShare(target_s, left_s, None, later, later * each_s)
    fitting = (left_s - own_s) / each_s if each_s > 0 else belief.left_turns
    later = belief.turns_within(fitting)
    served_s = left_s - later * belief.think_s
    all_s = own_s + later * next_s
    # If no times are known, turns share evenly.
    budget_s = served_s * own_s / all_s if all_s > 0 else served_s / (1.0 + later)
    return SessionShare(target_s, left_s, budget_s, later, later * each_s)


def turn_times_s(
    profile: Profile, prompt_tokens: int, new_tokens: int, expected_tokens: int
) -> tuple[float, float]:
    """Predicted times of a turn and of a later one, alone; their uncached tokens differ."""

    def whole_s(uncached_tokens: int) -> float:
        cached_tokens = prompt_tokens - min(uncached_tokens, prompt_tokens)
        return profile.service_s(prompt_tokens, expected_tokens, 1, cached_tokens)

    return whole_s(new_tokens), whole_s(TURN_TOKENS)


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn at its start: its share of the session's time, and the client's think time.

    `share` is None without a target. `think_s` is None for a first turn, if another turn is
    running, and if the previous turn had no answer.
    """

    began_at_s: float
    think_s: float | None
    share: SessionShare | None


@dataclass(slots=True)
class _Session:
    kind: str
    began_at_s: float
    seen_at_s: float
    target_s: float | None = None
    answered_at_s: float | None = None  # its latest turn, unless another has begun since
    under_way: int = 0


@dataclass(slots=True)
class _Learnt:
    followed: float = 0.0
    ended: float = 0.0
    gaps: float = 0.0
    think_s: float = 0.0


@dataclass(slots=True, eq=False)
class SessionBook:
    """The sessions of one ingress replica, or of a simulated one. All times are from one clock."""

    _live: OrderedDict[str, _Session] = field(default_factory=OrderedDict)  # last seen last
    _quiet: OrderedDict[str, _Session] = field(default_factory=OrderedDict)
    _learnt: OrderedDict[str, _Learnt] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._live) + len(self._quiet)

    def belief(self, kind: str) -> SessionBelief:
        known = self._learnt.get(kind, _Learnt())
        turns = known.followed + PRIOR_SESSIONS * PRIOR_LEFT_TURNS
        gaps_s = known.think_s + PRIOR_GAPS * PRIOR_THINK_S
        return SessionBelief(
            turns / (known.ended + PRIOR_SESSIONS), gaps_s / (known.gaps + PRIOR_GAPS)
        )

    def begin(
        self,
        session: str,
        kind: str,
        now_s: float,
        *,
        number: int = 1,
        times_s: tuple[float, float] = (0.0, 0.0),
        target_s: float | None = None,
        parent: str = "",
    ) -> Begun:
        """A turn of `session` arrives, the `number`-th of its conversation.

        `times_s` are those of `turn_times_s`. A session that is unknown here and has had turns
        elsewhere is assumed to have begun that many turns ago. A session started by another shares
        that one's time. A name that returns after its target and a long silence is a new session.
        """
        self._forget_silent(now_s)
        starter = self._live.get(parent) or self._quiet.get(parent)
        known = self._live.pop(session, None)
        if known is None and (known := self._quiet.pop(session, None)) is not None:
            is_over = known.target_s is not None and known.began_at_s + known.target_s < now_s
            if is_over:
                known = None
            else:
                learnt = self._of(known.kind)
                # Halving may have taken some of its end already.
                learnt.ended = max(0.0, learnt.ended - 1.0)
        target_s = target_s or next((s.target_s for s in (known, starter) if s), None)
        think_s = None
        if known is None:
            age_s = (number - 1) * (times_s[1] + self.belief(kind).think_s)
            known = _Session(kind, starter.began_at_s if starter else now_s - age_s, now_s)
        elif known.answered_at_s is not None:
            think_s = max(0.0, now_s - known.answered_at_s)
            learnt = self._of(known.kind)
            learnt.followed += 1.0
            learnt.gaps += 1.0
            learnt.think_s += min(think_s, MEMORY_S)
        known.target_s, known.seen_at_s, known.answered_at_s = target_s, now_s, None
        known.under_way += 1
        self._live[session] = known
        while len(self._live) > MOST_SESSIONS:
            self._live.popitem(last=False)
        share = None
        if target_s is not None:
            left_s = known.began_at_s + target_s - now_s
            share = share_of_turn(target_s, left_s, *times_s, self.belief(kind))
        return Begun(known.began_at_s, think_s, share)

    def ended(self, session: str, now_s: float, *, is_answered: bool = True) -> None:
        """A turn of `session` that began here has ended.

        A turn without an answer will be asked again: it does not count, and the time until then is
        no think time.
        """
        known = self._live.get(session)
        if known is not None and known.under_way:
            known.under_way -= 1
            known.seen_at_s = now_s
            known.answered_at_s = now_s if is_answered and not known.under_way else None
            self._live.move_to_end(session)

    def _forget_silent(self, now_s: float) -> None:
        """Sessions silent for long count as ended, until they are heard of again."""
        while self._live:
            session, oldest = next(iter(self._live.items()))
            if oldest.seen_at_s >= now_s - MEMORY_S:
                return
            del self._live[session]
            self._quiet[session] = oldest
            learnt = self._of(oldest.kind)
            learnt.ended += 1.0
            if learnt.ended >= REMEMBERED_SESSIONS:
                for name in ("followed", "ended", "gaps", "think_s"):
                    setattr(learnt, name, getattr(learnt, name) / 2.0)
        while len(self._quiet) > MOST_SESSIONS:
            self._quiet.popitem(last=False)

    def _of(self, kind: str) -> _Learnt:
        known = self._learnt.pop(kind, None)
        if known is None:
            known = _Learnt()
        self._learnt[kind] = known
        while len(self._learnt) > MOST_KINDS:
            self._learnt.popitem(last=False)
        return known
