"""The queue order of CATO, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation
from cato.policies.slack import FEASIBLE, LATE, TIGHT, holds_until_s, slack_class

_WORDS = {LATE: "late", TIGHT: "tight", FEASIBLE: "feasible"}


@dataclass(frozen=True, slots=True)
class SlackPriority:
    """Priority 0 (late) before 1 (tight) before 2 (feasible), as published.

    Serving late calls first costs calls that could still be met: see `LateLast`. Deviation from the
    printed text: slack is computed again at every dispatch, not only on arrival.
    """

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        cls = slack_class(invocation.deadline_s - now_s, 0.0, work.remaining_s)
        until_s = holds_until_s(cls, invocation.deadline_s, work.remaining_s)
        return Rank(cls, f"{_WORDS[cls]} (priority {cls})", until_s=until_s)


@dataclass(frozen=True, slots=True)
class LateLast:
    """The same classes, but late calls go after all that can still be met.

    Trade-off: a task past its deadline waits longer; attainment of the others rises sharply as soon
    as there is a queue.
    """

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        cls = slack_class(invocation.deadline_s - now_s, 0.0, work.remaining_s)
        place = {TIGHT: 0, FEASIBLE: 1, LATE: 2}[cls]
        until_s = holds_until_s(cls, invocation.deadline_s, work.remaining_s)
        return Rank(place, f"{_WORDS[cls]} (place {place})", until_s=until_s)
