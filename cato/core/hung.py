"""When an engine that says nothing is hung: stopped, deadlocked, or waiting for a card for ever.

A process that is gone closes its connections; one that stands still keeps them open, and its
streams would wait for ever. Silence alone proves nothing: a long prompt is computed in silence. An
engine that has nothing to do is asked now and then, before a call has to wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.profile import UNMEASURED, Profile

# Of the samples: a thread that answers metrics runs in one or two, one that computes in all.
_WORKING_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing came for `silent_s` of any of `running` answers.

    `prompt_tokens` are those of answers that have not begun. Without answers it is since the engine
    last showed that it lives.
    """

    silent_s: float
    running: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Signs:
    """What a silent engine showed while it was watched.

    `answered`: a token, or a probe's answer; `counted`: its own counters of tokens moved; `working`
    is the share of samples in which one of its threads ran.
    """

    answered: bool
    counted: bool
    working: float


@dataclass(frozen=True, slots=True)
class HungRule:
    """Ask after a multiple of what the next token is predicted to take; then look at all signs.

    Threads that run are given `working_s`, and `working_times` as long as an engine is not asked:
    kernels are compiled in silence, profiles may be guesses, and on a busy host everything takes
    longer, while a deadlocked process runs nothing. A process that a signal has stopped computes
    nothing until another signal continues it: it is given `stopped_s`, whatever it was doing.
    """

    profile: Profile = UNMEASURED
    times: float = 20.0
    least_s: float = 2.0
    watched_s: float = 1.5
    working_s: float = 60.0
    working_times: float = 10.0
    idle_s: float = 5.0
    stopped_s: float = 1.0

    def predicted_s(self, silence: Silence) -> float:
        """Until the next token."""
        if silence.prompt_tokens:
            return self.profile.first_token_s(silence.prompt_tokens, silence.running)
        return self.profile.decode_step_s(silence.running)

    def is_due(self, silence: Silence) -> bool:
        """Whether the engine should be asked for a sign."""
        return silence.silent_s >= self._asked_after_s(silence)

    def _asked_after_s(self, silence: Silence) -> float:
        if silence.running == 0:
            return self.idle_s
        return max(self.least_s, self.times * self.predicted_s(silence))

    def why_stopped(self, stopped_s: float) -> str:
        """The reason to give up an engine whose process is stopped; empty while there is none."""
        if stopped_s < self.stopped_s:
            return ""
        return f"hung: a signal stopped its process {stopped_s:.1f} s ago"

    def why_hung(self, silence: Silence, signs: Signs) -> str:
        """The reason to give the engine up; empty while there is none."""
        if signs.answered or signs.counted:
            return ""
        working_s = max(self.working_s, self.working_times * self._asked_after_s(silence))
        if signs.working >= _WORKING_SHARE and silence.silent_s < working_s:
            return ""
        if silence.running == 0:
            return f"hung: idle, and no answer to a probe for {silence.silent_s:.1f} s"
        return (
            f"hung: no token of {silence.running} answers for {silence.silent_s:.1f} s, where "
            f"{self.predicted_s(silence):.2f} s were predicted, and no answer to a probe"
        )
