"""Traffic of `cato bench live agents`: which sessions, how many users, for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cato.config.paths import resolve
from cato.core.errors import InputError
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.lab.studies import agent_fleet as study
from cato.sim.fleet import PoolSetup
from cato.sim.playing import TurnRules
from cato.sim.session_plans import UserPlan, plans_of
from cato.sim.session_traces import RecordedSession


@dataclass(frozen=True, slots=True)
class SessionTraffic:
    """Users of a recorded trace, in seconds of the trace; turns that would begin in the first
    `warm_up_s` are not counted."""

    trace: Path | None
    warm_up_s: float = 180.0
    counted_s: float = 360.0

    def sessions(self) -> list[RecordedSession]:
        """The half that is reported on."""
        return list(self._halves()[1])

    def taught(self) -> list[RecordedSession]:
        """The other half, whose lengths are known."""
        return list(self._halves()[0])

    def length(self) -> LengthBelief:
        return study.length_belief(self.taught())

    def _halves(self) -> tuple[tuple[RecordedSession, ...], tuple[RecordedSession, ...]]:
        if self.trace is None:
            raise InputError("this experiment needs --trace FILE, recorded sessions of agents")
        return study.halves(resolve(str(self.trace)))

    def rules(self, setup: PoolSetup, slowdown: float) -> TurnRules:
        return TurnRules(setup.name, setup.profiles[0], self.length(), slowdown)

    def plans(self, profile: Profile, seed: int, slowdown: float, users: int) -> list[UserPlan]:
        until_s = slowdown * (self.warm_up_s + self.counted_s)
        return plans_of(self.sessions(), users, profile, until_s, seed, slowdown)

    def counted(self, plans: Sequence[UserPlan], slowdown: float) -> list[str]:
        """Ids of the turns that count, in the same order for every run."""
        return [
            f"s{part.number}-{part.first + i}"
            for plan in plans
            for part in plan.parts
            for i, begin_s in enumerate(part.begins_s)
            if begin_s >= slowdown * self.warm_up_s
        ]
