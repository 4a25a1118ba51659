"""What of a prompt tells how long its answer will be, knowing only answers that are finished."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """An answer that was complete at `finished_at_s`."""

    arrived_at_s: float
    finished_at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SimilarAnswers:
    """Typical length of the recent answers to prompts of about the same length.

    An editor asks again and again with nearly the same buffer, and such answers resemble each
    other: on the Azure 2023 coding trace (rows 1-2,500) the rank correlation with the length is
    0.14, against 0.03 to 0.06 for the length of the prompt and for the latest answers. Weights
    are Gaussian in the ratio of the prompts' lengths and exponential in age; the mean, of
    logarithms, is drawn to that of all recent answers by `prior_weight`.
    """

    width: float = 0.003
    age_s: float = 60.0
    prior_weight: float = 0.1
    window: int = 300

    def log_tokens(
        self, prompt_tokens: int, now_s: float, finished: Sequence[FinishedAnswer]
    ) -> float:
        """Mean log of output tokens; only what finished before `now_s` counts, 0 without any.

        `finished` in order of arrival; the last `window` finished ones are looked at.
        """
        known = [a for a in finished if a.finished_at_s < now_s][-self.window :]
        if not known:
            return 0.0
        logs = [math.log(a.output_tokens) for a in known]
        weights = [
            math.exp(
                -(math.log((a.prompt_tokens + 1) / (prompt_tokens + 1)) ** 2) / (2 * self.width**2)
                - (now_s - a.arrived_at_s) / self.age_s
            )
            for a in known
        ]
        prior = math.fsum(logs) / len(logs)
        total = math.fsum(w * x for w, x in zip(weights, logs, strict=True))
        return (total + self.prior_weight * prior) / (math.fsum(weights) + self.prior_weight)
