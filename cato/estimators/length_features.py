"""Features of a prompt that predict its answer's length, from answers already finished."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numba import njit

from cato.estimators.survival import Floats


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is complete at `finished_at_s`."""

    arrived_at_s: float
    finished_at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Answers in order of arrival, as columns; lengths as natural logarithms of tokens (+ 1 for
    prompts, which may be empty)."""

    arrived_at_s: Floats
    finished_at_s: Floats
    log_prompt: Floats
    log_output: Floats

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Answers:
        rows = [
            (a.arrived_at_s, a.finished_at_s, a.prompt_tokens + 1.0, a.output_tokens)
            for a in answers
        ]
        table = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        return cls(table[0], table[1], np.log(table[2]), np.log(table[3]))

    def first(self, n: int) -> Answers:
        """The first `n` to arrive, without a copy."""
        return Answers(
            self.arrived_at_s[:n], self.finished_at_s[:n], self.log_prompt[:n], self.log_output[:n]
        )


@dataclass(frozen=True, slots=True)
class SimilarAnswers:
    """Typical length of recent answers to prompts of about the same length.

    An editor asks again and again with nearly the same buffer, and such answers resemble each
    other: on the Azure 2023 coding trace (rows 1-2,500) the rank correlation with the length is
    0.14, against less than 0.07 for the prompt's length and for the latest answers. Weights are
    Gaussian in the logarithm of the prompts' ratio and exponential in age; `prior_weight` pulls
    the mean of the logarithms towards that of all recent answers.
    """

    width: float = 0.003
    age_s: float = 60.0
    prior_weight: float = 0.1
    window: int = 300

    def log_tokens(self, prompt_tokens: int, now_s: float, past: Answers) -> float:
        """Mean log of output tokens over the last `window` finished answers of `past`.

        0 without any. Answers unfinished at `now_s` are skipped: their length is unknown.
        """
        return float(
            _log_tokens(
                math.log(prompt_tokens + 1.0),
                now_s,
                past.arrived_at_s,
                past.finished_at_s,
                past.log_prompt,
                past.log_output,
                self.width,
                self.age_s,
                self.prior_weight,
                self.window,
            )
        )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _log_tokens(
    log_prompt: float,
    now_s: float,
    arrived_at_s: Floats,
    finished_at_s: Floats,
    log_prompts: Floats,
    log_outputs: Floats,
    width: float,
    age_s: float,
    prior_weight: float,
    window: int,
) -> float:
    known = 0
    plain = weighted = weights = 0.0
    for i in range(len(arrived_at_s) - 1, -1, -1):
        if known == window:
            break
        if finished_at_s[i] >= now_s:
            continue
        known += 1
        away = (log_prompts[i] - log_prompt) / width
        weight = math.exp(-0.5 * away * away - (now_s - arrived_at_s[i]) / age_s)
        plain += log_outputs[i]
        weighted += weight * log_outputs[i]
        weights += weight
    if known == 0:
        return 0.0
    return (weighted + prior_weight * plain / known) / (weights + prior_weight)
