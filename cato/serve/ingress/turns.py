"""One turn of a session: its session's name and time, and its SLO."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace

from starlette.requests import Request

from cato.core.profile import Profile
from cato.core.session import Prompt, Turn, TurnKind
from cato.core.session_slo import SessionShare, turn_times_s
from cato.core.slo import Slo, SloMetric
from cato.serve.ingress.chat_request import ChatRequest
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.fill import call_slo_of
from cato.serve.pools import PoolInfo
from cato.serve.service import CALL_DEADLINE_S, CALL_SLO

# An agent's turn, in seconds: TTFT, from notes on what users of agents tolerate, and TPOT.
AGENT_TTFT_S = 2.0
AGENT_TPOT_S = 0.04
# If the prompt alone takes more than half of the TTFT target, or an engine step more than half of
# the TPOT, the target becomes twice the unloaded time.
UNLOADED = 2.0


@dataclass(frozen=True, slots=True)
class SessionClock:
    """Tracks session time for one turn; calls outside the main loop are not tracked."""

    ingress: Ingress
    request: Request
    turn: Turn
    memory: str

    @property
    def _is_main(self) -> bool:
        return self.turn.kind in (TurnKind.MAIN, TurnKind.COMPACTION)

    def begin(
        self, profile: Profile, prompt: Prompt, expected_tokens: int, target_s: float | None
    ) -> tuple[float | None, SessionShare | None]:
        """Think time before the turn, and the turn's share of the session's time; each None if it
        does not apply."""
        if not self._is_main:
            return None, None
        turn = self.turn
        begun = self.ingress.session_book.begin(
            self.memory,
            turn.client,
            time.monotonic(),
            number=turn.number,
            times_s=turn_times_s(profile, prompt.tokens, prompt.new_tokens, expected_tokens),
            target_s=target_s,
            parent=memory_of(self.request, Turn(turn.parent)) if turn.parent else "",
        )
        return begun.think_s, begun.share

    def end(self, *, is_answered: bool) -> None:
        if self._is_main:
            self.ingress.session_book.ended(self.memory, time.monotonic(), is_answered=is_answered)


def memory_of(request: Request, turn: Turn) -> str:
    """The session's name across tenants: a digest, since it leaves the ingress. A call outside the
    main loop has its own prompt, unless it summarizes the main one."""
    is_main = turn.kind in (TurnKind.MAIN, TurnKind.COMPACTION)
    beside = "" if is_main else turn.kind.value
    name = "\0".join((caller_of(request).tenant, turn.session, beside))
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()


def slo_of_turn(
    request: Request,
    chat: ChatRequest,
    turn: Turn,
    pool: PoolInfo,
    prompt: Prompt,
    expected_tokens: int,
    share: SessionShare | None,
) -> Slo:
    """The SLO of a turn, from the part of its prompt that is new to the session.

    An agent gets a TTFT of 2 s and a TPOT of 40 ms; any other chat the SLO of a direct call. Both
    are raised to twice the unloaded time where that is longer. Titles are not urgent. In a session
    with a target and slack, the TTFT is extended by the turn's share of the slack.
    """
    profile = pool.profile
    is_agent = bool(chat.client.name) or chat.has_tools
    ttft_s = max(
        AGENT_TTFT_S if is_agent else CALL_SLO.target_s,
        UNLOADED * profile.first_token_s(prompt.new_tokens),
    )
    base = Slo(SloMetric.TTFT, ttft_s)
    if is_agent:
        pace_s = max(AGENT_TPOT_S, UNLOADED * profile.decode_step_s(1, prompt.tokens))
        base = replace(base, tpot_target_s=pace_s)
    if share is not None:
        answer_s = expected_tokens * min(base.tpot_target_s, AGENT_TPOT_S)
        first_s = min(share.first_token_s(base.target_s, answer_s), CALL_DEADLINE_S)
        base = replace(base, target_s=first_s)
    is_urgent = turn.kind is not TurnKind.TITLE
    return call_slo_of(
        request, chat.tier, chat.extra, base, is_urgent=is_urgent, expected_tokens=expected_tokens
    )
