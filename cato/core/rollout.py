"""Rollouts: how a new version of a model goes live in steps. Pure.

Clients call a name. A rollout maps that name to two models: the stable one, and the canary, which
gets a growing share of the sessions. Both are compared, and the canary is promoted or rolled back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from cato.core.receipt import Drawn, TrafficArm
from cato.core.rollout_rule import (
    DEFAULT_RULE,
    NO_COUNTS,
    Advance,
    ArmCounts,
    RollBack,
    RolloutRule,
    Stay,
    judged,
)

KEPT_CHANGES = 20


class Phase(StrEnum):
    """The state of a rollout.

    `shadow`: the canary answers copies of calls, and nobody reads its answers. `canary`: it has a
    share of the sessions. `promoted`: it has all. `rolled-back`: it has none.
    """

    SHADOW = "shadow"
    CANARY = "canary"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled-back"

    @property
    def is_under_way(self) -> bool:
        return self in (Phase.SHADOW, Phase.CANARY)


@dataclass(frozen=True, slots=True)
class Change:
    """`phase` and `share` from `at_s` (since the epoch) on, and the reason."""

    at_s: float
    phase: Phase
    share: float
    why: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout.

    Times are seconds since the epoch; `id` distinguishes it from others of its `name`.

    `stage` counts its steps, including the shadow step; `stable_counts` and `canary_counts` cover
    the present step.
    """

    name: str
    stable: str
    canary: str
    id: int
    rule: RolloutRule = DEFAULT_RULE
    phase: Phase = Phase.CANARY
    stage: int = 0
    since_s: float = 0.0
    stable_counts: ArmCounts = NO_COUNTS
    canary_counts: ArmCounts = NO_COUNTS
    history: tuple[Change, ...] = ()

    @classmethod
    def started(
        cls, name: str, stable: str, canary: str, rule: RolloutRule, now_s: float
    ) -> Rollout:
        rollout = cls(name, stable, canary, round(now_s * 1000), rule)
        first = Phase.SHADOW if rule.shadow_share > 0 else Phase.CANARY
        return rollout._changed(first, 0, now_s, "started")

    @property
    def share(self) -> float:
        """Share of sessions that the canary serves."""
        match self.phase:
            case Phase.CANARY:
                return self.rule.shares[self.stage - (self.rule.shadow_share > 0)]
            case Phase.PROMOTED:
                return 1.0
            case _:
                return 0.0

    def outlook(self, now_s: float) -> str:
        """The rule's verdict on the present step, or why the rollout ended."""
        if not self.phase.is_under_way:
            return self.history[-1].why
        age_s = now_s - self.since_s
        return judged(self.rule, self.stable_counts, self.canary_counts, age_s).reason

    def draw(self, session: str, ready: Callable[[str], bool | None]) -> tuple[str, Drawn | None]:
        """The model that serves `session`, and its arm; None if its calls are not compared.

        Sessions are assigned by hash: every ingress assigns alike, and a session of the canary
        stays there while the share grows. `ready` says whether a model can serve now (None: no pool
        has it). Without its canary a session gets the stable model; without that, the model that
        the deployment file gives the name.
        """
        wanted = TrafficArm.CANARY if self._place(session) < self.share else TrafficArm.STABLE
        usual = (self.stable, self.name)
        models = (self.canary, *usual) if wanted is TrafficArm.CANARY else usual
        states = [(model, ready(model)) for model in models]
        known = [model for model, state in states if state is not None]
        model = next((m for m, state in states if state), known[0] if known else self.name)
        is_drawn = self.phase.is_under_way and model == models[0]
        return model, Drawn(self.name, self.id, self.stage, wanted) if is_drawn else None

    def is_shadowed(self, call: str) -> bool:
        """Whether the canary gets a copy of a call to its own name."""
        return self.phase is Phase.SHADOW and self._place(f"shadow\0{call}") < (
            self.rule.shadow_share
        )

    @property
    def shadow(self) -> Drawn:
        return Drawn(self.name, self.id, self.stage, TrafficArm.SHADOW)

    def _place(self, session: str) -> float:
        text = f"{self.name}\0{self.id}\0{session}".encode("utf-8", "replace")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2.0**64

    def seen(self, drawn: Drawn, counts: ArmCounts) -> Rollout:
        """With the result of one of its runs; runs of an earlier step do not count for this one."""
        if (drawn.id, drawn.stage) != (self.id, self.stage) or not self.phase.is_under_way:
            return self
        if drawn.arm is TrafficArm.STABLE:
            return replace(self, stable_counts=self.stable_counts.plus(counts))
        return replace(self, canary_counts=self.canary_counts.plus(counts))

    def at(self, now_s: float) -> Rollout:
        """The rollout after applying the rule at `now_s`."""
        if not self.phase.is_under_way:
            return self
        age_s = now_s - self.since_s
        match judged(self.rule, self.stable_counts, self.canary_counts, age_s):
            case Advance(reason):
                return self.promoted(now_s, reason)
            case RollBack(reason):
                return self.rolled_back(now_s, reason)
            case Stay():
                return self

    def promoted(self, now_s: float, why: str) -> Rollout:
        """At its next step; after the last one the canary has every session."""
        stage = self.stage + 1
        is_last = stage - (self.rule.shadow_share > 0) >= len(self.rule.shares)
        phase = Phase.PROMOTED if is_last else Phase.CANARY
        return self._changed(phase, stage, now_s, why)

    def rolled_back(self, now_s: float, why: str) -> Rollout:
        return self._changed(Phase.ROLLED_BACK, self.stage + 1, now_s, why)

    def _changed(self, phase: Phase, stage: int, now_s: float, why: str) -> Rollout:
        changed = replace(self, phase=phase, stage=stage, since_s=now_s)
        change = Change(now_s, phase, changed.share, why)
        ended = not phase.is_under_way  # keep the last counts, for people
        return replace(
            changed,
            stable_counts=self.stable_counts if ended else NO_COUNTS,
            canary_counts=self.canary_counts if ended else NO_COUNTS,
            history=(*self.history, change)[-KEPT_CHANGES:],
        )
