"""Sessions of the last half hour: their turns, their tokens, and the replicas they ran on."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from cato.core.receipt import Placement, SlaReceipt

WINDOW_S = 1800.0
# Recently active sessions to keep; about 400 B each.
KEPT_SESSIONS = 2_000
SHOWN_SESSIONS = 20


@dataclass(frozen=True, slots=True)
class SessionLine:
    """A session in a list, from the turns counted here; `replica` ran its last one.

    `moved` turns ran on another replica than the turn before. `slack_s` is the slack of a session
    with a target at its last turn, None without a target.
    """

    session: str
    client: str
    turns: int = 0
    met: int = 0
    moved: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    replica: str = ""
    slack_s: float | None = None
    ended_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RecentSessions:
    """Sessions of the last half hour: their number, their tokens, and the newest, latest first."""

    count: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    newest: tuple[SessionLine, ...] = ()


NO_SESSIONS = RecentSessions()


class RecentTurns:
    """Fed with receipts of turns; drops sessions that have been idle for half an hour."""

    def __init__(self) -> None:
        # By tenant and name, least recently used first.
        self._sessions: OrderedDict[tuple[str, str], SessionLine] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def record(self, receipt: SlaReceipt, ended_at_s: float) -> None:
        """Add a turn that ended at `ended_at_s`; calls must be in that order."""
        calls = [node.llm for node in receipt.nodes if node.llm is not None]
        if not calls:
            return
        name = (receipt.tenant, receipt.session)
        known = self._sessions.pop(name, None)
        if known is None or known.ended_at_s < ended_at_s - WINDOW_S:
            known = SessionLine(receipt.session, receipt.client)
        self._sessions[name] = replace(
            known,
            turns=known.turns + 1,
            met=known.met + receipt.met,
            moved=known.moved + (calls[-1].placement is Placement.MOVED),
            prompt_tokens=known.prompt_tokens + sum(c.prompt_tokens for c in calls),
            cached_prompt_tokens=known.cached_prompt_tokens
            + sum(c.cached_prompt_tokens for c in calls),
            replica=calls[-1].replica or known.replica,
            slack_s=receipt.session_slack_s,
            ended_at_s=ended_at_s,
        )
        if len(self._sessions) > KEPT_SESSIONS:
            self._sessions.popitem(last=False)

    def forget_old(self, now_s: float) -> None:
        while self._sessions:
            name, oldest = next(iter(self._sessions.items()))
            if oldest.ended_at_s >= now_s - WINDOW_S:
                return
            del self._sessions[name]

    def overview(self, tenant: str | None, since_s: float) -> RecentSessions:
        """Sessions of `tenant` (None: all) whose last turn ended since then."""
        mine = [
            line
            for (whose, _), line in reversed(self._sessions.items())
            if tenant in (None, whose) and line.ended_at_s >= since_s
        ]
        return RecentSessions(
            len(mine),
            sum(line.prompt_tokens for line in mine),
            sum(line.cached_prompt_tokens for line in mine),
            tuple(mine[:SHOWN_SESSIONS]),
        )
