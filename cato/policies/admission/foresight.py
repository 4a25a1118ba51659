"""Admission to a running batch in CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cato.core.decision import Admit, Defer
from cato.core.snapshot import Invocation, ReplicaView
from cato.policies.admission.prompt_window import PromptWindow
from cato.policies.admission.tempo import TempoAdmission
from cato.policies.outlook import PRICE, can_be_met, joining, outlook_of

# A call that is late by more than this joins even at a small loss to others.
AGED_S = 30.0
# With fewer batch slots, one late call would delay too many that can be met.
MIN_PLACES = 10
_WINDOW, _WITHOUT_SLO = PromptWindow(), TempoAdmission()
_IDLE = Admit("the replica is idle")
_IN_WINDOW = Admit("the replica's next steps can take its prompt")


@dataclass(frozen=True, slots=True)
class ForesightAdmission:
    """Projects the running set with the candidate in it; admits when more SLOs are met.

    Each call's chance to be in time follows from the belief about its length and its tokens so far.
    A candidate joins when its own chance exceeds `price` times the loss of the running calls.
    Prompts join by a window: prompts beyond the engine's next steps wait in the queue, where they
    can still be reordered. A call without an SLO joins as `TempoAdmission` allows, since it would
    occupy its slot for its whole run. Such calls, and calls that cannot be in time, join only at no
    loss. They leave `reserve` of the slots free (none if there are fewer than ten: the call yields
    when it must), or hold at most that share of them. A stream that could be in time, but not
    behind the prompts ahead, waits until it is late: otherwise its prompt would delay others in
    vain. Calls late by more than `AGED_S` join at a loss of up to `aged_loss`, one at a time.
    """

    price: float = PRICE
    reserve: float = 0.1
    unlikely: float = 0.1
    aged_loss: float = 0.2

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        running = replica.running
        if not running:
            return _IDLE
        if closed := why_closed(invocation, replica, now_s):
            return closed
        if invocation.session:  # routing has considered the cost: its context is nowhere else
            return _IN_WINDOW
        join = joining(invocation, replica, now_s)
        own, loss = join.own, join.loss
        has_aged = replica.max_running >= MIN_PLACES and is_aged(invocation, now_s)
        if (
            has_aged
            and loss <= self.aged_loss
            and not any(is_aged(r.invocation, now_s) for r in running)
        ):
            return Admit(f"late by more than {AGED_S:.0f} s, costs the others {loss:.2f}")
        if own > self.unlikely:
            if own >= self.price * loss:
                return Admit(f"in time with chance {own:.2f}, costs the others {loss:.2f}")
            return Defer(f"in time with chance {own:.2f}, but costs the others {loss:.2f}")
        is_behind = replica.prefilling > 0 and invocation.until_first_token
        if is_behind and can_be_met(invocation, replica.profile, now_s):
            return Defer("late behind the prompts here; others may be in time")
        if loss > 0.01:
            return Defer(f"in time with chance {own:.2f}, costs the others {loss:.2f}")
        places = int(self.reserve * replica.max_running)
        taken = sum(c <= self.unlikely for c in replica.derived(outlook_of, now_s).chances)
        if taken >= places > 0 and replica.held >= replica.max_running - places:
            return Defer(f"{taken} run already that are late or have no SLO")
        return Admit(f"in time with chance {own:.2f}, costs nobody anything")


def why_closed(invocation: Invocation, replica: ReplicaView, now_s: float) -> Defer | None:
    """Why it would wait at a busy replica whatever it costs others there: for prompts, or as it has
    no SLO and the places are for others. Routing prefers open replicas."""
    answer = _WINDOW.admit(invocation, replica, now_s)
    if isinstance(answer, Admit) and invocation.deadline_s == inf and not invocation.session:
        answer = _WITHOUT_SLO.admit(invocation, replica, now_s)
    return answer if isinstance(answer, Defer) else None


def is_aged(invocation: Invocation, now_s: float) -> bool:
    """Whether it is late by enough to join at a small loss."""
    return now_s - invocation.deadline_s > AGED_S
