"""Detects hung engines: stopped, deadlocked, or waiting forever for an accelerator.

A process that ends closes its connections. A hung one keeps them open, and its streams would wait
forever. Silence alone proves nothing: a long prompt is computed in silence. An idle engine is
probed now and then, before a call has to wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.profile import UNMEASURED, Profile

# Share of samples with a running thread: one that answers metrics runs in one or two samples, one
# that computes in all.
_WORKING_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Silence:
    """No token of `running` answers has arrived for `silent_s`.

    `prompt_tokens` are those of answers without a first token. Without answers, the silence counts
    from the engine's last sign of life. `lifeless_s` always does: a call that begins in an idle
    engine starts a new silence, but is no sign of life.
    """

    silent_s: float
    running: int
    prompt_tokens: int
    lifeless_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life of a silent engine.

    `answered`: a token, or a probe's answer; `counted`: its own token counters moved; `working` is
    the share of samples in which one of its threads ran.
    """

    answered: bool
    counted: bool
    working: float


@dataclass(frozen=True, slots=True)
class HungRule:
    """Probe after a multiple of the predicted time to the next token; then check all signs.

    Calls that come and are soon cancelled would each start a new silence. So an engine is also
    probed after `idle_s` without a sign of life, or later if the next token is predicted later.

    An engine whose threads run gets at least `working_s`, and `working_times` the silence after
    which it would be probed: kernels compile in silence, profiles may be guesses, and a busy host
    slows everything, while a deadlocked process runs nothing. A process stopped by a signal
    computes nothing until it is continued: it gets `stopped_s`, whatever it was doing.
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
        """Predicted time to the next token."""
        if silence.prompt_tokens:
            return self.profile.first_token_s(silence.prompt_tokens, silence.running)
        return self.profile.decode_step_s(silence.running)

    def is_due(self, silence: Silence) -> bool:
        """Whether to probe the engine."""
        asked_after_s = self._asked_after_s(silence)
        if silence.silent_s >= asked_after_s:
            return True
        return silence.lifeless_s >= max(self.idle_s, asked_after_s)

    def _asked_after_s(self, silence: Silence) -> float:
        if silence.running == 0:
            return self.idle_s
        return max(self.least_s, self.times * self.predicted_s(silence))

    def why_stopped(self, stopped_s: float) -> str:
        """The reason to give up an engine whose process is stopped; empty if there is none."""
        if stopped_s < self.stopped_s:
            return ""
        return f"hung: a signal stopped its process {stopped_s:.1f} s ago"

    def why_hung(self, silence: Silence, signs: Signs) -> str:
        """The reason to give up the engine; empty if there is none."""
        if signs.answered or signs.counted:
            return ""
        asked_after_s = self._asked_after_s(silence)
        working_s = max(self.working_s, self.working_times * asked_after_s)
        lifeless_s = max(silence.silent_s, silence.lifeless_s)
        if signs.working >= _WORKING_SHARE and lifeless_s < working_s:
            return ""
        if silence.running == 0:
            return f"hung: idle, and no answer to a probe for {lifeless_s:.1f} s"
        if silence.silent_s < asked_after_s:
            return (
                f"hung: no token for {lifeless_s:.1f} s, while calls came and went, "
                "and no answer to a probe"
            )
        return (
            f"hung: no token of {silence.running} answers for {silence.silent_s:.1f} s, where "
            f"{self.predicted_s(silence):.2f} s were predicted, and no answer to a probe"
        )
